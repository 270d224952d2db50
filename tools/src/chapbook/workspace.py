"""The source tree: where it is, which distributions it holds, and what each says about itself.

Read from pyproject.toml files, never by importing a package: a tree that does not import can still be looked at.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


class UsageError(Exception):
    """Wrong use or bad input: the command says one line and exits with 2."""


@dataclass(frozen=True)
class Member:
    """One distribution of the workspace."""

    folder: Path
    kind: str
    """`package` for a method, `shared` for the common package, `tools` for this one."""

    @cached_property
    def pyproject(self) -> dict[str, Any]:
        return read_toml(self.folder / "pyproject.toml")

    @property
    def project(self) -> dict[str, Any]:
        return self.pyproject.get("project", {})

    @property
    def dist(self) -> str:
        return self.project.get("name", self.folder.name)

    @property
    def version(self) -> str:
        return self.project.get("version", "")

    @property
    def source(self) -> Path:
        return self.folder / "src"

    @property
    def import_name(self) -> str:
        """The one import package; by convention the distribution's name with underscores."""
        found = sorted(init.parent.name for init in self.source.glob("*/__init__.py"))
        return found[0] if len(found) == 1 else self.dist.replace("-", "_")

    @property
    def import_folder(self) -> Path:
        return self.source / self.import_name

    @property
    def readme(self) -> str:
        return read(self.folder / "README.md")

    @property
    def changelog(self) -> str:
        return read(self.folder / "CHANGELOG.md")

    @property
    def requirements(self) -> list[Requirement]:
        return [Requirement(text) for text in self.project.get("dependencies", [])]

    @property
    def extras(self) -> dict[str, list[Requirement]]:
        extras: dict[str, list[str]] = self.project.get("optional-dependencies", {})
        return {canonicalize_name(extra): [Requirement(text) for text in texts] for extra, texts in extras.items()}

    def extra_requirements(self, extra: str) -> list[Requirement]:
        """The requirements of one extra, with `dist[other]` replaced by what that other extra asks for."""
        found: list[Requirement] = []
        waiting, seen = [extra], set()
        while waiting:
            name = canonicalize_name(waiting.pop())
            if name in seen:
                continue
            seen.add(name)
            for requirement in self.extras.get(name, []):
                if canonicalize_name(requirement.name) == canonicalize_name(self.dist):
                    waiting.extend(requirement.extras)
                else:
                    found.append(requirement)
        return found


@dataclass(frozen=True)
class Workspace:
    root: Path

    @cached_property
    def members(self) -> list[Member]:
        """Methods by name, then the common package and the tools."""
        members = [Member(file.parent, "package") for file in sorted(self.root.glob("packages/*/pyproject.toml"))]
        for kind in ("shared", "tools"):
            if (self.root / kind / "pyproject.toml").is_file():
                members.append(Member(self.root / kind, kind))
        return members

    @property
    def packages(self) -> list[Member]:
        return [member for member in self.members if member.kind == "package"]

    def find(self, dist: str) -> Member:
        return self.select([dist])[0]

    def select(self, names: Sequence[str], *, among: Sequence[Member] | None = None) -> list[Member]:
        """The members of these names, all of them if none is named."""
        members = self.members if among is None else list(among)
        known = {canonicalize_name(member.dist): member for member in members}
        for name in names:
            if canonicalize_name(name) not in known:
                raise UsageError(unknown_name("distribution", name, [member.dist for member in members]))
        return [known[canonicalize_name(name)] for name in names] or members


def find_workspace(start: Path | None = None) -> Workspace:
    """The workspace that `start` (the current folder) lies in."""
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        pyproject = folder / "pyproject.toml"
        if pyproject.is_file() and "workspace" in read_toml(pyproject).get("tool", {}).get("uv", {}):
            return Workspace(folder)
    raise UsageError(f"{start} lies in no chapbook workspace: run this in a checkout, or name one with --root")


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(known) or 'none'}"
    return f"no {what} is called {name!r}: {hint}"


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not TOML, or not UTF-8
        raise UsageError(f"{path} cannot be read: {error}") from None


def read(path: Path) -> str:
    """The text of a file, empty if there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""
