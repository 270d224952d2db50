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
the tool, such as a time-out, is kept from the Analyzer and the Rewriter. Not in the paper, and off unless asked for: several calls before
each rewrite (`batch`), and calls that are wrong by the tool's schema on purpose (`probe`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

from chapbook_shared.lm import LanguageModelError, Message
from draft_docs import prompts
from draft_docs.journal import Journal
from draft_docs.probes import probes
from draft_docs.prompts import Experience
from draft_docs.replies import Analysis, Exploration, Reply, ReplyError, Rewrite, parse_reply, schema_of
from draft_docs.stability import Vector, is_diverse, stability
from draft_docs.tools import ToolResult, ToolRunner, ToolSpec

R = TypeVar("R", bound=Reply)
_QUOTED = 4000

StopReason = Literal["converged", "max_iterations", "needs_credentials", "no_calls", "failed", "interrupted"]
"""`interrupted`: a budget, a limit or the model's server ended the run before the tool was done."""


class Ask(Protocol):
    """One chat call: the conversation and the JSON Schema of the reply in, the raw text out. `key` names it in the journal."""

    async def __call__(self, key: str, messages: Sequence[Message], schema: dict[str, Any]) -> str: ...


Embed = Callable[[str], Awaitable[Vector]]
Gate = Callable[[ToolSpec, ToolSpec, "Iteration", Sequence[str]], Awaitable[str]]
"""(old, new, iteration, what all calls so far returned) -> why the rewrite is refused; empty if it is accepted."""


async def accept_all(old: ToolSpec, new: ToolSpec, iteration: Iteration, results: Sequence[str]) -> str:
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
    batch: int = 1
    """Calls before each rewrite; the paper's is 1."""
    max_prompt_tokens: int | None = None
    """Longer prompts are cut (`prompts.fitted`)."""


