"""What each role must answer, and how an answer is read: strictly first, then tolerantly, then not at all.

Model output is data. It is parsed as JSON, repaired by a JSON library if need be, and checked against a schema; it is never
evaluated, and never becomes part of code or of a command.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import json_repair
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

_DEEPEST = 50


class Reply(BaseModel):
    """What all answers share: fields that were not asked for are left out."""

    model_config = ConfigDict(extra="ignore", str_strip_whitespace=True)


def _shallow(arguments: dict[str, Any]) -> dict[str, Any]:
    levels, layer = 0, list(arguments.values())
    while layer:
        levels += 1
        if levels > _DEEPEST:
            raise ValueError(f"nested more than {_DEEPEST} levels deep")
        inner = [item for item in layer if isinstance(item, dict | list)]
        layer = [part for item in inner for part in (item.values() if isinstance(item, dict) else item)]
    return arguments


Arguments = Annotated[dict[str, Any], AfterValidator(_shallow)]


class Exploration(Reply):
    """The Explorer's answer: one request that a user could make, and the arguments that serve it."""

    query: str = Field(min_length=1)
    arguments: Arguments = Field(default_factory=dict)


class Call(Reply):
    """The answer to one request: the arguments of the call that serves it."""

    arguments: Arguments


class Analysis(Reply):
    """The Analyzer's answer: what the call showed about the document; empty if it showed nothing new."""

    suggestions: str = ""

    @field_validator("suggestions", mode="before")
    @classmethod
    def _join(cls, value: Any) -> Any:
        if isinstance(value, list):
            return "\n".join(item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for item in value)
        return value


class Fact(Reply):
    """A statement that the new document adds, and the number of the call that showed it (None: nothing did)."""

    claim: str
    evidence: int | None = None


class Rewrite(Reply):
    """The Rewriter's answer: the new words, what they rest on, and where to look next."""

    description: str = Field(min_length=1)
    parameters: dict[str, str] = Field(default_factory=dict)
    facts: list[Fact] = Field(default_factory=list)
    next_direction: str = ""


class Summary(Reply):
    """The Summariser's answer: what a group of tools is for."""

    summary: str = Field(min_length=1)


R = TypeVar("R", bound=Reply)


@functools.cache
def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema of a reply. Made once: making it takes longer than all else that an iteration does here."""
    return kind.model_json_schema()


class ReplyError(ValueError):
    """A reply that does not hold what was asked for; the message can be shown to the model."""


def parse_reply(text: str, kind: type[R]) -> R:
    """Read a reply: a JSON object, alone, in a code fence or inside prose; with trailing commas or single quotes if need be.

    Of several objects the first that fits counts. Raises ReplyError, saying what is missing or wrong.
    """
    problem = "it holds no JSON object"
    for candidate in _objects(text):
        try:
            return kind.model_validate(candidate)
        except RecursionError:
            problem = "it is nested too deeply"
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"{'.'.join(map(str, first['loc'])) or 'the object'}: {first['msg']}"
    raise ReplyError(f"the reply could not be read as {kind.__name__}: {problem}")


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Every JSON object that the text may mean, best reading first."""
    fenced = re.findall(r"```(?:json)?\s*\n(.*?)```", text, re.DOTALL | re.IGNORECASE)
    decoder = json.JSONDecoder()
    for part in (text, *fenced):
        start = part.find("{")
        while start >= 0:
            try:
                value, end = decoder.raw_decode(part, start)
            except (ValueError, RecursionError):
                start = part.find("{", start + 1)
                continue
            if isinstance(value, dict):
                yield value
            start = part.find("{", end)
    for part in (*fenced, text):
        start = part.find("{")
        if start < 0:
            continue
        try:
            value = json_repair.loads(part[start:])
        except (ValueError, RecursionError):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield item
