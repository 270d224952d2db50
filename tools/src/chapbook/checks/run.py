"""All checks of all chosen members, in the order in which they cost."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..uv import UvError
from ..workspace import Member, Workspace
from . import alone, conventions, imports, wheels

Check = Callable[[Member, Workspace], Iterator[str]]

READING: Mapping[str, Check] = {
    "files": conventions.files,
    "metadata": conventions.metadata,
    "readme": conventions.readme,
    "changelog": conventions.changelog,
    "declared imports": imports.undeclared,
    "arrows": imports.arrows,
    "private names": imports.private,
}
"""What reading the tree can tell."""


@dataclass(frozen=True)
class Result:
    package: str
    check: str
    problems: list[str]
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.problems


def timed(package: str, check: str, find: Callable[..., Iterator[str]], *arguments: object) -> Result:
    start = time.perf_counter()
    found: list[str] = []
    try:
        found.extend(find(*arguments))
    except Exception as error:
        # A tree can be broken in ways a check did not expect; that is a finding, and the other checks go on.
        found.append(f"cannot be checked: {type(error).__name__}: {error}")
    return Result(package, check, found, time.perf_counter() - start)


def run_checks(
    workspace: Workspace,
    members: Sequence[Member],
    *,
    interpreters: Mapping[str, Path],
    quick: bool,
    started: Callable[[str], None] = lambda name: None,
) -> Iterator[Result]:
    """`quick` leaves out all that builds or installs; `interpreters` are version -> path."""
    with tempfile.TemporaryDirectory(prefix="chapbook-check-") as scratch:
        folder = Path(scratch)
        for member in members:
            for check, find in READING.items():
                yield timed(member.dist, check, find, member, workspace)
            started(f"{member.dist}: light import")
            yield timed(member.dist, "light import", alone.light, member, workspace, folder / "bytecode")
        if quick:
            return
        shared = [member for member in workspace.members if member.kind == "shared"]
        built: dict[str, Path] = {}
        for member in dict.fromkeys([*members, *shared]):
            started(f"{member.dist}: wheel")
            result = timed(member.dist, "wheel", build, member, folder, built)
            if member in members:
                yield result
        for version, interpreter in interpreters.items():
            environment = alone.Environment(interpreter, folder / version)
            for member in members:
                started(f"{member.dist}: alone on Python {version}")
                needed = list(dict.fromkeys([member, *shared]))
                check = f"alone on {version}"
                yield timed(member.dist, check, stand_alone, member, needed, environment, built)


def build(member: Member, folder: Path, built: dict[str, Path]) -> Iterator[str]:
    try:
        from_tree, from_sdist = wheels.build(member, folder / member.dist)
    except (UvError, RuntimeError) as error:
        yield f"does not build: {error}"
        return
    built[member.dist] = from_tree
    yield from wheels.problems(member, from_tree, from_sdist)


def stand_alone(
    member: Member, needed: Sequence[Member], environment: alone.Environment, built: Mapping[str, Path]
) -> Iterator[str]:
    missing = [other.dist for other in needed if other.dist not in built]
    if missing:
        yield f"there is no wheel of {', '.join(missing)} to install"
        return
    yield from alone.problems(member, environment, [built[other.dist] for other in needed])
