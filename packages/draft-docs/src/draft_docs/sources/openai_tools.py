"""Tools in OpenAI's JSON form, nested (`{"type": "function", "function": {...}}`) or flat, and back byte for byte.

Only the bytes of a description that changed are replaced; indentation, key order, escapes and line ends of everything else stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from draft_docs.tools import Hints, ToolResult, ToolSpec

Dispatch = Mapping[str, Callable[..., Any]]
Path = tuple[str | int, ...]
_DEEPEST = 100


class OpenAIToolsSource:
    """A JSON file of tools: a list of them, or an object with the list under `tools`.

    `dispatch` maps names to the functions that do the work; a tool without one is documented from its schema alone.
    """

    def __init__(self, text: str, *, dispatch: Dispatch | None = None, read_only: bool = False, source: str = ""):
        self._mark = text[: len(text) - len(text.removeprefix("\ufeff"))]  # some editors begin a file with it
        self.text = text.removeprefix("\ufeff")
        self.document = read_json(self.text)
        self._places: dict[str, Path] = {}
        self.tools: list[ToolSpec] = []
        for place, function in _functions(self.document):
            name = function["name"]
            if name in self._places:
                raise ValueError(f"two tools are called {name!r}: names must differ within a file")
            self._places[name] = place
            schema = function.get("parameters")
            schema = {"type": "object", "properties": {}} if schema is None else schema
            hints = Hints(read_only=True if read_only else None)
            words = function.get("description")
            self.tools.append(ToolSpec(name, "" if words is None else words, schema, hints, source))
        from draft_docs.sources.callables import CallableSource

        self._functions = CallableSource(())
        self._functions.functions.update(dispatch or {})

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if self.refusal(name):
            return ToolResult(f"not executed: {self.refusal(name)}", "not_executed")
        return await self._functions.call(name, arguments)

    def refusal(self, name: str) -> str:
        """Why the tool cannot be called; empty if it can."""
        return "" if name in self._functions.functions else "no function is given for it (dispatch)"

    def rewritten(self, refined: Mapping[str, ToolSpec]) -> str:
        """The file with the new descriptions, byte-identical but for them."""
        texts: dict[Path, str] = {}
        for tool in self.tools:
            new = refined.get(tool.name)
            if new is None:
                continue
            place = self._places[tool.name]
            if new.description != tool.description:
                texts[*place, "description"] = new.description
            for name, words in new.parameter_docs.items():
                if words != tool.parameter_docs[name]:
                    texts[*place, "parameters", "properties", name, "description"] = words
        return self._mark + replace_strings(self.text, texts)

    async def aclose(self) -> None:
        return


def read_json(text: str) -> Any:
    """A JSON text as Python values. Raises ValueError for what is none, and for nesting that nothing after this could follow."""
    try:
        value = json.loads(text)
        if depth(value) > _DEEPEST:
            raise RecursionError
    except RecursionError:
        raise ValueError(f"the document is nested more than {_DEEPEST} levels deep") from None
    except ValueError as error:
        raise ValueError(f"the document is no JSON: {error}") from None
    return value


def depth(value: Any) -> int:
    """How deep lists and objects lie in each other."""
    levels, layer = 0, [value]
    while layer:
        inner = [item for item in layer if isinstance(item, dict | list)]
        levels += bool(inner)
        layer = [part for item in inner for part in (item.values() if isinstance(item, dict) else item)]
    return levels


def replace_strings(text: str, changes: Mapping[Path, str]) -> str:
    """A JSON text with the strings at the given paths replaced, or added as the last key where there is none yet.

    Raises KeyError for a path whose parent object is not in the document.
    """
    spans = dict(_spans(text))
    edits: list[tuple[int, int, str]] = []
    for path, words in changes.items():
        value = json.dumps(words, ensure_ascii=text.isascii())
        if path in spans:
            edits.append((*spans[path], value))
            continue
        if path[:-1] not in spans:
            raise KeyError(f"the document has nothing at {'/'.join(map(str, path[:-1]))}")
        start, end = spans[path[:-1]]
        if text[start:end] == "true":  # a schema for anything, without room for words
            edits.append((start, end, f"{{{json.dumps(path[-1])}: {value}}}"))
        else:
            edits.append(_insertion(text, (start, end), str(path[-1]), value))
    for start, end, value in sorted(edits, reverse=True):
        text = text[:start] + value + text[end:]
    return text


def _functions(document: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    where: Path = ()
    if isinstance(document, dict) and isinstance(document.get("tools"), list):
        document, where = document["tools"], ("tools",)
    if isinstance(document, dict):
        entries: list[tuple[Path, Any]] = [((), document)]
    elif isinstance(document, list):
        entries = [((*where, i), entry) for i, entry in enumerate(document)]
    else:
        raise ValueError("tools must be a JSON list of tools, an object with a list under 'tools', or one tool")
    for place, entry in entries:
        inner = isinstance(entry, dict) and isinstance(entry.get("function"), dict)
        function, at = (entry["function"], (*place, "function")) if inner else (entry, place)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"entry {'/'.join(map(str, place)) or 0} is no tool: it needs a 'name', or a 'function' with one"
            )
        yield at, function


def _spans(text: str) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Every value of a JSON text, by path, with the characters that it stands in."""
    decoder = json.JSONDecoder()

    def skip(at: int) -> int:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        return at

    def value(at: int, path: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
        # Yields the spans inside, and last its own.
        start = at
        if text[at] not in "{[":
            yield path, (start, decoder.raw_decode(text, at)[1])
            return
        is_object, close = text[at] == "{", "}" if text[at] == "{" else "]"
        at, index = skip(at + 1), 0
        while text[at] != close:
            key: str | int = index
            if is_object:
                key, at = decoder.raw_decode(text, at)
                at = skip(skip(at) + 1)
            end = at
            for found in value(at, (*path, key)):
                yield found
                end = found[1][1]
            at, index = skip(end), index + 1
            if text[at] == ",":
                at = skip(at + 1)
        yield path, (start, at + 1)

    return value(skip(0), ())


def _insertion(text: str, span: tuple[int, int], key: str, value: str) -> tuple[int, int, str]:
    """Where and how a new last member goes into the object at `span`, laid out as its other members are."""
    start, end = span
    inside = text[start + 1 : end - 1]
    member = f"{json.dumps(key)}: {value}"
    if not inside.strip():
        return start + 1, end - 1, member
    at = start + 1 + len(inside.rstrip())
    lead = inside[: len(inside) - len(inside.lstrip())]
    return at, at, f",{lead or ' '}{member}"
