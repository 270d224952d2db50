"""What a run could do and cost at most, told before anything is called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from draft_docs import prompts
from draft_docs.drafter import DraftConfig
from draft_docs.policy import Policy
from draft_docs.prompts import estimated_tokens
from draft_docs.tools import ToolSpec

_PROMPT_CHARS = 1500  # the fixed words of the longest prompt, rounded up


@dataclass(frozen=True)
class ToolPlan:
    """The most that one tool can take. `refusal` says why it may not be called (then it takes nothing); empty if it may."""

    name: str
    refusal: str
    iterations: int
    chat_calls: int
    """If every reply can be read at once and every query but the last is too close."""
    chat_calls_with_repairs: int
    tool_calls: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Plan:
    """The most that a run can take, before budgets cut it short."""

    tools: tuple[ToolPlan, ...]
    max_calls: int
    prices: tuple[float, float] | None
    """Of a million prompt and a million completion tokens."""

    @property
    def chat_calls(self) -> int:
        return sum(tool.chat_calls for tool in self.tools)

    @property
    def chat_calls_with_repairs(self) -> int:
        return sum(tool.chat_calls_with_repairs for tool in self.tools)

    @property
    def tool_calls(self) -> int:
        """Calls of tools, without the repeats after an error of the moment."""
        return min(self.max_calls, sum(tool.tool_calls for tool in self.tools))

    @property
    def prompt_tokens(self) -> int:
        return sum(tool.prompt_tokens for tool in self.tools)

    @property
    def completion_tokens(self) -> int:
        return sum(tool.completion_tokens for tool in self.tools)

    @property
    def money(self) -> float | None:
        """The most it can cost without repairs; None if no prices are given."""
        if self.prices is None:
            return None
        return (self.prompt_tokens * self.prices[0] + self.completion_tokens * self.prices[1]) / 1e6


def plan(
    tools: Sequence[ToolSpec],
    *,
    config: DraftConfig | None = None,
    policy: Policy | None = None,
    prices: tuple[float, float] | None = None,
) -> Plan:
    """Upper bounds for a run over `tools`; calls nothing.

    A summary (`config.summary`) is one more chat call. Tokens are estimated from lengths: three characters a token, every document as long as it may become, every reply as long as
    `max_tokens`.
    """
    config, policy = config or DraftConfig(), policy or Policy()
    if prices is not None and (len(prices) != 2 or not all(price >= 0 for price in prices)):
        raise ValueError(f"prices must be two numbers >= 0, got {prices!r}")
    return Plan(tuple(_tool(tool, config, policy) for tool in tools), policy.max_calls, prices)


def _tool(tool: ToolSpec, config: DraftConfig, policy: Policy) -> ToolPlan:
    refusal = policy.refusal(tool)
    if refusal:
        return ToolPlan(tool.name, refusal, 0, 0, 0, 0, 0, 0)
    batch = config.batch if tool.parameters else 1
    turns = min(config.max_iterations, math.ceil(policy.max_calls_per_tool / batch))
    turns = turns if tool.parameters else min(2, turns)
    retried = config.max_attempts if tool.parameters else 1
    probes = 4 if config.probes and tool.parameters and tool.is_repeatable else 0
    held_out = len(config.held_out.get(tool.name, ())) * (turns + 1) if config.gate == "replay" else 0
    chats = (1 + (batch - 1) * retried + 2) + (turns - 1) * (batch * retried + 2) + held_out if turns else 0
    calls = min(turns * batch + probes + held_out, policy.max_calls_per_tool) if turns else 0
    record = len(prompts.record(policy.hide_secrets(tool))) + config.max_chars
    each = estimated_tokens("x" * (record + _PROMPT_CHARS + (batch + probes) * policy.max_result_chars))
    history = sum(estimated_tokens("x" * config.max_chars * i) for i in range(1, turns)) * 2
    return ToolPlan(
        tool.name,
        "",
        turns,
        chats,
        chats * (1 + config.repair_turns),
        calls,
        chats * each + history,
        chats * config.max_tokens,
    )
