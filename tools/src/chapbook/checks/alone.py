"""The wheel, with chapbook-shared's wheel, alone in a fresh environment; and what an import there and here pulls in."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..uv import UvError, run_uv
from ..workspace import Member, Workspace
from .conventions import readme_script
from .imports import distributions, imported_at_once, is_foreign, modules, providers, read_modules

PROBE = Path(__file__).with_name("probe.py")
IMPORT_SECONDS = 1.0
TIMEOUT = 300.0
INHERITED = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
"""What the environment of the one who checks may not hand on to the package under test."""


def without(variables: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


class Failed(Exception):
    """A process under test did not end well; the message is the end of what it said."""


class Environment:
    """A fresh virtual environment for one interpreter. Made again for each package, always in the same place: the
    bytecode of what is installed again is then found in `bytecode` and not compiled again."""

    def __init__(self, interpreter: Path, folder: Path):
        self.interpreter = interpreter
        self.folder = folder / "venv"
        self.bytecode = folder / "bytecode"

    @property
    def scripts(self) -> Path:
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    @property
    def python(self) -> Path:
        return self.scripts / "python"

    def install(self, *wheels: Path) -> None:
        run_uv("venv", "--quiet", "--clear", "--python", str(self.interpreter), str(self.folder))
        run_uv("pip", "install", "--quiet", "--python", str(self.python), *map(str, wheels), cwd=self.folder)

    def variables(self) -> dict[str, str]:
        kept = without(os.environ, *INHERITED)
        return {
            **kept,
            "PYTHONPYCACHEPREFIX": str(self.bytecode),
            "HF_HUB_OFFLINE": "1",
            "MPLBACKEND": "Agg",
            "PATH": os.pathsep.join([str(self.scripts), kept.get("PATH", "")]),
        }


def run(command: list[str], variables: Mapping[str, str], cwd: Path) -> str:
    try:
        done = subprocess.run(
            command, env=dict(variables), cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"ran past {TIMEOUT:g} s") from None
    said = done.stderr.decode("utf-8", errors="replace").strip()
    if done.returncode:
        raise Failed("\n".join(said.splitlines()[-8:]) or f"exit status {done.returncode}")
    return said


def ask(python: Path, variables: Mapping[str, str], job: str, *arguments: str) -> Any:
    with tempfile.TemporaryDirectory(prefix="chapbook-check-") as scratch:
        answer = Path(scratch) / "answer.json"
        empty = Path(scratch) / "empty"
        empty.mkdir()
        run([str(python), "-P", str(PROBE), job, str(answer), *arguments], variables, empty)
        return json.loads(answer.read_text(encoding="utf-8"))


def problems(member: Member, environment: Environment, wheels: list[Path]) -> Iterator[str]:
    """Install and try; a check that cannot start ends the list."""
    try:
        environment.install(*wheels)
    except UvError as error:
        yield f"the wheel does not install alone: {error}"
        return
    variables = environment.variables()
    try:
        yield from check_face(member, environment, variables)
        yield from check_import_time(member, environment, variables)
    except Failed as error:
        yield f"import {member.import_name} fails alone: {error}"
        return
    yield from check_readme(member, environment, variables)
    yield from check_commands(member, environment, variables)


def check_face(member: Member, environment: Environment, variables: Mapping[str, str]) -> list[str]:
    # Private modules are reached through public ones, which say what is missing.
    names = [name for name in modules(member) if not any(part.startswith("_") for part in name.split("."))]
    found = ask(environment.python, variables, "face", member.import_name, member.dist, *names)
    # The tools are a command: nothing there is for import.
    return [problem for problem in found if member.kind == "package" or "__all__" not in problem]


def check_import_time(member: Member, environment: Environment, variables: Mapping[str, str]) -> Iterator[str]:
    warm = ask(environment.python, variables, "seconds", member.import_name)
    before = ["torch"] if warm["torch"] else []
    times = [ask(environment.python, variables, "seconds", member.import_name, *before)["seconds"] for _ in range(3)]
    taken = statistics.median(times)
    if taken > IMPORT_SECONDS:
        beyond = " beyond torch's own" if before else ""
        yield f"import {member.import_name} takes {taken:.2f} s{beyond}, more than {IMPORT_SECONDS:g} s"


def check_readme(member: Member, environment: Environment, variables: Mapping[str, str]) -> Iterator[str]:
    script = readme_script(member.readme)
    if not script.strip():
        return
    with tempfile.TemporaryDirectory(prefix="chapbook-readme-") as scratch:
        (Path(scratch) / "empty").mkdir()
        file = Path(scratch) / "README.py"
        file.write_text(script, encoding="utf-8")
        try:
            run([str(environment.python), "-P", str(file)], variables, Path(scratch) / "empty")
        except Failed as error:
            yield f"the code in the README fails with the base install: {error}"


def check_commands(member: Member, environment: Environment, variables: Mapping[str, str]) -> Iterator[str]:
    """Each command explains itself, or says which extra it needs."""
    for command in member.project.get("scripts", {}):
        try:
            run([str(environment.scripts / command), "--help"], variables, environment.folder)
        except Failed as error:
            said = str(error)
            if "pip install" not in said or f"{member.dist}[" not in said or "Traceback" in said:
                yield f"{command} --help fails with the base install, and names no extra in one line: {said}"
        except OSError as error:
            yield f"{command} does not start: {error}"


def light(member: Member, workspace: Workspace, bytecode: Path | None = None) -> Iterator[str]:
    """With everything of the workspace installed, importing the package loads only what its base install declares.

    What a declared library loads by itself is its own affair, so that is taken off. `bytecode` is where compiled modules
    are kept from one package to the next.
    """
    variables = {
        **without(os.environ, *INHERITED),
        "PYTHONPATH": os.pathsep.join(str(other.source) for other in workspace.members),
    }
    if bytecode is not None:
        variables["PYTHONPYCACHEPREFIX"] = str(bytecode)
    readers = read_modules(member)
    direct = sorted(
        {
            made.top
            for name in imported_at_once(member, readers)
            for made in readers[name].imports
            if made.where == "module" and is_foreign(made.top, member)
        }
    )
    python = Path(sys.executable)
    try:
        theirs = set(ask(python, variables, "loaded", *direct))
        ours = set(ask(python, variables, "loaded", member.import_name))
    except Failed as error:
        yield f"import {member.import_name} fails in the workspace: {error}"
        return
    if member.import_name not in ours:
        yield f"import {member.import_name} fails in the workspace"
    allowed = closure(member.requirements, workspace)
    for top in sorted(ours - theirs):
        if not is_foreign(top, member) or (top not in distributions() and not is_member(top, workspace)):
            continue
        found = providers(top, workspace)
        if not found & allowed:
            yield f"import {member.import_name} loads {top} (from {', '.join(sorted(found))}) because it is there"


def is_member(top: str, workspace: Workspace) -> bool:
    return any(member.import_name == top for member in workspace.members)


def closure(requirements: list[Requirement], workspace: Workspace) -> set[str]:
    """All distributions that an install of these requirements brings."""
    ours = {canonicalize_name(member.dist): member for member in workspace.members}
    waiting = [(canonicalize_name(needed.name), frozenset(needed.extras)) for needed in requirements if applies(needed)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, frozenset(extras)))
        if name in ours:
            member = ours[name]
            further = [*member.requirements, *(r for extra in extras for r in member.extra_requirements(extra))]
        else:
            further = installed_requirements(name)
        for needed in further:
            if applies(needed, extras):
                waiting.append((canonicalize_name(needed.name), frozenset(needed.extras)))
    return {str(name) for name, _ in seen}


def applies(requirement: Requirement, extras: frozenset[str] = frozenset()) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, ""))


def installed_requirements(name: str) -> list[Requirement]:
    try:
        return [Requirement(text) for text in distribution(name).requires or []]
    except PackageNotFoundError:
        return []
