"""When a rewrite is refused. This is an extension: in the paper the last text wins, even if it is worse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from draft_docs.redact import Redactor, visible
from draft_docs.tools import ToolSpec

if TYPE_CHECKING:
    from draft_docs.loop import Gate, Iteration

_URL = re.compile(r"(?i:\b(?:https?|ftp)://|\bwww\.)[^\s<>\"')\]]+")
# Orders to a reader that is a model: a document describes a tool, it does not give such orders.
_ORDERS = re.compile(
    r"(?i:\b(?:ignore|disregard|forget|override)\b[^.\n]{0,40}\b(?:instruction|prompt|rule|previous|above|earlier|prior)"
    r"|\b(?:system|developer) (?:prompt|message)\b|\byou are now\b|\bdo not tell\b|\bwithout telling\b"
    r"|\b(?:always|must|first) (?:call|use|invoke|run|send|forward|include)\b[^.\n]{0,60}\b(?:password|token|key|secret|credential)s?\b"
    r"|<\s*/?\s*(?:system|instructions?|important)\s*>)"
)
_COPIED_WORDS = 12


def lint_gate(*, max_chars: int, redactor: Redactor) -> Gate:
    """Refuse a rewrite that loses a documented value, is too long, holds a secret, or carries what only a result said as an order."""

    async def gate(old: ToolSpec, new: ToolSpec, iteration: Iteration) -> str:
        return next(problems(old, new, iteration, max_chars=max_chars, redactor=redactor), "")

    return gate


def problems(
    old: ToolSpec, new: ToolSpec, iteration: Iteration, *, max_chars: int, redactor: Redactor
) -> Iterator[str]:
    """Everything that is wrong with a rewrite, the gravest first."""
    result = iteration.result.content if iteration.result is not None else ""
    was, now = _words(old), _words(new)
    if redactor.holds_secret(now) or "[redacted]" in now:
        yield "it holds a secret"
    if visible(now) != now:
        yield "it holds invisible characters"
    for order in orders(now):
        if order.lower() not in was.lower():
            yield f"it gives an order to its reader: {order!r}"
    for url in _URL.findall(now):
        if url not in was:
            yield f"it holds an address that the documentation did not: {url}"
    if len(new.description) > max_chars:
        yield f"its description has {len(new.description)} characters, more than {max_chars}"
    copied = _copied(now, result, was)
    if copied:
        yield f"it copies from a result: {copied!r}"
    for value in _enum_values(old):
        if _mentions(was, value) and not _mentions(now, value) and value not in iteration.suggestions:
            yield f"it no longer names the allowed value {value!r}"
    for name in old.required:
        if _mentions(old.description, name) and not _mentions(new.description, name):
            yield f"its description no longer names the required parameter {name!r}"


def orders(text: str) -> list[str]:
    """What in a text tells a model that reads it to do something that no document of a tool would."""
    return [found.group() for found in _ORDERS.finditer(text)]


def _words(tool: ToolSpec) -> str:
    return "\n".join([tool.description, *tool.parameter_docs.values()])


def _copied(text: str, result: str, old: str) -> str:
    """A run of words that stands in the text and in the result but not in the old document."""
    words = text.split()
    known, before = " ".join(result.split()), " ".join(old.split())
    for i in range(len(words) - _COPIED_WORDS + 1):
        run = " ".join(words[i : i + _COPIED_WORDS])
        if run in known and run not in before:
            return run
    return ""


def _enum_values(tool: ToolSpec) -> Iterator[str]:
    def walk(schema: Any) -> Iterator[str]:
        if isinstance(schema, dict):
            values = schema.get("enum")
            yield from (value for value in (values if isinstance(values, list) else []) if isinstance(value, str))
            for inner in schema.values():
                yield from walk(inner)
        elif isinstance(schema, list):
            for inner in schema:
                yield from walk(inner)

    yield from walk(dict(tool.input_schema))


def _mentions(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None
