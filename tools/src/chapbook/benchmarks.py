"""Run the benchmark scripts of packages and collect their rows."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .demos import stop
from .workspace import Member

FIELDS = ("workload", "ours", "peer", "peer_name", "ratio", "goal", "unit", "met")


@dataclass(frozen=True)
class Benchmark:
    """What one script printed: its rows, and why it stopped if it did not end well."""

    package: str
    script: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


def scripts(member: Member) -> list[Path]:
    return sorted((member.folder / "benchmarks").glob("bench_*.py"))


def run_benchmarks(
    members: Sequence[Member], *, started: Callable[[str], None] = lambda name: None
) -> Iterator[Benchmark]:
    for member in members:
        for script in scripts(member):
            started(f"{member.dist}: {script.name}")
            yield run_benchmark(member.dist, script)


def run_benchmark(package: str, script: Path) -> Benchmark:
    """Run one script. Rows that it printed before it crashed are kept."""
    command = [sys.executable, str(script), "--json"]
    with tempfile.TemporaryFile() as output:  # a pipe would not end before everything that the script started
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, cwd=script.parent, start_new_session=True
        )
        try:
            process.wait()
        finally:
            stop(process)
        output.seek(0)
        printed = output.read().decode("utf-8", errors="replace")
    rows, strange = [], ""
    for line in printed.splitlines():
        row = parse(line)
        if row is not None:
            rows.append(row)
        elif line.strip():
            strange = strange or line.strip()
    error = None
    if process.returncode:
        error = f"ended with exit status {process.returncode}"
    elif strange:
        error = f"printed something else than rows on stdout with --json: {strange!r}"
    elif not rows:
        error = "printed no row"
    return Benchmark(package, script.name, rows, error)


def parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or "workload" not in row or "ours" not in row:
        return None
    return {name: row.get(name) for name in FIELDS}
