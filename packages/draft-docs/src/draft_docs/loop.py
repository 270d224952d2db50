"""DRAFT's loop for one tool: explore, learn, rewrite, until the document has stopped changing (the paper's algorithm 1).

Symbols   paper      here
          M_E        the Explorer: `prompts.explore` -> `Exploration`
          M_A        the Analyzer: `prompts.analyse` -> `Analysis`
          M_R        the Rewriter: `prompts.rewrite` -> `Rewrite`
          t_i        `description` and `parameters` of iteration i
          e_i        `query`, `arguments`, `result` of iteration i
          s_i, d_i   `suggestions`, `direction`
          I, φ, τ    `max_iterations`, `phi`, `tau`

What differs from the paper: the version at which the loop stops is kept (as printed, the algorithm loses it); the texts of the
parameters are rewritten too, not only the description (`targets`); a rewrite can be refused (`gate`); a call that says nothing about
the tool, such as a time-out, is kept from the Analyzer and the Rewriter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from chapbook_shared.lm import LanguageModelError, Message
from draft_docs import prompts
from draft_docs.journal import Journal
from draft_docs.replies import Analysis, Exploration, ReplyError, Rewrite, parse_reply, schema_of
from draft_docs.stability import Vector, is_diverse, stability
from draft_docs.tools import ToolResult, ToolRunner, ToolSpec

R = TypeVar("R", Exploration, Analysis, Rewrite)

StopReason = Literal["converged", "max_iterations", "needs_credentials", "no_calls", "failed", "interrupted"]
"""`interrupted`: a budget, a limit or the model's server ended the run before the tool was done."""


class Ask(Protocol):
    """One chat call: the conversation and the JSON Schema of the reply in, the raw text out. `key` names it in the journal."""

    async def __call__(self, key: str, messages: Sequence[Message], schema: dict[str, Any]) -> str: ...


Embed = Callable[[str], Awaitable[Vector]]
Gate = Callable[[ToolSpec, ToolSpec, "Iteration"], Awaitable[str]]
"""(old, new, iteration) -> why the rewrite is refused; empty if it is accepted."""


async def accept_all(old: ToolSpec, new: ToolSpec, iteration: Iteration) -> str:
    """The paper's gate: the last text wins."""
    return ""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The paper's values are the defaults."""

    max_iterations: int = 5
    max_attempts: int = 3
    phi: float = 0.9
    tau: float = 0.75
    max_chars: int = 2000
    repair_turns: int = 2
    rewrite_parameters: bool = True
    """False rewrites the description alone, as the official code does."""


@dataclass(kw_only=True)
class Iteration:
    """What happened in one iteration. `accepted` says whether its document became the current one; if not, `reason` says why."""

    number: int
    query: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    result: ToolResult | None = None
    rejected_queries: list[str] = field(default_factory=list)
    suggestions: str = ""
    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    facts: list[dict[str, Any]] = field(default_factory=list)
    direction: str = ""
    stability: float | None = None
    accepted: bool = False
    reason: str = ""

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Iteration:
        result = record["result"]
        return cls(**{**record, "result": ToolResult(**result) if result else None})


@dataclass(frozen=True)
class Refined:
    """A tool before and after, with every iteration between."""

    before: ToolSpec
    after: ToolSpec
    iterations: tuple[Iteration, ...]
    stopped: StopReason
    note: str = ""
    """What there is to say about the stop."""


async def refine(
    tool: ToolSpec,
    runner: ToolRunner,
    *,
    ask: Ask,
    embed: Embed,
    journal: Journal,
    settings: LoopSettings,
    gate: Gate = accept_all,
) -> Refined:
    """Run the loop for one tool. What the journal holds is not done again."""
    home = f"{tool.name}@{tool.fingerprint}"
    current, versions = tool, [tool.description]
    iterations: list[Iteration] = []
    vectors: list[Vector] = []
    stopped: StopReason = "max_iterations"
    # Without arguments there is one request to make; a second one shows whether the answer changes.
    limit = settings.max_iterations if tool.parameters else min(2, settings.max_iterations)
    note = ""

    async def question(role: str, messages: tuple[Message, ...], reply: type[R]) -> R:
        return await _question(ask, f"chat/{home}/{number}/{role}", messages, reply, settings.repair_turns)

    for number in range(1, limit + 1):
        key = f"iteration/{home}/{number}"
        done = journal.get(key)
        if done is not None:
            iteration = Iteration.from_record(done)
            if iteration.query:
                vectors.append(await embed(iteration.query))
        else:
            iteration = Iteration(number=number)
            try:
                vector = await _explore(current, iteration, iterations, vectors, question, embed, settings)
                vectors.append(vector)
                iteration.result = await _call(runner, current, iteration, journal, home)
                if iteration.result.is_evidence:
                    await _learn(current, iteration, versions, question, settings)
                    await _judge(current, iteration, embed, gate)
                else:
                    iteration.reason = f"the call shows nothing about the tool: {iteration.result.error_kind}"
            except ReplyError as error:
                iteration.reason = str(error)
            except LanguageModelError as error:
                # Nothing is noted for this iteration but its answered calls: a later run goes on from them.
                stopped, note = "interrupted", str(error)
                break
            if not _is_for_now(iteration.result):
                await journal.put(key, iteration.to_record())
        iterations.append(iteration)
        if iteration.accepted:
            current = current.with_docs(iteration.description, iteration.parameters)
            versions.append(current.description)
            if iteration.stability is not None and iteration.stability > settings.tau:
                stopped = "converged"
                break
        elif iteration.result is not None and iteration.result.error_kind == "auth":
            stopped, note = "needs_credentials", iteration.result.content
            break
        elif iteration.result is not None and iteration.result.error_kind == "not_executed":
            stopped, note = "no_calls", iteration.result.content
            break
    if stopped == "max_iterations" and not any(iteration.accepted for iteration in iterations):
        stopped, note = "failed", iterations[-1].reason
    return Refined(tool, current, tuple(iterations), stopped, note)


