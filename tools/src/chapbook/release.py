"""Release one distribution: version, changelog, commit and tag `<dist>-v<version>`. The others are not touched."""

from __future__ import annotations

import datetime
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from packaging.utils import canonicalize_name

from .checks.conventions import sections
from .workspace import Member, UsageError, Workspace, read

UNRELEASED = "Unreleased"


class Bump(StrEnum):
    major = "major"
    minor = "minor"
    patch = "patch"


@dataclass(frozen=True)
class Plan:
    dist: str
    old: str
    new: str
    tag: str
    files: dict[Path, str]
    """The new text of each file that changes."""
    notes: list[str]


def bumped(version: str, bump: Bump) -> str:
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise UsageError(f"the version must be three numbers to be bumped, got {version!r}: set it by hand")
    major, minor, patch = map(int, version.split("."))
    return {
        Bump.major: f"{major + 1}.0.0",
        Bump.minor: f"{major}.{minor + 1}.0",
        Bump.patch: f"{major}.{minor}.{patch + 1}",
    }[bump]


def plan(workspace: Workspace, member: Member, bump: Bump, *, today: datetime.date) -> Plan:
    """What a release would change. Raises `UsageError` if it cannot be made."""
    new = bumped(member.version, bump)
    tag = f"{member.dist}-v{new}"
    changed = git(workspace, "status", "--porcelain")
    if changed:
        raise UsageError(f"the tree has uncommitted changes, commit them first: {', '.join(changed.splitlines()[:5])}")
    if git(workspace, "tag", "--list", tag):
        raise UsageError(f"the tag {tag} exists already")
    files = {
        member.folder / "pyproject.toml": with_version(member, new),
        member.folder / "CHANGELOG.md": with_heading(member, f"{new} - {today.isoformat()}"),
    }
    lock = workspace.root / "uv.lock"
    if lock.is_file():
        files[lock] = with_locked_version(read(lock), member, new)
    return Plan(member.dist, member.version, new, tag, files, notes(workspace, member, new))


def with_version(member: Member, new: str) -> str:
    text = read(member.folder / "pyproject.toml")
    line = re.compile(rf'^version = "{re.escape(member.version)}"$', re.MULTILINE)
    if len(line.findall(text)) != 1:
        raise UsageError(f'pyproject.toml of {member.dist} must have one line version = "{member.version}"')
    return line.sub(f'version = "{new}"', text)


def with_heading(member: Member, heading: str) -> str:
    """The changelog with its Unreleased section named after the release."""
    body = sections(member.changelog).get(UNRELEASED)
    if body is None:
        raise UsageError(f"the changelog of {member.dist} has no section '## {UNRELEASED}': say what users will notice")
    if not re.search(r"^- \S", body, re.MULTILINE):
        raise UsageError(f"the section '## {UNRELEASED}' in the changelog of {member.dist} is empty")
    return re.sub(rf"^## {UNRELEASED}[ \t]*$", f"## {heading}", member.changelog, count=1, flags=re.MULTILINE)


def with_locked_version(lock: str, member: Member, new: str) -> str:
    """`uv.lock` names the version of each member, and `uv sync --locked` refuses one that is behind."""
    entry = re.compile(rf'(\[\[package\]\]\nname = "{member.dist}"\nversion = )"{re.escape(member.version)}"')
    if len(entry.findall(lock)) != 1:
        raise UsageError(f"uv.lock does not have {member.dist} {member.version}: run uv lock and commit it")
    return entry.sub(rf'\1"{new}"', lock)


def notes(workspace: Workspace, member: Member, new: str) -> list[str]:
    """What the one who releases should think of: lower bounds do not move by themselves."""
    if member.kind == "shared":
        found = []
        for other in workspace.members:
            asked = [r for r in other.requirements if canonicalize_name(r.name) == canonicalize_name(member.dist)]
            found += [
                f"{other.dist} asks for {needed}: raise that to >={new} if it uses what is new" for needed in asked
            ]
        return found
    found = []
    for other in workspace.members:
        uses = any(canonicalize_name(needed.name) == canonicalize_name(other.dist) for needed in member.requirements)
        if other.kind == "shared" and uses and sections(other.changelog).get(UNRELEASED, "").strip():
            found.append(
                f"{other.dist} has unreleased changes: if {member.dist} uses them, release {other.dist} first "
                f"and raise the lower bound on it"
            )
    return found


def carry_out(workspace: Workspace, plan: Plan) -> None:
    before = {path: path.read_bytes() for path in plan.files}
    paths = [str(path) for path in plan.files]
    try:
        for path, text in plan.files.items():
            path.write_text(text, encoding="utf-8")
        git(workspace, "commit", "--quiet", "--message", f"Release {plan.dist} {plan.new}", "--", *paths)
    except BaseException:  # a hook that says no, a merge under way: the tree is left as it was
        for path, content in before.items():
            path.write_bytes(content)
        raise
    try:
        git(workspace, "tag", "--annotate", "--message", f"{plan.dist} {plan.new}", plan.tag)
    except UsageError as error:
        raise UsageError(f"the release is committed but not tagged: {error}; then git tag -a {plan.tag}") from None


def git(workspace: Workspace, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(workspace.root), *arguments], capture_output=True, text=True, encoding="utf-8"
        )
    except FileNotFoundError:
        raise UsageError("git is not on PATH") from None
    if done.returncode:
        raise UsageError(f"git {arguments[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def changes(plan: Plan, root: Path) -> Sequence[str]:
    return [str(path.relative_to(root)) for path in plan.files]
