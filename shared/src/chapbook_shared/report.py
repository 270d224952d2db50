"""`Report`: what a demo measured, as claims, tables and figures; to the terminal, JSON and one-file HTML.

A claim says what the paper says, what was measured here, and whether it holds. A demo may declare beforehand, in its code, that a
claim cannot be expected at the demo's scale; only such a claim can end as "not shown at this scale" instead of "fails".
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure
    from rich.console import Console

Status = Literal["holds", "fails", "not shown at this scale"]
Cell = str | int | float | bool | None

_STYLES: Mapping[Status, str] = {"holds": "green", "fails": "bold red", "not shown at this scale": "yellow"}


@dataclass(frozen=True)
class Claim:
    claim: str
    expected: str
    measured: str
    status: Status


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def text_rows(self) -> list[list[str]]:
        """The cells as they are shown: floats with four significant digits."""
        return [[_show(cell) for cell in row] for row in self.rows]


@dataclass(frozen=True)
class Figure:
    title: str
    caption: str
    png: bytes

    @property
    def data_url(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode("ascii")


class Report:
    """The evidence of one run of one package's demo.

    `method` and `baseline` name what is compared; `seed` is the seed of the run.
    """

    def __init__(self, package: str, *, method: str, baseline: str, seed: int):
        self.package, self.method, self.baseline, self.seed = package, method, baseline, int(seed)
        self.claims: list[Claim] = []
        self.tables: list[Table] = []
        self.figures: list[Figure] = []
        self.notes: list[str] = []

    def claim(self, claim: str, *, expected: str, measured: str, holds: bool, within_scale: bool = True) -> Claim:
        """Record a claim.

        `expected` is what the paper says or the mathematics demands, `measured` what this run gave, both in words and numbers.
        `within_scale=False` declares, before any result is known, that a run of this size need not show the claim.
        """
        for name, text in (("claim", claim), ("expected", expected), ("measured", measured)):
            if not isinstance(text, str):
                raise TypeError(f"{name} must be text, words and numbers, got {text!r}")
        holds = _truth("holds", holds)
        status: Status = "holds" if holds else "fails" if within_scale else "not shown at this scale"
        made = Claim(claim, expected, measured, status)
        self.claims.append(made)
        return made

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
        """Record a table; every row has one cell a column: text, a number (NumPy's and torch's too), a truth value or None."""
        columns, rows = list(columns), [list(row) for row in rows]
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"table {title!r} has {len(columns)} columns, but a row has {len(row)} cells: {row!r}")
        made = Table(title, tuple(columns), tuple(tuple(_plain(cell) for cell in row) for row in rows))
        self.tables.append(made)
        return made

    def figure(self, title: str, figure: MatplotlibFigure, *, caption: str = "") -> Figure:
        """Record a matplotlib figure. It is rendered at once and closed."""
        buffer = io.BytesIO()
        # A white ground: the figure stays readable on a dark page.
        figure.savefig(buffer, format="png", dpi=144, bbox_inches="tight", facecolor="white")
        figure.clear()
        from matplotlib import pyplot

        pyplot.close(figure)
        made = Figure(title, caption, buffer.getvalue())
        self.figures.append(made)
        return made

    def note(self, text: str) -> None:
        """Record a sentence that a reader needs in order to judge the numbers."""
        self.notes.append(text)

    @property
    def failed(self) -> list[Claim]:
        """The claims that fail."""
        return [claim for claim in self.claims if claim.status == "fails"]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pictures, ready for `json.dumps`; figures by title and caption."""
        return {
            "package": self.package,
            "method": self.method,
            "baseline": self.baseline,
            "seed": self.seed,
            "claims": [asdict(claim) for claim in self.claims],
            "tables": [asdict(table) for table in self.tables],
            "figures": [{"title": figure.title, "caption": figure.caption} for figure in self.figures],
            "notes": list(self.notes),
        }

    def to_json(self, path: str | Path) -> None:
        """Write the report with its figures to a file that `from_json` reads back whole."""
        data = self.to_dict()
        data["figures"] = [
            {**shown, "png": base64.b64encode(figure.png).decode("ascii")}
            for shown, figure in zip(data["figures"], self.figures, strict=True)
        ]
        Path(path).write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> Report:
        """Read a report that `to_json` wrote."""
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        report = cls(data["package"], method=data["method"], baseline=data["baseline"], seed=data["seed"])
        report.claims = [Claim(**claim) for claim in data["claims"]]
        report.tables = [
            Table(table["title"], tuple(table["columns"]), tuple(tuple(row) for row in table["rows"]))
            for table in data["tables"]
        ]
        report.figures = [
            Figure(figure["title"], figure["caption"], base64.b64decode(figure["png"])) for figure in data["figures"]
        ]
        report.notes = list(data["notes"])
        return report

    def print(self, console: Console | None = None) -> None:
        """Show claims, tables and notes on a terminal (stdout unless another console is given)."""
        from rich.console import Console
        from rich.table import Table as Grid
        from rich.text import Text  # taken as it is: no markup, no names of emoji

        console = console or Console()
        console.print(Text(self.package, "bold"), Text(f" {self.method} against {self.baseline}, seed {self.seed}"))
        grid = Grid("claim", "expected", "measured", "status")
        for claim in self.claims:
            cells = map(Text, (claim.claim, claim.expected, claim.measured))
            grid.add_row(*cells, Text(claim.status, _STYLES[claim.status]))
        console.print(grid)
        for table in self.tables:
            grid = Grid(title=Text(table.title))
            for column in table.columns:
                grid.add_column(Text(column))
            for row in table.text_rows():
                grid.add_row(*map(Text, row))
            console.print(grid)
        for note in self.notes:
            console.print(Text(note))

    def to_html(self, path: str | Path) -> None:
        """Write the report as one self-contained HTML page."""
        Path(path).write_text(render_html([self], title=self.package), encoding="utf-8")


@dataclass(frozen=True)
class Crash:
    """A demo that did not finish: shown in the page in the place of its report."""

    package: str
    reason: str


def render_html(reports: Sequence[Report | Crash], *, title: str) -> str:
    """One self-contained page with the summary of all reports on top and each report below it."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("chapbook_shared"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    finished = [report for report in reports if isinstance(report, Report)]
    crashes = [report for report in reports if isinstance(report, Crash)]
    counts = {status: sum(c.status == status for r in finished for c in r.claims) for status in _STYLES}
    return environment.get_template("report.html.j2").render(
        title=title, reports=finished, crashes=crashes, counts=counts
    )


def _truth(name: str, value: Any) -> bool:
    """Python's, NumPy's and torch's truth values. NaN, which counts as true, and whatever else a slip gives are refused."""
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return plain


def _plain(cell: Any) -> Cell:
    """NumPy and torch scalars become Python numbers, NaN and infinities text, so that a report is always JSON."""
    if isinstance(cell, float) and not math.isfinite(cell):
        return str(float(cell))
    if isinstance(cell, str | bool | int | float | None):
        return cell
    if hasattr(cell, "item"):
        return _plain(cell.item())
    raise TypeError(f"a table cell must be text, a number, a truth value or None, got {cell!r}")


def _show(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
