"""Refine many tools at once, resumably, within a policy and a budget."""

from __future__ import annotations

import asyncio
import base64
import difflib
import hashlib
import json
import math
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from chapbook_shared.jobs import atomic_write
from chapbook_shared.lm import (
    Budget,
    BudgetExceeded,
    Completion,
    LanguageModel,
    LanguageModelError,
    Message,
    RequestFailed,
    Sampling,
    Usage,
)
from draft_docs import prompts
from draft_docs.embedders import Embedder
from draft_docs.gates import lint_gate, replay_gate
from draft_docs.journal import Journal
from draft_docs.loop import Gate, Iteration, LoopSettings, Refined, accept_all, prompt_hash, question, refine
from draft_docs.policy import Guard, Policy
from draft_docs.prompts import estimated_tokens
from draft_docs.replies import Call, ReplyError, Summary, parse_reply, schema_of
from draft_docs.sources.base import ToolSource, opened
from draft_docs.sources.mcp import McpServer
from draft_docs.stability import Vector
from draft_docs.tools import ToolResult, ToolSpec

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Settings of a run; the paper's values are the defaults where it has them.

    Args:
        max_iterations: I, iterations for one tool at most.
        max_attempts: queries that the Explorer may propose in one iteration.
        phi: φ, a query is new if its cosine similarity to every earlier one is below.
        tau: τ, a document has converged if its stability Δ is above.
        temperature, max_tokens: of every chat call.
        targets: what is rewritten; {"description"} is what the official code does.
        gate: "lint" refuses rewrites that lose names or values, grow too long, or carry orders, addresses or long copies from results;
            "replay" also those with which fewer of the `held_out` requests are served; "none" is the paper's.
        held_out: tool name -> requests for "replay": a model makes the call from the old and from the new document.
        max_chars: longest description that "lint" accepts.
        repair_turns: how often a reply that cannot be read is asked for again.
        concurrency: tools refined at the same time.
        summary: also write a summary of all tools together, as the official code does.
        seed: of every chat call; None lets the model draw its own.
        batch: calls before each rewrite.
        probes: in the first iteration also make calls that are wrong by the schema on purpose, if the tool may be called repeatedly.
        window: tokens that the model can take, prompt and reply together; longer prompts lose their oldest history, then the end of the
            result, never the document. None cuts nothing.
    """

    max_iterations: int = 5
    max_attempts: int = 3
    phi: float = 0.9
    tau: float = 0.75
    temperature: float = 0.2
    max_tokens: int = 2000
    targets: frozenset[str] = frozenset({"description", "parameters"})
    gate: Literal["lint", "replay", "none"] = "lint"
    held_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    max_chars: int = 2000
    repair_turns: int = 2
    concurrency: int = 8
    summary: bool = False
    seed: int | None = None
    batch: int = 1
    probes: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_iterations", "max_attempts", "max_tokens", "max_chars", "concurrency", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)!r}")
        if self.repair_turns < 0:
            raise ValueError(f"repair_turns must be >= 0, got {self.repair_turns!r}")
        for name in ("phi", "tau"):
            if not -1 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [-1, 1], got {getattr(self, name)!r}")
        unknown = self.targets - {"description", "parameters"}
        if unknown or "description" not in self.targets:
            raise ValueError(f"targets must be 'description', with or without 'parameters', got {sorted(self.targets)}")
        if self.gate not in ("lint", "replay", "none"):
            raise ValueError(f"gate must be 'lint', 'replay' or 'none', got {self.gate!r}")
        if self.gate == "replay" and not any(self.held_out.values()):
            raise ValueError("gate='replay' needs held_out: tool name -> requests")
        if self.window is not None and self.window <= self.max_tokens:
            raise ValueError(f"window must be more than max_tokens={self.max_tokens}, got {self.window!r}")

    @property
    def loop(self) -> LoopSettings:
        return LoopSettings(
            max_iterations=self.max_iterations,
            max_attempts=self.max_attempts,
            phi=self.phi,
            tau=self.tau,
            max_chars=self.max_chars,
            repair_turns=self.repair_turns,
            rewrite_parameters="parameters" in self.targets,
            batch=self.batch,
            max_prompt_tokens=None if self.window is None else self.window - self.max_tokens,
        )


@dataclass
class Counts:
    """What a run has used. A resumed run counts what it did itself, not what it found in its store."""

    chat_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tool_calls: int = 0
    embeddings: int = 0


@dataclass(frozen=True)
class ToolDraft:
    """One tool's outcome, with its difference, its change log and the calls behind it."""

    refined: Refined

    @property
    def before(self) -> ToolSpec:
        return self.refined.before

    @property
    def after(self) -> ToolSpec:
        return self.refined.after

    @property
    def iterations(self) -> tuple[Iteration, ...]:
        return self.refined.iterations

    @property
    def changed(self) -> bool:
        return self.before != self.after

    def diff(self) -> str:
        """A unified diff of the description and the parameters' texts."""
        old, new = (_document(tool).splitlines() for tool in (self.before, self.after))
        name = self.before.name
        return "\n".join(difflib.unified_diff(old, new, f"{name} (before)", f"{name} (after)", lineterm="", n=2))

    def changelog(self) -> list[dict[str, Any]]:
        """Each statement that an accepted rewrite added, with the call that showed it; `grounded` is False where none did."""
        entries: list[dict[str, Any]] = []
        for iteration in self.iterations:
            if not iteration.accepted:
                continue
            for fact in iteration.facts:
                call = self._call(fact["evidence"])
                entry = {
                    "claim": fact["claim"],
                    "evidence": fact["evidence"],
                    "grounded": call is not None,
                    "call": call,
                }
                if entry not in entries:  # a later rewrite may say again what an earlier one added
                    entries.append(entry)
        return entries

    def evidence(self) -> list[dict[str, Any]]:
        """Every call that was made: number, request, arguments, result and, where it was wrong on purpose, what was (`probe`)."""
        return [asdict(call) for iteration in self.iterations for call in iteration.experiences]

    def example(self) -> dict[str, Any] | None:
        """The first request that was served, with its arguments and result; None if none was."""
        return next((call for call in self.evidence() if call["result"]["error_kind"] is None), None)

    def _call(self, number: int | None) -> dict[str, Any] | None:
        return next((call for call in self.evidence() if call["number"] == number), None)


