"""What may be called, how often, and what of it may be seen. Closed by default: a tool runs only if it is allowed by name and
known to be harmless, or named as an exception.
"""

from __future__ import annotations

import asyncio
import fnmatch
import functools
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from draft_docs.redact import Redactor, visible
from draft_docs.tools import ToolResult, ToolRunner, ToolSpec

_MARGIN = 100_000
"""Characters beyond the cut that are masked too: a secret may lie across the cut. More are not looked at: a result may be huge."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits on the tools of one run. The defaults call nothing but tools that say they only read.

    Args:
        allow: name patterns (`get_*`) of tools that may be called.
        allow_unsafe: names, not patterns, of tools that may be called although they do not say that they only read.
        dry_run: call nothing; every result is "not executed".
        max_calls, max_calls_per_tool: limits on calls, over a whole run and for one tool. A run that goes on from its store has made the
            calls that it made before.
        rate: calls a second over all tools; None for no limit.
        timeout: seconds for one call.
        retries: how often a call that failed for the moment (429, 5xx, a dropped connection) is made again. Only of tools that say that
            they only read or may be repeated: a call that failed may have done its work.
        max_result_chars: longer results are cut.
        secrets: parameter name -> `env:NAME`. Such a parameter is taken from the environment when a call is made; models never see it,
            and its value is masked wherever it turns up.
        hidden: environment variables whose values are masked too, such as that of the chat model's key: functions of this process can
            read them.
    """

    allow: Sequence[str] = ("*",)
    allow_unsafe: Sequence[str] = ()
    dry_run: bool = False
    max_calls: int = 200
    max_calls_per_tool: int = 20
    rate: float | None = None
    timeout: float = 30.0
    retries: int = 2
    max_result_chars: int = 2048
    secrets: Mapping[str, str] = field(default_factory=dict)
    hidden: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("max_calls", "max_calls_per_tool", "retries"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)!r}")
        for name in ("timeout", "max_result_chars"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"rate must be positive calls a second or None, got {self.rate!r}")
        for parameter, reference in self.secrets.items():
            if not reference.startswith("env:"):
                # The value itself must not be repeated: it may be the secret.
                raise ValueError(f"secrets[{parameter!r}] must be a reference like env:API_KEY, not a value")

    def refusal(self, tool: ToolSpec) -> str:
        """Why the tool may not be called; empty if it may."""
        if self.dry_run:
            return "dry run"
        if not any(fnmatch.fnmatchcase(tool.name, pattern) for pattern in self.allow):
            return "its name is not allowed"
        if tool.name in self.allow_unsafe or (tool.hints.read_only and not tool.hints.destructive):
            return ""
        return "it does not say that it only reads: name it in allow_unsafe to call it all the same"

    def secret_values(self) -> dict[str, str]:
        """The secrets, read from the environment now. Raises KeyError naming the variable that is not set."""
        values = {}
        for parameter, reference in self.secrets.items():
            variable = reference.removeprefix("env:")
            if variable not in os.environ:
                raise KeyError(f"the environment variable {variable}, for the parameter {parameter}, is not set")
            values[parameter] = os.environ[variable]
        return values

    def hide_secrets(self, tool: ToolSpec) -> ToolSpec:
        """The tool without its secret parameters: as models see it."""
        if not self.secrets.keys() & tool.parameters.keys():
            return tool
        schema = dict(tool.input_schema)
        schema["properties"] = {k: v for k, v in tool.parameters.items() if k not in self.secrets}
        if "required" in schema:
            schema["required"] = [name for name in tool.required if name not in self.secrets]
        return replace(tool, input_schema=schema)


