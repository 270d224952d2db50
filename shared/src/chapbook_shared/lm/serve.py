"""A loopback HTTP server that speaks the OpenAI protocol around any language model, and misbehaves on order.

    with Server(model) as server:
        client = OpenAIModel(model.name, base_url=server.base_url)

    python -m chapbook_shared.lm.serve --model echo --port 8000

It answers `/v1/models`, `/v1/chat/completions` and `/v1/completions`: several prompts, n, seeds, stops, log-probabilities, usage,
streaming (the answer is made first and then sent in pieces), images as data URLs, JSON schemas, and `echo` with `max_tokens=0`
to score a text, each where the model can. What it does not know, it refuses: a field that is silently ignored would be a setting
that was silently not applied. Beyond the protocol it takes vLLM's `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids` and
`return_token_ids`, and honours `Idempotency-Key`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import binascii
import importlib
import json
import math
import random
import re
import signal
import sys
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from itertools import accumulate, cycle
from typing import Any, Literal

from chapbook_shared.lm._base import sample_seed
from chapbook_shared.lm.protocol import (
    CapabilityError,
    Completion,
    Image,
    LanguageModel,
    Message,
    Prompt,
    Role,
    Sampling,
    TokenLogprob,
)
from chapbook_shared.validate import import_extra

FaultKind = Literal["ok", "status", "slow", "cut", "malformed", "drop", "lose", "empty", "duplicate", "model"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CHAT_MAX_TOKENS, _COMPLETION_MAX_TOKENS = 1024, 16  # the protocol's own default for completions is 16
_REPLAYS_KEPT = 10_000
_BODY_LIMIT = 256 * 2**20

_MEANINGLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that change no answer."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "typical_p": (1,),
}
"""Fields that are taken only at values that change nothing."""
_SAMPLING = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "n",
    "logprobs",
}
_TYPES: dict[str, tuple[Any, str]] = {
    "top_k": (int, "a whole number"),
    "seed": (int, "a whole number"),
    "max_tokens": (int, "a whole number"),
    "n": (int, "a whole number"),
    "logprobs": (int, "a whole number"),
    "stop": (str, "text or a list of texts"),
    "stop_token_ids": (int, "a list of token ids"),
}
"""Those that are not any number."""
_COMMON = _SAMPLING | {"logit_bias", "model", "stream", "stream_options", "return_token_ids"}
_CHAT_FIELDS = _COMMON | {"messages", "top_logprobs", "max_completion_tokens", "response_format"}
_COMPLETION_FIELDS = _COMMON | {"prompt", "echo"}


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    ok          nothing
    status      an error status, with Retry-After in seconds (`wait`) or as a date (`date=True`)
    slow        the answer comes `wait` seconds late
    drop        the connection is closed before the model is asked
    lose        the connection is closed after the model has answered (and been paid)
    cut         half of the answer is sent, then the connection is closed
    malformed   the answer is broken JSON, as a complete reply
    empty       the answer has no choices
    duplicate   every sample is a copy of the last answer to this kind of request
    model       another model's name is in the answer
    """

    kind: FaultKind = "ok"
    status: int = 500
    wait: float | None = None
    date: bool = False
    model: str = "another-model"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read `ok`, `429`, `429:2` (Retry-After 2), `429:date:2`, `503`, `slow:0.5`, `cut`, `model:gpt-0`, ..."""
        kind, *rest = text.strip().split(":")
        if kind.isdigit():
            date = rest[:1] == ["date"]
            waits = rest[1:] if date else rest
            return cls("status", status=int(kind), wait=float(waits[0]) if waits else None, date=date)
        if kind == "slow":
            return cls("slow", wait=float(rest[0]) if rest else 1.0)
        if kind == "model":
            return cls("model", model=rest[0] if rest else "another-model")
        if kind in ("ok", "cut", "malformed", "drop", "lose", "empty", "duplicate") and not rest:
            return cls(kind)  # type: ignore[arg-type]
        raise ValueError(
            f"a fault must be a status, or one of ok, slow, cut, malformed, drop, lose, empty, duplicate, model; got {text!r}"
        )


class Faults:
    """A script of faults, one for each request in the order in which they come in.

    Args:
        script: faults, or their texts (see `Fault.parse`), or all in one string with commas.
        repeat: begin again at the end; otherwise all is well from there on.
    """

    def __init__(self, script: str | Iterable[str | Fault] = (), *, repeat: bool = False) -> None:
        entries = script.split(",") if isinstance(script, str) else script
        faults = [entry if isinstance(entry, Fault) else Fault.parse(entry) for entry in entries if entry != ""]
        self._faults: Iterator[Fault] = cycle(faults) if repeat else iter(faults)

    @classmethod
    def at_random(cls, kinds: str | Sequence[str], *, rate: float, seed: int) -> Faults:
        """A share `rate` of the requests meets one of the faults, for ever."""
        choices = [Fault.parse(kind) for kind in (kinds.split(",") if isinstance(kinds, str) else kinds)]
        generator = random.Random(seed)

        def script() -> Iterator[Fault]:
            while True:
                yield generator.choice(choices) if generator.random() < rate else Fault()

        faults = cls()
        faults._faults = script()
        return faults

    def next(self) -> Fault:
        return next(self._faults, Fault())


@dataclass(frozen=True)
class Received:
    """One request as the server saw it."""

    path: str
    body: Any
    headers: Mapping[str, str] = field(repr=False)
    fault: Fault
    time: float
    """Monotonic seconds."""


class _BadRequest(Exception):
    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Server:
    """Serve a model on 127.0.0.1 for as long as the `with` block lasts.

    Args:
        model: any `LanguageModel`.
        port: 0 takes a free one.
        faults: what goes wrong, and when; None: nothing.
        latency: seconds that every answer takes at least.
        api_key: the key that clients must send; None asks for none.
        host: a loopback address: the server has no defence against strangers.
        keep: how many of the last requests to keep in `received`.

    `base_url` is what clients need. `asked` counts the requests that reached the model and `billed_tokens` what they used: what a
    hosted endpoint would put on the bill.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        port: int = 0,
        faults: Faults | str | None = None,
        latency: float = 0.0,
        api_key: str | None = None,
        host: str = "127.0.0.1",
        keep: int = 10_000,
    ) -> None:
        if host not in _LOOPBACK:
            raise ValueError(f"host must be one of {_LOOPBACK}, got {host!r}: this server is for one machine")
        if not latency >= 0:
            raise ValueError(f"latency must be >= 0 seconds, got {latency!r}")
        self._web = import_extra("aiohttp.web", "chapbook-shared[serve]")
        self.model = model
        self.host, self.port = host, port
        self.received: deque[Received] = deque(maxlen=keep)
        self.asked = 0
        self.billed_tokens = 0
        self._faults = faults if isinstance(faults, Faults) else Faults(faults or ())
        self._latency = latency
        self._api_key = api_key
        self._replays: OrderedDict[tuple[str, str], asyncio.Future[dict[str, Any]]] = OrderedDict()
        self._last: dict[str, dict[str, Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping: asyncio.Event | None = None

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def start(self) -> Server:
        """Listen, in a thread of the server's own."""
        if self._thread is not None:
            raise RuntimeError("the server is already running")
        ready = threading.Event()
        problem: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(self._main(ready))
            except BaseException as error:
                problem.append(error)
                ready.set()

        self._thread = threading.Thread(target=run, name="chapbook-lm-serve", daemon=True)
        self._thread.start()
        ready.wait()
        if problem:
            self._thread = None
            raise problem[0]
        return self

    def stop(self) -> None:
        """Close every connection and end the thread."""
        if self._thread is not None and self._loop is not None and self._stopping is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        self._thread = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _main(self, ready: threading.Event) -> None:
        web = self._web
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        application = web.Application(client_max_size=_BODY_LIMIT)
        application.router.add_get("/health", self._health)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/v1/models/{name:.+}", self._one_model)
        application.router.add_post("/v1/chat/completions", self._post)
        application.router.add_post("/v1/completions", self._post)
        runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.host, self.port, backlog=1024)
            await site.start()
            self.port = runner.addresses[0][1]
            ready.set()
            await self._stopping.wait()
        finally:
            await runner.cleanup()

    # Endpoints

    async def _health(self, request: Any) -> Any:
        return self._web.Response()

    async def _models(self, request: Any) -> Any:
        try:
            self._authorise(request)
        except _BadRequest as error:
            return self._web.json_response(error.body(), status=error.status)
        return self._web.json_response({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: Any) -> Any:
        try:
            self._authorise(request)
            self._check_model(request.match_info["name"])
        except _BadRequest as error:
            return self._web.json_response(error.body(), status=error.status)
        return self._web.json_response(self._card())

    async def _post(self, request: Any) -> Any:
        web = self._web
        began = time.monotonic()
        chat = request.path.endswith("/chat/completions")
        try:
            body = await request.json()
        except ValueError:
            error = _BadRequest("the body is not JSON")
            return web.json_response(error.body(), status=error.status)
        fault = self._faults.next()
        self.received.append(Received(request.path, body, dict(request.headers), fault, began))
        if fault.kind == "status":
            return self._error_status(fault)
        if fault.kind == "drop":
            return self._abort(request)
        try:
            self._authorise(request)
            payload = await self._payload(request, body, chat)
        except _BadRequest as error:
            return web.json_response(error.body(), status=error.status)
        except (CapabilityError, TypeError, ValueError) as problem:
            return web.json_response(_BadRequest(str(problem)).body(), status=400)
        except Exception as problem:
            failure = _BadRequest(f"{type(problem).__name__}: {problem}", status=500)
            return web.json_response(failure.body(), status=500)
        payload = self._spoilt(payload, fault, request.path)
        wait = max(self._latency, fault.wait or 0.0 if fault.kind == "slow" else 0.0)
        await asyncio.sleep(max(0.0, began + wait - time.monotonic()))
        if fault.kind == "lose":
            return self._abort(request)
        if body.get("stream"):
            return await self._stream(request, body, payload, chat, fault)
        text = _json(payload)
        if fault.kind == "malformed":
            text = text[: len(text) // 2]
        if fault.kind != "cut":
            return web.Response(text=text, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        data = text.encode()
        response.content_length = len(data)
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        return self._abort(request, response)

    def _card(self) -> dict[str, Any]:
        return {"id": self.model.name, "object": "model", "created": 0, "owned_by": "chapbook"}

    def _authorise(self, request: Any) -> None:
        if self._api_key is not None and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            raise _BadRequest("the API key is missing or wrong", status=401, code="invalid_api_key")

    def _check_model(self, name: Any) -> None:
        if name != self.model.name:
            raise _BadRequest(
                f"the model {name!r} does not exist; this server has {self.model.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _payload(self, request: Any, body: Any, chat: bool) -> dict[str, Any]:
        """The answer; one that was made for the same idempotency key is given again, not made again."""
        if not isinstance(body, dict):
            raise _BadRequest("the body must be a JSON object")
        self._check_model(body.get("model"))
        token = request.headers.get("Idempotency-Key")
        if token is None:
            return await self._answer(body, chat)
        key = (token, json.dumps(body, sort_keys=True))
        if key not in self._replays:
            self._replays[key] = asyncio.ensure_future(self._answer(body, chat))
            if len(self._replays) > _REPLAYS_KEPT:
                self._replays.popitem(last=False)
        try:
            return await asyncio.shield(self._replays[key])
        except Exception:
            self._replays.pop(key, None)
            raise

    async def _answer(self, body: Mapping[str, Any], chat: bool) -> dict[str, Any]:
        payload = await (self._chat(body) if chat else self._complete(body))
        self.asked += 1
        self.billed_tokens += payload["usage"]["total_tokens"]
        return payload

    async def _chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        _check_fields(body, _CHAT_FIELDS)
        sampling = _sampling(body, chat=True)
        messages = _messages(body.get("messages"))
        schema = _schema(body.get("response_format"))
        completions = await asyncio.gather(
            *(self.model.achat(messages, _sample_sampling(sampling, i), schema=schema) for i in range(sampling.n))
        )
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                "logprobs": _chat_logprobs(completion.logprobs),
                "finish_reason": completion.finish_reason,
                **_token_ids(body, completion),
            }
            for i, completion in enumerate(completions)
        ]
        return self._envelope("chat.completion", "chatcmpl", choices, [completions])

    async def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        _check_fields(body, _COMPLETION_FIELDS)
        prompts = _prompts(body.get("prompt"))
        if body.get("max_tokens") == 0:
            return await self._echo_only(body, prompts)
        sampling = _sampling(body, chat=False)
        groups = await asyncio.gather(*(self.model.acomplete(prompt, sampling) for prompt in prompts))
        echoes: list[tuple[TokenLogprob, ...] | None] = [None] * len(prompts)
        if body.get("echo"):
            echoes = list(await asyncio.gather(*(self._prompt_logprobs(prompt) for prompt in prompts)))
        choices: list[dict[str, Any]] = []
        for prompt, echo, completions in zip(prompts, echoes, groups, strict=True):
            head = "" if echo is None else prompt if isinstance(prompt, str) else _text(echo)
            for completion in completions:
                logprobs = completion.logprobs
                if logprobs is not None and echo is not None:
                    logprobs = (*echo, *logprobs)
                choices.append(
                    {
                        "index": len(choices),
                        "text": head + completion.text,
                        "logprobs": _completion_logprobs(
                            logprobs, head + completion.text, tops=bool(body.get("logprobs"))
                        ),
                        "finish_reason": completion.finish_reason,
                        **_token_ids(body, completion),
                    }
                )
        return self._envelope("text_completion", "cmpl", choices, groups)

    async def _echo_only(self, body: Mapping[str, Any], prompts: Sequence[Prompt]) -> dict[str, Any]:
        if not body.get("echo"):
            raise _BadRequest("max_tokens=0 needs echo=true: there would be nothing to return", param="max_tokens")
        echoes = await asyncio.gather(*(self._prompt_logprobs(prompt) for prompt in prompts))
        choices = [
            {
                "index": i,
                "text": prompt if isinstance(prompt, str) else _text(echo),
                "logprobs": _completion_logprobs(
                    echo, prompt if isinstance(prompt, str) else _text(echo), tops=bool(body.get("logprobs"))
                )
                if body.get("logprobs") is not None
                else None,
                "finish_reason": "length",
            }
            for i, (prompt, echo) in enumerate(zip(prompts, echoes, strict=True))
        ]
        payload = self._envelope("text_completion", "cmpl", choices, [])
        tokens = sum(map(len, echoes))
        payload["usage"] = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
        return payload

    async def _prompt_logprobs(self, prompt: Prompt) -> tuple[TokenLogprob, ...]:
        ask = getattr(self.model, "aprompt_logprobs", None)
        try:
            if ask is not None:
                return await ask(prompt)
        except NotImplementedError:
            pass
        raise _BadRequest(
            f"{self.model.name} gives no log-probabilities of a prompt: echo is not possible", param="echo"
        )

    def _envelope(
        self, kind: str, prefix: str, choices: list[dict[str, Any]], groups: Sequence[Sequence[Completion]]
    ) -> dict[str, Any]:
        """One prompt is counted once, however many samples it has."""
        completions = [completion for group in groups for completion in group]
        prompt_tokens = sum(group[0].usage.prompt_tokens for group in groups if group[0].usage is not None)
        completion_tokens = sum(c.usage.completion_tokens for c in completions if c.usage is not None)
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": completions[0].model if completions else self.model.name,
            "system_fingerprint": completions[0].details.get("system_fingerprint") if completions else None,
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }

    # Misbehaviour

    def _error_status(self, fault: Fault) -> Any:
        headers = {}
        if fault.wait is not None:
            # a date has whole seconds only: round up, so that it is never earlier than asked
            headers["Retry-After"] = (
                formatdate(math.ceil(time.time() + fault.wait), usegmt=True) if fault.date else f"{fault.wait:g}"
            )
        body = {"error": {"message": f"fault {fault.status} on order", "type": "fault", "param": None, "code": None}}
        return self._web.json_response(body, status=fault.status, headers=headers)

    def _spoilt(self, payload: dict[str, Any], fault: Fault, path: str) -> dict[str, Any]:
        last = self._last.get(path)
        self._last[path] = payload
        if fault.kind == "empty":
            return {**payload, "choices": []}
        if fault.kind == "model":
            return {**payload, "model": fault.model}
        if fault.kind == "duplicate":
            original = (last or payload)["choices"][0]
            copies = [{**original, "index": i} for i in range(len(payload["choices"]))]
            return {**payload, "choices": copies}
        return payload

    def _abort(self, request: Any, response: Any = None) -> Any:
        if request.transport is not None:
            request.transport.abort()
        return response if response is not None else self._web.Response()

    async def _stream(
        self, request: Any, body: Mapping[str, Any], payload: dict[str, Any], chat: bool, fault: Fault
    ) -> Any:
        options = body.get("stream_options")
        with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        response = self._web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        chunks = list(_chunks(payload, chat, with_usage))
        events = [f"data: {_json(chunk)}\n\n" for chunk in chunks]
        if fault.kind == "malformed":
            events[len(events) // 2] = 'data: {"id": \n\n'
        if fault.kind == "cut":
            for event in events[: len(events) // 2]:
                await response.write(event.encode())
            return self._abort(request, response)
        for event in [*events, "data: [DONE]\n\n"]:
            await response.write(event.encode())
        await response.write_eof()
        return response


def _chunks(payload: Mapping[str, Any], chat: bool, with_usage: bool) -> Iterator[dict[str, Any]]:
    """The answer in the pieces of a stream: a token each where tokens are known, a word each otherwise."""
    head = {key: payload[key] for key in ("id", "created", "model", "system_fingerprint")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    if with_usage:
        head["usage"] = None
    for choice in payload["choices"]:
        index = choice["index"]

        def chunk(content: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
            return {
                **head,
                "choices": [{"index": index, **content, "logprobs": logprobs, "finish_reason": reason}],  # noqa: B023
            }

        text = choice["message"]["content"] if chat else choice["text"]
        if chat:
            yield chunk({"delta": {"role": "assistant", "content": ""}})
        for piece, logprobs in _pieces(text, choice["logprobs"], chat):
            yield chunk({"delta": {"content": piece}} if chat else {"text": piece}, logprobs)
        yield chunk({"delta": {}} if chat else {"text": ""}, None, choice["finish_reason"])
    if with_usage:
        yield {**head, "choices": [], "usage": payload["usage"]}


def _pieces(text: str, logprobs: Mapping[str, Any] | None, chat: bool) -> Iterator[tuple[str, Any]]:
    if logprobs is None:
        words = text.split(" ")
        for i, word in enumerate(words):
            if piece := word if i == 0 else f" {word}":
                yield piece, None
        return
    tokens = [entry["token"] for entry in logprobs["content"]] if chat else logprobs["tokens"]
    whole = "".join(tokens) == text
    for i, token in enumerate(tokens):
        # tokens that do not spell the text (parts of a character, control tokens): the text goes out with the first
        piece = token if whole else text if i == 0 else ""
        if chat:
            yield piece, {"content": [logprobs["content"][i]], "refusal": None}
        else:
            yield piece, {key: values if values is None else [values[i]] for key, values in logprobs.items()}
    if not tokens and text:
        yield text, None


# Requests


def _check_fields(body: Mapping[str, Any], known: set[str]) -> None:
    for name, value in body.items():
        if name in known or name in _MEANINGLESS or value is None:
            continue
        if name in _NEUTRAL and value in _NEUTRAL[name]:
            continue
        raise _BadRequest(f"unsupported field {name!r} with value {value!r}", param=name, code="unsupported_parameter")


def _sampling(body: Mapping[str, Any], *, chat: bool) -> Sampling:
    values = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    if chat:
        if body.get("max_completion_tokens") is not None:
            values["max_tokens"] = body["max_completion_tokens"]
        if body.get("top_logprobs") and not body.get("logprobs"):
            raise _BadRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        if values.pop("logprobs", False):
            values["logprobs"] = body.get("top_logprobs") or 0
    values.setdefault("max_tokens", _CHAT_MAX_TOKENS if chat else _COMPLETION_MAX_TOKENS)
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    for name, value in values.items():
        _check_type(name, value)
    for name in ("stop", "stop_token_ids"):
        values[name] = tuple(values.get(name, ()))
    values["logit_bias"] = _logit_bias({} if body.get("logit_bias") is None else body["logit_bias"])
    if values.get("top_k") == -1:  # vLLM's word for the whole vocabulary
        values["top_k"] = 0
    try:
        return Sampling(**values)
    except (TypeError, ValueError) as error:
        raise _BadRequest(str(error)) from None


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    bias = value.items() if isinstance(value, dict) else [("", 0)]
    known = all(
        re.fullmatch(r"[0-9]{1,18}", token)
        and isinstance(number, int | float)
        and not isinstance(number, bool)
        and -100 <= number <= 100
        for token, number in bias
    )
    if not known:
        raise _BadRequest(f"logit_bias must map token ids to numbers in [-100, 100], got {value!r}", param="logit_bias")
    return tuple((int(token), float(number)) for token, number in bias)


def _check_type(name: str, value: Any) -> None:
    kind, description = _TYPES.get(name, (int | float, "a number"))
    listed = name in ("stop", "stop_token_ids")
    entries = value if listed and isinstance(value, list) else [value]
    if (listed and not isinstance(value, list)) or any(isinstance(e, bool) or not isinstance(e, kind) for e in entries):
        raise _BadRequest(f"{name} must be {description}, got {value!r}", param=name)


def _sample_sampling(sampling: Sampling, index: int) -> Sampling:
    if sampling.n == 1:
        return sampling
    values = {**vars(sampling), "n": 1, "seed": sample_seed(sampling.seed, index)}
    return Sampling(**values)


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise _BadRequest("messages must be a list with at least one message", param="messages")
    messages = []
    for entry in value:
        if not isinstance(entry, dict) or entry.get("role") not in ("system", "developer", "user", "assistant"):
            raise _BadRequest(
                f"a message must have a role (system, user or assistant) and content, got {entry!r}", param="messages"
            )
        role: Role = "system" if entry["role"] == "developer" else entry["role"]
        content = entry.get("content")
        if isinstance(content, list):
            content = tuple(_part(part) for part in content)
        elif not isinstance(content, str):
            raise _BadRequest(f"content must be text or a list of parts, got {content!r}", param="messages")
        messages.append(Message(role, content))
    return messages


def _part(part: Any) -> str | Image:
    try:
        if part["type"] == "text":
            return str(part["text"])
        if part["type"] != "image_url":
            raise _BadRequest(f"a part must be text or image_url, got {part['type']!r}", param="messages")
        url = part["image_url"]["url"]
        header, _, data = url.partition(",")
        if not (header.startswith("data:image/") and header.endswith(";base64")):
            raise _BadRequest(
                "images must be data URLs (data:image/png;base64,...): nothing is fetched", param="messages"
            )
        image = Image(base64.b64decode(data, validate=True))
        _ = image.mime
        return image
    except (KeyError, TypeError, AttributeError) as error:
        raise _BadRequest(f"a part of a message cannot be read: {part!r} ({error})", param="messages") from None
    except (binascii.Error, ValueError) as error:
        raise _BadRequest(f"an image cannot be read: {error}", param="messages") from None


def _prompts(value: Any) -> list[Prompt]:
    """One text, several texts, one sequence of token ids, or several."""

    def is_ids(entry: Any) -> bool:
        return isinstance(entry, list) and bool(entry) and all(type(token) is int for token in entry)

    if isinstance(value, str):
        return [value]
    if is_ids(value):
        return [tuple(value)]
    if isinstance(value, list) and value and all(isinstance(entry, str) for entry in value):
        return list(value)
    if isinstance(value, list) and value and all(is_ids(entry) for entry in value):
        return [tuple(entry) for entry in value]
    raise _BadRequest("prompt must be text, token ids, or a list of either", param="prompt")


def _schema(value: Any) -> Mapping[str, Any] | None:
    if value is None or value == {"type": "text"}:
        return None
    if isinstance(value, dict) and value.get("type") == "json_object":
        return {"type": "object"}
    try:
        if value["type"] == "json_schema":
            return value["json_schema"]["schema"]
    except (KeyError, TypeError):
        pass
    raise _BadRequest(f"response_format cannot be read: {value!r}", param="response_format")


# Replies


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8 form, but a JSON escape
        return json.dumps(value, allow_nan=False)
    return text


def _finite(logprob: float) -> float | None:
    if math.isnan(logprob):
        return None
    return max(logprob, -9999.0)  # JSON has no infinity


def _chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None

    def entry(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode("utf-8", "replace"))}

    content = [
        {**entry(lp.token, lp.logprob), "top_logprobs": [entry(token, logprob) for token, logprob in lp.top]}
        for lp in logprobs
    ]
    return {"content": content, "refusal": None}


def _offsets(text: str, tokens: Sequence[str]) -> list[int]:
    """Where each token begins in the text, in characters.

    A token that holds only part of a character reads as U+FFFD, so lengths do not tell: the UTF-8 bytes are divided such that
    every part reads as its token. A token within a character begins where the character does. Where the tokens do not spell the
    text (control tokens), it is their own lengths that count.
    """
    data = text.encode("utf-8", "replace")

    def lengths(token: str, at: int) -> Iterator[int]:
        longest = 4 * len(token) if "\ufffd" in token else len(token.encode("utf-8", "replace"))
        shortest = 1 if "\ufffd" in token else longest
        return (n for n in range(shortest, longest + 1) if data[at : at + n].decode("utf-8", "replace") == token)

    starts = [0]
    tried: list[Iterator[int]] = []
    for _ in range(1000 + 20 * len(tokens)):
        if len(starts) > len(tokens):
            begins = [i for i, character in enumerate(text) for _ in character.encode("utf-8", "replace")]
            return [begins[start] if start < len(begins) else len(text) for start in starts[:-1]]
        if len(tried) < len(starts):
            tried.append(lengths(tokens[len(starts) - 1], starts[-1]))
        length = next(tried[-1], None)
        if length is not None:
            starts.append(starts[-1] + length)
        elif len(starts) > 1:  # a part of a character was taken too long or too short: go back
            starts.pop()
            tried.pop()
        else:
            break
    return [0, *accumulate(map(len, tokens))][: len(tokens)]


def _completion_logprobs(logprobs: Sequence[TokenLogprob] | None, text: str, *, tops: bool) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    offsets = _offsets(text, [lp.token for lp in logprobs])
    return {
        "tokens": [lp.token for lp in logprobs],
        "token_logprobs": [_finite(lp.logprob) for lp in logprobs],
        "top_logprobs": [{token: _finite(p) for token, p in lp.top} or None for lp in logprobs] if tops else None,
        "text_offset": offsets,
    }


def _text(logprobs: Sequence[TokenLogprob]) -> str:
    return "".join(lp.token for lp in logprobs)


def _token_ids(body: Mapping[str, Any], completion: Completion) -> dict[str, Any]:
    if not body.get("return_token_ids"):
        return {}
    return {"token_ids": None if completion.token_ids is None else list(completion.token_ids)}


# The command


def _named_model(spec: str) -> LanguageModel:
    if spec == "echo":
        from chapbook_shared.lm.scripted import ScriptedModel

        return ScriptedModel(
            lambda messages, _: messages[-1].text,
            complete=lambda prompt, _: prompt if isinstance(prompt, str) else " ".join(map(str, prompt)),
            name="echo",
        )
    module, _, attribute = spec.partition(":")
    if not attribute:
        raise ValueError(f"--model must be 'echo' or MODULE:NAME, got {spec!r}")
    model = getattr(importlib.import_module(module), attribute)
    return model if isinstance(model, LanguageModel) else model()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m chapbook_shared.lm.serve",
        description="Serve a language model on this machine over the OpenAI protocol, well-behaved or not.",
    )
    parser.add_argument(
        "--model",
        default="echo",
        help="'echo', or MODULE:NAME of a model or of a function that makes one (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--faults", default="", help="a script such as '429:1,ok,500,slow:0.5,cut,malformed'")
    parser.add_argument("--repeat", action="store_true", help="begin the script again at its end")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds that every answer takes at least")
    options = parser.parse_args(arguments)
    try:
        faults = Faults(options.faults, repeat=options.repeat)
        model = _named_model(options.model)
        server = Server(model, port=options.port, faults=faults, latency=options.latency, keep=0).start()
    except (ValueError, ImportError, AttributeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    print(f"serving {model.name} at {server.base_url}", file=sys.stderr, flush=True)
    stop.wait()
    server.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
