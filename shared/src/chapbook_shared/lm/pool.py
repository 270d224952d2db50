"""Several servers of one model, used as one: requests go round in turn, and a server that fails is passed over for a while."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from chapbook_shared.lm._base import AsyncModel, RequestFailed, sample_seed
from chapbook_shared.lm.openai_model import RETRIED_STATUSES, OpenAIModel
from chapbook_shared.lm.protocol import (
    Capabilities,
    Completion,
    JsonSchema,
    Message,
    Prompt,
    Sampling,
    Score,
    TokenLogprob,
)
from chapbook_shared.validate import check_nonnegative

_R = TypeVar("_R")


@dataclass
class _Member:
    model: OpenAIModel
    under_way: int = 0
    closed_until: float = 0.0


class ModelPool(AsyncModel):
    """Any number of endpoints that serve the same model.

    A request goes to the endpoint with the least under way, in turn where several have as little. One that gives no answer, after
    the retries of its own that its `OpenAIModel` makes (set `retries` low in a pool), is passed over for `pause` seconds, and its
    request goes to the next. What an endpoint refuses (other 4xx) is not tried elsewhere: the request is wrong, not the server.
    `concurrency` is by default that of all members together. Caches know answers by endpoint: a repeated run finds those given by
    the endpoint that it happens to ask.
    """

    def __init__(self, models: Sequence[OpenAIModel], *, pause: float = 30.0, concurrency: int | None = None) -> None:
        if not models:
            raise ValueError("models must hold at least one endpoint, got none")
        names = sorted({model.name for model in models})
        if len(names) > 1:
            raise ValueError(f"models must all serve one model, got {names}: their samples would be mixed")
        check_nonnegative("pause", pause)
        super().__init__(concurrency=sum(model.concurrency for model in models) if concurrency is None else concurrency)
        self.name = names[0]
        self.pause = pause
        self._members = [_Member(model) for model in models]
        self._turn = 0
        self.capabilities = _shared([model.capabilities for model in models])

    def close(self) -> None:
        super().close()
        for member in self._members:
            member.model.close()

    async def _chat(self, messages: tuple[Message, ...], sampling: Sampling, schema: JsonSchema | None) -> Completion:
        return await self._anywhere(lambda model: model.achat(messages, sampling, schema=schema))

    async def _complete(self, prompt: Prompt, sampling: Sampling) -> list[Completion]:
        if sampling.n == 1 or any(member.model.together for member in self._members):
            return await self._anywhere(lambda model: model.acomplete(prompt, sampling))

        async def sample(
            i: int,
        ) -> Completion:  # each for itself: what one endpoint has answered is not asked of the next
            alone = replace(sampling, n=1, seed=sample_seed(sampling.seed, i))
            return (await self._anywhere(lambda model: model.acomplete(prompt, alone)))[0]

        return await self._many(sample, range(sampling.n), what="sample")

    async def _score(self, prompt: Prompt, choices: tuple[Prompt, ...]) -> list[Score]:
        return await self._anywhere(lambda model: model.ascore(prompt, choices))

    async def _prompt_logprobs(self, prompt: Prompt) -> tuple[TokenLogprob, ...]:
        return await self._anywhere(lambda model: model.aprompt_logprobs(prompt))

    async def _anywhere(self, ask: Callable[[OpenAIModel], Awaitable[_R]]) -> _R:
        tried: list[_Member] = []
        failure: RequestFailed | None = None
        while len(tried) < len(self._members):
            member = self._next(tried)
            tried.append(member)
            member.under_way += 1
            try:
                return await ask(member.model)
            except RequestFailed as error:
                if error.status is not None and 400 <= error.status < 500 and error.status not in RETRIED_STATUSES:
                    raise
                member.closed_until = max(time.monotonic() + self.pause, member.model.closed_until)
                failure = error
            finally:
                member.under_way -= 1
        assert failure is not None  # there is at least one member
        failure.add_note(f"none of the {len(self._members)} endpoints answered")
        raise failure

    def _next(self, tried: Sequence[_Member]) -> _Member:
        """The open member with the least under way; when all are closed, the one that opens first."""
        now = time.monotonic()
        count = len(self._members)
        in_turn = [self._members[(self._turn + i) % count] for i in range(count)]
        self._turn = (self._turn + 1) % count
        free = [member for member in in_turn if member not in tried]
        return min(free, key=lambda member: (max(0.0, member.closed_until - now), member.under_way))


def _shared(all_can: Sequence[Capabilities]) -> Capabilities:
    """What every one of them can."""
    first = vars(all_can[0])
    flags = {
        name: all(getattr(can, name) for can in all_can) for name, value in first.items() if isinstance(value, bool)
    }
    limits = [can.logprobs for can in all_can]
    known = [limit for limit in limits if limit is not None]
    unsupported = frozenset().union(*(can.unsupported for can in all_can))
    logprobs = min(known) if len(known) == len(limits) else None
    return Capabilities(**flags, logprobs=logprobs, unsupported=unsupported)