class Guard:
    """A `ToolRunner` that puts every call through the policy."""

    def __init__(
        self, tools: Sequence[ToolSpec], runner: ToolRunner, policy: Policy, *, made: Mapping[str, int] | None = None
    ):
        self.policy = policy
        self._tools = {tool.name: tool for tool in tools}
        self._runner = runner
        self._secrets = policy.secret_values()
        # A source sends credentials of its own, and a tool may send them back.
        hidden = [os.environ.get(variable, "") for variable in policy.hidden]
        self.redact = Redactor([*self._secrets.values(), *hidden, *getattr(runner, "secrets", ())])
        self._earlier = Counter(made or {})
        self.calls: Counter[str] = Counter()
        self._next_slot = 0.0

    def refusal(self, tool: ToolSpec) -> str:
        """Why the tool may not, or cannot, be called; empty if it can."""
        unable = getattr(self._runner, "refusal", None)
        return self.policy.refusal(tool) or (unable(tool.name) if unable is not None else "")

    async def call(self, name: str, arguments: Mapping[str, Any], *, is_checked: bool = True) -> ToolResult:
        """Check, call, retry, cut, mask. Every outcome is a result. `is_checked=False` leaves out the check of the arguments."""
        tool = self._tools[name]
        refusal = self.refusal(tool) or self._over_limit(name)
        if refusal:
            return ToolResult(f"not executed: {refusal}", "not_executed")
        arguments = {k: v for k, v in arguments.items() if k not in self.policy.secrets}
        problem = invalid(self.policy.hide_secrets(tool), arguments) if is_checked else ""
        if problem:
            return self._seen(ToolResult(problem, "invalid_arguments"))
        secrets = {k: v for k, v in self._secrets.items() if k in tool.parameters}
        self.calls[name] += 1
        retries = self.policy.retries if tool.is_repeatable else 0
        for attempt in range(retries + 1):
            await self._wait_for_slot()
            result = await self._once(name, {**arguments, **secrets})
            if result.error_kind != "transient" or attempt == retries:
                break
            await asyncio.sleep(random.uniform(0.5, 1.0) * 0.2 * 2**attempt)
        return self._seen(result)

    def _over_limit(self, name: str) -> str:
        if self.calls.total() + self._earlier.total() >= self.policy.max_calls:
            return f"the run has made its {self.policy.max_calls} calls"
        if self.calls[name] + self._earlier[name] >= self.policy.max_calls_per_tool:
            return f"the tool has had its {self.policy.max_calls_per_tool} calls"
        return ""

    async def _wait_for_slot(self) -> None:
        if self.policy.rate is None:
            return
        now = time.monotonic()
        slot = max(now, self._next_slot)
        self._next_slot = slot + 1 / self.policy.rate
        await asyncio.sleep(slot - now)

    async def _once(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        start = time.perf_counter()
        try:
            result = await asyncio.wait_for(self._runner.call(name, arguments), self.policy.timeout)
        except TimeoutError:
            result = ToolResult(f"no answer within {self.policy.timeout:g} s", "timeout")
        except (
            Exception
        ) as error:  # a fault of the adapter says nothing about the tool, and must not end the others' run
            result = ToolResult(f"the call could not be made: {type(error).__name__}: {error}", "died")
        return replace(result, seconds=time.perf_counter() - start)

    def _seen(self, result: ToolResult) -> ToolResult:
        """The result as models and the store may see it. Masked before it is cut, so that no half of a secret is left."""
        limit = self.policy.max_result_chars
        near = result.content[: limit + _MARGIN]
        text = self.redact(visible(near))
        is_cut = len(text) > limit or len(near) < len(result.content)
        return replace(result, content=text[:limit], truncated=result.truncated or is_cut)


def invalid(tool: ToolSpec, arguments: Mapping[str, Any]) -> str:
    """What is wrong with the arguments by the tool's own schema; empty if nothing is."""
    unknown = [name for name in arguments if name not in tool.parameters]
    if unknown and not tool.input_schema.get("additionalProperties"):
        return (
            f"unknown argument {', '.join(map(repr, unknown))}: the tool takes {', '.join(tool.parameters) or 'none'}"
        )
    validator = _validator(json.dumps(tool.input_schema, sort_keys=True, default=str))
    if validator is None:
        return ""  # a tool whose own schema is broken is asked without it
    try:
        validator.validate(dict(arguments))
    except ValidationError as error:
        where = ".".join(map(str, error.absolute_path))
        return f"{where}: {error.message}" if where else error.message
    except (Unresolvable, RecursionError, re.error):
        return ""  # a schema that refers to what is not there, or to itself: the tool is asked without it
    return ""


@functools.lru_cache(maxsize=1024)
def _validator(schema_text: str) -> Any:
    """What checks arguments by a schema; None if the schema itself is wrong."""
    schema = json.loads(schema_text)
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError:
        return None
    # An empty registry: a reference to an address is not followed.
    return kind(schema, registry=Registry())
