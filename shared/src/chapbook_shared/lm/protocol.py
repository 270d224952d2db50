"""The language-model seam: three verbs that every model speaks.

    chat(messages, sampling)     -> Completion         one reply to a conversation
    complete(prompt, sampling)   -> list[Completion]   sampling.n continuations of raw text or token ids
    score(prompt, choices)       -> list[Score]        log-probability of each continuation

Each verb also exists for many requests (`chat_many`, `complete_many`, `score_many`: bounded concurrency, answers in the order of
the requests) and as a coroutine (`achat`, `acomplete`, `ascore`). What a model cannot do is in its `capabilities`; asking for it
raises `CapabilityError` before any work is done.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import index
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

Role = Literal["system", "user", "assistant"]
JsonSchema = Mapping[str, Any]
Prompt = str | Sequence[int]

_IMAGE_SIGNATURES = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"))


class CapabilityError(ValueError):
    """The request asks for something that this model cannot do.

    Where that shows only in the answer to one of many requests, `index` and `partial` say which and what was answered, as
    in `LanguageModelError`.
    """

    index: int | None = None
    partial: Sequence[Any] | None = None


@dataclass(frozen=True)
class Image:
    """An encoded image (PNG, JPEG, GIF or WebP bytes) inside a message."""

    data: bytes = field(repr=False)

    @classmethod
    def read(cls, path: str | Path) -> Image:
        """Read an image file."""
        image = cls(Path(path).read_bytes())
        _ = image.mime  # fails here, with the file at hand, rather than inside a request
        return image

    @property
    def mime(self) -> str:
        """The media type, told from the first bytes."""
        for signature, mime in _IMAGE_SIGNATURES:
            if self.data.startswith(signature):
                return mime
        if self.data[:4] == b"RIFF" and self.data[8:12] == b"WEBP":
            return "image/webp"
        raise ValueError(f"image must be PNG, JPEG, GIF or WebP bytes, got bytes that start with {self.data[:8]!r}")

    @property
    def data_url(self) -> str:
        """The image as a `data:` URL, the form in which OpenAI-compatible servers take it."""
        return f"data:{self.mime};base64,{base64.b64encode(self.data).decode('ascii')}"


Content = str | Sequence[str | Image]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation: text, or a sequence of texts and images."""

    role: Role
    content: Content

    def __post_init__(self) -> None:
        if self.role not in ("system", "user", "assistant"):
            raise ValueError(f"role must be 'system', 'user' or 'assistant', got {self.role!r}")

    @property
    def text(self) -> str:
        """The text parts, joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part for part in self.content if isinstance(part, str))

    @property
    def images(self) -> tuple[Image, ...]:
        """The image parts, in order."""
        if isinstance(self.content, str):
            return ()
        return tuple(part for part in self.content if isinstance(part, Image))


Messages = str | Sequence[Message | Mapping[str, Any]]


def as_messages(messages: Messages) -> tuple[Message, ...]:
    """Bring a conversation into one form.

    A string is one user turn; a mapping is `{"role": ..., "content": ...}` with text content.
    """
    if isinstance(messages, str):
        return (Message("user", messages),)
    turns = tuple(m if isinstance(m, Message) else Message(m["role"], m["content"]) for m in messages)
    if not turns:
        raise ValueError("messages must hold at least one turn, got none")
    return turns


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample. Every field is sent explicitly: no default of a checkpoint or a server is ever used.

    The defaults draw from the model's own distribution: temperature 1, nothing cut, nothing penalised.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), at every place; -inf forbids the token. Endpoints take at most 100 either way."""
    seed: int | None = None
    """The same request with the same seed gives the same sample, whatever else is in the batch. None draws a fresh seed."""
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings; the string is not part of the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends at these ids as it does at the model's own end of text."""
    n: int = 1
    """Samples per prompt (`complete` only); sample i of a seeded request is drawn with its own derived seed."""
    logprobs: int | None = None
    """None: none wanted. k >= 0: the log-probability of each sampled token and of the k likeliest alternatives."""

    def __post_init__(self) -> None:
        def require(name: str, ok: bool, wanted: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

        for name in ("top_k", "seed", "max_tokens", "n", "logprobs"):
            value = getattr(self, name)
            if value is not None or name in ("top_k", "max_tokens", "n"):
                require(name, hasattr(value, "__index__"), "a whole number")
                object.__setattr__(self, name, index(value))  # an integer of NumPy has no place in JSON
        require("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "finite and >= 0")
        require("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        require("top_k", self.top_k >= 0, ">= 0 (0 keeps the whole vocabulary)")
        require("min_p", 0 <= self.min_p < 1, "in [0, 1)")
        require("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        require("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        require("repetition_penalty", 0 < self.repetition_penalty < math.inf, "positive and finite")
        try:
            bias = tuple((index(token), float(value)) for token, value in self.logit_bias)
        except (TypeError, ValueError):
            bias = ((-1, 0.0),)
        require(
            "logit_bias",
            all(token >= 0 and value < math.inf for token, value in bias),
            "pairs of a token id (>= 0) and a number below infinity",
        )
        object.__setattr__(self, "logit_bias", bias)
        require("max_tokens", self.max_tokens >= 1, ">= 1")
        require("n", self.n >= 1, ">= 1")
        require("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "None or in 0..20")
        require("stop", not isinstance(self.stop, str) and all(self.stop), "a tuple of non-empty strings")


@dataclass(frozen=True)
class TokenLogprob:
    """One sampled token with its natural-log probability and the likeliest alternatives at its place."""

    token: str
    logprob: float
    id: int | None = None
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Completion:
    """What came back, with nothing decoded silently."""

    text: str
    finish_reason: str
    """"stop" (end of text or a stop string), "length" (max_tokens), "content_filter", or the server's own word."""
    model: str
    """The name that the server or checkpoint gave, which may differ from the one asked for."""
    usage: Usage | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else identifies the answer: system fingerprint, provider, request id."""


@dataclass(frozen=True)
class Score:
    """Natural-log probability of one continuation: the sum over its tokens, and how many tokens it has."""

    logprob: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a model can do; everything is off unless said."""

    chat: bool = False
    complete: bool = False
    score: bool = False
    images: bool = False
    videos: bool = False
    json_schema: bool = False
    token_prompts: bool = False
    """`complete` and `score` take token ids."""
    token_ids: bool = False
    """Completions carry token ids."""
    logprobs: int | None = None
    """None: no log-probabilities; k: at most k alternatives per token."""
    seed: bool = False
    unsupported: frozenset[str] = frozenset()
    """Names of `Sampling` fields that must stay at their defaults."""


_SAMPLING_DEFAULTS = {f.name: f.default for f in fields(Sampling)}


def check_request(
    name: str,
    can: Capabilities,
    verb: Literal["chat", "complete", "score"],
    sampling: Sampling | None = None,
    *,
    messages: Sequence[Message] = (),
    prompt: Prompt = "",
    schema: JsonSchema | None = None,
) -> None:
    """Raise `CapabilityError` if model `name` cannot do what is asked, before any work."""

    def refuse(what: str, instead: str) -> None:
        raise CapabilityError(f"{name} cannot {what}: {instead}")

    if not getattr(can, verb):
        refuse(verb, "see its capabilities for the verbs it has")
    if not can.images and any(m.images for m in messages):
        refuse("read images", "send text only, or use a vision model")
    if schema is not None and not can.json_schema:
        refuse("hold a reply to a JSON schema", "ask in words and parse the reply")
    if not can.token_prompts and not isinstance(prompt, str):
        refuse("take token ids", "pass the prompt as text")
    if sampling is None:
        return
    if sampling.logprobs is not None and (can.logprobs is None or sampling.logprobs > can.logprobs):
        refuse(f"return {sampling.logprobs} log-probabilities a token", f"its limit is {can.logprobs}")
    if sampling.seed is not None and not can.seed:
        refuse("be seeded", "leave seed=None")
    if verb == "chat" and sampling.n != 1:
        refuse(f"chat with n={sampling.n}", "ask n times, or use complete")
    for field_name in sorted(can.unsupported):
        if getattr(sampling, field_name) != _SAMPLING_DEFAULTS[field_name]:
            refuse(f"sample with {field_name}", f"leave it at {_SAMPLING_DEFAULTS[field_name]!r}")


@runtime_checkable
class LanguageModel(Protocol):
    """What every model offers; see the module's docstring."""

    name: str
    capabilities: Capabilities

    def chat(self, messages: Messages, sampling: Sampling = ..., *, schema: JsonSchema | None = None) -> Completion: ...

    def complete(self, prompt: Prompt, sampling: Sampling = ...) -> list[Completion]: ...

    def score(self, prompt: Prompt, choices: Sequence[Prompt]) -> list[Score]: ...

    def chat_many(
        self,
        conversations: Sequence[Messages],
        sampling: Sampling | Sequence[Sampling] = ...,
        *,
        schema: JsonSchema | None = None,
    ) -> list[Completion]: ...

    def complete_many(
        self, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] = ...
    ) -> list[list[Completion]]: ...

    def complete_each(self, requests: Iterable[tuple[Prompt, Sampling]]) -> Iterator[tuple[int, list[Completion]]]: ...

    def score_many(self, requests: Sequence[tuple[Prompt, Sequence[Prompt]]]) -> list[list[Score]]: ...

    async def achat(
        self, messages: Messages, sampling: Sampling = ..., *, schema: JsonSchema | None = None
    ) -> Completion: ...

    async def acomplete(self, prompt: Prompt, sampling: Sampling = ...) -> list[Completion]: ...

    async def ascore(self, prompt: Prompt, choices: Sequence[Prompt]) -> list[Score]: ...
