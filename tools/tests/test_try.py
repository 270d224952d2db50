"""`chapbook try`: what it reports of demos that hold, fail, crash, exit, are killed and hang."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chapbook import demos
from chapbook.workspace import UsageError

GOOD = """
    from chapbook_shared.report import Report

    def demo(*, seed, progress):
        print("a careless print")
        report = Report("good", method="ours", baseline="theirs", seed=seed)
        report.claim("A < B", expected="lower", measured=f"<b>lower</b> with seed {seed}", holds=True)
        return report
"""
FAILING = """
    from chapbook_shared.report import Report

    def demo(*, seed, progress):
        report = Report("failing", method="ours", baseline="theirs", seed=seed)
        report.claim("it is faster", expected="2 times", measured="0.5 times", holds=False)
        report.claim("it scales", expected="at 7B", measured="no", holds=False, within_scale=False)
        return report
"""
UNSHOWN = """
    from chapbook_shared.report import Report

    def demo(*, seed, progress):
        report = Report("unshown", method="ours", baseline="theirs", seed=seed)
        report.claim("it scales", expected="at 7B", measured="no", holds=False, within_scale=False)
        return report
"""
CRASHING = """
    def demo(*, seed, progress):
        raise RuntimeError("no such luck: [/bold]")
"""
SEGFAULT = """
    import ctypes

    def demo(*, seed, progress):
        ctypes.string_at(0)
"""
KILLED = """
    import os, signal

    def demo(*, seed, progress):
        os.kill(os.getpid(), signal.SIGKILL)
"""
EXITING = """
    import sys

    def demo(*, seed, progress):
        sys.exit(0)
"""
EMPTY = """
    from chapbook_shared.report import Report

    def demo(*, seed, progress):
        return Report("empty", method="ours", baseline="theirs", seed=seed)
"""
HANGING = """
    import time, pathlib

    def demo(*, seed, progress):
        pathlib.Path("started").touch()
        time.sleep(600)
"""


def test_a_claim_that_holds_is_exit_0_and_in_the_json(chapbook, install):
    done = chapbook("try", "good", "--seed", 7, "--json", path=install("good", GOOD))
    assert done.code == 0, done.err
    assert done.json["packages"]["good"]["claims"] == [
        {"claim": "A < B", "expected": "lower", "measured": "<b>lower</b> with seed 7", "status": "holds"}
    ]


def test_what_a_demo_prints_is_not_in_the_json(chapbook, install):
    done = chapbook("try", "good", "--json", path=install("good", GOOD))
    json.loads(done.out)
    assert "a careless print" in done.err


def test_the_json_is_utf_8_whatever_the_terminal_says(chapbook, install, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = chapbook("try", "good", "--json", path=install("good", GOOD.replace("A < B", "A ≤ B")))
    assert done.json["packages"]["good"]["claims"][0]["claim"] == "A ≤ B"


def test_the_page_is_written_and_escaped(chapbook, install):
    chapbook("try", "good", "--out", "elsewhere", path=install("good", GOOD))
    page = (chapbook.here / "elsewhere" / "index.html").read_text(encoding="utf-8")
    assert "A &lt; B" in page
    assert "<b>lower" not in page


def test_a_claim_that_fails_is_exit_1_and_named(chapbook, install):
    done = chapbook("try", "failing", path=install("failing", FAILING))
    assert done.code == 1
    assert "failing fails: it is faster (expected 2 times, measured 0.5 times)" in done.err
    assert "it scales" not in done.err


def test_a_claim_declared_out_of_scale_is_no_failure(chapbook, install):
    done = chapbook("try", "unshown", "--json", path=install("unshown", UNSHOWN))
    assert done.code == 0
    assert done.json["packages"]["unshown"]["claims"][0]["status"] == "not shown at this scale"


@pytest.mark.parametrize(
    ("demo", "reason"),
    [
        (CRASHING, "RuntimeError: no such luck: [/bold]"),
        (SEGFAULT, "killed by SIGSEGV"),
        (KILLED, "killed by SIGKILL"),
        (EXITING, "SystemExit: 0"),
        (EMPTY, "made no claim"),
        ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
        ("def demo(*, seed, progress): return 3", "must return a chapbook_shared.report.Report, got int"),
    ],
    ids=["raises", "segfault", "kill -9", "exits", "no claim", "no import", "no report"],
)
def test_a_crash_is_exit_1_and_the_rest_go_on(chapbook, install, demo, reason):
    install("bad", demo)
    done = chapbook("try", "bad", "good", "--json", path=install("good", GOOD))
    assert done.code == 1
    assert done.json["packages"]["bad"]["status"] == "crashed"
    assert reason in done.json["packages"]["bad"]["error"]
    assert done.json["packages"]["good"]["status"] == "passed"
    assert reason in next(line for line in done.err.splitlines() if line.startswith("bad crashed: "))


def test_a_crash_is_in_the_table_and_the_page(chapbook, install):
    done = chapbook("try", "bad", path=install("bad", CRASHING))
    assert "no such luck: [/bold]" in done.out
    assert "no such luck" in (chapbook.here / "report" / "index.html").read_text(encoding="utf-8")


def test_a_segfault_leaves_the_place_in_the_report(chapbook, install):
    done = chapbook("try", "bad", "--json", path=install("bad", SEGFAULT))
    assert "bad_demo.py" in done.json["packages"]["bad"]["error"]


def test_a_demo_that_hangs_is_stopped(chapbook, install):
    done = chapbook("try", "slow", "--timeout", 3, "--json", path=install("slow", HANGING))
    assert done.code == 1
    assert done.json["packages"]["slow"]["error"] == "it ran past 3 s and was stopped"


FORKING = """
    import os, pathlib, subprocess, sys, time

    def demo(*, seed, progress):
        child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
        time.sleep(0.5)
        pathlib.Path("unfinished").write_text(f"{os.getpid()} {child.pid}")
        os.rename("unfinished", "started")
        if seed == 1:
            raise RuntimeError("no such luck")
        time.sleep(600)