@dataclass(frozen=True)
class DraftResult(Mapping[str, ToolDraft]):
    """All tools of a run, by name."""

    tools: Mapping[str, ToolDraft]
    counts: Counts
    summary: str = ""
    stopped_by: str = ""
    """Why the run ended before all tools were done (a budget, say); empty if they are."""
    source: ToolSource | None = field(default=None, repr=False)

    def __getitem__(self, name: str) -> ToolDraft:
        return self.tools[name]

    def __iter__(self) -> Any:
        return iter(self.tools)

    def __len__(self) -> int:
        return len(self.tools)

    @property
    def specs(self) -> dict[str, ToolSpec]:
        return {name: result.after for name, result in self.tools.items()}

    @property
    def stops(self) -> Counter[str]:
        """How many tools stopped for which reason."""
        return Counter(result.refined.stopped for result in self.tools.values())

    def diff(self) -> str:
        return "\n".join(result.diff() for result in self.tools.values() if result.changed)

    def changelog(self) -> dict[str, list[dict[str, Any]]]:
        """The change log of every tool that changed."""
        return {name: result.changelog() for name, result in self.tools.items() if result.changed}

    def rewritten(self) -> str:
        """The source's document with the new words, in the format it came in."""
        if self.source is None:
            raise ValueError("the result has no source to write back to")
        return self.source.rewritten(self.specs)

    def save(self, path: str | Path) -> None:
        """Write `rewritten()` to a file, at once or not at all."""
        with atomic_write(path) as file:
            file.write(self.rewritten())


