import inspect
import io
import json
import math
from html.parser import HTMLParser

import matplotlib.pyplot as plt
import numpy as np
import pytest
from rich.console import Console

from chapbook_shared.report import Crash, Report, render_html


@pytest.fixture
def report():
    report = Report("some-loss", method="Dice + ours", baseline="Dice", seed=3)
    report.claim("fewer errors", expected="10-30 % fewer", measured="21 % fewer", holds=True)
    report.claim("no <worse> & no [bold]slower", expected="<= 3 %", measured="9 %", holds=False)
    report.claim("better in the long run", expected="1 point", measured="0.1", holds=False, within_scale=False)
    report.table("Per seed", ["seed", "DIU", "better"], [[0, np.float32(1.5), True], [1, math.nan, None]])
    figure, axes = plt.subplots()
    axes.plot([0, 1])
    report.figure("Curve", figure, caption="Lower is better.")
    report.note("Pseudo labels.")
    return report


def test_status_follows_the_declaration(report):
    assert [claim.status for claim in report.claims] == ["holds", "fails", "not shown at this scale"]
    assert [claim.claim for claim in report.failed] == ["no <worse> & no [bold]slower"]
    beyond = report.claim(
        "declared beyond the scale, yet shown", expected="", measured="", holds=True, within_scale=False
    )
    assert beyond.status == "holds"


def test_the_figure_is_a_png_and_is_closed(report):
    assert report.figures[0].png.startswith(b"\x89PNG")
    assert plt.get_fignums() == []


def test_json_is_strict_and_comes_back_whole(report, tmp_path):
    json.dumps(report.to_dict(), allow_nan=False)
    report.to_json(tmp_path / "r.json")
    again = Report.from_json(tmp_path / "r.json")
    assert again.to_dict() == report.to_dict()
    assert again.figures == report.figures
    assert again.tables == report.tables


def test_tables_refuse_ragged_rows_and_foreign_cells(report):
    with pytest.raises(ValueError, match="has 2 columns, but a row has 1 cells"):
        report.table("t", ["a", "b"], [[1]])
    with pytest.raises(TypeError, match="a table cell must be"):
        report.table("t", ["a"], [[object()]])


def test_the_terminal_shows_every_claim_as_written(report):
    console = Console(width=200, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    report.print(console)
    text = console.export_text()
    for expected in (
        "21 % fewer",
        "no <worse> & no [bold]slower",
        "not shown at this scale",
        "Per seed",
        "nan",
        "Pseudo labels.",
    ):
        assert expected in text


class Page(HTMLParser):
    """The text of a page, and everything that it would load."""

    def __init__(self, page):
        super().__init__()
        self.text, self.loads = "", []
        self.feed(page)

    def handle_data(self, data):
        self.text += data

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]


def test_the_page_is_self_contained_and_escapes(report, tmp_path):
    report.to_html(tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "no <worse> & no [bold]slower" in page.text
    assert all(load.startswith(("data:image/png;base64,", "#")) for load in page.loads)


def test_a_page_of_many_shows_the_summary_and_the_crashes(report):
    page = Page(render_html([report, Crash("other-method", "Traceback <here>")], title="shelf"))
    assert "1 claims hold, 1 fail, 1 not shown at this scale" in page.text
    assert "1 demo crashed" in page.text
    assert "Traceback <here>" in page.text
    assert "#some-loss" in page.loads


@pytest.mark.parametrize("holds", [math.nan, None, 1, "no"])
def test_only_a_truth_value_can_hold(report, holds):
    claim = inspect.unwrap(Report.claim)  # as users have it, without the checks of types that our tests run under
    with pytest.raises(TypeError, match="holds must be True or False"):
        claim(report, "c", expected="e", measured="m", holds=holds)
    assert claim(report, "c", expected="e", measured="m", holds=np.float64(2) > 1).status == "holds"
    with pytest.raises(TypeError, match="measured must be text"):
        claim(report, "c", expected="e", measured=0.3, holds=True)


def test_rows_may_come_from_a_generator(report):
    assert report.table("t", ["a"], ([i] for i in range(3))).rows == ((0,), (1,), (2,))


def test_a_seed_of_numpy_can_be_written(tmp_path):
    report = Report("p", method="m", baseline="b", seed=0)
    inspect.unwrap(Report.__init__)(report, "p", method="m", baseline="b", seed=np.int64(3))
    report.to_json(tmp_path / "r.json")
    assert Report.from_json(tmp_path / "r.json").seed == 3


def test_text_is_printed_as_it_is():
    report = Report("p", method="a:b:c", baseline="[/x]", seed=0)
    report.claim("d:x:e", expected="[bold]f\\", measured=":warning:", holds=True)
    report.table("[/t]", ["g:m:h"], [["i:o:j"]])
    report.note("k:v:l [/]")
    console = Console(record=True, width=100, file=io.StringIO())
    report.print(console)
    shown = console.export_text()
    for text in ("a:b:c", "[/x]", "d:x:e", "[bold]f\\", ":warning:", "[/t]", "g:m:h", "i:o:j", "k:v:l [/]"):
        assert text in shown
