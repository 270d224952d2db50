"""Python functions as tools: schema from the signature, words from the docstring, and back.

Only the words change hands. A function is called with keyword arguments that have passed its schema; nothing is evaluated.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import contextvars
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_type_hints

import docstring_parser
from pydantic import ConfigDict, TypeAdapter, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from draft_docs.sources.base import shown
from draft_docs.sources.docstrings import rewrite_docstring
from draft_docs.tools import Hints, ToolResult, ToolSpec


class CallableSource:
    """Functions of this process.

    `read_only` names those that are known to change nothing, or is True for all; others need to be allowed by name in the policy.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], *, read_only: bool | Sequence[str] = ()):
        self.functions: dict[str, Callable[..., Any]] = {}
        for function in functions:
            name = getattr(function, "__name__", type(function).__name__)
            if name in self.functions:  # two of one name: the module tells them apart
                name = f"{function.__module__}.{name}"
            if name in self.functions:
                raise ValueError(f"the function {name} is given twice")
            self.functions[name] = function
        harmless = set(self.functions) if read_only is True else set(read_only or ())
        unknown = harmless - set(self.functions)
        if unknown:
            raise ValueError(
                f"read_only names {', '.join(sorted(unknown))}, but the functions are {', '.join(self.functions)}"
            )
        self.tools = [
            tool_of(function, name, Hints(read_only=True if name in harmless else None))
            for name, function in self.functions.items()
        ]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call the function in a thread (await it if it is a coroutine function). What it prints is part of the result."""
        function = self.functions[name]
        if inspect.iscoroutinefunction(function):
            return await _awaited(function, arguments)
        return await _in_thread(lambda: _called(function, arguments))

    def rewritten(self, refined: Mapping[str, ToolSpec]) -> str:
        """The new docstrings, one after the other, each under the name of its function."""
        blocks = [
            f"{name}:\n{docstring_for(function, refined[name])}"
            for name, function in self.functions.items()
            if name in refined
        ]
        return "\n\n".join(blocks) + "\n"

    async def aclose(self) -> None:
        return


def tool_of(function: Callable[..., Any], name: str, hints: Hints) -> ToolSpec:
    """The tool that a function is: types from its annotations, words from its docstring (Google, NumPy or reST style)."""
    doc = docstring_parser.parse(inspect.getdoc(function) or "")
    schema = _schema(function)
    for parameter in doc.params:
        if parameter.arg_name in schema["properties"] and parameter.description:
            schema["properties"][parameter.arg_name]["description"] = parameter.description
    source = f"{function.__module__}.{getattr(function, '__qualname__', name)}"
    return ToolSpec(name, (doc.description or "").strip(), schema, hints, source)


def docstring_for(function: Callable[..., Any], tool: ToolSpec) -> str:
    """The function's docstring with the words of `tool`."""
    return rewrite_docstring(inspect.getdoc(function) or "", tool.description, tool.parameter_docs)


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    """JSON Schema of the keyword arguments. A parameter without a usable annotation may be anything."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return {"type": "object", "properties": {}, "additionalProperties": True}
    hints: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # annotations are the function's own code and may name what is not there
        hints = get_type_hints(function)
    fields: dict[str, Any] = {}
    open_ended = False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            open_ended = True
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = hints.get(name, Any)
        try:
            TypeAdapter(kind).json_schema()
        except (PydanticSchemaGenerationError, PydanticUserError):
            kind = Any
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (kind, default)
    model = create_model("Arguments", __config__=ConfigDict(arbitrary_types_allowed=True), **fields)
    schema = model.model_json_schema(mode="validation")
    properties = {
        name: {k: v for k, v in p.items() if k != "title"} for name, p in schema.get("properties", {}).items()
    }
    made: dict[str, Any] = {"type": "object", "properties": properties}
    for key in ("required", "$defs"):
        if key in schema:
            made[key] = schema[key]
    if open_ended:
        made["additionalProperties"] = True
    return made


def _called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> ToolResult:
    with _capture() as printed:
        try:
            return _result(shown(_call(function, arguments)), printed)
        except BaseException as error:  # also sys.exit: it ends the call, not the run
            return ToolResult(_said(error), "tool_error")


async def _awaited(function: Callable[..., Any], arguments: Mapping[str, Any]) -> ToolResult:
    with _capture() as printed:
        try:
            return _result(shown(await _call(function, arguments)), printed)
        except (Exception, SystemExit) as error:
            return ToolResult(_said(error), "tool_error")


def _result(text: str, printed: _Printed) -> ToolResult:
    return ToolResult(f"{text}\nprinted: {printed.text}" if printed.text else text)


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an error whose own text fails
        return type(error).__name__


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call by keyword, but for parameters that take a place only."""
    by_name = dict(arguments)
    by_place = [by_name.pop(name) for name in _placed(function) if name in by_name]
    return function(*by_place, **by_name)


def _placed(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some built-in functions have none
        return []
    return [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_ONLY]


async def _in_thread(work: Callable[[], ToolResult]) -> ToolResult:
    """Run in a thread of its own, not of a pool: a function that hangs holds up neither other calls nor the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ToolResult] = loop.create_future()

    def settle(result: ToolResult) -> None:
        if not future.done():  # nobody waits any longer for a call that was given up
            future.set_result(result)

    def target() -> None:
        result = work()
        with contextlib.suppress(RuntimeError):  # the run may be over
            loop.call_soon_threadsafe(settle, result)

    # `threading.Thread.start` would hold up the event loop until the thread has begun.
    _thread.start_new_thread(target, ())
    return await future


class _Printed:
    """What one call prints, up to a limit."""

    limit = 1_000_000

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text[: self.limit - len(self.text)]
        return len(text)

    def flush(self) -> None:
        return


class _Stdout:
    """Stands in for `sys.stdout` while functions are called: what a call prints goes to it, all else goes where it went."""

    def __init__(self, behind: Any):
        self._behind = behind

    def write(self, text: str) -> Any:
        return (_printed.get() or self._behind).write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        (_printed.get() or self._behind).flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


_printed: contextvars.ContextVar[_Printed | None] = contextvars.ContextVar("printed", default=None)
_users, _users_lock = 0, threading.Lock()


@contextmanager
def _capture() -> Iterator[_Printed]:
    """Catch what this thread or task prints. `redirect_stdout` cannot: it is for one thread at a time."""
    global _users
    with _users_lock:
        _users += 1
        if not isinstance(sys.stdout, _Stdout):
            sys.stdout = _Stdout(sys.stdout)  # type: ignore[assignment]
    printed = _Printed()
    token = _printed.set(printed)
    try:
        yield printed
    finally:
        _printed.reset(token)
        with _users_lock:
            _users -= 1
            if _users == 0 and isinstance(sys.stdout, _Stdout):
                sys.stdout = sys.stdout._behind
