"""Fake distributions and workspaces, and the command run as a user runs it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from chapbook.scaffold import create
from chapbook.workspace import Workspace

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture(scope="session")
def bytecode(tmp_path_factory) -> Path:
    """Where the many short processes of these tests keep what they compile."""
    return tmp_path_factory.mktemp("bytecode")


@pytest.fixture
def chapbook(tmp_path, bytecode) -> Callable[..., Done]:
    """Run `python -m chapbook …` in an empty folder."""
    here = tmp_path / "here"
    here.mkdir()

    def run(*arguments: object, path: Path | None = None, cwd: Path = here) -> Done:
        environment = {**os.environ, "PYTHONPATH": str(path or ""), "PYTHONPYCACHEPREFIX": str(bytecode)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "chapbook", *map(str, arguments)]
        done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, encoding="utf-8")
        return Done(done.returncode, done.stdout, done.stderr)

    run.here = here  # type: ignore[attr-defined]
    return run


@pytest.fixture
def install(tmp_path) -> Callable[..., Path]:
    """Put a fake distribution with a demo on a path, as an installer would; gives that path."""
    site = tmp_path / "site"

    def install(dist: str, demo: str, *, description: str = "Method: its use", readme: str = "") -> Path:
        name = dist.replace("-", "_")
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("raise AssertionError('the command imported a package')\n")
        (site / f"{name}_demo.py").write_text(dedent(demo), encoding="utf-8")
        info = site / f"{name}-1.2.3.dist-info"
        info.mkdir()
        urls = "Project-URL: Paper, https://example.org/paper\n"
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {dist}\nVersion: 1.2.3\nSummary: {description}\n{urls}\n{readme}",
            encoding="utf-8",
        )
        (info / "entry_points.txt").write_text(f"[chapbook.demos]\n{dist} = {name}_demo:demo\n", encoding="utf-8")
        return site

    return install


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    """A workspace with the common package and one new package, `demo-pkg`."""
    root = tmp_path / "workspace"
    (root / "packages").mkdir(parents=True)
    (root / "LICENSE").write_text("the licence\n")
    (root / "pyproject.toml").write_text(
        dedent("""\
            [project]
            name = "a-workspace"
            version = "0"
            dependencies = [
                "chapbook-shared",
            ]

            [tool.uv.workspace]
            members = ["packages/*", "shared"]

            [tool.uv.sources]
            chapbook-shared = { workspace = true }
            """)
    )
    (root / "shared").symlink_to(ROOT / "shared")
    made = Workspace(root)
    create(made, "demo-pkg")
    return Workspace(root)  # afresh: the members are read once
