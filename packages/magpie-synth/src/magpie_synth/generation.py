"""The two steps (Xu et al. 2025, section 2): instructions from the pre-query template alone, then a response to each.

1. q is drawn from the model given A alone.
2. r is drawn from the model given A q B.

Further turns repeat the two with the conversation so far before them, and preference data draws k responses instead of one. Every
method here yields (id, record) pairs as rows are finished; `Magpie.run` puts them into a store, where the next stage finds them.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from chapbook_shared.jobs import SettingsMismatchError, Store
from chapbook_shared.lm import Completion, Sampling, Usage
from chapbook_shared.progress import Progress
from chapbook_shared.validate import check_int, import_extra

from .completing import Completer, Request, check_completes, complete_rows, row_seed
from .errors import BackendError
from .first_token import BLOCK, FirstToken, begun, suppressed_ids
from .preferences import Scorer, pair
from .rows import Record, Row, Run, answerable, conversation
from .settings import (
    InstructionSettings,
    ResponseSettings,
    RowKey,
    Schedule,
    SystemMix,
    check_schedule,
    row_keys,
)
from .stopping import cut_at_role, reason_to_drop, sanitize
from .template import ChatTemplate, PromptTemplate, derive_from, split_reasoning
from .writing import Writer

_PILOT = 32
_FORMAT = 1


_T = TypeVar("_T")


@dataclass(frozen=True)
class _Todo(Generic[_T]):
    """What to run, in batches that may hold rows that are there already, and the ids of those that are not."""

    batch: list[_T]
    missing: set[str]


@dataclass(frozen=True)
class _Voice:
    """A model with its chat template."""

    model: Completer
    chat: ChatTemplate


class Magpie:
    """Instruction and preference data out of an aligned model.

    Args:
        model: any completing model of `chapbook_shared.lm`: `LocalModel`, `OpenVINOModel`, `OpenAIModel` (vLLM, llama.cpp),
            `ModelPool`, or `RayModel`.
        tokenizer: the model's tokenizer, or the name or folder to load it from; models in this process bring their own.
        seed: of the run; every row derives its own from it.
        system: "template", "none", a domain ("math", "code", "translation") or a system text; see `derive_template`.
        systems: several system texts by key, or (text, weight) pairs; each row draws one.
        language: a language code; one sentence in that language becomes the system text.
        system_fallback: "prepend" puts a system text that the template refuses before the user's text.
        legacy_template: a pre-query template to use in place of the derived one.
        responder: another model for the responses (with `responder_tokenizer`); the paper's ablation finds this to hurt.
        instruction, response: settings of the two steps.
        revision: written to every row as `model_revision`.
        template_kwargs: for the chat template: `enable_thinking`, `date_string`, ...
    """

    def __init__(
        self,
        model: Completer,
        *,
        tokenizer: Any = None,
        seed: int = 0,
        system: str = "template",
        systems: Mapping[str, str | tuple[str, float]] | None = None,
        language: str | None = None,
        system_fallback: Literal["prepend"] | None = None,
        legacy_template: str | None = None,
        responder: Completer | None = None,
        responder_tokenizer: Any = None,
        instruction: InstructionSettings | None = None,
        response: ResponseSettings | None = None,
        revision: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_completes(model)
        check_int("seed", seed, minimum=0)
        self.seed = seed
        self.instruction = instruction or InstructionSettings()
        self.response = response or ResponseSettings()
        self.revision = revision
        self.mix = SystemMix.of(system, systems, language)
        self._asker = _Voice(model, _chat_template(model, tokenizer, template_kwargs or {}))
        self._answerer = self._asker
        if responder is not None:
            check_completes(responder)
            self._answerer = _Voice(responder, _chat_template(responder, responder_tokenizer, template_kwargs or {}))
        self.templates: dict[str, PromptTemplate] = {
            key: derive_from(
                self._asker.chat, system=text, system_fallback=system_fallback, legacy_template=legacy_template
            )
            for key, text in self.mix.texts.items()
        }
        self._first = FirstToken(
            suppressed_ids(self._asker.chat.tokenizer, self.instruction.suppress_first)
            if self.instruction.suppress_first
            else frozenset(),
            self.instruction.first_token_temperature,
        )
        self._checked_prompts: set[str] = set()
        self._answer_templates: dict[str, PromptTemplate] = {}

    @property
    def suppressed(self) -> int:
        """How many tokens of the vocabulary may not come first."""
        return len(self._first.suppressed)

    # The stages in memory

    def instructions(self, rows: int | None = None, *, schedule: Schedule | None = None) -> list[Record]:
        """Draw instructions; the records of all rows, dropped ones included (their `drop` says why), in the order of ids."""
        cells = _schedule(rows, schedule)
        return [record for _, record in sorted(self._instructions(row_keys(self.seed, cells), cells))]

    def responses(self, instructions: Iterable[Record]) -> list[Row]:
        """Answer the instructions that are worth it; rows in the order of ids."""
        kept = answerable(list(instructions))
        answers = dict(self._responses((record["id"], record) for record in kept))
        rows = [Row(record, answers[record["id"]]) for record in kept]
        return [row for row in rows if row.drop is None]

    def extend(self, rows: Sequence[Row], turns: int) -> list[Row]:
        """Add turns until every conversation has `turns` of them; one whose next turn is dropped ends before it."""
        check_int("turns", turns, minimum=1)
        rows = list(rows)
        for turn in range(2, turns + 1):
            open_rows = [row for row in rows if row.turns == turn - 1]
            asked = dict(self._follow_ups(((row.id, row) for row in open_rows), turn))
            kept = [(row.id, row.with_question(asked[row.id])) for row in open_rows if asked[row.id]["drop"] is None]
            answers = dict(self._responses(((id, row) for id, row in kept), turn=turn))
            longer = {
                id: row.with_turn(asked[id], answers[id]) for id, row in ((r.id, r) for r in open_rows) if id in answers
            }
            rows = [longer.get(row.id, row) if row.turns == turn - 1 else row for row in rows]
        return rows

    def preferences(
        self, rows: Iterable[Row], *, k: int = 5, scorer: Scorer, temperature: float = 0.8, top_p: float = 1.0
    ) -> list[Record]:
        """k responses to each first instruction, scored: the best and the worst. Rows whose best equals their worst are left out."""
        check_int("k", k, minimum=2)
        chosen = []
        kept = [(row.id, row.instruction) for row in rows]
        drawn: dict[str, dict[int, Record]] = {}
        for (id, place), record in self._candidates(kept, k=k, temperature=temperature, top_p=top_p):
            drawn.setdefault(id, {})[place] = record
        for id, instruction in kept:
            texts = [drawn[id][place]["response"] for place in range(k)]
            scores = scorer([conversation([instruction], [text]) for text in texts])
            if made := pair(id, instruction, texts, scores):
                chosen.append(made)
        return chosen

    # The stages in a store

    def run(
        self,
        out: str | Path,
        *,
        rows: int | None = None,
        schedule: Schedule | None = None,
        responses: int | None = None,
        turns: int = 1,
        strict: bool = False,
        force_new: bool = False,
        progress: Progress | None = None,
    ) -> Run:
        """Do whatever of a run is not done yet, and return it. Killed at any moment, the same call goes on.

        `rows` instructions at temperature 1, or those of a `schedule` of (temperature, top_p, rows), are drawn; then the first
        `responses` (None: all) of those worth it are answered, and extended to `turns` turns. More rows, responses or turns may be
        asked for later; anything else that differs from what the folder was begun with is refused (SettingsMismatchError),
        unless `force_new` puts the old store aside. A pilot of 32 rows that mostly came to nothing is a warning, or with `strict`
        an error. One process writes to a folder at a time.
        """
        cells = _schedule(rows, schedule)
        check_int("turns", turns, minimum=1)
        if responses is not None:
            check_int("responses", responses, minimum=0)
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        path = out / "run.sqlite"
        if force_new:
            _put_aside(path)
        progress = progress or Progress()
        with Store(path, settings=self.fingerprint(cells)) as store:
            keys = row_keys(self.seed, cells)
            todo = self._todo(store, "instruction", {key.id: key for key in keys}, self._asker, first=True)
            watch = _Pilot({key.id for key in keys[:_PILOT]}, self._asker.model.name, strict=strict)
            self._store(store, "instruction", todo, lambda batch: self._instructions(batch, cells), progress, watch)
            Run(out).write_stats()
            self._answer(store, out, keys, responses, turns, progress)
        return Run(out)

    def run_preferences(
        self,
        out: str | Path,
        *,
        k: int = 5,
        temperature: float = 0.8,
        top_p: float = 1.0,
        ids: Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> Run:
        """Draw k responses to the first instruction of each row of a run (or of those in `ids`), resumably.

        They are scored and paired by `Run.preferences`, as often as wanted and with any scorer.
        """
        check_int("k", k, minimum=2)
        settings = {"temperature": temperature, "top_p": top_p, "max_tokens": self.response.max_tokens}
        Sampling(temperature=temperature, top_p=top_p)
        run = Run(Path(out))
        chosen = None if ids is None else set(ids)
        rows = [row for row in run.rows() if chosen is None or row.id in chosen]
        with Store(run.store_path) as store:
            if "preference-settings" in store:
                known = store.get("preference-settings")
                if known != settings:
                    raise SettingsMismatchError(
                        run.store_path,
                        {name: (known[name], settings[name]) for name in settings if known[name] != settings[name]},
                    )
            else:
                store.put("preference-settings", settings)
            wanted = [(row.id, row.instruction, place) for row in rows for place in range(k)]
            named = {f"{id}/{place}": (id, instruction, place) for id, instruction, place in wanted}
            todo = self._todo(store, "preference", named, self._answerer)

            def draw(batch: Sequence[tuple[str, str, int]]) -> Iterator[tuple[str, Record]]:
                for (id, place), record in self._some_candidates(batch, temperature=temperature, top_p=top_p):
                    yield f"{id}/{place}", record

            self._store(store, "preference", todo, draw, progress or Progress())
        return run

    def fingerprint(self, cells: Schedule) -> Record:
        """What a store is begun with, and what a resumed run must agree with. Numbers of rows are no part of it."""
        return {
            "format": _FORMAT,
            "model": self._asker.model.name,
            "responder": self._answerer.model.name,
            "revision": self.revision,
            "seed": self.seed,
            "schedule": [[temperature, top_p] for temperature, top_p, _ in cells],
            "systems": {key: [self.mix.texts[key], self.mix.weights[key]] for key in self.mix.texts},
            "prompts": {key: list(template.prompt_ids) for key, template in self.templates.items()},
            "pre_query": {key: template.pre_query for key, template in self.templates.items()},
            "post_query": next(iter(self.templates.values())).post_query,
            "instruction": _jsonable(asdict(self.instruction)),
            "response": _jsonable(asdict(self.response)),
        }

    def _answer(
        self, store: Store, out: Path, keys: Sequence[RowKey], responses: int | None, turns: int, progress: Progress
    ) -> None:
        drawn = {record["id"]: record for _, record in store.items("instruction/")}
        kept = answerable([drawn[key.id] for key in keys])[:responses]
        todo = self._todo(store, "response", {record["id"]: record for record in kept}, self._answerer)
        self._store(store, "response", todo, lambda batch: self._responses((r["id"], r) for r in batch), progress)
        Run(out).write_stats()
        wanted = {record["id"] for record in kept}
        for turn in range(2, turns + 1):
            self._next_turn(store, out, wanted, turn, progress)
            Run(out).write_stats()

    def _next_turn(self, store: Store, out: Path, wanted: set[str], turn: int, progress: Progress) -> None:
        rows = [row.before_turn(turn) for row in Run(out).rows() if row.id in wanted and row.turns >= turn - 1]
        asking = self._todo(store, f"instruction-{turn}", {row.id: row for row in rows}, self._asker)
        self._store(
            store,
            f"instruction-{turn}",
            asking,
            lambda batch: self._follow_ups(((row.id, row) for row in batch), turn),
            progress,
        )
        questions = {record["id"]: record for _, record in store.items(f"instruction-{turn}/")}
        open_rows = [row.with_question(questions[row.id]) for row in rows if questions[row.id]["drop"] is None]
        answering = self._todo(store, f"response-{turn}", {row.id: row for row in open_rows}, self._answerer)
        self._store(
            store,
            f"response-{turn}",
            answering,
            lambda batch: self._responses(((row.id, row) for row in batch), turn=turn),
            progress,
        )

    def _todo(
        self, store: Store, stage: str, named: Mapping[str, _T], voice: _Voice, *, first: bool = False
    ) -> _Todo[_T]:
        """What of a stage is not done. A model that runs fixed batches gets them whole, for the same rows to the last bit."""
        missing = {key.removeprefix(f"{stage}/") for key in store.missing(f"{stage}/{id}" for id in named)}
        size = getattr(voice.model, "stream_block", None)
        if size is None:
            return _Todo([value for id, value in named.items() if id in missing], missing)
        if first and self._first != FirstToken():
            size = math.lcm(size, BLOCK)
        blocks = {place // size for place, id in enumerate(named) if id in missing}
        return _Todo([value for place, value in enumerate(named.values()) if place // size in blocks], missing)

    def _store(
        self,
        store: Store,
        stage: str,
        todo: _Todo[_T],
        draw: Callable[[Sequence[_T]], Iterator[tuple[str, Record]]],
        progress: Progress,
        watch: Callable[[Record], None] | None = None,
    ) -> None:
        with progress.task(stage, total=len(todo.missing)) as task, Writer(store) as writer:
            for id, record in draw(todo.batch):
                if id not in todo.missing:
                    continue
                writer.put(f"{stage}/{id}", record)
                task.advance()
                if watch is not None:
                    watch(record)

    # Step 1

    def _instructions(self, keys: Sequence[RowKey], cells: Schedule) -> Iterator[tuple[str, Record]]:
        def requests() -> Iterator[Request]:
            for key in keys:
                template = self.templates[self.mix.choose(key)]
                temperature, top_p, _ = cells[key.cell]
                path = (key.seed, "instruction", key.cell, key.index)
                sampling = self._query_sampling(template, temperature, top_p, row_seed(*path))
                text = _as_text(self._asker, template.prompt_ids)
                yield Request(key.id, template.prompt_ids, sampling, path, text)

        for request, completion in self._drawn(requests()):
            key = RowKey.parse(request.key)
            system = self.mix.choose(key)
            record = self._instruction_record(request, completion, self.templates[system], self.mix.texts[system])
            yield request.key, {**record, "cell": key.cell, "index": key.index, "system": system}

    def _query_sampling(self, template: PromptTemplate, temperature: float, top_p: float, seed: int) -> Sampling:
        stop = (*template.stop_strings, *self.instruction.stop, *(("\n",) if self.instruction.stop_at_newline else ()))
        return Sampling(
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            max_tokens=self.instruction.max_tokens,
            stop=tuple(dict.fromkeys(stop)),
            stop_token_ids=template.stop_ids,
        )

    def _drawn(self, requests: Iterator[Request]) -> Iterator[tuple[Request, Completion]]:
        """Step 1 with or without control of the first token."""
        model = self._asker.model
        if self._first == FirstToken():
            yield from self._completed(self._asker, requests)
            return
        size = getattr(model, "wave", BLOCK)  # a cluster's workers load the model once a wave
        while block := list(islice(requests, size)):
            going_on: dict[str, tuple[Request, Completion]] = {}
            for request, first in begun(model, block, self._first):
                ids = first.token_ids or ()
                if not ids or ids[0] in request.sampling.stop_token_ids or request.sampling.max_tokens == 1:
                    ended = "length" if ids and ids[0] not in request.sampling.stop_token_ids else "stop"
                    yield request, replace(first, finish_reason=ended)
                else:
                    going_on[request.key] = (request, first)
            rest = (
                replace(
                    request,
                    prompt=(*request.prompt, *(first.token_ids or ())),
                    text=None if request.text is None else request.text + first.text,
                    sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - 1),
                )
                for request, first in going_on.values()
            )
            for later, completion in self._completed(self._asker, rest):
                request, first = going_on[later.key]
                yield request, _joined(self._asker.chat, request, first, completion)

    def _completed(self, voice: _Voice, requests: Iterator[Request]) -> Iterator[tuple[Request, Completion]]:
        for request, completion in complete_rows(voice.model, requests):
            self._check_prompt(voice, request, completion.usage)
            yield request, _ended_at_stop(voice, request, completion)

    def _check_prompt(self, voice: _Voice, request: Request, usage: Usage | None) -> None:
        """An endpoint that takes text alone must see the tokens that the template has: no second BOS, no other reading."""
        if voice.model.capabilities.token_prompts or usage is None or voice.model.name in self._checked_prompts:
            return
        if usage.prompt_tokens != len(request.prompt):
            raise BackendError(
                f"{voice.model.name} read {usage.prompt_tokens} tokens where the template has {len(request.prompt)}: it adds "
                "or splits tokens. Use an endpoint that takes token ids"
            )
        self._checked_prompts.add(voice.model.name)

    def _instruction_record(
        self, request: Request, completion: Completion, template: PromptTemplate, system: str
    ) -> Record:
        raw = completion.text
        text, cut = cut_at_role(raw, template)
        taken: tuple[str, ...] = ("role header",) if cut else ()
        if self.instruction.sanitize:
            text, reasons = sanitize(text)
            taken += reasons
        ended = completion.finish_reason == "stop" or bool(taken)
        return {
            "id": request.key,
            "instruction": text.strip(),
            "raw_instruction": raw,
            "taken": list(taken),
            "drop": reason_to_drop(text, ended=ended, system=system),
            "finish_reason": completion.finish_reason,
            "tokens": None if completion.token_ids is None else len(completion.token_ids),
            "gen_input_configs": {
                "temperature": request.sampling.temperature,
                "top_p": request.sampling.top_p,
                "input_generator": self._asker.model.name,
                "seed": request.sampling.seed,
                "pre_query_template": template.pre_query,
                "system_prepended": template.system_prepended,
            },
            "model_revision": self.revision,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    # Step 2

    def _responses(self, rows: Iterable[tuple[str, Record | Row]], *, turn: int = 1) -> Iterator[tuple[str, Record]]:
        refused: list[str] = []

        def requests() -> Iterator[Request]:
            for id, row in rows:
                turns = row.open_conversation() if isinstance(row, Row) else conversation([row["instruction"]], [])
                if self._would_be_markup(turns):
                    refused.append(id)
                    continue
                system = row.instruction_record["system"] if isinstance(row, Row) else row["system"]
                key = RowKey.parse(id)
                path = (key.seed, "response", turn, key.cell, key.index)
                yield self._response_request(id, turns, system, self.response.sampling(), path)

        for request, completion in self._completed(self._answerer, requests()):
            yield request.key, self._response_record(request, completion)
        for id in refused:
            yield id, {"id": id, "response": "", "drop": "control tokens"}

    def _would_be_markup(self, turns: Sequence[Mapping[str, str]]) -> bool:
        """An endpoint that takes text alone reads control tokens in a generated text as markup; such rows are not sent there."""
        if self._answerer.model.capabilities.token_prompts:
            return False
        hide = self._answerer.chat.codec.hide
        return any(hide(turn["content"]) != turn["content"] for turn in turns)

    def _response_request(
        self, key: str, turns: list[dict[str, str]], system: str, sampling: Sampling, path: tuple[str | int, ...]
    ) -> Request:
        text = self.mix.texts[system]
        if self.response.system_in_response and text not in ("template", "none"):
            turns = [{"role": "system", "content": text}, *turns]
        chat = self._answerer.chat
        stops = self._answer_stops()
        sampling = replace(
            sampling,
            seed=row_seed(*path) if sampling.temperature > 0 else None,
            stop=stops.stop_strings,
            stop_token_ids=stops.stop_ids,
        )
        ids = chat.reply_ids(turns)
        return Request(key, ids, sampling, path, _as_text(self._answerer, ids))

    def _answer_stops(self) -> PromptTemplate:
        if self._answerer is self._asker:
            return next(iter(self.templates.values()))
        if "" not in self._answer_templates:
            self._answer_templates[""] = derive_from(self._answerer.chat)
        return self._answer_templates[""]

    def _response_record(self, request: Request, completion: Completion) -> Record:
        reasoning, text = split_reasoning(completion.text, opens_thinking=self._answer_stops().opens_thinking)
        return {
            "id": request.key,
            "response": text,
            "reasoning": reasoning,
            "drop": None if text else "empty response",
            "response_finish_reason": completion.finish_reason,
            "response_tokens": None if completion.token_ids is None else len(completion.token_ids),
            "gen_response_configs": {
                "temperature": request.sampling.temperature,
                "top_p": request.sampling.top_p,
                "repetition_penalty": request.sampling.repetition_penalty,
                "output_generator": self._answerer.model.name,
                "engine": str(completion.details.get("engine") or type(self._answerer.model).__name__),
                "seed": request.sampling.seed,
            },
        }

    # Further turns

    def _follow_ups(self, rows: Iterable[tuple[str, Row]], turn: int) -> Iterator[tuple[str, Record]]:
        chat = self._asker.chat
        template = next(iter(self.templates.values()))
        lead: list[dict[str, str]] = []
        if self.instruction.follow_up_system:
            if template.system_support == "native":
                lead = [{"role": "system", "content": self.instruction.follow_up_system}]
            else:
                warnings.warn(
                    f"the chat template of {chat.name} takes no system text: turn {turn} is asked for without one",
                    stacklevel=2,
                )

        def requests() -> Iterator[Request]:
            for id, row in rows:
                key = RowKey.parse(id)
                path = (key.seed, "instruction", turn, key.cell, key.index)
                turns = [*lead, *row.conversation()]
                sampling = self._query_sampling(template, 1.0, 1.0, row_seed(*path))
                ids = chat.query_ids(turns)
                yield Request(id, ids, sampling, path, _as_text(self._asker, ids))

        for request, completion in self._completed(self._asker, requests()):
            record = self._instruction_record(request, completion, template, self.instruction.follow_up_system)
            yield request.key, record

    # Preferences

    def _candidates(
        self, rows: Sequence[tuple[str, str]], *, k: int, temperature: float, top_p: float
    ) -> Iterator[tuple[tuple[str, int], Record]]:
        wanted = [(id, instruction, place) for id, instruction in rows for place in range(k)]
        return self._some_candidates(wanted, temperature=temperature, top_p=top_p)

    def _some_candidates(
        self, wanted: Sequence[tuple[str, str, int]], *, temperature: float, top_p: float
    ) -> Iterator[tuple[tuple[str, int], Record]]:
        sampling = replace(self.response.sampling(), temperature=temperature, top_p=top_p)

        def requests() -> Iterator[Request]:
            for id, instruction, place in wanted:
                key = RowKey.parse(id)
                path = (key.seed, "preference", place, key.cell, key.index)
                turns = conversation([instruction], [])
                yield self._response_request(f"{id}/{place}", turns, next(iter(self.templates)), sampling, path)

        for request, completion in self._completed(self._answerer, requests()):
            id, _, place = request.key.rpartition("/")
            yield (id, int(place)), self._response_record(request, completion)


class _Pilot:
    """Looks at the first rows: a model that was not aligned mostly writes nothing, no end, or the same."""

    def __init__(self, ids: set[str], name: str, *, strict: bool) -> None:
        self.ids, self.name, self.strict = ids, name, strict
        self.seen: list[Record] = []

    def __call__(self, record: Record) -> None:
        if record["id"] not in self.ids:
            return
        self.seen.append(record)
        if len(self.seen) < _PILOT:
            return
        texts = [record["instruction"] for record in self.seen if record["drop"] is None]
        bad = len(self.seen) - len(set(texts))
        if bad * 2 <= len(self.seen):
            return
        message = (
            f"{bad} of the first {len(self.seen)} instructions of {self.name} are empty, cut at the limit or duplicates: is this "
            "an aligned model, and is this its chat template? `magpie-synth template` shows the prompt"
        )
        if self.strict:
            raise BackendError(message)
        warnings.warn(message, stacklevel=4)


def _schedule(rows: int | None, schedule: Schedule | None) -> tuple[tuple[float, float, int], ...]:
    if schedule is None:
        if rows is None:
            raise ValueError("give rows, or a schedule of (temperature, top_p, rows)")
        return check_schedule([(1.0, 1.0, rows)])
    cells = check_schedule(schedule)
    if rows is not None and rows != sum(cell[2] for cell in cells):
        raise ValueError(f"rows is {rows}, but the schedule has {sum(cell[2] for cell in cells)}: give one of them")
    return cells


def _chat_template(model: Completer, tokenizer: Any, kwargs: Mapping[str, Any]) -> ChatTemplate:
    if tokenizer is None:
        tokenizer = getattr(getattr(model, "text", None), "tokenizer", None)
        if tokenizer is None:
            raise ValueError(
                f"tokenizer is needed for {model.name}: pass the folder or hub id of its tokenizer, whose chat template is used"
            )
    if isinstance(tokenizer, str | Path):
        transformers: Any = import_extra("transformers", "magpie-synth[server]")
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(tokenizer))
    return ChatTemplate(tokenizer, name=model.name, **kwargs)


def _as_text(voice: _Voice, ids: Sequence[int]) -> str | None:
    """A prompt as text, for an endpoint that takes no token ids, without the BOS that its tokenizer puts before a text."""
    if voice.model.capabilities.token_prompts:
        return None
    codec = voice.chat.codec
    start = len(codec.prefix) if list(ids[: len(codec.prefix)]) == codec.prefix else 0
    return voice.chat.tokenizer.decode(list(ids[start:]), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _ended_at_stop(voice: _Voice, request: Request, completion: Completion) -> Completion:
    """Cut at the first stop token where the endpoint takes no ids to stop at."""
    if "stop_token_ids" not in voice.model.capabilities.unsupported or completion.token_ids is None:
        return completion
    for place, id in enumerate(completion.token_ids):
        if id in request.sampling.stop_token_ids:
            ids = completion.token_ids[:place]
            return replace(
                completion,
                text=voice.chat.codec.text(ids, request.prompt) if place else "",
                token_ids=completion.token_ids[: place + 1],
                finish_reason="stop",
            )
    return completion


def _joined(chat: ChatTemplate, request: Request, first: Completion, rest: Completion) -> Completion:
    """One completion out of the first token and what follows it."""
    ids = (*(first.token_ids or ()), *(rest.token_ids or ()))
    text = first.text + rest.text
    if rest.token_ids is not None:  # a character may lie across the two
        body = ids[:-1] if rest.finish_reason == "stop" and ids[-1] in request.sampling.stop_token_ids else ids
        whole = chat.codec.text(body, request.prompt)
        if rest.text and whole.endswith(rest.text):
            text = whole
    return replace(rest, text=text, token_ids=ids)


def _put_aside(path: Path) -> None:
    """Rename a store and what SQLite keeps next to it."""
    if not path.exists():
        return
    Store(path).close()  # nobody writes to it, and all of it is in one file
    number = 1
    while (aside := path.with_name(f"run-{number}.sqlite")).exists():
        number += 1
    path.rename(aside)
    for ending in ("-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)


def _jsonable(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
