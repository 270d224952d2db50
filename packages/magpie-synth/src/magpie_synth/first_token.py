"""Control of the first generated token: forbid some, and flatten the rest.

Both act on the first position only, so the base of it all is two calls: one token with its own settings, then the rest from
prompt and token. The official code refuses the two together; here tokens are forbidden first and the temperature divides after.
Where a model takes no logit bias, forbidden first tokens are drawn again: with top_p = 1 that is the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from chapbook_shared.lm import Completion
from chapbook_shared.validate import check_positive

from .completing import Completer, Request, complete_rows
from .errors import BackendError

BLOCK = 512
"""Rows whose first tokens are drawn together."""
_TRIES = 100


@dataclass(frozen=True)
class FirstToken:
    """`suppressed` ids are never drawn first; the temperature of the first token is multiplied by `temperature`."""

    suppressed: frozenset[int] = frozenset()
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_positive("first_token_temperature", self.temperature)


def suppressed_ids(tokenizer: Any, beginnings: Sequence[str]) -> frozenset[int]:
    """Every id of the vocabulary whose text, white space before it aside, starts with one of `beginnings`.

    Raises ValueError naming those that match nothing.
    """
    texts = {
        id: tokenizer.decode([id], skip_special_tokens=False, clean_up_tokenization_spaces=False).lstrip()
        for id in sorted(tokenizer.get_vocab().values())
    }
    found: set[int] = set()
    for beginning in beginnings:
        matching = {id for id, text in texts.items() if beginning and text.startswith(beginning)}
        if not matching:
            raise ValueError(f"suppress_first holds {beginning!r}, with which no token of the vocabulary starts")
        found |= matching
    return frozenset(found)


def begun(model: Completer, requests: Sequence[Request], first: FirstToken) -> list[tuple[Request, Completion]]:
    """Draw the first token of each request, and give it with the completion that is this token alone, in order."""
    biased = "logit_bias" not in model.capabilities.unsupported
    bias = tuple((id, float("-inf")) for id in sorted(first.suppressed)) if biased else ()
    ids_from_logprobs = None if model.capabilities.token_ids or model.capabilities.logprobs is None else 0
    done: dict[str, tuple[Request, Completion]] = {}
    waiting = {request.key: request for request in requests}
    for attempt in range(_TRIES):
        tries = [
            replace(
                request,
                sampling=replace(
                    request.sampling,
                    max_tokens=1,
                    temperature=request.sampling.temperature * first.temperature,
                    seed=request.seed("first", attempt),
                    logit_bias=bias,
                    logprobs=ids_from_logprobs,
                ),
            )
            for request in waiting.values()
        ]
        for tried, completion in complete_rows(model, iter(tries)):
            ids = completion.token_ids
            if ids is None:
                raise BackendError(f"{model.name} gives no token ids: the first token cannot be controlled")
            if not (ids and ids[0] in first.suppressed):
                done[tried.key] = (waiting.pop(tried.key), completion)
        if not waiting:
            return [done[request.key] for request in requests]
    raise BackendError(
        f"{model.name} drew a suppressed first token {_TRIES} times running for {len(waiting)} of {len(requests)} rows "
        f"({', '.join(sorted(waiting)[:3])}): it has hardly another; suppress less, or use a model that takes a logit bias"
    )