@dataclass(kw_only=True)
class Iteration:
    """What happened in one iteration. `accepted` says whether its document became the current one; if not, `reason` says why."""

    number: int
    experiences: list[Experience] = field(default_factory=list)
    """The calls: one, unless there are a batch or probes."""
    rejected_queries: list[str] = field(default_factory=list)
    suggestions: str = ""
    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    facts: list[dict[str, Any]] = field(default_factory=list)
    direction: str = ""
    stability: float | None = None
    accepted: bool = False
    reason: str = ""

    @property
    def query(self) -> str:
        """Of the first call; empty if there was none."""
        return self.experiences[0].query if self.experiences else ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the first call."""
        return self.experiences[0].arguments if self.experiences else {}

    @property
    def result(self) -> ToolResult | None:
        """Of the first call; None if there was none."""
        return self.experiences[0].result if self.experiences else None

    @property
    def evidence(self) -> list[Experience]:
        """The calls that show something about the tool."""
        return [experience for experience in self.experiences if experience.result.is_evidence]

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Iteration:
        calls = [Experience(**{**call, "result": ToolResult(**call["result"])}) for call in record["experiences"]]
        return cls(**{**record, "experiences": calls})


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
    probe: ToolRunner | None = None,
) -> Refined:
    """Run the loop for one tool. What the journal holds is not done again.

    `probe` calls the tool with arguments that its schema forbids; None makes no such calls.
    """
    loop = _Loop(tool, runner, ask, embed, journal, settings, gate, probe)
    stopped: StopReason = "max_iterations"
    note = ""
    # Without arguments there is one request to make; a second one shows whether the answer changes.
    limit = settings.max_iterations if tool.parameters else min(2, settings.max_iterations)
    for number in range(1, limit + 1):
        try:
            iteration = await loop.iterate(number)
        except LanguageModelError as error:
            # Nothing is noted for this iteration but its answered calls: a later run goes on from them.
            stopped, note = "interrupted", str(error)
            break
        loop.iterations.append(iteration)
        kinds = {experience.result.error_kind: experience.result.content for experience in iteration.experiences}
        if iteration.accepted:
            loop.current = loop.current.with_docs(iteration.description, iteration.parameters)
            loop.versions.append(loop.current.description)
            if iteration.stability is not None and iteration.stability > settings.tau:
                stopped = "converged"
                break
        if "auth" in kinds:
            stopped, note = "needs_credentials", kinds["auth"]
            break
        if "not_executed" in kinds:
            stopped, note = "no_calls", kinds["not_executed"]
            break
    if stopped == "max_iterations" and not any(iteration.accepted for iteration in loop.iterations):
        stopped, note = "failed", loop.iterations[-1].reason
    return Refined(tool, loop.current, tuple(loop.iterations), stopped, note)


def _is_for_now(result: ToolResult) -> bool:
    """Whether the outcome hangs on the policy or the credentials of this run, so that a later one may try again."""
    return result.error_kind in ("not_executed", "auth")


class _Loop:
    """One tool's loop: where it stands, and what it works with."""

    def __init__(
        self,
        tool: ToolSpec,
        runner: ToolRunner,
        ask: Ask,
        embed: Embed,
        journal: Journal,
        settings: LoopSettings,
        gate: Gate,
        probe: ToolRunner | None,
    ):
        self.current, self.versions = tool, [tool.description]
        self.iterations: list[Iteration] = []
        self._home = f"{tool.name}@{tool.fingerprint}"
        self._runner, self._probe = runner, probe
        self._ask, self._embed, self._journal = ask, embed, journal
        self._settings, self._gate = settings, gate
        self._vectors: dict[str, Vector] = {}

    async def iterate(self, number: int) -> Iteration:
        """One iteration, or what the journal has of it."""
        key = f"iteration/{self._home}/{number}"
        done = self._journal.get(key)
        if done is not None:
            return Iteration.from_record(done)
        iteration = Iteration(number=number)
        try:
            await self._gather(iteration)
            if iteration.evidence:
                await self._learn(iteration)
                await self._judge(iteration)
            else:
                kind = iteration.experiences[-1].result.error_kind
                iteration.reason = f"the call shows nothing about the tool: {kind}"
        except ReplyError as error:
            iteration.reason = str(error)
        if not any(_is_for_now(experience.result) for experience in iteration.experiences):
            self._journal.note(
                key, iteration.to_record()
            )  # it follows from the answers and the results, which are on disk
        return iteration

    async def _gather(self, iteration: Iteration) -> None:
        """Phase 1, as often as a batch has calls; then the probes, if there are to be any."""
        for place in range(self._settings.batch if self.current.parameters else 1):
            query, arguments = await self._explore(iteration, place)
            result = await self._call(self._runner, arguments, f"{iteration.number}/{place}")
            self._note(iteration, query, arguments, result)
            if _is_for_now(result):
                return
        if self._probe is None or iteration.number > 1 or not self.current.is_repeatable:
            return
        for place, (what, arguments) in enumerate(probes(self.current, iteration.arguments)):
            result = await self._call(self._probe, arguments, f"{iteration.number}/probe-{place}")
            if result.is_evidence:
                self._note(iteration, "", arguments, result, what)

    def _note(
        self, iteration: Iteration, query: str, arguments: dict[str, Any], result: ToolResult, probe: str = ""
    ) -> None:
        number = 1 + sum(len(other.experiences) for other in [*self.iterations, iteration])
        iteration.experiences.append(Experience(number, query, arguments, result, probe))

    async def _explore(self, iteration: Iteration, place: int) -> tuple[str, dict[str, Any]]:
        """A query that is not too close to an earlier one; the last attempt is taken as it is."""
        made = [call for other in [*self.iterations, iteration] for call in other.experiences if not call.probe]
        directions = [other.direction for other in self.iterations if other.experiences]
        # With nothing to vary, closeness has no meaning.
        attempts = self._settings.max_attempts if made and self.current.parameters else 1
        rejected: list[str] = []
        for attempt in range(attempts):

            def ask(history: Sequence[Experience], result: ToolResult | None) -> tuple[Message, ...]:
                return prompts.explore(
                    self.current,
                    queries=[call.query for call in history],
                    tried=[call.arguments for call in history],
                    direction=directions[-1] if directions else "",
                    rejected=rejected,
                )

            messages = prompts.fitted(ask, made, None, self._settings.max_prompt_tokens)
            answer = await self._question(f"{iteration.number}/explore-{place}-{attempt}", messages, Exploration)
            if attempt == attempts - 1:
                break
            earlier = [await self._vector(call.query) for call in made]
            if is_diverse(await self._vector(answer.query), earlier, phi=self._settings.phi):
                break
            rejected.append(answer.query)
            iteration.rejected_queries.append(answer.query)
        return answer.query, answer.arguments

    async def _call(self, runner: ToolRunner, arguments: dict[str, Any], place: str) -> ToolResult:
        """Call the tool, noting the intention before and the outcome after.

        An intention without an outcome means that a killed run may have made the call: it is made again only if that does no harm.
        """
        key = f"call/{self._home}/{place}"
        noted = self._journal.get(key)
        was = ToolResult(**noted["result"]) if noted is not None and noted["result"] is not None else None
        if was is not None and not _is_for_now(was):
            return was
        may_have_run = noted is not None and was is None
        if may_have_run and not self.current.is_repeatable:
            result = ToolResult("a run that was killed may have made this call; it is not made twice", "transient")
        else:
            await self._journal.put(key, {"arguments": arguments, "result": None})
            result = await runner.call(self.current.name, arguments)
        await self._journal.put(key, {"arguments": arguments, "result": asdict(result)})
        return result

    async def _learn(self, iteration: Iteration) -> None:
        """Phases 2 and 3: what the calls show, and the document that follows from it."""
        tool, limit = self.current, self._settings.max_prompt_tokens
        seen = iteration.evidence
        # One version is no history.
        versions = self.versions if len(self.versions) > 1 else ()

        def shown(result: ToolResult | None) -> list[Experience]:
            return [*seen[:-1], replace(seen[-1], result=result)] if result is not None else seen

        def analyse(history: Sequence[str], result: ToolResult | None) -> tuple[Message, ...]:
            return prompts.analyse(tool, shown(result), versions=history)

        messages = prompts.fitted(analyse, versions, seen[-1].result, limit)
        analysis = await self._question(f"{iteration.number}/analyse", messages, Analysis)
        iteration.suggestions = analysis.suggestions

        def rewrite(history: Sequence[str], result: ToolResult | None) -> tuple[Message, ...]:
            return prompts.rewrite(
                tool,
                shown(result),
                suggestions=analysis.suggestions,
                versions=history,
                max_chars=self._settings.max_chars,
                parameters=self._settings.rewrite_parameters,
            )

        messages = prompts.fitted(rewrite, versions, seen[-1].result, limit)
        answer = await self._question(f"{iteration.number}/rewrite", messages, Rewrite)
        iteration.description, iteration.direction = answer.description, answer.next_direction
        iteration.facts = [fact.model_dump() for fact in answer.facts]
        if self._settings.rewrite_parameters:
            # Words for a parameter that does not exist have no place to go.
            iteration.parameters = {name: text for name, text in answer.parameters.items() if name in tool.parameters}

    async def _judge(self, iteration: Iteration) -> None:
        tool = self.current
        new = tool.with_docs(iteration.description, iteration.parameters)
        made = [call for other in [*self.iterations, iteration] for call in other.experiences]
        iteration.reason = await self._gate(tool, new, iteration, [call.result.content for call in made])
        iteration.accepted = not iteration.reason
        old_text, new_text = tool.description, iteration.description
        words = {name: text for name, text in iteration.parameters.items() if text}
        changed = sorted(name for name, text in words.items() if text.split() != tool.parameter_docs[name].split())
        if changed:
            # The text of the parameters is part of the document.
            old_text = "\n".join([old_text, *(tool.parameter_docs[name] for name in changed)])
            new_text = "\n".join([new_text, *(words[name] for name in changed)])
        if old_text.split() == new_text.split():
            iteration.stability = 1.0
        elif not old_text.strip():
            iteration.stability = 0.0  # nothing has no direction, and some endpoints refuse it
        else:
            iteration.stability = stability(
                old_text, new_text, await self._vector(old_text), await self._vector(new_text)
            )

    async def _vector(self, text: str) -> Vector:
        if text not in self._vectors:
            self._vectors[text] = await self._embed(text)
        return self._vectors[text]

    async def _question(self, place: str, messages: tuple[Message, ...], reply: type[R]) -> R:
        return await question(self._ask, f"chat/{self._home}/{place}", messages, reply, self._settings.repair_turns)


async def question(ask: Ask, key: str, messages: tuple[Message, ...], reply: type[R], repair_turns: int) -> R:
    """Ask, and ask again with the reason if the answer cannot be read. Raises ReplyError after `repair_turns` repairs."""
    conversation = list(messages)
    for turn in range(repair_turns + 1):
        text = await ask(f"{key}/{turn}", conversation, schema_of(reply))
        try:
            return parse_reply(text, reply)
        except ReplyError as error:
            if turn == repair_turns:
                raise
            # Only the last answer stands in the conversation, and not all of one that is endless.
            conversation = [*messages, Message("assistant", text[:_QUOTED]), prompts.repair(str(error))]
    raise AssertionError("the last turn returns or raises")


def prompt_hash(messages: Sequence[Message], **request: Any) -> str:
    """Names a chat call by all that its answer depends on."""
    said = [[message.role, message.text] for message in messages]
    return hashlib.sha256(json.dumps([said, request], sort_keys=True, default=str).encode()).hexdigest()
