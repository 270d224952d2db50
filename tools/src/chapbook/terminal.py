"""What goes where: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

PLAIN_WIDTH = 160
"""Columns where the output is no terminal, such as a CI log."""


def stdout() -> Console:
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PLAIN_WIDTH, emoji=False)


def say(text: str) -> None:
    """A line for the person who waits."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2))
