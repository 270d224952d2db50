"""Python functions as tools: schema from the signature, words from the docstring, and back.

Only the words change hands. A function is called with keyword arguments that have passed its schema; nothing is evaluated.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
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
            name = function.__name__
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
        function, printed = self.functions[name], io.StringIO()
        try:
            if inspect.iscoroutinefunction(function):
                value = await function(**arguments)
            else:
                value = await asyncio.to_thread(_captured, function, dict(arguments), printed)
        except Exception as error:
            return ToolResult(f"{type(error).__name__}: {error}", "tool_error")
        text = printed.getvalue()
        return ToolResult(f"{shown(value)}\nprinted: {text}" if text else shown(value))

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
    return ToolSpec(name, doc.description or "", schema, hints, source)


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
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
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


def _captured(function: Callable[..., Any], arguments: dict[str, Any], printed: io.StringIO) -> Any:
    with contextlib.redirect_stdout(printed):
        return function(**arguments)
