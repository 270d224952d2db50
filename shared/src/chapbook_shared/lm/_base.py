"""What every model shares: a request is checked, then run alone or with others, from plain code or from a coroutine.

A model inside this process derives from `BatchModel` and implements the batch primitives of the verbs it has; a model
behind a network derives from `AsyncModel` and implements the coroutines for one request. Both get all nine public methods.

What the primitives may rely on: every request has passed `check_request`; messages are tuples of `Message`; every prompt
is a string or a tuple of ints; no list is empty (`score` with no choices never reaches them).

Text and tokens in `score`: a prompt and a choice that are both text are tokenised together, as the one string they form,
and the choice's tokens are those that end after the prompt does (a token across the border counts as the choice's). Token
ids are simply concatenated. `prompt_logprobs` follows the same tokenisation of the prompt as `complete`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import islice
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, TypeVar

from chapbook_shared.lm.protocol import (
    Capabilities,
    CapabilityError,
    Completion,
    JsonSchema,
    Message,
    Messages,
    Prompt,
    Sampling,
    Score,
    TokenLogprob,
    as_messages,
    check_request,
)

ChatRequest = tuple[tuple[Message, ...], Sampling]
CompleteRequest = tuple[Prompt, Sampling]
ScoreRequest = tuple[Prompt, tuple[Prompt, ...]]

_M = TypeVar("_M")  # not Self: run-time type checks cannot read that one in a method
_T = TypeVar("_T")
_R = TypeVar("_R")


class LanguageModelError(RuntimeError):
    """A run of requests stopped: nothing that was answered is lost.

    Raised from one of the `*_many` forms, `index` is the request that failed and `partial` the answers so far, in the
    order of the requests, None where there is none.
    """

    index: int | None = None
    partial: Sequence[Any] | None = None


class RequestFailed(LanguageModelError):
    """The endpoint refused the request or never answered it, after every retry that makes sense."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class BudgetExceeded(LanguageModelError):
    """The next request would go beyond a budget; it was not sent."""


def sample_seed(seed: int | None, index: int) -> int | None:
    """The seed of sample `index` of a request: its own for the first, derived (stable, 31 bits) for the others.

    So the first k samples of a seeded request are the same whatever n is.
    """
    if seed is None or index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def _per_request(sampling: Sampling | Sequence[Sampling], count: int) -> list[Sampling]:
    if isinstance(sampling, Sampling):
        return [sampling] * count
    if len(sampling) != count:
        raise ValueError(
            f"sampling has {len(sampling)} entries for {count} requests: pass one Sampling for all or one for each"
        )
    return list(sampling)


def _frozen(prompt: Prompt) -> Prompt:
    return prompt if isinstance(prompt, str) else tuple(int(token) for token in prompt)


