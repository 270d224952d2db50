"""A model that says what it was told to: for unit tests and offline replay, never for evidence.

Its tokens are words with the white space before them, each of probability 1/2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from chapbook_shared.lm._base import BatchModel, ChatRequest, CompleteRequest, ScoreRequest, sample_seed
from chapbook_shared.lm.protocol import (
    Capabilities,
    Completion,
    JsonSchema,
    Message,
    Prompt,
    Sampling,
    Score,
    TokenLogprob,
    Usage,
)

Reply = str | Completion
ChatScript = Callable[[tuple[Message, ...], Sampling], Reply] | Mapping[str, Reply] | Sequence[Reply] | str
CompleteScript = Callable[[Prompt, Sampling], Reply] | Mapping[str, Reply] | Sequence[Reply] | str
ScoreScript = Callable[[Prompt, Prompt], float] | Mapping[tuple[str, str], float]

_LOGPROB = math.log(0.5)


@dataclass(frozen=True)
class Call:
    """One request that a scripted model has answered."""

    verb: Literal["chat", "complete", "score"]
    request: Any
    """The messages, the prompt, or the pair of prompt and choices."""
    sampling: Sampling | None = None
    schema: JsonSchema | None = None


class ScriptedModel(BatchModel):
    """Answers from a script, and notes what it was asked in `calls`.

    Args:
        chat: the script for `chat`: a function of (messages, sampling); a mapping from the text of the last message; a sequence of
            replies used up in order; or one string, always said. None: the model cannot chat.
        complete: the same for `complete`, a function of (prompt, sampling), called once for each of the n samples.
        score: a function of (prompt, choice) that gives a log-probability, or a mapping from such pairs of texts.
        name: the model's name.
        capabilities: what else it pretends to do or not to do.

    A reply that is a string is cut at stop strings and at `max_tokens` words as a real one would be; a `Completion` is returned
    as it is.
    """

    def __init__(
        self,
        chat: ChatScript | None = None,
        *,
        complete: CompleteScript | None = None,
        score: ScoreScript | None = None,
        name: str = "scripted",
        capabilities: Capabilities | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.capabilities = capabilities or Capabilities(
            chat=chat is not None,
            complete=complete is not None,
            score=score is not None,
            images=True,
            json_schema=True,
            token_prompts=callable(complete) or callable(score),
            logprobs=20,
            seed=True,
        )
        self.calls: list[Call] = []
        self._chat_script, self._complete_script, self._score_script = chat, complete, score
        self._used = {"chat": 0, "complete": 0}

    def _chat_batch(self, requests: list[ChatRequest], schema: JsonSchema | None) -> list[Completion]:
        answers = []
        for messages, sampling in requests:
            self.calls.append(Call("chat", messages, sampling, schema))
            reply = self._reply("chat", self._chat_script, messages, messages[-1].text, sampling)
            answers.append(self._completion(reply, "".join(message.text for message in messages), sampling))
        return answers

    def _complete_batch(self, requests: list[CompleteRequest]) -> list[list[Completion]]:
        answers = []
        for prompt, sampling in requests:
            self.calls.append(Call("complete", prompt, sampling))
            each = [replace(sampling, n=1, seed=sample_seed(sampling.seed, i)) for i in range(sampling.n)]
            replies = [self._reply("complete", self._complete_script, prompt, prompt, sample) for sample in each]
            answers.append([self._completion(reply, prompt, sampling) for reply in replies])
        return answers

    def _score_batch(self, requests: list[ScoreRequest]) -> list[list[Score]]:
        answers = []
        for prompt, choices in requests:
            self.calls.append(Call("score", (prompt, choices)))
            answers.append([Score(self._logprob(prompt, choice), _length(choice)) for choice in choices])
        return answers

    def _prompt_logprobs_batch(self, prompts: list[Prompt]) -> list[tuple[TokenLogprob, ...]]:
        return [
            tuple(TokenLogprob(word, math.nan if i == 0 else _LOGPROB) for i, word in enumerate(_words(prompt)))
            for prompt in prompts
        ]

    def _reply(self, verb: str, script: Any, request: Any, text: Prompt, sampling: Sampling) -> Reply:
        if isinstance(script, str):
            return script
        if callable(script):
            return script(request, sampling)
        if isinstance(script, Mapping):
            if text not in script:
                raise KeyError(f"{self.name} has no {verb} reply to {text!r}")
            return script[text]
        used = self._used[verb]
        if used == len(script):
            raise IndexError(f"{self.name} has used up its {used} {verb} replies")
        self._used[verb] += 1
        return script[used]

    def _logprob(self, prompt: Prompt, choice: Prompt) -> float:
        script = self._score_script
        if isinstance(script, Mapping):
            if (prompt, choice) not in script:
                raise KeyError(f"{self.name} has no score for {choice!r} after {prompt!r}")
            return script[prompt, choice]  # type: ignore[index]
        assert script is not None  # its capabilities say so
        return script(prompt, choice)

    def _completion(self, reply: Reply, prompt: Prompt, sampling: Sampling) -> Completion:
        if isinstance(reply, Completion):
            return reply
        text = reply
        for stop in sampling.stop:
            text = text.split(stop, 1)[0]
        words = _words(text)
        kept = words[: sampling.max_tokens]
        return Completion(
            text="".join(kept),
            finish_reason="length" if len(kept) < len(words) else "stop",
            model=self.name,
            usage=Usage(_length(prompt), len(kept)),
            logprobs=None
            if sampling.logprobs is None
            else tuple(
                TokenLogprob(word, _LOGPROB, None, ((word, _LOGPROB),) if sampling.logprobs else ()) for word in kept
            ),
        )


def _words(prompt: Prompt) -> list[str]:
    if not isinstance(prompt, str):
        return [f" {token}" for token in prompt]
    return re.findall(r"\s*\S+|\s+$", prompt)


def _length(prompt: Prompt) -> int:
    return len(_words(prompt))
