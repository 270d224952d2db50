import json
import subprocess
import sys

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from umup.cli import app

run = CliRunner().invoke


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "täxt.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; größer\n" * 200, encoding="utf-8")
    return str(path)


def test_help_explains_the_commands():
    done = subprocess.run(
        [sys.executable, "-c", "from umup.cli import main; main()", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", "TERM": "dumb", "COLUMNS": "120"},
    )
    for command in ("coord-check", "sweep", "report"):
        assert command in done.stdout
    assert "(umup[plot])" in run(app, ["sweep", "--help"]).stdout


def test_report_prints_scales_near_one(text, tmp_path):
    pytest.importorskip("matplotlib")
    done = run(app, ["report", "--width", "32", "--text", text, "--json", "--plot", str(tmp_path / "f.png")])
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert report["weight"]["embed_tokens.weight"] == pytest.approx(1, abs=0.1)
    assert (tmp_path / "f.png").stat().st_size > 1000
    assert "lm_head" in run(app, ["report", "--width", "32", "--text", text, "--steps", "2"]).stdout


def test_coord_check_says_yes_and_no(text, tmp_path):
    common = ["coord-check", "--widths", "32,64,128", "--text", text, "--seeds", "1"]
    done = run(app, [*common, "--json"])
    assert done.exit_code == 0
    assert all(json.loads(line)["holds"] for line in done.stdout.splitlines())
    done = run(app, [*common, "--scheme", "sp", "--lr", "0.03"])
    assert done.exit_code == 1
    assert "grows" in done.stdout


def test_sweep_resumes_and_prints_the_best(text, tmp_path):
    args = ["sweep", "--store", str(tmp_path / "s.sqlite"), "--lrs", "0.5,1", "--alpha", "alpha_res=0.25"]
    args += ["--steps", "4", "--text", text, "--depth", "1"]
    done = run(app, [*args, "--dry-run"])
    assert (done.exit_code, done.stdout.strip()) == (0, "at most 4 runs of 4 steps")
    done = run(app, [*args, "--json", "--export", str(tmp_path / "s.jsonl")])
    assert done.exit_code == 0, done.stderr
    *records, best = map(json.loads, done.stdout.splitlines())
    assert [r["phase"] for r in records][:3] == ["lr", "lr", "alpha_res"]
    assert best["loss"] == min(r["loss"] for r in records)
    assert len((tmp_path / "s.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    assert run(app, [*args, "--json"]).stdout == done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["report", "--width", "33"], "multiple of head_dim"),
        (["report", "--scheme", "xp"], "scheme"),
        (["report", "--text", "/nowhere/at/all"], "no text"),
        (["coord-check", "--widths", "a,b"], "numbers separated by commas"),
        (["coord-check", "--widths", "32"], "two widths"),
        (["sweep", "--store", "s.sqlite", "--alpha", "alpha_rest=1"], "--alpha wants"),
        (["sweep", "--store", "s.sqlite", "--lrs", "-1"], "positive"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(app, args)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
