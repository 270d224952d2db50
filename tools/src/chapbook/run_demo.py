"""One demo in a process of its own: `python -m chapbook.run_demo DIST SEED FOLDER`.

Writes `report.json`, or `traceback.txt` if the demo raised, into FOLDER. A process that dies in compiled code leaves
what faulthandler saw in `fault.txt`. Progress goes to stderr, straight to the terminal.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from pathlib import Path

from chapbook_shared.progress import Progress
from chapbook_shared.report import Report

from .catalogue import demo_entry_points

REPORT, TRACEBACK, FAULT = "report.json", "traceback.txt", "fault.txt"


def run(dist: str, seed: int, folder: Path) -> None:
    demo = demo_entry_points()[dist].load()
    report = demo(seed=seed, progress=Progress())
    if not isinstance(report, Report):
        raise TypeError(f"the demo of {dist} must return a chapbook_shared.report.Report, got {type(report).__name__}")
    if not report.claims:
        raise ValueError(f"the demo of {dist} made no claim: it shows nothing")
    # Renamed when whole: a process killed while writing leaves no half report.
    report.to_json(folder / "unfinished.json")
    os.replace(folder / "unfinished.json", folder / REPORT)


def main() -> int:
    dist, seed, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    with (folder / FAULT).open("w", encoding="utf-8") as fault:
        faulthandler.enable(fault)
        try:
            run(dist, seed, folder)
        except BaseException:  # SystemExit too: a demo that exits has not reported
            text = traceback.format_exc()
            (folder / TRACEBACK).write_text(text, encoding="utf-8", errors="backslashreplace")
            print(text, file=sys.stderr)
            return 1
        finally:
            faulthandler.disable()
    return 0


if __name__ == "__main__":
    sys.exit(main())
