"""From logits to a token, exactly as a `Sampling` says, one row of a batch never touching another.

Order: repetition penalty (prompt and reply), frequency and presence penalties (reply), bias, temperature, top_k, top_p over what top_k
kept, min_p. A cut keeps every token as likely as the last one that it must keep, so that ties do not depend on an order.

The token is the winner of an exponential race (token v finishes after E_v / p_v, E_v exponential), run twice: first between blocks
of tokens, then within the block that won. A race turns on its two leaders alone, so the rounding of logits, which differs between
batches of different shapes, hardly ever decides it; inverting the cumulative distribution has a border at every token. The numbers
come from a counter-based stream (Philox) keyed by the request's seed, a fixed count of them a token: no state is shared between the
requests of a batch, and the same numbers are drawn on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from chapbook_shared.lm.protocol import Sampling

_BLOCK = 256


def numbers_per_token(vocabulary: int) -> int:
    """How many numbers the draw of one token takes: one for each block of the vocabulary and one for each token of a block."""
    return -(-vocabulary // _BLOCK) + _BLOCK


def stream(seed: int) -> np.random.Philox:
    """The numbers of a request."""
    return np.random.Philox(key=seed % 2**128)


def uniforms(streams: Sequence[np.random.Philox], count: int) -> Float[np.ndarray, "rows count"]:
    """The next `count` numbers of each stream, 52 bits each, in (0, 1) without its ends."""
    raw = np.stack([numbers.random_raw(count) for numbers in streams])
    return ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


class Settings:
    """The sampling settings of the rows of a batch, as tensors, and the token counts that penalties need."""

    def __init__(
        self, rows: Sequence[Sampling], prompts: Sequence[Sequence[int]], vocabulary: int, device: torch.device
    ) -> None:
        def column(name: str) -> Float[Tensor, "rows 1"]:
            values = [float(getattr(row, name)) for row in rows]
            return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)

        self.temperature = column("temperature")
        self.top_p = column("top_p")
        self.min_p = column("min_p")
        self.top_k = torch.tensor([row.top_k or vocabulary for row in rows], device=device).clamp(max=vocabulary)
        self.repetition = column("repetition_penalty")
        self.frequency = column("frequency_penalty")
        self.presence = column("presence_penalty")
        self.bias: Float[Tensor, "rows vocabulary"] | None = None
        if any(row.logit_bias for row in rows):
            self.bias = torch.zeros(len(rows), vocabulary, device=device)
            for place, sampling in enumerate(rows):
                bias = dict(sampling.logit_bias)
                self.bias[place, list(bias)] = torch.tensor(list(bias.values()), device=device)
        self.counts: Int[Tensor, "rows vocabulary"] | None = None
        self.seen: Bool[Tensor, "rows vocabulary"] | None = None
        if any(row.frequency_penalty or row.presence_penalty for row in rows):
            self.counts = torch.zeros(len(rows), vocabulary, dtype=torch.int32, device=device)
        if any(row.repetition_penalty != 1 for row in rows):
            self.seen = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts):
                self.seen[row, torch.tensor(prompt, device=device)] = True

    def select(self, rows: Int[Tensor, "kept"]) -> None:
        """Keep only these rows, in this order."""
        for name, value in vars(self).items():
            if value is not None:
                setattr(self, name, value[rows])

    def count(self, tokens: Int[Tensor, "rows"]) -> None:
        """Take note of the tokens just drawn."""
        if self.counts is not None:
            self.counts.scatter_add_(1, tokens.unsqueeze(1), torch.ones_like(tokens, dtype=torch.int32).unsqueeze(1))
        if self.seen is not None:
            self.seen.scatter_(1, tokens.unsqueeze(1), True)


def draw(
    logits: Float[Tensor, "rows vocabulary"], settings: Settings, numbers: Float[Tensor, "rows numbers"]
) -> Int[Tensor, "rows"]:
    """One token a row; temperature 0 takes the likeliest. Raises FloatingPointError on logits that are NaN.

    `numbers`: `numbers_per_token(vocabulary)` of them in (0, 1) a row, float64.
    """
    if bool(logits.amax(dim=1).isnan().any()):
        raise FloatingPointError(
            "the model's logits are NaN: its weights, or its attention on a padded batch, leave the range of its dtype; "
            "load it in float32 or set batch_size=1"
        )
    logits = penalised(logits, settings)
    greedy = settings.temperature.squeeze(1) == 0
    if bool(greedy.all()):
        return logits.argmax(dim=1)
    warm = torch.where(settings.temperature == 0, torch.ones_like(settings.temperature), settings.temperature)
    if not bool((warm == 1).all()):
        logits = logits / warm.to(logits.dtype)
    sampled = _race(cut(logits, settings), numbers)
    return torch.where(greedy, logits.argmax(dim=1), sampled) if bool(greedy.any()) else sampled


def penalised(logits: Float[Tensor, "rows vocabulary"], settings: Settings) -> Float[Tensor, "rows vocabulary"]:
    """Logits after the three penalties and the bias."""
    if settings.seen is not None:
        penalty = settings.repetition.to(logits.dtype)
        logits = torch.where(settings.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if settings.counts is not None:
        counts = settings.counts.to(logits.dtype)
        logits = logits - settings.frequency.to(logits.dtype) * counts
        logits = logits - settings.presence.to(logits.dtype) * (counts > 0)
    return logits if settings.bias is None else logits + settings.bias.to(logits.dtype)


def cut(logits: Float[Tensor, "rows vocabulary"], settings: Settings) -> Float[Tensor, "rows vocabulary"]:
    """Logits with -inf where top_k, top_p or min_p leave a token out."""
    vocabulary = logits.shape[1]
    if bool((settings.top_k < vocabulary).any()):
        largest = logits.topk(int(settings.top_k.max()), dim=1).values
        lowest = largest.gather(1, settings.top_k.unsqueeze(1) - 1)
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    rows = (settings.top_p.squeeze(1) < 1).nonzero().squeeze(1)
    if len(rows):
        kept = logits[rows]
        kept = kept.masked_fill(kept < _lowest_of_top_p(kept, settings.top_p[rows]), -torch.inf)
        logits = logits.index_copy(0, rows, kept)
    if bool((settings.min_p > 0).any()):
        lowest = logits.amax(dim=1, keepdim=True) + settings.min_p.log().to(logits.dtype)
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    return logits


def _lowest_of_top_p(
    logits: Float[Tensor, "rows vocabulary"], top_p: Float[Tensor, "rows 1"]
) -> Float[Tensor, "rows 1"]:
    """The smallest logit of the smallest set of likeliest tokens whose probability reaches top_p."""
    vocabulary = logits.shape[1]
    total = logits.double().logsumexp(dim=1, keepdim=True)
    size = min(512, vocabulary)
    while True:  # most distributions reach top_p within a few hundred tokens; sorting all is slow
        largest = logits.topk(size, dim=1).values
        mass = (largest.double() - total).exp().cumsum(dim=1)
        if size == vocabulary or bool((mass[:, -1:] >= top_p).all()):
            break
        size = min(size * 16, vocabulary)
    last = (mass < top_p).sum(dim=1, keepdim=True).clamp(max=size - 1)
    return largest.gather(1, last)


def _race(logits: Float[Tensor, "rows vocabulary"], numbers: Float[Tensor, "rows numbers"]) -> Int[Tensor, "rows"]:
    """The token that finishes first. One of weight 0 never finishes."""
    rows, vocabulary = logits.shape
    weights = (logits - logits.amax(dim=1, keepdim=True)).exp()
    blocks = torch.nn.functional.pad(weights, (0, -vocabulary % _BLOCK)).view(rows, -1, _BLOCK)
    exponential = -numbers.log()
    block = (exponential[:, :-_BLOCK] / blocks.sum(dim=2, dtype=torch.float64)).argmin(dim=1, keepdim=True)
    inside = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, _BLOCK)).squeeze(1)
    place = (exponential[:, -_BLOCK:] / inside.double()).argmin(dim=1)
    return block.squeeze(1) * _BLOCK + place