class Drafter:
    """DRAFT over the tools of one source.

    Args:
        model: any chat model of `chapbook_shared.lm`.
        embedder: turns texts into vectors for the two similarity tests. φ and τ are meant for semantic embeddings.
        config: the method's settings.
        policy: what may be called.
        budget: limits on chat calls, tokens and money; a run that meets one ends cleanly and can be resumed. Give the same budget to
            nothing else: it counts each answer once.
        max_seconds: wall time after which no further chat call is begun.
        store: a file that keeps all that was done; a run that is killed goes on where it was. None keeps nothing.
        progress: called with each tool's outcome as soon as it is there.
    """

    def __init__(
        self,
        model: LanguageModel,
        embedder: Embedder,
        *,
        config: DraftConfig | None = None,
        policy: Policy | None = None,
        budget: Budget | None = None,
        max_seconds: float | None = None,
        store: str | Path | None = None,
        progress: Callable[[ToolDraft], None] | None = None,
    ):
        if max_seconds is not None and not (max_seconds > 0 and math.isfinite(max_seconds)):
            raise ValueError(f"max_seconds must be positive and finite, or None, got {max_seconds!r}")
        self.model, self.embedder = model, embedder
        self.config, self.policy = config or DraftConfig(), policy or Policy()
        self.budget, self.max_seconds = budget or Budget(), max_seconds
        self.store, self.progress = store, progress

    def run(self, source: ToolSource | McpServer) -> DraftResult:
        """As `arun`, from plain code, also inside a running event loop."""
        return in_own_loop(self.arun(source))

    async def arun(self, source: ToolSource | McpServer) -> DraftResult:
        """Refine every tool of the source. A server is connected to for the run."""
        async with opened(source) as tools:
            return await self._refine_all(tools)

    async def _refine_all(self, source: ToolSource) -> DraftResult:
        if len({tool.name for tool in source.tools}) < len(source.tools):
            raise ValueError("two tools of the source have one name: names must differ")
        with Journal(self.store, settings=self._settings()) as journal:
            guard = Guard(source.tools, source, self.policy, made=made_calls(journal.items()))
            session = _Session(self, guard, journal)
            limit = asyncio.Semaphore(self.config.concurrency)
            done: dict[str, ToolDraft] = {}

            async def work(tool: ToolSpec) -> None:
                async with limit:
                    if session.stopped_by:
                        done[tool.name] = ToolDraft(Refined(tool, tool, (), "interrupted", session.stopped_by))
                        return
                    draft = done[tool.name] = ToolDraft(await session.refine(tool))
                    if self.progress is not None:
                        self.progress(draft)

            try:
                async with asyncio.TaskGroup() as group:
                    for tool in source.tools:
                        group.create_task(work(tool))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from errors
            results = {tool.name: done[tool.name] for tool in source.tools}
            summary = ""
            if self.config.summary and not session.stopped_by:
                summary = await session.summarise(source, results)
            session.counts.tool_calls = guard.calls.total()
            return DraftResult(results, session.counts, summary, session.stopped_by, source)

    def _settings(self) -> dict[str, Any]:
        """What fixes the meaning of the records: not how many at once, nor how long the run may be."""
        config = asdict(self.config)
        del config["concurrency"]
        config["targets"] = sorted(config["targets"])
        config["held_out"] = {name: list(queries) for name, queries in self.config.held_out.items()}
        return {"model": self.model.name, "embedder": self.embedder.name, **config}


