"""Arguments that are wrong on purpose: what a tool says to them is often what its documentation lacks. Not in the paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from draft_docs.tools import ToolSpec

_OF_ANOTHER_TYPE: dict[str, Any] = {
    "string": 7, "integer": "seven", "number": "seven", "boolean": "maybe", "array": "seven", "object": "seven",
}  # fmt: skip


def probes(tool: ToolSpec, arguments: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What is wrong, and the arguments: at most one each of a missing required argument, a wrong type, a value that is not allowed, and one
    beyond a limit, all else as in `arguments`."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for kind, what, probe in _all(tool, arguments):
        found.setdefault(kind, (what, probe))
    return list(found.values())


def _all(tool: ToolSpec, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name in tool.required:
        if name in arguments:
            yield "missing", f"{name} is missing", {key: value for key, value in arguments.items() if key != name}
    for name, schema in tool.parameters.items():
        if not isinstance(schema, Mapping):
            continue
        if isinstance(schema.get("type"), str) and schema["type"] in _OF_ANOTHER_TYPE:
            yield "type", f"{name} has another type", {**arguments, name: _OF_ANOTHER_TYPE[schema["type"]]}
        values = schema.get("enum")
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            yield "enum", f"{name} is none of the allowed values", {**arguments, name: "-".join(values)}
        for limit, step in (("maximum", 1), ("minimum", -1)):
            if isinstance(schema.get(limit), int | float):
                yield "limit", f"{name} is beyond its {limit}", {**arguments, name: schema[limit] + step}
