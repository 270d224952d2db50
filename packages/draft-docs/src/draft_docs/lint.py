"""What can be seen to be wrong with a tool's documentation without calling anything."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from draft_docs.gates import orders
from draft_docs.redact import Redactor, visible
from draft_docs.tools import ToolSpec

RULES = {
    "no-description": "the tool has no description",
    "undocumented-parameter": "a parameter has no description",
    "placeholder": "a text only repeats the name, or stands for one still to be written",
    "short-description": "the description has fewer than four words",
    "long-description": "the description is longer than the limit",
    "ambiguous-name": "a parameter's name fits anything (id, data, value) and its text does not say what it is",
    "unexplained-enum": "the allowed values are not explained in words",
    "unstated-format": "a date, time or duration whose format or unit is not said",
    "same-description": "several tools have the same description",
    "mixed-names": "the names of the tools follow different conventions",
    "bad-schema": "the schema of the arguments is not valid JSON Schema",
    "secret": "a text holds what looks like a credential",
    "hidden-characters": "a text holds characters that a person does not see",
    "order": "a text gives orders to the model that reads it",
}

_PLACEHOLDER = re.compile(
    r"(?i)^\W*(?:todo|tbd|fixme|xxx|n/?a|none|null|lorem ipsum.*|description(?: (?:of|for)\b.*| here)?|"
    r"(?:the |a |an )?(?:string|str|integer|int|number|float|bool|boolean|object|array|list|dict|param|parameter|argument|arg|value|input)"
    r"(?: (?:value|parameter|param|argument|input))?|no description.*|add (?:a )?description.*|your .* here)\W*$"
)
_AMBIGUOUS = {
    "id", "data", "value", "input", "arg", "args", "param", "params", "info", "item", "obj", "object", "x", "y", "key", "name", "type",
    "text", "options", "payload", "val", "num", "s", "n",
}  # fmt: skip
_TIMED = re.compile(
    r"(?i)(?:^|_)(?:date|datetime|time|timestamp|since|until|start|end|from|to|timeout|duration|ttl|interval)(?:_|$)"
)
_FORMAT_SAID = re.compile(
    r"(?i)iso|rfc ?\d|yyyy|hh[:h]|\d{4}-\d\d|\d{1,2}:\d\d|unix|epoch|utc|zone|seconds?|minutes?|hours?|in days|milliseconds?|\bms\b|format"
)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: which rule, in which tool, at `where` ("description", or a parameter's name)."""

    tool: str
    where: str
    rule: str
    message: str


def lint(tools: Sequence[ToolSpec], *, max_chars: int = 2000) -> list[Finding]:
    """Check the documentation of tools against `RULES`, tool by tool."""
    if max_chars < 1:
        raise ValueError(f"max_chars must be >= 1, got {max_chars!r}")
    return [*(found for tool in tools for found in _of_tool(tool, max_chars)), *_between(tools)]


def _of_tool(tool: ToolSpec, max_chars: int) -> Iterator[Finding]:
    def found(where: str, rule: str, message: str) -> Finding:
        return Finding(tool.name, where, rule, message)

    text = tool.description.strip()
    if not text:
        yield found("description", "no-description", "there is no description")
    elif _is_placeholder(text, tool.name):
        yield found("description", "placeholder", f"{text!r} says no more than the name")
    elif len(text.split()) < 4:
        yield found("description", "short-description", f"{text!r} has fewer than four words")
    if len(text) > max_chars:
        yield found("description", "long-description", f"{len(text)} characters, more than {max_chars}")
    try:
        validator_for(dict(tool.input_schema)).check_schema(dict(tool.input_schema))
    except SchemaError as error:
        yield found("schema", "bad-schema", error.message)
    for name, schema in tool.parameters.items():
        yield from (found(name, rule, message) for rule, message in _of_parameter(name, schema, tool.description))
    for where, words in (("description", tool.description), *tool.parameter_docs.items()):
        if Redactor().holds_secret(words):
            yield found(where, "secret", "it holds what looks like a credential")
        if visible(words) != words.replace("\r", ""):
            yield found(where, "hidden-characters", "it holds characters that cannot be seen")
        for order in orders(words):
            yield found(where, "order", f"it tells its reader: {order!r}")


def _of_parameter(name: str, schema: Any, description: str) -> Iterator[tuple[str, str]]:
    words = str(schema.get("description", "")).strip() if isinstance(schema, dict) else ""
    if not words:
        yield "undocumented-parameter", f"{name} has no description"
    elif _is_placeholder(words, name):
        yield "placeholder", f"{words!r} says no more than the name"
    if name.lower() in _AMBIGUOUS and len(words.split()) < 3:
        yield "ambiguous-name", f"{name} fits anything: say what it is"
    if not isinstance(schema, dict):
        return
    values = [value for value in schema.get("enum", ()) if isinstance(value, str)]
    said = f"{words}\n{description}"
    missing = [value for value in values if not re.search(rf"(?<!\w){re.escape(value)}(?!\w)", said)]
    if len(values) > 1 and missing:
        yield "unexplained-enum", f"nothing says what {', '.join(missing[:5])} mean{'s' if len(missing) == 1 else ''}"
    is_open = schema.get("type") in ("string", "integer", "number") and "format" not in schema and not values
    if is_open and _TIMED.search(name) and not _FORMAT_SAID.search(words):
        yield "unstated-format", f"{name} is a time, date or duration, and its format or unit is not said"


def _between(tools: Sequence[ToolSpec]) -> Iterator[Finding]:
    same: dict[str, list[str]] = defaultdict(list)
    for tool in tools:
        if tool.description.strip():
            same[" ".join(tool.description.lower().split())].append(tool.name)
    for names in same.values():
        for name in names if len(names) > 1 else ():
            others = ", ".join(other for other in names if other != name)
            yield Finding(name, "description", "same-description", f"it is also that of {others}")
    styles = {tool.name: _style(tool.name) for tool in tools}
    counts = {style: list(styles.values()).count(style) for style in set(styles.values()) - {"one word"}}
    if len(counts) > 1:
        common = max(sorted(counts), key=lambda style: counts[style])
        for name, style in styles.items():
            if style not in (common, "one word"):
                yield Finding(name, "name", "mixed-names", f"{style}, while most names are {common}")


def _is_placeholder(words: str, name: str) -> bool:
    def plain(text: str) -> str:
        spread = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
        return " ".join(re.findall(r"[^\W_]+", re.sub(r"(?i)^(?:the|a|an)\s+", "", spread).lower()))

    return _PLACEHOLDER.match(words) is not None or plain(words) in ("", plain(name))


def _style(name: str) -> str:
    if "-" in name:
        return "kebab-case"
    if "_" in name:
        return "snake_case"
    return "camelCase" if re.search(r"[a-z][A-Z]", name) else "one word"
