"""What the adapters share."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Protocol

from draft_docs.tools import ToolResult, ToolSpec


class ToolSource(Protocol):
    """A place that tools come from."""

    tools: list[ToolSpec]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult: ...

    def rewritten(self, refined: Mapping[str, ToolSpec]) -> str:
        """The source's own document with the words of `refined` (by tool name) in it, everything else unchanged."""
        ...

    async def aclose(self) -> None:
        """Let go of processes and connections."""
        ...


def shown(value: Any) -> str:
    """A return value as text: strings as they are, JSON where there is JSON for it, otherwise its `repr`; bytes by length."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(bytes(value))} bytes"
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys that are no strings, cycles
        return repr(value)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(bytes(value))} bytes"
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return repr(value)
