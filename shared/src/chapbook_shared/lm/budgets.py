"""Budgets: how much may be spent on requests in all, and how fast.

A request is admitted only if its worst case (the estimate of its prompt, plus all of `max_tokens`) still fits next to what is
spent and what is under way; when it answers, the real usage takes the place of the estimate. So a limit is kept to, and no money
is left lying because of estimates: a request that does not fit waits until nothing else is under way before it is refused.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from chapbook_shared.lm._base import BudgetExceeded
from chapbook_shared.lm.protocol import Usage

_RECHECK_SECONDS = 0.02
_BURST_SECONDS = 1.0
"""A rate may run ahead by what it allows in this time, so that idle moments are not lost."""


@dataclass(frozen=True)
class Spent:
    """What a budget has paid for."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float = 0.0
    lost: int = 0
    """Replies that broke off or could not be read and were asked for again; an endpoint may have billed them too."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class _Rate:
    """Spreads amounts over time: `book` says how long to wait before the amount may go out."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._per_second = per_minute / 60
        self._clock = clock
        self._next = clock() - _BURST_SECONDS

    def book(self, amount: float) -> float:
        now = self._clock()
        start = max(self._next, now - _BURST_SECONDS)
        self._next = start + amount / self._per_second
        return max(0.0, start - now)

    def give_back(self, amount: float) -> None:
        self._next -= amount / self._per_second


class Budget:
    """Limits on requests, tokens and money, and on their rate; one budget may be shared by several models and threads.

    Args:
        requests: answered requests in all.
        tokens: prompt and completion tokens in all.
        money: in the currency of `prices`.
        prices: price of a million prompt tokens and of a million completion tokens; needed for `money`.
        requests_per_minute: requests sent, tries included.
        tokens_per_minute: prompt and completion tokens.

    `spent` says what has been paid for; answers from a cache cost nothing. Where a server reports no usage, the estimate counts.
    """

    def __init__(
        self,
        *,
        requests: int | None = None,
        tokens: int | None = None,
        money: float | None = None,
        prices: tuple[float, float] | None = None,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, limit in [("requests", requests), ("tokens", tokens), ("money", money)]:
            if limit is not None and not limit >= 0:
                raise ValueError(f"{name} must be >= 0, got {limit!r}")
        for name, rate in [("requests_per_minute", requests_per_minute), ("tokens_per_minute", tokens_per_minute)]:
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} must be positive, got {rate!r}")
        if money is not None and prices is None:
            raise ValueError(
                "money needs prices: pass prices=(per million prompt tokens, per million completion tokens)"
            )
        if prices is not None and (len(prices) != 2 or not all(price >= 0 for price in prices)):
            raise ValueError(f"prices must be two numbers >= 0, got {prices!r}")
        self.requests, self.tokens, self.money, self.prices = requests, tokens, money, prices
        self._lock = threading.Lock()
        self._spent = Spent()
        self._held = Usage(0, 0)
        self._under_way = 0
        """Requests under way; `_held` is their worst case together."""
        self._request_rate = None if requests_per_minute is None else _Rate(requests_per_minute, clock)
        self._token_rate = None if tokens_per_minute is None else _Rate(tokens_per_minute, clock)

    @property
    def spent(self) -> Spent:
        with self._lock:
            return self._spent

    def price(self, usage: Usage) -> float:
        """What a usage costs; 0 without prices."""
        per_prompt, per_completion = self.prices or (0.0, 0.0)
        return (usage.prompt_tokens * per_prompt + usage.completion_tokens * per_completion) / 1e6

    @asynccontextmanager
    async def bill(self, estimate: Usage) -> AsyncIterator[Bill]:
        """Hold room for one request; raise `BudgetExceeded` if there is none. What is not settled is given back."""
        while not self._reserve(estimate):
            await asyncio.sleep(_RECHECK_SECONDS)
        bill = Bill(self, estimate)
        try:
            yield bill
        finally:
            with self._lock:
                self._under_way -= 1
                self._held = _plus(self._held, Usage(-estimate.prompt_tokens, -estimate.completion_tokens))
                self._settle(bill)

    async def wait_for_turn(self, estimate: Usage) -> None:
        """Wait until the rates let one try go out."""
        with self._lock:
            waits = [
                rate.book(amount)
                for rate, amount in [
                    (self._request_rate, 1),
                    (self._token_rate, estimate.prompt_tokens + estimate.completion_tokens),
                ]
                if rate is not None
            ]
        if wait := max(waits, default=0.0):
            await asyncio.sleep(wait)

    def _reserve(self, estimate: Usage) -> bool:
        with self._lock:
            if over := self._over(estimate):
                if self._under_way:  # what is under way may cost less than its worst case
                    return False
                raise BudgetExceeded(f"{over}; spent so far: {self._summary()}")
            self._under_way += 1
            self._held = _plus(self._held, estimate)
            return True

    def _over(self, estimate: Usage) -> str:
        if self.requests is not None and self._spent.requests + self._under_way + 1 > self.requests:
            return f"the budget of {self.requests} requests is used up"
        worst = _plus(self._held, estimate)
        if self.tokens is not None and self._spent.tokens + worst.prompt_tokens + worst.completion_tokens > self.tokens:
            need = estimate.prompt_tokens + estimate.completion_tokens
            return f"the next request may take {need} tokens, which the budget of {self.tokens} tokens does not hold"
        # Ten payments of 0.1 are a little more than 1 in floating point.
        if self.money is not None and self._spent.money + self.price(worst) > self.money * (1 + 1e-9):
            return f"the next request may cost {self.price(estimate):.6g}, beyond the budget of {self.money:.6g}"
        return ""

    def _settle(self, bill: Bill) -> None:
        estimated = bill.estimate.prompt_tokens + bill.estimate.completion_tokens
        used = 0
        if bill.usage is not None:
            used = bill.usage.prompt_tokens + bill.usage.completion_tokens
            self._spent = replace(
                self._spent,
                requests=self._spent.requests + 1,
                prompt_tokens=self._spent.prompt_tokens + bill.usage.prompt_tokens,
                completion_tokens=self._spent.completion_tokens + bill.usage.completion_tokens,
                money=self._spent.money + self.price(bill.usage),
            )
        if bill.lost:
            self._spent = replace(self._spent, lost=self._spent.lost + bill.lost)
        if self._token_rate is not None and bill.usage is not None:
            self._token_rate.give_back(estimated - used)

    def _summary(self) -> str:
        spent = self._spent
        money = "" if self.prices is None else f" for {spent.money:.6g}"
        return (
            f"{spent.requests} requests, {spent.prompt_tokens} prompt and {spent.completion_tokens} completion tokens"
            f"{money}"
        )


def _plus(one: Usage, other: Usage) -> Usage:
    return Usage(one.prompt_tokens + other.prompt_tokens, one.completion_tokens + other.completion_tokens)


class Bill:
    """Room held for one request, until the server says what it took."""

    def __init__(self, budget: Budget, estimate: Usage) -> None:
        self.budget, self.estimate = budget, estimate
        self.usage: Usage | None = None
        self.lost = 0

    def settle(self, usage: Usage | None) -> None:
        """The request was answered: charge what it took."""
        self.usage = usage or self.estimate
