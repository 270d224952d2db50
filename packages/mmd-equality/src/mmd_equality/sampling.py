"""Collect completions from a model: n of each prompt, each on disk as soon as it is there, none lost and none twice.

What an audit compares is the sampling distribution, so everything that shapes it is sent with every request (temperature 1, the
whole vocabulary, no penalties), hashed, and stored with every completion. A checkpoint's or a server's defaults never leak in:
`transformers` alone would otherwise cut to the 50 likeliest tokens where a checkpoint says so.

One completion a request: several servers answer `n > 1` with identical copies. Each request has its own seed where the model takes
seeds; a shared one would make copies too.

Finished completions go to a SQLite store next to the output file (`<out>.sqlite`); the JSON lines are its export. After kill -9
the same call asks only for what is missing; with other settings it refuses.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from chapbook_shared.jobs import Store
from chapbook_shared.lm import BudgetExceeded, CapabilityError, LanguageModel, LanguageModelError, Sampling
from chapbook_shared.progress import Progress
from chapbook_shared.seeding import derive_seed
from chapbook_shared.validate import check_choice, check_int, import_extra
from mmd_equality.samples import PromptId, Samples, completion_fields

__all__ = [
    "LlamaCpp",
    "OpenAICompatible",
    "Prompt",
    "SampleReport",
    "Transformers",
    "VLLM",
    "load_prompts",
    "prompt_sets",
    "sample",
    "template_tokens",
]

PROMPT_SETS = ("continuations", "code", "questions")
FAILED_FINISH = ("content_filter",)


@dataclass(frozen=True)
class Prompt:
    """One prompt: text for a completion or a user's turn, or the turns of a conversation (`{"role": ..., "content": ...}`)."""

    id: PromptId
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.id, bool) or not isinstance(self.id, (str, int)):
            raise TypeError(f"a prompt's id must be a str or an int, got {type(self.id).__name__}: {self.id!r}")
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"prompt {self.id!r} needs either text or messages")
        if self.text is not None and not isinstance(self.text, str):
            raise TypeError(f"the text of prompt {self.id!r} must be a str, got {type(self.text).__name__}")
        for turn in self.messages or ():
            if not isinstance(turn, Mapping) or not all(isinstance(turn.get(k), str) for k in ("role", "content")):
                raise TypeError(f'a turn of prompt {self.id!r} must be {{"role": ..., "content": ...}}, got {turn!r}')


def load_prompts(source: str | Path) -> list[Prompt]:
    """Prompts of a JSON-lines file (`id` or `prompt_id`; `prompt` or `text`, or `messages`), or of a set that comes with this package.

    The sets: "continuations" (25 openings in several languages to go on with), "code" (20 small stubs), "questions" (20 open
    questions). A bare number of lines without ids gets line numbers.
    """
    if str(source) in PROMPT_SETS:
        text = resources.files("mmd_equality").joinpath("data", f"{source}.jsonl").read_text(encoding="utf-8")
        name = str(source)
    else:
        path = Path(source)
        if not path.exists():
            raise FileNotFoundError(
                f"no prompt file {path}; the sets that come with the package: {', '.join(PROMPT_SETS)}"
            )
        name = str(path)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8: {error}") from None
    out: list[Prompt] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: not JSON: {error}") from None
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, dict):
            raise ValueError(f"{name}, line {number}: a JSON object or string is needed, got {type(row).__name__}")
        label: PromptId = row["id"] if "id" in row else row.get("prompt_id", number - 1)
        content = row.get("prompt", row.get("text"))
        messages = row.get("messages")
        if content is None and messages is None:
            raise ValueError(f"{name}, line {number}: no 'prompt', 'text' or 'messages'")
        try:
            out.append(Prompt(label, content, None if messages is None else tuple(messages)))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}, line {number}: {error}") from None
    twice = [label for label, count in Counter(p.id for p in out).items() if count > 1]
    if twice:
        raise ValueError(f"{name}: prompt ids must be unique, but {twice[:5]!r} stand twice")
    if not out:
        raise ValueError(f"{name} has no prompts")
    return out