class _Session:
    """What the loops of one run share: the model with its journal, vectors each computed once, counts."""

    def __init__(self, drafter: Drafter, guard: Guard, journal: Journal):
        self.config, self.model, self.embedder = drafter.config, drafter.model, drafter.embedder
        self.guard, self.journal = guard, journal
        self.counts, self.stopped_by = Counts(), ""
        self._vectors: dict[str, asyncio.Future[Vector]] = {}
        self._has_warned = False
        self._to_embed: list[tuple[str, str]] = []
        self._embedding: asyncio.Task[None] | None = None
        self._sampling = Sampling(
            temperature=self.config.temperature, max_tokens=self.config.max_tokens, seed=self.config.seed
        )
        self._sampling_record = asdict(self._sampling)
        self._budget = drafter.budget
        self._ends = None if drafter.max_seconds is None else time.monotonic() + drafter.max_seconds
        self._takes_schema = self.model.capabilities.json_schema

    async def refine(self, tool: ToolSpec) -> Refined:
        gate: Gate = accept_all
        if self.config.gate != "none":
            gate = lint_gate(max_chars=self.config.max_chars, redactor=self.guard.redact)
        refusal = self.guard.refusal(tool)
        if refusal:  # nothing could be learnt: no chat call is worth its price
            return Refined(tool, tool, (), "no_calls", f"not executed: {refusal}")
        seen = self.guard.policy.hide_secrets(tool)
        home = f"{seen.name}@{seen.fingerprint}"
        queries = self.config.held_out.get(tool.name, ())
        if self.config.gate == "replay" and queries:

            async def serve(document: ToolSpec, query: str) -> bool | None:
                return await self.serve(home, document, query)

            gate = replay_gate(gate, queries, serve)
        if self.journal.get(f"tool/{home}") is None:
            self.journal.note(f"tool/{home}", self._clean(asdict(seen)))
        refined = await refine(
            seen,
            self.guard,
            ask=self.ask,
            embed=self.embed,
            journal=self.journal,
            settings=self.config.loop,
            gate=gate,
            probe=_Probe(self.guard) if self.config.probes else None,
        )
        if refined.stopped != "interrupted":
            self.journal.note(f"end/{home}", {"stopped": refined.stopped, "note": refined.note})
        # Secret parameters come back as they were.
        after = tool.with_docs(refined.after.description, refined.after.parameter_docs)
        return replace(refined, before=tool, after=after)

    def _clean(self, record: dict[str, Any]) -> dict[str, Any]:
        def clean(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: clean(inner) for key, inner in value.items()}
            if isinstance(value, list):
                return [clean(inner) for inner in value]
            return self.guard.redact(value) if isinstance(value, str) else value

        return dict(clean(json.loads(json.dumps(record, ensure_ascii=False, default=str))))

    async def serve(self, home: str, tool: ToolSpec, query: str) -> bool | None:
        """Whether a model that knows only the document makes a call that succeeds; asked and called once for each document."""
        told = hashlib.sha256(f"{tool.fingerprint} {query}".encode()).hexdigest()[:16]
        try:
            answer = await question(
                self.ask, f"chat/{home}/replay/{told}", prompts.serve(tool, query), Call, self.config.repair_turns
            )
        except ReplyError:
            return False
        key = f"call/{home}/replay-{told}"
        noted = self.journal.get(key)
        if noted is None or (noted["result"] is None and tool.is_repeatable):
            await self.journal.put(key, {"arguments": answer.arguments, "result": None})
            result = await self.guard.call(tool.name, answer.arguments)
            noted = {"arguments": answer.arguments, "result": asdict(result)}
            await self.journal.put(key, noted)
        outcome = noted["result"]
        if outcome is None:  # a run that was killed may have made this call
            return None
        return ToolResult(**outcome).ok if ToolResult(**outcome).is_evidence else None

    async def ask(self, key: str, messages: Sequence[Message], schema: dict[str, Any]) -> str:
        name = prompt_hash(messages, model=self.model.name, sampling=self._sampling_record)
        kept = self.journal.get(key)
        if kept is not None and kept["prompt"] == name:
            return str(kept["reply"])
        # Half a character has no form that could be sent.
        texts = (self.guard.redact(message.text).encode("utf-8", "replace").decode("utf-8") for message in messages)
        clean = [Message(message.role, text) for message, text in zip(messages, texts, strict=True)]
        try:
            reply = await self._paid(clean, schema)
        except (LanguageModelError, ValueError) as error:  # ValueError: the model cannot take the prompt
            self.stopped_by = self.stopped_by or f"at {key}: {error}"
            raise LanguageModelError(str(error)) from error
        self.counts.chat_calls += 1
        if reply.usage is not None:
            self.counts.prompt_tokens += reply.usage.prompt_tokens
            self.counts.completion_tokens += reply.usage.completion_tokens
        text = self.guard.redact(reply.text)
        usage = asdict(reply.usage or Usage(0, 0))
        await self.journal.put(
            key, {"prompt": name, "reply": text, "model": reply.model, "finish": reply.finish_reason, "usage": usage}
        )
        return text

    async def _paid(self, messages: Sequence[Message], schema: dict[str, Any]) -> Completion:
        """One chat call within the budget and the time."""
        if self._ends is not None and time.monotonic() >= self._ends:
            raise BudgetExceeded("the time of the run is over")
        estimate = Usage(sum(map(estimated_tokens, (m.text for m in messages))), self._sampling.max_tokens)
        async with self._budget.bill(estimate) as bill:
            await self._budget.wait_for_turn(estimate)
            try:
                reply = await self.model.achat(messages, self._sampling, schema=schema if self._takes_schema else None)
            except RequestFailed as error:
                if error.status != 400 or not self._takes_schema:
                    raise
                # Some servers take schemas, but not open-ended objects such as a tool's arguments: the prompt says the same in words.
                self._takes_schema = False
                reply = await self.model.achat(messages, self._sampling)
            bill.settle(reply.usage)
        return reply

    async def embed(self, text: str) -> Vector:
        """The vector of a text; each distinct text is embedded once in the life of the store."""
        key = f"vector/{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"
        if key not in self._vectors:
            self._vectors[key] = asyncio.get_running_loop().create_future()
            kept = self.journal.get(key)
            if kept is not None:
                self._vectors[key].set_result(np.frombuffer(base64.b64decode(kept["float32"]), np.float32))
            else:
                self._to_embed.append((key, text))
                if self._embedding is None or self._embedding.done():
                    self._embedding = asyncio.create_task(self._embed_waiting())
        vector = await asyncio.shield(self._vectors[key])
        if not self._has_warned and not (np.isfinite(vector).all() and vector.any()):
            self._has_warned = True
            warnings.warn(
                f"the embedder {self.embedder.name} gave a vector without direction, which counts as similar to nothing, for {text[:80]!r}",
                stacklevel=2,
            )
        return vector

    async def _embed_waiting(self) -> None:
        """Embed what many loops wait for in one go."""
        while self._to_embed:
            batch, self._to_embed = self._to_embed, []
            try:
                rows = np.asarray(await asyncio.to_thread(self.embedder.embed, [text for _, text in batch]), np.float32)
                if rows.ndim != 2 or len(rows) != len(batch):
                    raise ValueError(f"{len(batch)} texts gave vectors of shape {rows.shape}")
            except Exception as error:
                failure = f"the embedder {self.embedder.name} failed: {type(error).__name__}: {error}"
                self.stopped_by = self.stopped_by or failure
                for key, _ in batch:
                    self._vectors[key].set_exception(LanguageModelError(failure))
                    self._vectors[key].exception()  # looked at, also if nobody waits any longer
                continue
            self.counts.embeddings += len(batch)
            for (key, _), vector in zip(batch, rows, strict=True):
                self.journal.note(key, {"float32": base64.b64encode(vector.tobytes()).decode("ascii")})
                self._vectors[key].set_result(vector)

    async def summarise(self, source: ToolSource, results: Mapping[str, ToolDraft]) -> str:
        tools = [result.after for result in results.values()]
        messages = prompts.summarise(getattr(source, "name", "this source"), tools)
        try:
            return parse_reply(await self.ask("chat/summary", messages, schema_of(Summary)), Summary).summary
        except (ReplyError, LanguageModelError):
            return ""


def in_own_loop(work: Coroutine[Any, Any, T], *, runner: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run) -> T:
    """Run a coroutine to its end: here if no event loop is running, else in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return runner(work)
    outcome: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            outcome.append(runner(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]


class _Probe:
    """Calls with arguments that the schema forbids: as the guard, without its check of them."""

    def __init__(self, guard: Guard):
        self._guard = guard

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._guard.call(name, arguments, is_checked=False)


def made_calls(records: Iterable[tuple[str, Mapping[str, Any]]]) -> Counter[str]:
    """How many calls of each tool the records of a store tell of; one that a killed run may have made counts."""
    made: Counter[str] = Counter()
    for key, record in records:
        found = re.match(r"call/(.*)@[0-9a-f]{16}/", key, re.DOTALL)
        if found:
            kind = record["result"]["error_kind"] if record["result"] is not None else None
            if kind not in ("not_executed", "invalid_arguments"):
                made[found.group(1)] += 1
    return made


def _document(tool: ToolSpec) -> str:
    return "\n".join([tool.description, *(f"{name}: {words}" for name, words in tool.parameter_docs.items())])
