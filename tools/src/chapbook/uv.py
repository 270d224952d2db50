"""The one place that calls uv."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


class UvError(RuntimeError):
    """uv is missing, or said no; the message is the end of what it said."""


def run_uv(*arguments: str, cwd: Path | None = None) -> None:
    uv = shutil.which("uv")
    if uv is None:
        raise UvError("uv is not on PATH: pip install uv")
    # The workspace's own environment must not be taken for the target of an install.
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    environment["UV_PYTHON_DOWNLOADS"] = "never"
    done = subprocess.run([uv, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise UvError(f"uv {' '.join(arguments[:2])} failed: " + "\n".join(said[-12:]))