class _Checked:
    """Brings requests into one form and refuses what the model cannot do, before any of them is run."""

    name: str
    capabilities: Capabilities

    def _chat_request(self, messages: Messages, sampling: Sampling, schema: JsonSchema | None) -> ChatRequest:
        turns = as_messages(messages)
        check_request(self.name, self.capabilities, "chat", sampling, messages=turns, schema=schema)
        return turns, sampling

    def _complete_request(self, prompt: Prompt, sampling: Sampling) -> CompleteRequest:
        prompt = _frozen(prompt)
        check_request(self.name, self.capabilities, "complete", sampling, prompt=prompt)
        return prompt, sampling

    def _score_request(self, prompt: Prompt, choices: Sequence[Prompt]) -> ScoreRequest:
        if isinstance(choices, str):
            raise TypeError(f"choices must be a sequence, got the string {choices!r}: put it in a list")
        prompt, frozen = _frozen(prompt), tuple(_frozen(choice) for choice in choices)
        for part in (prompt, *frozen):
            check_request(self.name, self.capabilities, "score", prompt=part)
        mixed = [part for part in frozen if isinstance(part, str) != isinstance(prompt, str)]
        if mixed:
            raise TypeError(
                f"prompt and choices must be all text or all token ids, got a {type(prompt).__name__} prompt "
                f"and the choice {mixed[0]!r}"
            )
        empty = [i for i, part in enumerate(frozen) if len(part) == 0]
        if empty:
            raise ValueError(f"choices must not be empty, but choice {empty[0]} of {len(frozen)} is")
        return prompt, frozen

    def _chat_requests(
        self,
        conversations: Sequence[Messages],
        sampling: Sampling | Sequence[Sampling],
        schema: JsonSchema | None,
    ) -> list[ChatRequest]:
        if isinstance(conversations, str):
            raise TypeError("conversations must be a sequence of conversations, got one string: use chat for one")
        each = _per_request(sampling, len(conversations))
        return [self._chat_request(messages, s, schema) for messages, s in zip(conversations, each, strict=True)]

    def _complete_requests(
        self, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling]
    ) -> list[CompleteRequest]:
        if isinstance(prompts, str):
            raise TypeError("prompts must be a sequence of prompts, got one string: use complete for one")
        each = _per_request(sampling, len(prompts))
        return [self._complete_request(prompt, s) for prompt, s in zip(prompts, each, strict=True)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __enter__(self: _M) -> _M:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of connections and memory; the model is not used afterwards."""


_DEFAULT = Sampling()


class BatchModel(_Checked):
    """A model in this process: the requests of one call are one batch, and coroutines that wait together share a batch.

    A subclass sets `name` and `capabilities`, calls `super().__init__()`, and implements the primitives of its verbs. They
    run one at a time, whatever threads the callers are on, and split what does not fit into memory themselves.
    """

    stream_block: int | None = 64
    """`complete_each` runs so many requests as one batch: the same block gives the same samples to the last bit, which other
    batches do up to rounding. None: no fixed batches."""

    def __init__(self) -> None:
        self._running = threading.RLock()
        self._queued = threading.Lock()
        self._queue: list[tuple[Callable[[list[Any]], list[Any]], str, Any, Future[Any]]] = []
        self._worker: ThreadPoolExecutor | None = None
        self._worker_pid = 0

    # Abstract: a model overrides those of the verbs that its capabilities name; the others are never reached.
    def _chat_batch(self, requests: list[ChatRequest], schema: JsonSchema | None) -> list[Completion]:
        raise NotImplementedError

    def _complete_batch(self, requests: list[CompleteRequest]) -> list[list[Completion]]:
        raise NotImplementedError

    def _score_batch(self, requests: list[ScoreRequest]) -> list[list[Score]]:
        raise NotImplementedError

    def _prompt_logprobs_batch(self, prompts: list[Prompt]) -> list[tuple[TokenLogprob, ...]]:
        """Optional: the tokens of each prompt with log-probabilities; NaN where nothing comes before (the first)."""
        raise NotImplementedError

    def chat(
        self, messages: Messages, sampling: Sampling = _DEFAULT, *, schema: JsonSchema | None = None
    ) -> Completion:
        return self.chat_many([messages], sampling, schema=schema)[0]

    def complete(self, prompt: Prompt, sampling: Sampling = _DEFAULT) -> list[Completion]:
        return self.complete_many([prompt], sampling)[0]

    def score(self, prompt: Prompt, choices: Sequence[Prompt]) -> list[Score]:
        return self.score_many([(prompt, choices)])[0]

    def chat_many(
        self,
        conversations: Sequence[Messages],
        sampling: Sampling | Sequence[Sampling] = _DEFAULT,
        *,
        schema: JsonSchema | None = None,
    ) -> list[Completion]:
        requests = self._chat_requests(conversations, sampling, schema)
        return self._run(lambda batch: self._chat_batch(batch, schema), requests)

    def complete_many(
        self, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] = _DEFAULT
    ) -> list[list[Completion]]:
        return self._run(self._complete_batch, self._complete_requests(prompts, sampling))

    def complete_each(self, requests: Iterable[tuple[Prompt, Sampling]]) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (place of the request, its completions) as they are ready, in whatever order that is.

        `requests` may be endless work: no more of it is taken than the model can have under way. Between two answers the model is
        free for other calls, from any thread.
        """
        stream = self._complete_stream(self._complete_request(*request) for request in requests)
        try:
            while True:
                with self._running:
                    answer = next(stream, None)
                if answer is None:
                    return
                yield answer
        finally:
            with self._running:
                stream.close()

    def _complete_stream(
        self, requests: Iterator[CompleteRequest]
    ) -> Generator[tuple[int, list[Completion]], None, None]:
        """Optional: the primitive behind `complete_each`; by default blocks of requests, each as one batch."""
        start = 0
        while block := list(islice(requests, self.stream_block)):
            yield from enumerate(self._complete_batch(block), start)
            start += len(block)

    def score_many(self, requests: Sequence[tuple[Prompt, Sequence[Prompt]]]) -> list[list[Score]]:
        return self._run(self._scores, [self._score_request(prompt, choices) for prompt, choices in requests])

    def prompt_logprobs(self, prompt: Prompt) -> tuple[TokenLogprob, ...]:
        """Each token of a prompt with its log-probability given those before it; NaN for the first."""
        return self._run(self._prompt_logprobs_batch, [_frozen(prompt)])[0]

    async def achat(
        self, messages: Messages, sampling: Sampling = _DEFAULT, *, schema: JsonSchema | None = None
    ) -> Completion:
        request = self._chat_request(messages, sampling, schema)
        return await self._enqueue(lambda batch: self._chat_batch(batch, schema), f"chat {schema!r}", request)

    async def acomplete(self, prompt: Prompt, sampling: Sampling = _DEFAULT) -> list[Completion]:
        return await self._enqueue(self._complete_batch, "complete", self._complete_request(prompt, sampling))

    async def ascore(self, prompt: Prompt, choices: Sequence[Prompt]) -> list[Score]:
        return await self._enqueue(self._scores, "score", self._score_request(prompt, choices))

    async def aprompt_logprobs(self, prompt: Prompt) -> tuple[TokenLogprob, ...]:
        return await self._enqueue(self._prompt_logprobs_batch, "prompt_logprobs", _frozen(prompt))

    def close(self) -> None:
        if self._worker is not None and self._worker_pid == os.getpid():
            self._worker.shutdown()
        self._worker = None

    def _scores(self, requests: list[ScoreRequest]) -> list[list[Score]]:
        asked = [request for request in requests if request[1]]
        scores = iter(self._score_batch(asked) if asked else [])
        return [next(scores) if choices else [] for _, choices in requests]

    def _run(self, primitive: Callable[[list[_T]], list[_R]], requests: list[_T]) -> list[_R]:
        if not requests:
            return []
        with self._running:
            answers = primitive(requests)
        if len(answers) != len(requests):
            raise RuntimeError(f"{self.name} gave {len(answers)} answers to {len(requests)} requests")
        return answers

    def _enqueue(self, primitive: Callable[[list[_T]], list[_R]], kind: str, request: _T) -> asyncio.Future[_R]:
        """Wait in line; whoever runs next takes along everything of the same kind that has come in meanwhile."""
        future: Future[_R] = Future()
        with self._queued:
            if self._worker is None or self._worker_pid != os.getpid():  # a fork has no threads but its own
                self._queue = []
                self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chapbook-lm")
                self._worker_pid = os.getpid()
            self._queue.append((primitive, kind, request, future))
            self._worker.submit(self._next_batch)
        return asyncio.wrap_future(future)

    def _next_batch(self) -> None:
        with self._queued:
            if not self._queue:  # an earlier batch took this one's request along
                return
            kind = self._queue[0][1]
            batch = [entry for entry in self._queue if entry[1] == kind]
            self._queue = [entry for entry in self._queue if entry[1] != kind]
        batch = [entry for entry in batch if entry[3].set_running_or_notify_cancel()]
        if not batch:
            return
        primitive = batch[0][0]
        try:
            answers = self._run(primitive, [request for _, _, request, _ in batch])
        except Exception:
            self._one_by_one(batch)  # the error belongs to one of them
            return
        for (_, _, _, future), answer in zip(batch, answers, strict=True):
            future.set_result(answer)

    def _one_by_one(self, batch: list[tuple[Callable[[list[Any]], list[Any]], str, Any, Future[Any]]]) -> None:
        for primitive, _, request, future in batch:
            try:
                future.set_result(self._run(primitive, [request])[0])
            except Exception as error:
                future.set_exception(error)


class _Loop:
    """One event loop in a thread of its own, so that plain code can wait for coroutines even inside a running loop."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.closers: list[Callable[[], Awaitable[object]]] = []
        """Awaited on the loop when it ends."""
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self.thread = threading.Thread(
            target=asyncio.run, args=[self._main(started)], name="chapbook-lm-loop", daemon=True
        )
        self.thread.start()
        self.loop, self._stopping = started.result()

    async def _main(self, started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        stopping = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), stopping))
        await stopping.wait()
        for close in self.closers:
            await close()

    def stop(self) -> None:
        """Cancel what is under way, close what was opened, end the thread."""
        if self.pid != os.getpid() or not self.thread.is_alive():
            return
        self.loop.call_soon_threadsafe(self._stopping.set)
        if threading.current_thread() is not self.thread:  # it is when the garbage collector runs there
            self.thread.join(timeout=5)


class AsyncModel(_Checked):
    """A model behind a network: `*_many` runs `concurrency` requests at a time, on one event loop of the model's own.

    A subclass sets `name` and `capabilities`, calls `super().__init__()`, and implements the coroutines of its verbs. They
    always run on that one loop, so a client may be kept in the model whatever loops and threads its callers are on.
    """

    def __init__(self, *, concurrency: int = 16) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be >= 1, got {concurrency!r}")
        self.concurrency = concurrency
        self._home: _Loop | None = None
        self._home_lock = threading.Lock()

    # Abstract: a model overrides those of the verbs that its capabilities name; the others are never reached.
    async def _chat(self, messages: tuple[Message, ...], sampling: Sampling, schema: JsonSchema | None) -> Completion:
        raise NotImplementedError

    async def _complete(self, prompt: Prompt, sampling: Sampling) -> list[Completion]:
        raise NotImplementedError

    async def _score(self, prompt: Prompt, choices: tuple[Prompt, ...]) -> list[Score]:
        raise NotImplementedError

    async def _prompt_logprobs(self, prompt: Prompt) -> tuple[TokenLogprob, ...]:
        """Optional: see `BatchModel._prompt_logprobs_batch`."""
        raise NotImplementedError

    def chat(
        self, messages: Messages, sampling: Sampling = _DEFAULT, *, schema: JsonSchema | None = None
    ) -> Completion:
        turns, sampling = self._chat_request(messages, sampling, schema)
        return self._wait(self._chat(turns, sampling, schema))

    def complete(self, prompt: Prompt, sampling: Sampling = _DEFAULT) -> list[Completion]:
        return self._wait(self._complete(*self._complete_request(prompt, sampling)))

    def score(self, prompt: Prompt, choices: Sequence[Prompt]) -> list[Score]:
        return self._wait(self._scores(self._score_request(prompt, choices)))

    def chat_many(
        self,
        conversations: Sequence[Messages],
        sampling: Sampling | Sequence[Sampling] = _DEFAULT,
        *,
        schema: JsonSchema | None = None,
    ) -> list[Completion]:
        requests = self._chat_requests(conversations, sampling, schema)
        return self._wait(self._many(lambda request: self._chat(*request, schema), requests))

    def complete_many(
        self, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] = _DEFAULT
    ) -> list[list[Completion]]:
        requests = self._complete_requests(prompts, sampling)
        return self._wait(self._many(lambda request: self._complete(*request), requests))

    def complete_each(self, requests: Iterable[tuple[Prompt, Sampling]]) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (place of the request, its completions) as they come in, `concurrency` requests under way at a time.

        What has come in and was not taken yet counts as under way, so a slow consumer pays for nothing that it may never take.
        After a failure nothing new is begun; what was under way is still yielded, and then the failure is raised.
        """
        waiting: Iterator[tuple[Prompt, Sampling] | None] = iter(requests)
        taken = 0
        exhausted = False
        under_way: dict[Future[list[Completion]], int] = {}
        ended: SimpleQueue[Future[list[Completion]]] = SimpleQueue()
        failures: dict[int, Exception] = {}
        try:
            while True:
                while not (exhausted or failures) and ended.empty() and len(under_way) < self.concurrency:
                    try:
                        request = next(waiting, None)
                        if request is None:
                            exhausted = True
                            break
                        future = self._submit(self._complete(*self._complete_request(*request)))
                        under_way[future] = taken
                        taken += 1
                        future.add_done_callback(ended.put)
                    except Exception as error:
                        failures[taken] = error
                if not under_way:
                    break
                future = ended.get()
                place = under_way.pop(future)
                try:
                    answer = future.result()
                except CancelledError:
                    failures[place] = RuntimeError(f"{self.name} was closed while a request was under way")
                except Exception as error:
                    failures[place] = error
                else:
                    yield place, answer
            if failures:
                place, failure = min(failures.items(), key=itemgetter(0))
                failure.add_note(f"at request {place} (counted from 0)")
                if isinstance(failure, LanguageModelError | CapabilityError):
                    failure.index = place
                raise failure
        finally:
            for future in under_way:
                future.cancel()

    def score_many(self, requests: Sequence[tuple[Prompt, Sequence[Prompt]]]) -> list[list[Score]]:
        checked = [self._score_request(prompt, choices) for prompt, choices in requests]
        return self._wait(self._many(self._scores, checked))

    def prompt_logprobs(self, prompt: Prompt) -> tuple[TokenLogprob, ...]:
        """Each token of a prompt with its log-probability given those before it; NaN for the first."""
        return self._wait(self._prompt_logprobs(_frozen(prompt)))

    async def achat(
        self, messages: Messages, sampling: Sampling = _DEFAULT, *, schema: JsonSchema | None = None
    ) -> Completion:
        turns, sampling = self._chat_request(messages, sampling, schema)
        return await self._at_home(self._chat(turns, sampling, schema))

    async def acomplete(self, prompt: Prompt, sampling: Sampling = _DEFAULT) -> list[Completion]:
        return await self._at_home(self._complete(*self._complete_request(prompt, sampling)))

    async def ascore(self, prompt: Prompt, choices: Sequence[Prompt]) -> list[Score]:
        return await self._at_home(self._scores(self._score_request(prompt, choices)))

    async def aprompt_logprobs(self, prompt: Prompt) -> tuple[TokenLogprob, ...]:
        return await self._at_home(self._prompt_logprobs(_frozen(prompt)))

    def close(self) -> None:
        with self._home_lock:
            home, self._home = self._home, None
        if home is not None:
            home.stop()

    async def _scores(self, request: ScoreRequest) -> list[Score]:
        prompt, choices = request
        return await self._score(prompt, choices) if choices else []

    async def _many(
        self, run: Callable[[_T], Awaitable[_R]], requests: Sequence[_T], *, what: str = "request"
    ) -> list[_R]:
        """Run all. After a failure nothing new is begun, what is under way is waited for, and the failure is raised."""
        answers: list[_R | None] = [None] * len(requests)
        waiting = iter(enumerate(requests))
        failures: list[tuple[int, Exception]] = []

        async def work() -> None:
            for index, request in waiting:
                if failures:
                    return
                try:
                    answers[index] = await run(request)
                except Exception as error:
                    failures.append((index, error))

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(self.concurrency, len(requests))):
                workers.create_task(work())
        if failures:
            index, error = min(failures, key=lambda failure: failure[0])
            done = sum(answer is not None for answer in answers)
            error.add_note(f"at {what} {index} of {len(requests)} (counted from 0), with {done} answered")
            if isinstance(error, LanguageModelError | CapabilityError):
                error.index, error.partial = index, answers
            raise error
        return answers  # type: ignore[return-value]  # no failures: none is None

    def _own_loop(self) -> _Loop:
        with self._home_lock:
            if self._home is None or self._home.pid != os.getpid():  # a fork has no threads but its own
                self._home = _Loop()
                weakref.finalize(self, self._home.stop)
            return self._home

    def _submit(self, work: Coroutine[Any, Any, _R]) -> Future[_R]:
        home = self._own_loop()
        if threading.current_thread() is home.thread:
            work.close()
            raise RuntimeError(f"{self.name} was called from its own event loop: await achat, acomplete or ascore")
        return asyncio.run_coroutine_threadsafe(work, home.loop)

    def _wait(self, work: Coroutine[Any, Any, _R]) -> _R:
        future = self._submit(work)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError(f"{self.name} was closed while a request was under way") from None
        except BaseException:
            future.cancel()  # Ctrl-C: what is under way is dropped, what is answered is in the cache
            raise

    async def _at_home(self, work: Coroutine[Any, Any, _R]) -> _R:
        return await asyncio.wrap_future(self._submit(work))
