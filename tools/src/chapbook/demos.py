"""Run demos, each in a process of its own, and gather what they claim.

A demo that raises, exits, is killed or hangs is reported in its place; the others are not touched by it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chapbook_shared.report import Crash, Report, render_html

from .catalogue import demo_entry_points
from .run_demo import FAULT, REPORT, TRACEBACK
from .workspace import UsageError, read, unknown_name

TRACEBACK_LINES = 15
GRACE_SECONDS = 5.0

Outcome = Report | Crash


@dataclass(frozen=True)
class Run:
    """One finished or crashed demo and how long it took."""

    package: str
    version: str
    outcome: Outcome
    seconds: float

    @property
    def status(self) -> Literal["passed", "failed", "crashed"]:
        if isinstance(self.outcome, Crash):
            return "crashed"
        return "failed" if self.outcome.failed else "passed"

    def to_dict(self) -> dict[str, Any]:
        shared = {"version": self.version, "status": self.status, "seconds": round(self.seconds, 2)}
        if isinstance(self.outcome, Crash):
            return {**shared, "claims": [], "error": self.outcome.reason}
        return {**shared, **self.outcome.to_dict(), "error": None}


def choose(names: Sequence[str], *, all_: bool) -> list[str]:
    """The demos to run, in the order asked for; raises `UsageError` for a name that has none."""
    known = list(demo_entry_points())
    if all_ and names:
        raise UsageError(f"name packages or give --all, not both: got {' '.join(names)} and --all")
    if not all_ and not names:
        raise UsageError(f"name the packages to try, or give --all: known are {', '.join(known) or 'none'}")
    for name in names:
        if name not in known:
            raise UsageError(unknown_name("package with a demo", name, known))
    return known if all_ else list(dict.fromkeys(names))


def run_demos(
    names: Sequence[str], *, seed: int, timeout: float, started: Callable[[str], None] = lambda name: None
) -> Iterator[Run]:
    """Run one after the other; `timeout` is in seconds for each."""
    points = demo_entry_points()
    for name in names:
        started(name)
        begin = time.perf_counter()
        outcome = run_demo(name, seed=seed, timeout=timeout)
        dist = points[name].dist
        yield Run(name, dist.version if dist else "", outcome, time.perf_counter() - begin)


def run_demo(name: str, *, seed: int, timeout: float) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="chapbook-try-") as scratch:
        folder = Path(scratch)
        # -P: the current folder is no source of modules. What a demo prints goes to stderr, stdout is for our result.
        command = [sys.executable, "-P", "-m", "chapbook.run_demo", name, str(seed), str(folder)]
        environment = {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", **os.environ}
        # A session of its own, so that what the demo started can be ended with it.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, env=environment, start_new_session=True)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return Crash(name, f"it ran past {timeout:g} s and was stopped")
        finally:
            stop(process)
        if code == 0 and (folder / REPORT).is_file():
            return Report.from_json(folder / REPORT)
        return Crash(name, reason(code, folder))


def reason(code: int, folder: Path) -> str:
    """Why a demo gave no report: how its process ended and the last lines it left."""
    raised = read(folder / TRACEBACK).rstrip()
    if raised:
        return tail(raised)
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code} and no report"
    return "\n".join(filter(None, [tail(read(folder / FAULT).rstrip()), ended]))


def tail(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(["…", *lines[-TRACEBACK_LINES:]] if len(lines) > TRACEBACK_LINES else lines)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that has a session of its own, politely, then not; and whatever it started and left running."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(GRACE_SECONDS)
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):  # nothing is left of it
            os.killpg(process.pid, signal.SIGKILL)
    else:  # Windows
        process.kill()
    process.wait()


def write_page(runs: Sequence[Run], folder: Path) -> Path:
    page = folder / "index.html"
    page.write_text(render_html([run.outcome for run in runs], title="What the shelf shows"), encoding="utf-8")
    return page


def verdicts(runs: Sequence[Run]) -> list[str]:
    """One line for each claim that fails and each demo that crashed."""
    lines = []
    for run in runs:
        if isinstance(run.outcome, Crash):
            lines.append(f"{run.package} crashed: {run.outcome.reason.splitlines()[-1].strip()}")
        else:
            lines += [
                f"{run.package} fails: {claim.claim} (expected {claim.expected}, measured {claim.measured})"
                for claim in run.outcome.failed
            ]
    return lines
