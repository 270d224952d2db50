"""Any endpoint that speaks the OpenAI protocol: hosted APIs, vLLM, llama.cpp, `chapbook_shared.lm.serve`.

The protocol is spoken directly over aiohttp: what the official client adds to a request (about 2 ms of processor time, against
0.3 ms) would be the bottleneck of any local server, and retries, cache and budgets have to be done here anyway.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sqlite3
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from chapbook_shared.lm._base import AsyncModel, RequestFailed, sample_seed
from chapbook_shared.lm.budgets import Bill, Budget
from chapbook_shared.lm.cache import ResponseCache, completion_from_json, completion_to_json, request_key
from chapbook_shared.lm.protocol import (
    Capabilities,
    CapabilityError,
    Completion,
    Image,
    JsonSchema,
    Message,
    Prompt,
    Sampling,
    Score,
    TokenLogprob,
    Usage,
)
from chapbook_shared.validate import import_extra

Dialect = Literal["openai", "vllm", "llama.cpp"]

_R = TypeVar("_R")

_CHARACTERS_PER_TOKEN = 3  # few for English, so that estimates are on the high side
_TOKENS_PER_IMAGE = 1500
RETRIED_STATUSES = {408, 409, 425, 429}
_HOPELESS_CODES = {"insufficient_quota", "billing_hard_limit_reached", "invalid_api_key"}

_PENALTY_WINDOW = 2**16  # llama.cpp allocates a buffer of this many tokens; its own default of 64 forgets too soon
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_COMMON = Capabilities(
    chat=True,
    complete=True,
    score=True,
    images=True,
    json_schema=True,
    token_prompts=True,
    logprobs=20,
    seed=True,
)
_DIALECTS: dict[str, Capabilities] = {
    "openai": replace(_COMMON, unsupported=frozenset({"top_k", "min_p", "repetition_penalty", "stop_token_ids"})),
    "vllm": replace(_COMMON, token_ids=True),
    "llama.cpp": replace(_COMMON, score=False, unsupported=frozenset({"stop_token_ids"})),  # it does not echo prompts
}


class _TryAgain(Exception):
    """One try failed in a way that may pass."""

    def __init__(
        self, reason: str, *, status: int | None = None, wait: float | None = None, lost: bool = False
    ) -> None:
        super().__init__(reason)
        self.status, self.wait, self.lost = status, wait, lost


@dataclass
class _Connection:
    """What belongs to one event loop (another one after a fork or a close)."""

    loop: asyncio.AbstractEventLoop
    session: Any
    slots: asyncio.Semaphore
    under_way: dict[str, asyncio.Future[None]] = field(default_factory=dict)


class OpenAIModel(AsyncModel):
    """A model behind an OpenAI-compatible endpoint.

    Args:
        name: the model's name at the endpoint.
        base_url: up to and including `/v1`.
        api_key_env: name of the environment variable that holds the key; None sends no key. The key is read at each request and
            is kept nowhere.
        dialect: what the server understands beyond the protocol. "openai": nothing, so top_k, min_p, repetition_penalty and
            stop_token_ids are refused; "vllm" and "llama.cpp": their own fields, always sent, so that no default of the server
            or the checkpoint has a say.
        concurrency: requests under way at a time.
        timeout: seconds for one try, from sending to the last byte.
        retries: further tries after the first, for what may pass: no connection, timeouts, 408, 409, 425, 429, 5xx, replies cut
            short, malformed or without choices. Retry-After is obeyed (seconds or date), by all requests together.
        backoff: seconds to pause before the second try, doubled from try to try, and the longest pause; a random part of up
            to half is taken off.
        max_wait: a longer Retry-After (a daily quota) fails at once.
        budget: limits in requests, tokens, money and rate.
        cache: a `ResponseCache` or the path of one. Unseeded samples are kept by how often this model has asked the same: the
            second identical request is a second sample, and a run that is repeated finds its samples in the same order.
        offline: answer from the cache only.
        together: ask for the n samples of `complete` in one request, not one request each. The server derives the seeds then.
        require_model: names the server may answer under; any other fails. None accepts and reports what it says.
        capabilities: what the endpoint can do, where that is not what its dialect can.
        max_tokens_field: what the endpoint calls the limit in chats (OpenAI's reasoning models take the longer name).
        extra_body: further fields for every request (part of the cache's keys; no place for secrets).

    Every try of one request carries the same `Idempotency-Key`, so an endpoint that honours it never bills a request twice.
    """

    def __init__(
        self,
        name: str,
        *,
        base_url: str = "https://api.openai.com/v1",
        api_key_env: str | None = None,
        dialect: Dialect = "openai",
        concurrency: int = 16,
        timeout: float = 120.0,
        retries: int = 6,
        backoff: tuple[float, float] = (0.5, 30.0),
        max_wait: float = 120.0,
        budget: Budget | None = None,
        cache: ResponseCache | str | Path | None = None,
        offline: bool = False,
        together: bool = False,
        require_model: str | Collection[str] | None = None,
        capabilities: Capabilities | None = None,
        max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens",
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(concurrency=concurrency)
        self._aiohttp = import_extra("aiohttp", "chapbook-shared[openai]")
        if dialect not in _DIALECTS:
            raise ValueError(f"dialect must be one of {sorted(_DIALECTS)}, got {dialect!r}")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout!r}")
        if retries < 0:
            raise ValueError(f"retries must be >= 0, got {retries!r}")
        if not 0 <= backoff[0] <= backoff[1]:
            raise ValueError(
                f"backoff must be (first pause, longest pause) with 0 <= first <= longest, got {backoff!r}"
            )
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ValueError(
                f"the environment variable {_safe_name(api_key_env)} is not set: export it with the key for {base_url}"
            )
        if offline and cache is None:
            raise ValueError("offline needs a cache to answer from: pass cache=")
        self.name = name
        self.base_url = _checked_url(base_url)
        self.capabilities = capabilities or _DIALECTS[dialect]
        self.dialect = dialect
        self.timeout, self.retries, self.backoff, self.max_wait = timeout, retries, backoff, max_wait
        self.budget = budget or Budget()
        self.cache = ResponseCache(cache) if isinstance(cache, str | Path) else cache
        self._api_key_env = api_key_env
        self._offline = offline
        self.together = together
        self._required = {require_model} if isinstance(require_model, str) else require_model
        self._max_tokens_field = max_tokens_field
        self._extra_body = dict(extra_body or {})
        self._asked: Counter[str] = Counter()
        self._fewest_logprobs = 1 if dialect == "llama.cpp" else 0  # it takes 0 for none at all
        self._proxy = _proxy_for(self.base_url)
        self._connection: _Connection | None = None
        self.closed_until = 0.0
        """Monotonic time before which the server asked not to be called."""

    # The verbs

    async def _chat(self, messages: tuple[Message, ...], sampling: Sampling, schema: JsonSchema | None) -> Completion:
        body = {
            "model": self.name,
            "messages": [_message(message) for message in messages],
            **self._settings(sampling),
            self._max_tokens_field: sampling.max_tokens,
            "n": 1,
        }
        if sampling.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": max(sampling.logprobs, self._fewest_logprobs)}
        if schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "reply", "schema": schema, "strict": True},
            }
        prompt_tokens = _estimated_tokens(*(message.text for message in messages)) + sum(
            _TOKENS_PER_IMAGE * len(message.images) for message in messages
        )
        (completion,) = await self._ask("chat/completions", body, sampling, prompt_tokens, 1)
        return completion

    async def _complete(self, prompt: Prompt, sampling: Sampling) -> list[Completion]:
        def ask(seed: int | None, n: int) -> Coroutine[Any, Any, list[Completion]]:
            body = {
                "model": self.name,
                "prompt": prompt if isinstance(prompt, str) else list(prompt),
                **self._settings(sampling),
                "max_tokens": sampling.max_tokens,
                "n": n,
            }
            if seed is not None:
                body["seed"] = seed
            if sampling.logprobs is not None:
                body["logprobs"] = max(sampling.logprobs, self._fewest_logprobs)
            return self._ask("completions", body, sampling, _estimated_tokens(prompt), n)

        async def sample(index: int) -> Completion:
            return (await ask(sample_seed(sampling.seed, index), 1))[0]

        if self.together or sampling.n == 1:
            return await ask(sampling.seed, sampling.n)
        return await self._many(sample, range(sampling.n), what="sample")

    async def _score(self, prompt: Prompt, choices: tuple[Prompt, ...]) -> list[Score]:
        echoes = await self._echo([prompt + choice for choice in choices])  # type: ignore[operator]
        return [_score_of(self.name, prompt, choice, echo) for choice, echo in zip(choices, echoes, strict=True)]

    async def _prompt_logprobs(self, prompt: Prompt) -> tuple[TokenLogprob, ...]:
        ((tokens, logprobs, _),) = await self._echo([prompt])
        return tuple(
            TokenLogprob(token, math.nan if logprob is None else logprob)
            for token, logprob in zip(tokens, logprobs, strict=True)
        )

    async def _echo(self, prompts: Sequence[Prompt]) -> list[_Echo]:
        """The endpoint's tokens of each prompt, with log-probabilities: `echo` with nothing generated."""
        body = {
            "model": self.name,
            "prompt": [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts],
            "max_tokens": 0,
            "temperature": 1.0,
            "echo": True,
            "logprobs": 0,
            "n": 1,
            **self._extra_body,
        }
        estimate = Usage(sum(map(_estimated_tokens, prompts)), 0)

        def read(reply: Mapping[str, Any]) -> list[_Echo]:
            return [_echo_of(choice) for choice in _choices(reply, len(prompts))]

        return await self._cached("completions", body, estimate, read, list, lambda stored: [tuple(e) for e in stored])

    # One request

    def _settings(self, sampling: Sampling) -> dict[str, Any]:
        """The sampling settings that chats and completions share, none left to the server."""
        body: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.logit_bias:  # JSON has no infinity, and the protocol no more than 100
            body["logit_bias"] = {str(token): max(-100.0, min(100.0, value)) for token, value in sampling.logit_bias}
        if self.dialect == "vllm":
            body |= {
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "stop_token_ids": list(sampling.stop_token_ids),
                "return_token_ids": True,
            }
        elif self.dialect == "llama.cpp":
            body |= {
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "repeat_penalty": sampling.repetition_penalty,
                "repeat_last_n": _PENALTY_WINDOW,
                "typical_p": 1.0,
                "top_n_sigma": -1.0,
                "xtc_probability": 0.0,
                "dry_multiplier": 0.0,
                "dynatemp_range": 0.0,
                "mirostat": 0,
                # the usual order: its own cuts the tail before it applies the temperature
                "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            }
        return body | self._extra_body

    async def _ask(
        self, path: str, body: dict[str, Any], sampling: Sampling, prompt_tokens: int, n: int
    ) -> list[Completion]:
        def read(reply: Mapping[str, Any]) -> list[Completion]:
            usage = _usage(reply)
            if usage is not None and n > 1:
                usage = None  # of all samples together: no sample's own
            return [_completion(reply, choice, usage, sampling) for choice in _choices(reply, n)]

        estimate = Usage(prompt_tokens, sampling.max_tokens * n)
        drawn = sampling.temperature > 0 and sampling.seed is None
        return await self._cached(
            path,
            body,
            estimate,
            read,
            lambda completions: [completion_to_json(completion) for completion in completions],
            lambda stored: [completion_from_json(completion) for completion in stored],
            drawn=drawn,
        )

    async def _cached(
        self,
        path: str,
        body: dict[str, Any],
        estimate: Usage,
        read: Callable[[Mapping[str, Any]], _R],
        to_json: Callable[[_R], Any],
        from_json: Callable[[Any], _R],
        *,
        drawn: bool = False,
    ) -> _R:
        """The answer from the cache or the endpoint; requests for the same answer at the same time share one request."""
        if self.cache is None:
            return await self._send(path, body, estimate, read)
        key = request_key({"endpoint": f"{self.base_url}/{path}", "body": body})
        if drawn:
            self._asked[key] += 1
            key = request_key({"key": key, "occurrence": self._asked[key]})
        under_way = self._connected().under_way
        while key in under_way:
            await asyncio.wait([under_way[key]])
        stored = self.cache.get(key)
        if stored is not None:
            return from_json(stored)
        if self._offline:
            raise RequestFailed(f"{self.name} is offline and its cache {self.cache.path} has no answer to this request")
        under_way[key] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._send(path, body, estimate, read)
            value = to_json(answer)
            if not self._holds_key(json.dumps(value)):
                self._keep(key, value)
            return answer
        finally:
            under_way.pop(key).set_result(None)

    def _keep(self, key: str, value: Any) -> None:
        """Into the cache; an answer that is paid for is not thrown away because the disk is full."""
        assert self.cache is not None
        try:
            self.cache.put(key, value)
        except sqlite3.Error as error:
            warnings.warn(
                f"an answer could not be kept in {self.cache.path} ({error}): the run goes on without it",
                RuntimeWarning,
                stacklevel=2,
            )

    async def _send(
        self, path: str, body: dict[str, Any], estimate: Usage, read: Callable[[Mapping[str, Any]], _R]
    ) -> _R:
        """Ask until there is an answer that can be read, the tries are used up, or trying is hopeless."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": uuid.uuid4().hex}
        try:
            payload = json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # a lone surrogate, which a reply may hold and a prompt then repeat
            payload = json.dumps(body).encode()
        async with self.budget.bill(estimate) as bill:
            for attempt in range(self.retries + 1):
                await self._wait_until_open()
                await self.budget.wait_for_turn(estimate)
                try:
                    async with self._connected().slots:
                        reply = await self._try(path, payload, headers)
                    return self._read(reply, read, bill)
                except _TryAgain as failure:
                    bill.lost += failure.lost
                    if failure.wait is not None and failure.wait <= self.max_wait:  # for every request, this one or not
                        self.closed_until = max(self.closed_until, time.monotonic() + failure.wait)
                    if failure.wait is not None and failure.wait > self.max_wait:
                        raise RequestFailed(
                            f"{self.base_url} asks to wait {failure.wait:.0f} s, longer than max_wait={self.max_wait:.0f}: "
                            f"{failure}",
                            status=failure.status,
                        ) from None
                    if attempt == self.retries:
                        raise RequestFailed(
                            f"{self.base_url}/{path} gave no answer in {attempt + 1} tries; the last: {failure}",
                            status=failure.status,
                        ) from None
                    await self._pause(attempt, failure.wait)
        raise AssertionError("unreachable")

    async def _pause(self, attempt: int, asked: float | None) -> None:
        if asked:  # "0" says nothing about how long: the usual pause
            await self._wait_until_open()
            await asyncio.sleep(random.uniform(0, min(0.1 * asked, 1.0)))  # not all in the same instant
        else:
            await asyncio.sleep(random.uniform(0.5, 1.0) * min(self.backoff[1], self.backoff[0] * 2**attempt))

    async def _wait_until_open(self) -> None:
        while (wait := self.closed_until - time.monotonic()) > 0:
            await asyncio.sleep(wait)

    async def _try(self, path: str, payload: bytes, headers: Mapping[str, str]) -> Any:
        """One POST; the reply's JSON."""
        aiohttp = self._aiohttp
        headers = {**headers, **self._authorization()}
        sent = False
        try:
            async with self._connected().session.post(
                f"{self.base_url}/{path}", data=payload, headers=headers, proxy=self._proxy, allow_redirects=False
            ) as response:
                sent = True
                raw = await response.read()
        except TimeoutError:
            raise _TryAgain(f"no answer within timeout={self.timeout:g} s", lost=True) from None
        except aiohttp.ClientSSLError as error:
            raise RequestFailed(self._redact(f"{self.base_url}: {error}")) from None
        except aiohttp.ClientError as error:
            refused = isinstance(error, aiohttp.ClientConnectorError)
            what = "the reply was cut short" if sent else "no connection" if refused else "the connection was lost"
            raise _TryAgain(self._redact(f"{what} ({type(error).__name__}: {error})"), lost=not refused) from None
        if response.status != 200:
            self._refused(response.status, response.headers, raw)
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise _TryAgain(f"the reply is not JSON: {self._excerpt(raw)}", lost=True) from None

    def _refused(self, status: int, headers: Mapping[str, str], raw: bytes) -> None:
        """Raise what a status other than 200 means."""
        message, code = _error_of(raw)
        reason = f"HTTP {status}: {self._excerpt(raw) if message is None else _shortened(self._redact(message))}"
        hopeless = code in _HOPELESS_CODES or headers.get("x-should-retry") == "false"
        if (status in RETRIED_STATUSES or status >= 500) and not hopeless:
            raise _TryAgain(reason, status=status, wait=_retry_after(headers))
        raise RequestFailed(f"{self.base_url} refused the request: {reason}", status=status)

    def _read(self, reply: Any, read: Callable[[Mapping[str, Any]], _R], bill: Bill) -> _R:
        try:
            answer = read(reply)
        except CapabilityError:
            bill.settle(_usage(reply))
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            excerpt = self._excerpt(json.dumps(reply).encode())
            problem = self._redact(f"{type(error).__name__}: {error}")
            raise _TryAgain(f"the reply cannot be read ({problem}): {excerpt}", lost=True) from None
        bill.settle(_usage(reply))
        served = reply.get("model")
        if self._required is not None and not (isinstance(served, str) and served in self._required):
            name = _shortened(self._redact(repr(served)))
            raise RequestFailed(f"{self.base_url} answered as model {name}, not as {sorted(self._required)}")
        return answer

    # The connection

    def _connected(self) -> _Connection:
        home = self._own_loop()
        if self._connection is None or self._connection.loop is not home.loop:
            aiohttp = self._aiohttp
            connector = aiohttp.TCPConnector(limit=0)  # the slots are the limit
            session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=self.timeout, sock_connect=min(self.timeout, 15.0)),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
            home.closers.append(session.close)
            self._connection = _Connection(home.loop, session, asyncio.Semaphore(self.concurrency))
        return self._connection

    def _secret(self) -> str:
        # Read from a file, a key easily ends in a line break, which no header may hold.
        return os.environ.get(self._api_key_env, "").strip() if self._api_key_env else ""

    def _authorization(self) -> dict[str, str]:
        secret = self._secret()
        return {"Authorization": f"Bearer {secret}"} if secret else {}

    def _holds_key(self, text: str) -> bool:
        secret = self._secret()
        return bool(secret) and secret in text

    def _redact(self, text: str) -> str:
        secret = self._secret()
        return text.replace(secret, f"[{self._api_key_env}]") if secret else text

    def _excerpt(self, raw: bytes) -> str:
        # Redacted first: an excerpt could end within the key.
        return repr(_shortened(self._redact(raw.decode("utf-8", "replace"))))


_Echo = tuple[list[str], list[float | None], list[int]]
"""Tokens, their log-probabilities, and where each begins in the text."""


def _safe_name(name: str) -> str:
    """The name of an environment variable for a message; a key passed in its place is not shown."""
    if name.isidentifier() and not name.startswith("sk"):
        return name
    return "named by api_key_env (not shown: it does not look like a variable's name)"


def _checked_url(base_url: str) -> str:
    parts = urlsplit(base_url)
    if parts.username or parts.password or parts.query:
        raise ValueError("base_url must hold no credentials and no query: name the key's variable in api_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"base_url must be an http or https URL such as http://127.0.0.1:8000/v1, got {base_url!r}")
    return base_url.rstrip("/")


def _proxy_for(url: str) -> str | None:
    """The proxy that the environment names for a URL. (aiohttp's own lookup would also take credentials from ~/.netrc.)"""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return None if host in _LOOPBACK or proxy_bypass(host) else getproxies().get(parts.scheme)


def _message(message: Message) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    parts = [
        {"type": "image_url", "image_url": {"url": part.data_url}}
        if isinstance(part, Image)
        else {"type": "text", "text": part}
        for part in message.content
    ]
    return {"role": message.role, "content": parts}


def _estimated_tokens(*prompts: Prompt) -> int:
    """An estimate on the high side; UTF-8 bytes, since scripts without Latin letters take more tokens a character."""
    return sum(
        8 + len(prompt.encode("utf-8", "replace")) // _CHARACTERS_PER_TOKEN if isinstance(prompt, str) else len(prompt)
        for prompt in prompts
    )


def _choices(reply: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    choices = sorted(reply["choices"], key=lambda choice: choice.get("index", 0))
    if len(choices) != count:
        raise ValueError(f"{count} choices were asked for, {len(choices)} came")
    return choices


def _usage(reply: Mapping[str, Any]) -> Usage | None:
    """What the server says the request took; None where it does not say it in numbers, which is no reason to ask again."""
    usage = reply.get("usage")
    if not isinstance(usage, Mapping):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens") or 0
    if not all(isinstance(count, int | float) and 0 <= count < math.inf for count in (prompt, completion)):
        return None
    return Usage(int(prompt), int(completion))  # type: ignore[arg-type]  # checked above


def _completion(
    reply: Mapping[str, Any], choice: Mapping[str, Any], usage: Usage | None, sampling: Sampling
) -> Completion:
    message = choice.get("message")
    text = choice["text"] if message is None else message.get("content")
    if not isinstance(text, str | None):
        raise TypeError(f"the text is a {type(text).__name__}")
    details = {k: reply[k] for k in ("id", "system_fingerprint", "provider", "created") if reply.get(k) is not None}
    if message is not None:
        details |= {k: message[k] for k in ("refusal", "reasoning_content", "reasoning") if message.get(k)}
    logprobs = _logprobs(choice.get("logprobs"), sampling.logprobs or 0)
    if sampling.logprobs is not None and logprobs is None:
        if text:
            raise CapabilityError("the endpoint returned no log-probabilities: ask with logprobs=None")
        logprobs = ()
    ids = choice.get("token_ids")
    if ids is None and logprobs and all(entry.id is not None for entry in logprobs):
        ids = [entry.id for entry in logprobs]
    return Completion(
        text=text or "",
        finish_reason=str(choice.get("finish_reason") or "unknown"),
        model=str(reply.get("model") or ""),
        usage=usage,
        token_ids=None if ids is None else tuple(ids),
        logprobs=logprobs if sampling.logprobs is not None else None,
        details=details,
    )


def _logprobs(value: Mapping[str, Any] | None, alternatives: int) -> tuple[TokenLogprob, ...] | None:
    """Log-probabilities in the form of chats (`content`) or of completions (`tokens`, `token_logprobs`, `top_logprobs`)."""
    if not value:
        return None
    if value.get("content") is not None:
        return tuple(
            TokenLogprob(
                entry["token"],
                float(entry["logprob"]),
                entry.get("id"),
                tuple((top["token"], float(top["logprob"])) for top in entry.get("top_logprobs") or ())[:alternatives],
            )
            for entry in value["content"]
        )
    if value.get("tokens") is None:
        return None
    tops = value.get("top_logprobs") or [None] * len(value["tokens"])
    return tuple(
        TokenLogprob(token, float(logprob), None, _likeliest(top or {}, alternatives))
        for token, logprob, top in zip(value["tokens"], value["token_logprobs"], tops, strict=True)
    )


def _likeliest(top: Mapping[str, Any], count: int) -> tuple[tuple[str, float], ...]:
    """Servers add the sampled token to the alternatives asked for, in no fixed place."""
    ranked = sorted(((token, float(logprob)) for token, logprob in top.items()), key=lambda pair: -pair[1])
    return tuple(ranked[:count])


def _echo_of(choice: Mapping[str, Any]) -> _Echo:
    logprobs = choice["logprobs"]
    tokens, values = list(logprobs["tokens"]), list(logprobs["token_logprobs"])
    offsets = logprobs.get("text_offset")
    if offsets is None:
        offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    if not len(tokens) == len(values) == len(offsets):
        raise ValueError(f"{len(tokens)} tokens, {len(values)} log-probabilities, {len(offsets)} offsets")
    return tokens, values, list(offsets)


def _score_of(name: str, prompt: Prompt, choice: Prompt, echo: _Echo) -> Score:
    tokens, logprobs, offsets = echo
    if not tokens:
        raise RequestFailed(f"{name} echoed no token of the text it was to score")
    if isinstance(prompt, str):
        text, border = prompt + str(choice), len(prompt)
        spelt = "".join(tokens)
        if spelt.endswith(text):  # what comes before the text are tokens that the endpoint put in front of it
            offsets = [0, *accumulate(map(len, tokens[:-1]))]
            border += len(spelt) - len(text)
        ends = [*offsets[1:], border + len(choice)]
        first = next(i for i, end in enumerate(ends) if offsets[i] >= border or end > border)
    else:
        if len(tokens) != len(prompt) + len(choice):
            raise RequestFailed(
                f"{name} echoed {len(tokens)} tokens for {len(prompt)} + {len(choice)} token ids: it adds or drops some"
            )
        first = len(prompt)
    own = logprobs[first:]
    if any(value is None for value in own):
        raise RequestFailed(
            f"{name} gives no log-probability to the first token of a text: score with a non-empty prompt"
        )
    return Score(math.fsum(value for value in own if value is not None), len(own))


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, from `retry-after-ms` or `Retry-After` in seconds or as a date (against the server's own clock)."""
    for header, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers[header]) * scale
        except (KeyError, ValueError):
            continue
        return max(0.0, seconds) if math.isfinite(seconds) else None
    try:
        until = parsedate_to_datetime(headers["retry-after"]).timestamp()
    except (KeyError, ValueError, OverflowError):
        return None
    try:
        now = parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, ValueError, OverflowError):
        now = time.time()
    return max(0.0, until - now)


def _error_of(raw: bytes) -> tuple[str | None, str | None]:
    """Message and code of an error reply, where it has them."""
    try:
        error = json.loads(raw)
        error = error.get("error", error)
        if isinstance(error, str):
            return error, None
        code = error.get("code")
        message = error.get("message")
        return None if not message else str(message), None if code is None else str(code)
    except (ValueError, AttributeError, RecursionError):
        return None, None


def _shortened(text: str) -> str:
    return text if len(text) <= 500 else text[:500] + "..."