def prompt_sets() -> dict[str, list[Prompt]]:
    """The prompt sets that come with this package."""
    return {name: load_prompts(name) for name in PROMPT_SETS}


@dataclass(frozen=True)
class SampleReport:
    """What a call to `sample` did. requested counts completions asked for in this call; failed those recorded as failed, in all."""

    samples: Samples
    path: Path
    requested: int
    failed: int
    warnings: tuple[str, ...]
    settings_hash: str


def settings_of(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    verb: str,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All that fixes what a completion means, as plain data: the model's name, the verb, every sampling field, the prompts."""
    fields = {k: v for k, v in asdict(sampling).items() if k not in ("seed", "n")}
    content = json.dumps([[p.id, p.text, p.messages] for p in prompts], ensure_ascii=True, default=dict)
    return {
        "model": model.name,
        "verb": verb,
        "sampling": json.loads(json.dumps(fields)),
        "prompts": hashlib.sha256(content.encode()).hexdigest()[:16],
        "extra": dict(extra or {}),
    }


def _hash(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def sample(
    model: LanguageModel,
    prompts: Sequence[Prompt] | str | Path,
    *,
    n: int,
    out: str | Path,
    sampling: Sampling | None = None,
    verb: Literal["chat", "complete"] = "chat",
    seed: int = 0,
    concurrency: int = 16,
    per_request: int = 1,
    retry_failed: bool = False,
    content_retries: int = 2,
    strict: bool = False,
    expected_prompt_tokens: Callable[[Prompt], int] | None = None,
    extra: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> SampleReport:
    """Draw n completions of every prompt from `model` into the JSON-lines file `out`, resuming what is there.

    model: anything that speaks `chapbook_shared.lm`'s protocol. sampling: temperature, max_tokens and so on; its `seed` and `n`
    are set here. verb: "chat" applies the model's template, "complete" sends raw text.
    concurrency: requests under way. per_request: completions a request ("complete" only; some servers return copies).
    retry_failed: ask again for what is recorded as failed. A request that fails after the client's own retries is recorded and
    counts in the failure rate; if the very first one fails, the error is raised and nothing is recorded.
    content_retries: how often to ask again after a filtered or empty-handed answer.
    strict: a change of the served model's name while sampling is an error, not a warning.
    expected_prompt_tokens: what the local template counts for a prompt; a differing report is a `template-mismatch`.
    extra: more settings to hash (a server's version, say). Never put secrets there.
    """
    check_int("n", n, minimum=1)
    check_int("concurrency", concurrency, minimum=1)
    check_int("per_request", per_request, minimum=1)
    check_choice("verb", verb, ("chat", "complete"))
    if per_request > 1 and verb == "chat":
        raise ValueError("per_request > 1 needs verb='complete'")
    items = load_prompts(prompts) if isinstance(prompts, (str, Path)) else list(prompts)
    if not items:
        raise ValueError("prompts is empty")
    if verb == "complete" and any(p.messages is not None for p in items):
        raise ValueError("verb='complete' needs prompts with text, not messages")
    base = replace(sampling or Sampling(), seed=None, n=1)
    settings = settings_of(model, items, base, verb, extra)
    path = Path(out)
    if path.is_dir():
        raise IsADirectoryError(f"out must be a file to write, but {path} is a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    run = _Run(
        model, base, verb, seed, per_request, content_retries, strict, expected_prompt_tokens, _hash(settings),
        progress or Progress(),
    )  # fmt: skip
    with Store(_store_path(path), settings=settings) as store:
        by_key = {_key(p.id, i): (p, i) for p in items for i in range(n)}
        wanted = store.missing(by_key)
        if retry_failed:
            wanted += [key for key, row in store.items() if row.get("error") and key in by_key]
        try:
            _ask(run, store, [by_key[key] for key in wanted], concurrency, known_good=len(store) > 0)
        finally:  # after an interruption, what is there can be read
            _export(store, path, by_key)
    samples = Samples.from_jsonl(path)
    return SampleReport(
        samples,
        path,
        len(wanted),
        sum(samples.failures.values()),
        tuple(_closing_warnings(samples, base)),
        _hash(settings),
    )


def _store_path(path: Path) -> Path:
    return path.with_name(path.name + ".sqlite")


def _key(label: PromptId, number: int) -> str:
    return f"{json.dumps(label)}#{number}"


def _export(store: Store, path: Path, by_key: Mapping[str, Any]) -> None:
    """JSON lines in the order of prompts and sample numbers, whatever order the answers came in."""
    from chapbook_shared.jobs import atomic_write

    rows = dict(store.items())
    with atomic_write(path) as file:
        for key in (k for k in by_key if k in rows):
            file.write(json.dumps(rows[key], ensure_ascii=True) + "\n")


@dataclass
class _Run:
    model: LanguageModel
    base: Sampling
    verb: str
    seed: int
    per_request: int
    content_retries: int
    strict: bool
    expected_prompt_tokens: Callable[[Prompt], int] | None
    settings_hash: str
    progress: Progress
    served: str | None = None

    async def answers(self, prompt: Prompt, number: int, count: int, attempt: int) -> list[Any]:
        """`count` completions from one request, for samples number, number + 1, ..."""
        seed = None
        if self.model.capabilities.seed:
            seed = derive_seed(self.seed, str(prompt.id), number, attempt) % 2**31
        sampling = replace(self.base, seed=seed, n=count)
        if self.verb == "chat":
            messages = list(prompt.messages) if prompt.messages is not None else str(prompt.text)
            return [await self.model.achat(messages, sampling)]
        return await self.model.acomplete(str(prompt.text), sampling)

    async def records(self, prompt: Prompt, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """A record for each of these samples of one prompt: a completion, or why there is none."""
        done: dict[int, dict[str, Any]] = {}
        error = "no answer"
        for attempt in range(1 + self.content_retries):
            left = [i for i in numbers if i not in done]
            if not left:
                break
            try:
                got = await self.answers(prompt, left[0], len(left), attempt)
            except (BudgetExceeded, CapabilityError):
                raise
            except LanguageModelError as failure:
                error = f"{type(failure).__name__}: {failure}"
                break  # the client has retried what can be retried
            for i, answer in zip(left, got, strict=False):
                if answer.finish_reason in FAILED_FINISH:
                    error = answer.finish_reason
                    continue
                done[i] = self.record(prompt, i, answer)
            if len(got) < len(left) and not done:
                error = "the server returned no choices"
        return [done.get(i) or {**self.head(prompt, i), "completion": None, "error": error} for i in numbers]

    def head(self, prompt: Prompt, number: int) -> dict[str, Any]:
        return {
            "prompt_id": prompt.id,
            "sample": number,
            "settings_hash": self.settings_hash,
            "max_tokens": self.base.max_tokens,
            "time": round(time.time(), 3),
        }

    def record(self, prompt: Prompt, number: int, answer: Any) -> dict[str, Any]:
        warnings: list[str] = []
        usage = answer.usage
        if usage is not None and usage.completion_tokens > self.base.max_tokens:
            warnings.append("settings-not-honoured")
        row: dict[str, Any] = self.head(prompt, number)
        if usage is not None:
            row["usage"] = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
            if self.expected_prompt_tokens is not None:
                expected = self.expected_prompt_tokens(prompt)
                if expected != usage.prompt_tokens:
                    warnings.append(f"template-mismatch: {usage.prompt_tokens} prompt tokens reported, {expected} here")
        if self.served is None:
            self.served = answer.model
        elif answer.model != self.served:
            if self.strict:
                raise RuntimeError(f"the served model changed from {self.served!r} to {answer.model!r} while sampling")
            warnings.append("served-model-changed")
        row.update(completion_fields(answer.text))
        if answer.token_ids is not None:
            row["token_ids"] = list(answer.token_ids)
        row["finish_reason"] = answer.finish_reason
        row["served_model"] = answer.model
        details = {k: v for k, v in dict(answer.details).items() if isinstance(v, (str, int, float, bool))}
        if details:
            row["details"] = details
            if details.get("provider"):
                row["provider"] = details["provider"]
        if warnings:
            row["warnings"] = warnings
        return row


def _ask(run: _Run, store: Store, wanted: list[tuple[Prompt, int]], concurrency: int, *, known_good: bool) -> None:
    groups = list(_grouped(wanted, run.per_request))
    if not groups:
        return

    async def work() -> None:
        waiting = iter(groups)
        with run.progress.task(f"sampling {run.model.name}", total=len(wanted)) as task:

            async def one(prompt: Prompt, numbers: list[int], *, first: bool = False) -> None:
                rows = await run.records(prompt, numbers)
                # A filtered answer says something about the prompt, not about the address or the key.
                if first and all(row.get("error") and row["error"] not in FAILED_FINISH for row in rows):
                    raise RuntimeError(f"the first request failed, so nothing was recorded: {rows[0]['error']}")
                store.put_many([(_key(prompt.id, row["sample"]), row) for row in rows], replace=True)
                task.advance(len(rows))

            async def worker() -> None:
                for prompt, numbers in waiting:
                    await one(prompt, numbers)

            if not known_good:  # a wrong address or key shows here, not as a file full of failures
                await one(*next(waiting), first=True)
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(concurrency, len(groups))):
                    workers.create_task(worker())

    try:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(work())
        else:  # in a notebook: a loop of its own, in a thread of its own
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, work()).result()
    except BaseExceptionGroup as group:
        raise _first_of(group) from None


def _first_of(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _grouped(wanted: list[tuple[Prompt, int]], size: int) -> Iterator[tuple[Prompt, list[int]]]:
    by_prompt: dict[PromptId, tuple[Prompt, list[int]]] = {}
    for prompt, number in wanted:
        by_prompt.setdefault(prompt.id, (prompt, []))[1].append(number)
    for prompt, numbers in by_prompt.values():
        for start in range(0, len(numbers), size):
            yield prompt, numbers[start : start + size]


def _closing_warnings(samples: Samples, base: Sampling) -> Iterator[str]:
    seen = samples.meta.get("served_model", {})
    if len(seen) > 1:
        yield f"served-model-changed: answered by {', '.join(sorted(seen))}"
    if len(samples.meta.get("provider", {})) > 1:
        yield f"provider-changed: answered by {', '.join(sorted(samples.meta['provider']))}"
    for code, count in samples.meta.get("sampling_warnings", {}).items():
        if code != "served-model-changed":
            yield f"{code} ({count} completions)"
    if base.temperature > 0:
        copied = []
        for label, rows in samples.rows_of().items():
            most = Counter(samples.completions[i] for i in rows).most_common(1)[0][1]
            if len(rows) >= 5 and (most - 1) / (len(rows) - 1) > 0.9:
                copied.append(repr(label))
        if copied:
            yield (
                "settings-not-honoured: over 90% of the completions are copies of one another for prompts "
                f"{', '.join(copied[:8])}: is the temperature ignored, the seed fixed, or an answer cached?"
            )
    if samples.failures:
        yield f"failed-requests: {sum(samples.failures.values())} ({samples.failure_rate:.1%}) recorded as failed"


def template_tokens(tokenizer: Any) -> Callable[[Prompt], int]:
    """What a local chat template counts for a prompt, for `expected_prompt_tokens`: a transformers tokenizer's template and ids.

    A differing count at the endpoint means another template (or a date, or a system prompt of its own) and so another prompt.
    """

    def count(prompt: Prompt) -> int:
        turns = [dict(turn) for turn in prompt.messages or ({"role": "user", "content": str(prompt.text)},)]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)
        return len(ids["input_ids"])

    return count


# -- thin constructors


def OpenAICompatible(
    base_url: str,
    model: str,
    *,
    api_key_env: str | None = None,
    dialect: Literal["openai", "vllm", "llama.cpp"] = "openai",
    extra_body: Mapping[str, Any] | None = None,
    concurrency: int = 16,
    timeout: float = 120.0,
    max_retries: int = 6,
    **options: Any,
) -> Any:
    """A model behind an OpenAI-compatible server: a hosted API, vLLM, llama.cpp. Needs `mmd-equality[api]`.

    api_key_env names the environment variable that holds the key; the key itself is never an argument. dialect: which further
    sampling fields the server takes, so that they are sent and no default of its own has a say. extra_body goes into every
    request (a provider pin on a router, say). Other options go to `chapbook_shared.lm.OpenAIModel` (budget, cache, ...).
    """
    import_extra("aiohttp", "mmd-equality[api]")
    from chapbook_shared.lm import OpenAIModel

    if api_key_env is not None and not os.environ.get(api_key_env):
        raise ValueError(f"the environment variable {api_key_env} is not set: it must hold the API key")
    return OpenAIModel(
        model, base_url=base_url, api_key_env=api_key_env, dialect=dialect, concurrency=concurrency, timeout=timeout,
        retries=max_retries, extra_body=None if extra_body is None else dict(extra_body), **options,
    )  # fmt: skip


def Transformers(model: Any, tokenizer: Any = None, **options: Any) -> Any:
    """A transformers causal LM in this process: a folder or hub name, or a loaded model with its tokenizer. Needs `mmd-equality[local]`."""
    if tokenizer is None and not isinstance(model, (str, Path)):
        raise ValueError("a loaded model needs its tokenizer: Transformers(model, tokenizer)")
    import_extra("transformers", "mmd-equality[local]")
    from chapbook_shared.lm import LocalModel

    if isinstance(model, Path) or str(model).startswith((".", "/", "~")):
        _existing(model, "model folder")
    if isinstance(model, (str, Path)):
        return LocalModel.from_pretrained(str(model), **options)
    return LocalModel(model, tokenizer, **options)


def _existing(path: str | Path, what: str) -> None:
    if not Path(path).exists():
        raise FileNotFoundError(f"no {what} {path}")


@contextmanager
def LlamaCpp(
    path: str | Path, *, context: int = 4096, slots: int = 4, threads: int | None = None, **options: Any
) -> Iterator[Any]:
    """A GGUF file run by llama.cpp (the prebuilt wheel `xllamacpp`), for the time of a `with` block. Needs `mmd-equality[llamacpp,api]`.

    llama.cpp's own server listens on a loopback port, and is spoken to like any endpoint: `with LlamaCpp("m.gguf") as model`.
    threads: None takes all cores; its threads wait by spinning, so on a busy machine fewer are far quicker.
    """
    xllamacpp = import_extra("xllamacpp", "mmd-equality[llamacpp]")
    _existing(path, "GGUF file")
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel = context * slots, slots
    params.warmup = False
    params.verbosity = 1  # errors only: it would write several lines a request
    if threads is not None:
        check_int("threads", threads, minimum=1)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    # Penalties look at no tokens: recent builds refuse the -1 that used to mean "all of them".
    body = {"repeat_last_n": 0, **options.pop("extra_body", {})}
    model = OpenAICompatible(
        f"{server.listening_address}/v1", Path(path).stem, dialect="llama.cpp", extra_body=body, **options
    )
    try:
        yield model
    finally:
        model.close()


def VLLM(base_url: str = "http://127.0.0.1:8000/v1", model: str = "", **options: Any) -> Any:
    """A vLLM server (`vllm serve MODEL --generation-config vllm`, so that the checkpoint's own sampling defaults stay out).

    vLLM runs as its own process and is spoken to over HTTP like any other endpoint. Needs `mmd-equality[api]`.
    """
    if not model:
        raise ValueError("model must be the name that the vLLM server serves")
    return OpenAICompatible(base_url, model, dialect="vllm", **options)
