"""What the adapters share."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from draft_docs.tools import ToolResult, ToolSpec

if TYPE_CHECKING:
    from draft_docs.sources.mcp import McpServer


@runtime_checkable
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


@asynccontextmanager
async def opened(source: ToolSource | McpServer) -> AsyncIterator[ToolSource]:
    """The source itself, or the connection to a server, closed at the end."""
    if isinstance(source, ToolSource):
        yield source
        return
    connected = await source.connect()
    try:
        yield connected
    finally:
        await connected.aclose()


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
