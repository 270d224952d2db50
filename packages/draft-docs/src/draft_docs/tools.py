"""What a tool is, and what came back from calling it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

JsonSchema = Mapping[str, Any]

ErrorKind = Literal["invalid_arguments", "tool_error", "transient", "auth", "timeout", "died", "not_executed"]


@dataclass(frozen=True)
class Hints:
    """What the tool's owner says about its effects; None where nothing is said. Hints are claims, not guarantees."""

    read_only: bool | None = None
    idempotent: bool | None = None
    destructive: bool | None = None


@dataclass(frozen=True)
class ToolSpec:
    """A tool as a model sees it: name, description and the JSON Schema of its arguments.

    `source` says where it came from (a file, a server, a function), for messages and for the store.
    """

    name: str
    description: str
    input_schema: JsonSchema = field(default_factory=lambda: {"type": "object", "properties": {}})
    hints: Hints = Hints()
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not _is_unicode(self.name):
            raise ValueError(f"a tool's name must be a text that is not empty, got {self.name!r}")
        if not isinstance(self.description, str):
            raise ValueError(f"the description of tool {self.name} must be a text, got {self.description!r}")
        schema = self.input_schema
        if not isinstance(schema, Mapping):
            raise ValueError(f"the parameters of tool {self.name} must be a JSON Schema object, got {schema!r}")
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if not isinstance(properties, Mapping) or not all(isinstance(p, Mapping | bool) for p in properties.values()):
            raise ValueError(f"the properties of tool {self.name} must be an object of schemas, got {properties!r}")
        if isinstance(required, str) or not all(isinstance(name, str) for name in required):
            raise ValueError(f"'required' of tool {self.name} must be a list of names, got {required!r}")

    @property
    def parameters(self) -> dict[str, JsonSchema]:
        """Each parameter with its schema, in order."""
        return dict(self.input_schema.get("properties", {}))

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(self.input_schema.get("required", ()))

    @property
    def parameter_docs(self) -> dict[str, str]:
        """The description of each parameter, empty where there is none."""
        schemas = {name: schema for name, schema in self.parameters.items() if isinstance(schema, Mapping)}
        return {name: str(schemas.get(name, {}).get("description", "")) for name in self.parameters}

    @property
    def is_repeatable(self) -> bool:
        """Whether making a call twice is known to do no more than making it once."""
        return bool(self.hints.read_only or self.hints.idempotent)

    def with_docs(self, description: str, parameters: Mapping[str, str] | None = None) -> ToolSpec:
        """The same tool with other words: names, types and everything else stay.

        Parameters that are not named keep their description. Raises KeyError for one that the tool does not have.
        """
        schema = dict(self.input_schema)
        properties = dict(schema.get("properties", {}))
        for name, text in (parameters or {}).items():
            if name not in properties:
                raise KeyError(
                    f"tool {self.name} has no parameter {name!r}, only {', '.join(self.parameters) or 'none'}"
                )
            if text and properties[name] is not False:  # `true` is a schema for anything, without room for words
                known = properties[name] if isinstance(properties[name], Mapping) else {}
                properties[name] = {**known, "description": text}
        if properties:
            schema["properties"] = properties
        return replace(self, description=description, input_schema=schema)

    @property
    def fingerprint(self) -> str:
        """Changes when anything that a model or a call depends on changes."""
        said = [self.name, self.description, self.input_schema, self.hints.__dict__]
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _is_unicode(text: str) -> bool:
    return text.encode("utf-8", "ignore").decode("utf-8") == text


@dataclass(frozen=True)
class ToolResult:
    """The outcome of one call. `content` is text, cut to the policy's length (`truncated` says so).

    `error_kind` is None for a success. Only `tool_error` and `invalid_arguments` say something about the tool; the others are about
    the moment (`transient`, `timeout`, `died`), the caller (`auth`) or the policy (`not_executed`).
    """

    content: str
    error_kind: ErrorKind | None = None
    seconds: float = 0.0
    truncated: bool = False

    @property
    def ok(self) -> bool:
        return self.error_kind is None

    @property
    def is_evidence(self) -> bool:
        """Whether the result shows how the tool behaves, so that a document may be rewritten from it."""
        return self.error_kind in (None, "tool_error", "invalid_arguments")


class ToolRunner(Protocol):
    """Calls tools by name. An adapter's own failures come back as results; it raises only for names it does not have."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult: ...