def _is_for_now(result: ToolResult | None) -> bool:
    """Whether the outcome hangs on the policy or the credentials of this run, so that a later one may try again."""
    return result is not None and result.error_kind in ("not_executed", "auth")


async def _explore(
    tool: ToolSpec,
    iteration: Iteration,
    earlier: Sequence[Iteration],
    vectors: Sequence[Vector],
    question: Callable[..., Awaitable[Exploration]],
    embed: Embed,
    settings: LoopSettings,
) -> Vector:
    """Find a query that is not too close to an earlier one; the last attempt is taken as it is."""
    asked = [other for other in earlier if other.query]
    # With nothing to vary, closeness has no meaning.
    attempts = settings.max_attempts if asked and tool.parameters else 1
    for attempt in range(attempts):
        exploration = await question(
            f"explore-{attempt}",
            prompts.explore(
                tool,
                queries=[other.query for other in asked],
                tried=[other.arguments for other in asked],
                direction=asked[-1].direction if asked else "",
                rejected=iteration.rejected_queries,
            ),
            Exploration,
        )
        iteration.query, iteration.arguments = exploration.query, exploration.arguments
        vector = await embed(exploration.query)
        if attempt == attempts - 1 or is_diverse(vector, vectors, phi=settings.phi):
            break
        iteration.rejected_queries.append(exploration.query)
    return vector


async def _call(runner: ToolRunner, tool: ToolSpec, iteration: Iteration, journal: Journal, home: str) -> ToolResult:
    """Call the tool, noting the intention before and the outcome after.

    An intention without an outcome means that a killed run may have made the call: it is made again only if that does no harm.
    """
    key = f"call/{home}/{iteration.number}"
    noted = journal.get(key)
    was = ToolResult(**noted["result"]) if noted is not None and noted["result"] is not None else None
    if was is not None and not _is_for_now(was):
        return was
    may_have_run = noted is not None and was is None
    if may_have_run and not (tool.hints.read_only or tool.hints.idempotent):
        result = ToolResult("a run that was killed may have made this call; it is not made twice", "transient")
    else:
        await journal.put(key, {"arguments": iteration.arguments, "result": None})
        result = await runner.call(tool.name, iteration.arguments)
    await journal.put(key, {"arguments": iteration.arguments, "result": asdict(result)})
    return result


async def _learn(
    tool: ToolSpec,
    iteration: Iteration,
    versions: Sequence[str],
    question: Callable[..., Awaitable[Any]],
    settings: LoopSettings,
) -> None:
    """Phases 2 and 3: what the call shows, and the document that follows from it."""
    assert iteration.result is not None
    seen: dict[str, Any] = {
        "number": iteration.number,
        "query": iteration.query,
        "arguments": iteration.arguments,
        "result": iteration.result,
        # One version is no history.
        "versions": versions if len(versions) > 1 else (),
    }
    analysis: Analysis = await question("analyse", prompts.analyse(tool, **seen), Analysis)
    iteration.suggestions = analysis.suggestions
    asked = prompts.rewrite(
        tool,
        **seen,
        suggestions=analysis.suggestions,
        max_chars=settings.max_chars,
        parameters=settings.rewrite_parameters,
    )
    rewrite: Rewrite = await question("rewrite", asked, Rewrite)
    iteration.description, iteration.direction = rewrite.description, rewrite.next_direction
    iteration.facts = [fact.model_dump() for fact in rewrite.facts]
    if settings.rewrite_parameters:
        # Words for a parameter that does not exist have no place to go.
        iteration.parameters = {name: text for name, text in rewrite.parameters.items() if name in tool.parameters}


async def _judge(tool: ToolSpec, iteration: Iteration, embed: Embed, gate: Gate) -> None:
    new = tool.with_docs(iteration.description, iteration.parameters)
    iteration.reason = await gate(tool, new, iteration)
    iteration.accepted = not iteration.reason
    old_text, new_text = tool.description, iteration.description
    changed = {name for name, text in iteration.parameters.items() if text.split() != tool.parameter_docs[name].split()}
    if changed:
        # The text of the parameters is part of the document.
        old_text = "\n".join([old_text, *(tool.parameter_docs[name] for name in sorted(changed))])
        new_text = "\n".join([new_text, *(iteration.parameters[name] for name in sorted(changed))])
    if old_text.split() == new_text.split():
        iteration.stability = 1.0
    else:
        iteration.stability = stability(old_text, new_text, await embed(old_text), await embed(new_text))


async def _question(ask: Ask, key: str, messages: tuple[Message, ...], reply: type[R], repair_turns: int) -> R:
    """Ask, and ask again with the reason if the answer cannot be read. Raises ReplyError after `repair_turns` repairs."""
    conversation = list(messages)
    for turn in range(repair_turns + 1):
        text = await ask(f"{key}/{turn}", conversation, schema_of(reply))
        try:
            return parse_reply(text, reply)
        except ReplyError as error:
            if turn == repair_turns:
                raise
            conversation += [Message("assistant", text), prompts.repair(str(error))]
    raise AssertionError("the last turn returns or raises")


def prompt_hash(messages: Sequence[Message], **request: Any) -> str:
    """Names a chat call by all that its answer depends on."""
    said = [[message.role, message.text] for message in messages]
    return hashlib.sha256(json.dumps([said, request], sort_keys=True, default=str).encode()).hexdigest()
