"""Which Python interpreters of this machine a check can run on. None is ever downloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SUPPORTED = ("3.11", "3.12", "3.13")


def find(version: str) -> Path | None:
    """A working interpreter of this `major.minor`, outside any virtual environment; None if there is none.

    A file of the right name proves nothing (a pyenv shim exists for versions that are not active), so each is asked.
    """
    for candidate in candidates(version):
        if answers(candidate, version):
            return candidate
    return None


def candidates(version: str) -> Iterator[Path]:
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        yield Path(getattr(sys, "_base_executable", sys.executable))
    name = f"python{version}"
    for root in (os.environ.get("PYENV_ROOT"), Path.home() / ".pyenv"):
        if root:
            yield from sorted(Path(root).glob(f"versions/{version}*/bin/{name}"), reverse=True)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if folder and (Path(folder) / name).is_file():
            yield Path(folder) / name
    for home in uv_homes():
        yield from sorted(home.glob(f"cpython-{version}*/bin/{name}"), reverse=True)


def uv_homes() -> Iterator[Path]:
    """Where uv keeps the interpreters that it manages."""
    if "UV_PYTHON_INSTALL_DIR" in os.environ:
        yield Path(os.environ["UV_PYTHON_INSTALL_DIR"])
    yield Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "uv" / "python"


def answers(python: Path, version: str) -> bool:
    try:
        done = subprocess.run(
            [python, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() == version
