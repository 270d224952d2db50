"""One way in: `load_tools` for whatever holds the tools."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draft_docs.sources.base import ToolSource
from draft_docs.sources.callables import CallableSource
from draft_docs.sources.mcp import McpServer
from draft_docs.sources.openai_tools import OpenAIToolsSource


def load_tools(
    *,
    callables: Sequence[Callable[..., Any]] | None = None,
    openai: str | Path | None = None,
    openapi: str | Path | None = None,
    mcp: str | Sequence[str] | None = None,
    read_only: bool | Sequence[str] = (),
    dispatch: Mapping[str, Callable[..., Any]] | None = None,
    base_url: str | None = None,
    headers: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> ToolSource | McpServer:
    """Tools to refine, from exactly one place.

    Args:
        callables: Python functions.
        openai: a JSON file of tools in OpenAI's form, nested or flat.
        openapi: an OpenAPI 3.0 or 3.1 file, JSON or YAML; needs `draft-docs[openapi]`.
        mcp: the command of an MCP server (stdio), or the URL of one (streamable HTTP); needs `draft-docs[mcp]`.
        read_only: for `callables` the names of those that change nothing, or True for all; for `openai` True or nothing.
        dispatch: for `openai`, the function behind each name; tools without one are not called.
        base_url: for `openapi`, where to call.
        headers: for `openapi` and the URL of an MCP server, what to send with each call.
        env: for `mcp`, environment variables for the command.

    Raises ValueError unless exactly one place is given, or if the file is not what it should be.
    """
    places = {"callables": callables, "openai": openai, "openapi": openapi, "mcp": mcp}
    given = [name for name, value in places.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"load_tools takes exactly one of {', '.join(places)}, got {', '.join(given) or 'none'}")
    if callables is not None:
        return CallableSource(callables, read_only=read_only)
    if openai is not None:
        if not isinstance(read_only, bool | tuple) or (isinstance(read_only, tuple) and read_only):
            raise ValueError(f"read_only must be True or left out for openai, got {read_only!r}")
        text = Path(openai).read_text(encoding="utf-8")
        return OpenAIToolsSource(text, dispatch=dispatch, read_only=bool(read_only), source=str(openai))
    if openapi is not None:
        from draft_docs.sources.openapi import OpenApiSource

        text = Path(openapi).read_text(encoding="utf-8")
        return OpenApiSource(text, base_url=base_url, headers=headers, source=str(openapi))
    assert mcp is not None
    if isinstance(mcp, str) and not mcp.startswith(("http://", "https://")):
        mcp = shlex.split(mcp)
    if not mcp:
        raise ValueError("mcp must be a command or a URL, got nothing")
    return McpServer(mcp, env, headers)