"""


def listen():
    """Tests may run in the background or under nohup, where these signals are ignored, and children would inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def running(pid):
    try:
        return (Path("/proc") / pid / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("seed", [0, 1], ids=["hangs", "crashes"])
def test_what_a_demo_started_ends_with_it(chapbook, install, seed):
    done = chapbook("try", "slow", "--timeout", 5, "--seed", seed, "--json", path=install("slow", FORKING))
    assert done.code == 1
    assert done.json["packages"]["slow"]["status"] == "crashed"
    pids = (chapbook.here / "started").read_text().split()
    assert [pid for pid in pids if running(pid)] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ended_from_outside_it_ends_what_it_started(chapbook, install, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "chapbook", "try", "slow"],
        env={**os.environ, "PYTHONPATH": str(install("slow", FORKING))},
        cwd=chapbook.here,
        stderr=subprocess.DEVNULL,
        preexec_fn=listen,
    )
    deadline = time.monotonic() + 60
    while not (chapbook.here / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    pids = (chapbook.here / "started").read_text().split()
    assert [pid for pid in pids if running(pid)] == []


def test_an_unknown_name_is_exit_2_with_a_suggestion(chapbook, install):
    done = chapbook("try", "goood", path=install("good", GOOD))
    assert done.code == 2
    assert done.err == "chapbook: no package with a demo is called 'goood': did you mean good?\n"
    assert not (chapbook.here / "report").exists()


@pytest.mark.parametrize("arguments", [[], ["good", "--all"]])
def test_names_or_all_but_one_of_them(chapbook, install, arguments):
    done = chapbook("try", *arguments, path=install("good", GOOD))
    assert done.code == 2
    assert "--all" in done.err


def test_all_takes_every_registered_demo():
    with pytest.raises(UsageError):
        demos.choose([], all_=False)
    assert demos.choose([], all_=True) == list(demos.demo_entry_points())


def test_ctrl_c_ends_cleanly_and_keeps_what_is_done(chapbook, install):
    install("good", GOOD)
    path = install("slow", HANGING)
    process = subprocess.Popen(
        [sys.executable, "-m", "chapbook", "try", "good", "slow", "--json"],
        env={**os.environ, "PYTHONPATH": str(path)},
        cwd=chapbook.here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=listen,
    )
    deadline = time.monotonic() + 60
    while not (chapbook.here / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert list(json.loads(out)["packages"]) == ["good"]
    assert "interrupted: 1 of 2 demos" in err
    assert "Traceback" not in err


def test_a_place_that_cannot_be_written_is_said_before_any_work(chapbook, install):
    (chapbook.here / "report").write_text("a file")
    done = chapbook("try", "good", path=install("good", GOOD))
    assert done.code == 2
    assert "--out report cannot be made a folder" in done.err
    assert "trying" not in done.err
