"""Side-by-side timings: ours and a peer in one process, on one input, in turns; medians and one ratio.

A benchmark is a script:

    def run() -> Iterator[Comparison]:
        yield compare("sort 1e6 floats", ours=lambda: ..., peer=lambda: ..., peer_name="numpy", goal=2.0)

    if __name__ == "__main__":
        main(run)
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .validate import check_int


@dataclass(frozen=True)
class Comparison:
    """One row. `ours` and `peer` are in `unit`; `ratio` > 1 means that ours is better; `goal` is the ratio to reach.

    A row that only shows something (how cost grows, say) has no goal; one without a peer has an absolute `goal` in `unit` that
    `ours` may not pass, and no ratio.
    """

    workload: str
    ours: float
    peer: float | None = None
    peer_name: str = ""
    ratio: float | None = None
    goal: float | None = None
    unit: str = "ms"

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None if there is none."""
        if self.goal is None:
            return None
        return bool(self.ours <= self.goal if self.ratio is None else self.ratio >= self.goal)


def compare(
    workload: str,
    ours: Callable[[], Any],
    peer: Callable[[], Any] | None = None,
    *,
    peer_name: str = "",
    goal: float | None = None,
    repeats: int = 7,
    warmup: int = 1,
) -> Comparison:
    """Time both in turns, `repeats` times each after `warmup` unmeasured rounds. Wall-clock medians, in milliseconds.

    Without a peer `goal` is the most milliseconds allowed.
    """
    check_int("repeats", repeats, minimum=1)
    check_int("warmup", warmup, minimum=0)
    ours_ms: list[float] = []
    peer_ms: list[float] = []
    for round_ in range(warmup + repeats):
        for call, times in ((ours, ours_ms), (peer, peer_ms)):
            if call is None:
                continue
            elapsed = _milliseconds(call)
            if round_ >= warmup:
                times.append(elapsed)
    mine = statistics.median(ours_ms)
    if peer is None:
        return Comparison(workload, mine, goal=goal)
    theirs = statistics.median(peer_ms)
    return Comparison(workload, mine, theirs, peer_name, theirs / mine, goal)


def main(run: Callable[[], Iterable[Comparison]]) -> None:
    """Run a benchmark script: a table on stdout, or one JSON object a line with `--json`."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    as_json = parser.parse_args().json
    rows = []
    for row in run():
        rows.append(row)
        if as_json:
            print(json.dumps({**asdict(row), "met": row.met}), flush=True)
        else:
            print(f"measured {row.workload}", file=sys.stderr)
    if not as_json:
        _print_table(rows)


def _milliseconds(call: Callable[[], Any]) -> float:
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    finally:
        if collecting:
            gc.enable()


def _print_table(rows: Iterable[Comparison]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("workload", "ours", "peer", "ratio", "goal", "met")
    for row in rows:
        peer = "" if row.peer is None else f"{row.peer:.4g} {row.unit} ({row.peer_name})"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        goal = "" if row.goal is None else f"<= {row.goal:g} {row.unit}" if row.ratio is None else f">= {row.goal:g}"
        met = {None: "", True: "yes", False: "no"}[row.met]
        table.add_row(*map(Text, (row.workload, f"{row.ours:.4g} {row.unit}", peer, ratio, goal, met)))
    Console().print(table)
