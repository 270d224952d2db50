"""Many completions out of one model: finished rows at once, and no row lost to one that fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, runtime_checkable

from chapbook_shared.lm import Capabilities, Completion, RequestFailed, Sampling
from chapbook_shared.lm.protocol import Prompt
from chapbook_shared.seeding import derive_seed

from .errors import BackendError

_SEED_BITS = 53  # what every JSON reader keeps of an integer; engines that take 32 bits use the lowest


@runtime_checkable
class Completer(Protocol):
    """What a stage needs of a model: any model of `chapbook_shared.lm` that completes has it."""

    name: str
    capabilities: Capabilities

    def complete_each(self, requests: Iterable[tuple[Prompt, Sampling]]) -> Iterator[tuple[int, list[Completion]]]:
        """Yield the place of each request and its completions as they end."""
        ...


@dataclass(frozen=True)
class Request:
    """One row to complete. `path` is what its random numbers depend on: the run's seed, the stage, and the row."""

    key: str
    prompt: tuple[int, ...]
    sampling: Sampling
    path: tuple[str | int, ...]
    text: str | None = None
    """The prompt as text, for endpoints that take no token ids."""

    def seed(self, *more: str | int) -> int:
        """A seed of the row's own, whatever else is in the batch and whenever it runs."""
        return row_seed(*self.path, *more)


def row_seed(seed: str | int, *path: str | int) -> int:
    """The seed of what `path` names in the run with `seed`."""
    return derive_seed(int(seed), *path) % 2**_SEED_BITS


def check_completes(model: Completer) -> None:
    """Raise BackendError for a model that has no completions: the first step sends the start of a user's turn and nothing else."""
    if not model.capabilities.complete:
        raise BackendError(
            f"{model.name} chats but does not complete: a chat endpoint puts the user's turn, its end and the assistant's header "
            "around whatever it is sent, so the model answers instead of asking. Use the completions endpoint of vLLM or "
            "llama.cpp, or a model in this process"
        )


def complete_rows(model: Completer, requests: Iterator[Request]) -> Iterator[tuple[Request, Completion]]:
    """Yield each request with its completion as soon as that has ended.

    When memory runs out or logits are NaN, what was under way is tried again in halves, down to single rows; BackendError then
    names the rows that fail alone.
    """
    while True:
        under_way: dict[int, Request] = {}

        def feed(waiting: Iterator[Request], open_rows: dict[int, Request]) -> Iterator[tuple[Prompt, Sampling]]:
            for place, request in enumerate(waiting):
                open_rows[place] = request
                yield _asked(model, request)

        try:
            for place, (completion,) in model.complete_each(feed(requests, under_way)):
                yield under_way.pop(place), completion
            return
        except RequestFailed as error:
            if error.status in (404, 405, 501):
                raise BackendError(
                    f"{model.name} has no completions endpoint ({error}); chat endpoints cannot take the first step: they wrap "
                    "whatever they are sent in a whole user's turn"
                ) from error
            raise
        except (FloatingPointError, MemoryError, RuntimeError) as error:
            if not _passes_with_less(error):
                raise
            rest = list(under_way.values())
            warnings.warn(f"{model.name}: {error}; {len(rest)} rows are tried again in halves", stacklevel=2)
            yield from _halved(model, rest, error)
        following = next(requests, None)
        if following is None:
            return
        requests = chain([following], requests)


def _halved(model: Completer, requests: Sequence[Request], error: Exception) -> Iterator[tuple[Request, Completion]]:
    if len(requests) <= 1:
        keys = ", ".join(request.key for request in requests)
        raise BackendError(f"{model.name} failed at row {keys}: {error}") from error
    middle = (len(requests) + 1) // 2
    for half in (requests[:middle], requests[middle:]):
        left = dict(enumerate(half))
        try:
            for place, (completion,) in model.complete_each(_asked(model, request) for request in half):
                yield left.pop(place), completion
        except (FloatingPointError, MemoryError, RuntimeError) as again:
            if not _passes_with_less(again):
                raise
            yield from _halved(model, list(left.values()), again)


def _passes_with_less(error: Exception) -> bool:
    return isinstance(error, FloatingPointError | MemoryError) or "out of memory" in str(error).lower()


def _asked(model: Completer, request: Request) -> tuple[Prompt, Sampling]:
    sampling, can = request.sampling, model.capabilities
    if not can.seed:
        sampling = replace(sampling, seed=None)
    if "stop_token_ids" in can.unsupported:
        sampling = replace(sampling, stop_token_ids=())
        if not can.token_ids and can.logprobs is not None and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)  # llama.cpp says the ids of its tokens there
    if can.token_prompts:
        return request.prompt, sampling
    return request.text if request.text is not None else "", sampling
