"""MCP servers as tools, over stdio or streamable HTTP, and a proxy that republishes a server's tools with the refined words.

A server's source is often not ours to change: the words go into an overlay file, and `serve` puts it over the running server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from chapbook_shared.validate import import_extra
from draft_docs.redact import Redactor
from draft_docs.tools import Hints, ToolResult, ToolSpec

if TYPE_CHECKING:
    import mcp
    from mcp import types

_STDERR_TAIL = 2000
_START_SECONDS = 60.0  # a server that is installed at its first start takes long
_STOP_SECONDS = 10.0
_MOST_TOOLS = 10_000
_OVERLAY = "draft-docs overlay 1"


class McpServerError(RuntimeError):
    """The server could not be started or does not answer."""


@dataclass(frozen=True)
class McpServer:
    """An MCP server that is not connected to yet: `connect` gives its tools. Arguments as for `McpSource.connect`."""

    target: str | Sequence[str]
    env: Mapping[str, str] | None = None
    headers: Mapping[str, str] | None = None

    async def connect(self) -> McpSource:
        return await McpSource.connect(self.target, env=self.env, headers=self.headers)


class McpSource:
    """The tools of one MCP server: `await McpSource.connect([...command])` or `await McpSource.connect("http://...")`.

    A server's annotations (read-only, idempotent, destructive) are taken as hints. A server that dies is started once more.
    """

    def __init__(
        self,
        target: str | Sequence[str],
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        self.target, self._env, self._headers = target, dict(env or {}), dict(headers or {})
        self.tools: list[ToolSpec] = []
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by aclose
        self._restarted = False
        self._close = asyncio.Event()
        self._connection: asyncio.Task[None] | None = None
        self._client: mcp.Client | None = None

    @classmethod
    async def connect(
        cls,
        target: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> McpSource:
        """Connect and list the tools, all pages.

        Args:
            target: the command and its arguments (stdio), or the URL of a streamable HTTP endpoint.
            env: environment variables for the command, besides the few that every server gets. No others reach it.
            headers: sent with every request to a URL (credentials, say).

        The values of `env` and `headers` never reach a model, also if the server sends them back.

        Raises McpServerError with the end of what the server wrote to stderr.
        """
        import_extra("mcp", "draft-docs[mcp]")
        source = cls(target, env, headers)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await source._start()
                assert source._client is not None
                source.tools = [_spec(tool, source.name) for tool in await list_all_tools(source._client)]
        except TimeoutError:
            said = source._said()
            await source.aclose()
            raise McpServerError(f"{source.name} did not answer within {_START_SECONDS:g} s{said}") from None
        except BaseException:
            await source.aclose()
            raise
        names = [tool.name for tool in source.tools]
        if len(set(names)) < len(names):
            await source.aclose()
            raise McpServerError(f"{source.name} lists two tools of one name: {', '.join(sorted(names))}")
        return source

    @property
    def name(self) -> str:
        if not isinstance(self.target, str):
            return Redactor()(" ".join(self.target))
        parts = urlsplit(self.target)  # a user name, a password or a query may be credentials
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @property
    def secrets(self) -> list[str]:
        """What must not be seen if the server sends it back."""
        values = [*self._env.values(), *self._headers.values()]
        return values + [value.split(None, 1)[1] for value in values if len(value.split(None, 1)) == 2]

    @property
    def client(self) -> mcp.Client:
        """The connected client."""
        if self._client is None:
            raise McpServerError(f"{self.name} is not connected")
        return self._client

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS

        assert self._connection is not None
        answer = asyncio.ensure_future(self.client.call_tool(name, dict(arguments)))
        try:
            await asyncio.wait({answer, self._connection}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer.cancel()  # does nothing to one that is there; one that is given up is not waited for
        if not answer.done():
            return await self._died(name)
        try:
            result = answer.result()
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                return await self._died(name, error)
            if error.error.code == INVALID_PARAMS:
                return ToolResult(error.error.message, "invalid_arguments")
            return ToolResult(error.error.message, "tool_error")
        except Exception as error:
            return await self._died(name, error)
        text = "\n".join(_text(block) for block in result.content)
        return ToolResult(text, "tool_error" if result.is_error else None)

    def rewritten(self, refined: Mapping[str, ToolSpec]) -> str:
        """The overlay: for each refined tool its description and the texts of its parameters."""
        return overlay({tool.name: refined[tool.name] for tool in self.tools if tool.name in refined}, self.name)

    async def aclose(self) -> None:
        await self._stop()
        self._errors.close()

    async def _start(self) -> None:
        self._close.clear()
        self._client = None
        ready: asyncio.Future[mcp.Client] = asyncio.get_running_loop().create_future()
        self._connection = asyncio.create_task(self._hold(ready))
        waiting: set[asyncio.Future[Any]] = {ready, self._connection}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            error = self._connection.exception()
            raise McpServerError(f"{self.name} did not start: {_cause(error)}{self._said()}") from error
        self._client = ready.result()

    async def _stop(self) -> None:
        """End the connection, patiently once it stands, at once while it is still being made."""
        self._close.set()
        if self._connection is not None:
            if self._client is None:
                self._connection.cancel()
            await asyncio.wait({self._connection}, timeout=_STOP_SECONDS)
            self._connection.cancel()
            await asyncio.wait({self._connection}, timeout=_STOP_SECONDS)
            if self._connection.done() and not self._connection.cancelled():
                self._connection.exception()  # looked at: it was the server's end

    async def _hold(self, ready: asyncio.Future[mcp.Client]) -> None:
        """Keep the connection open until `aclose`: the SDK wants it opened and closed by one task."""
        import mcp
        from mcp.client.stdio import stdio_client

        server: Any = self.target
        if not isinstance(self.target, str):
            command, *arguments = self.target
            parameters = mcp.StdioServerParameters(command=command, args=arguments, env=self._env)
            server = stdio_client(parameters, errlog=self._errors)  # type: ignore[arg-type]  # only its file number is used
        async with contextlib.AsyncExitStack() as stack:
            if isinstance(self.target, str) and self._headers:
                from mcp.client.streamable_http import streamable_http_client

                httpx2 = import_extra("httpx2", "draft-docs[mcp]")
                http = httpx2.AsyncClient(headers=self._headers, timeout=httpx2.Timeout(30, read=300))
                server = streamable_http_client(self.target, http_client=await stack.enter_async_context(http))
            ready.set_result(await stack.enter_async_context(mcp.Client(server)))
            await self._close.wait()

    async def _died(self, name: str, error: BaseException | None = None) -> ToolResult:
        what = f"the server died while {name} was called: {_cause(error)}{self._said()}"
        if not self._restarted:
            self._restarted = True
            await self._stop()
            try:
                async with asyncio.timeout(_START_SECONDS):
                    await self._start()
                return ToolResult(f"{what}; it was started again", "died")
            except (McpServerError, TimeoutError) as failure:
                what = f"{what}; {failure or 'it did not start again'}"
        return ToolResult(what, "died")

    def _said(self) -> str:
        size = self._errors.seek(0, 2)
        self._errors.seek(max(0, size - _STDERR_TAIL))
        tail = self._errors.read().decode("utf-8", "replace").strip()
        return f"; it wrote: {tail}" if tail else ""


async def list_all_tools(client: mcp.Client) -> list[types.Tool]:
    """Every page of `tools/list`."""
    tools: list[types.Tool] = []
    cursor, seen = None, set[str]()
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None or cursor in seen:  # a server that gives the same cursor again would never end
            return tools
        if len(tools) > _MOST_TOOLS:
            raise McpServerError(f"the server lists more than {_MOST_TOOLS} tools: its pages do not end")
        seen.add(cursor)


def overlay(refined: Mapping[str, ToolSpec], server: str) -> str:
    """The words of tools as a file that `read_overlay` takes."""
    tools = {
        name: {
            "description": tool.description,
            "parameters": {parameter: words for parameter, words in tool.parameter_docs.items() if words},
        }
        for name, tool in refined.items()
    }
    return json.dumps({"format": _OVERLAY, "server": server, "tools": tools}, ensure_ascii=False, indent=2) + "\n"


def read_overlay(text: str) -> dict[str, dict[str, Any]]:
    """The words of an overlay, by tool name. Raises ValueError for anything else."""
    document = json.loads(text)
    if not isinstance(document, dict) or document.get("format") != _OVERLAY:
        raise ValueError(f"not an overlay: it needs the format {_OVERLAY!r}")
    tools = document.get("tools")
    if not isinstance(tools, dict) or not all(_are_words(words) for words in tools.values()):
        raise ValueError(
            "not an overlay: under 'tools' each tool needs a text 'description' and texts under 'parameters'"
        )
    return tools


def _are_words(words: Any) -> bool:
    parameters = words.get("parameters", {}) if isinstance(words, dict) else None
    return (
        isinstance(parameters, dict)
        and isinstance(words.get("description", ""), str)
        and all(isinstance(text, str) for text in parameters.values())
    )


@asynccontextmanager
async def proxy(
    target: str | Sequence[str], words: Mapping[str, Mapping[str, Any]], **connection: Any
) -> AsyncIterator[mcp.server.Server[Any]]:
    """A server that offers the tools of `target` with the words of the overlay. Names, schemas, calls and results pass unchanged.

    `connection` is as for `McpSource.connect`: `env`, `headers`.
    """
    from mcp import types
    from mcp.server import Server

    source = await McpSource.connect(target, **connection)

    async def list_tools(context: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_overlaid(tool, words) for tool in await list_all_tools(source.client)])

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        return await source.client.call_tool(params.name, params.arguments)

    try:
        yield Server("draft-docs", on_list_tools=list_tools, on_call_tool=call_tool)
    finally:
        await source.aclose()


async def serve_stdio(target: str | Sequence[str], words: Mapping[str, Mapping[str, Any]], **connection: Any) -> None:
    """Run the proxy on stdin and stdout until the client hangs up."""
    from mcp.server.stdio import stdio_server

    async with proxy(target, words, **connection) as server, stdio_server() as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())


def _overlaid(tool: types.Tool, overlaid: Mapping[str, Mapping[str, Any]]) -> types.Tool:
    words = overlaid.get(tool.name)
    if words is None:
        return tool
    spec = _spec(tool, "")
    known = {name: text for name, text in words.get("parameters", {}).items() if name in spec.parameters}
    new = spec.with_docs(words.get("description", spec.description), known)
    return tool.model_copy(update={"description": new.description, "input_schema": dict(new.input_schema)})


def _spec(tool: types.Tool, source: str) -> ToolSpec:
    said = tool.annotations
    hints = Hints(said.read_only_hint, said.idempotent_hint, said.destructive_hint) if said else Hints()
    return ToolSpec(tool.name, tool.description or "", dict(tool.input_schema), hints, source)


def _text(block: Any) -> str:
    """A content block as text: text as it is, anything else by kind and size."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        inner = block.resource
        return inner.text if hasattr(inner, "text") else f"[{inner.uri}: {len(inner.blob)} base64 characters]"
    if block.type in ("image", "audio"):
        return f"[{block.type} {block.mime_type}: {len(block.data)} base64 characters]"
    return f"[{block.type}]"


def _cause(error: BaseException | None) -> str:
    """The innermost error: task groups wrap what went wrong."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if error is not None else "the connection closed"
