"""One forward pass of any transformers causal language model, and where a batch stands between two of them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

Padded = tuple[Int[Tensor, "rows width"], Bool[Tensor, "rows width"]]
"""Token ids and which of them are real."""


class Forward:
    """A model's forward pass, whatever its signature, and what its cache can do."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = model.device
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        accepted = inspect.signature(model.forward).parameters
        self.accepts = frozenset(accepted)
        # transformers renamed the argument and the output field; older releases and remote code have the old name.
        self.cache_name = next((name for name in ("cache", "past_key_values") if name in accepted), None)
        self.layers = _cache_layers(model) if self.cache_name else []
        attention_only = bool(self.layers) and not any(
            hasattr(layer, "update_recurrent_state") for layer in self.layers
        )
        self.sliding = any(getattr(layer, "is_sliding", False) for layer in self.layers)
        self.can_pad = attention_only
        """Padding is masked out exactly; a recurrent state would take it in."""
        self.can_select = self.cache_name is not None
        """Rows of the cache can be copied and dropped; False from the first time that it fails."""

    def can_share(self, prompts: Sequence[Sequence[int]]) -> bool:
        """Whether prompts of these lengths may follow a shared beginning.

        The shorter ones are padded between the two, which a mask hides but a sliding window counts.
        """
        return self.can_pad and (not self.sliding or len({len(prompt) for prompt in prompts}) == 1)

    def new_cache(self) -> Any:
        """An empty cache of our faster layers where the model has plain attention; None lets the model make its own."""
        if not self.can_pad:
            return None
        cache = DynamicCache(config=self.model.config)
        cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
        return cache

    def logit_device(self, logits: Tensor) -> torch.device:
        return torch.device("cpu") if logits.device.type == "mps" else logits.device  # no float64 there

    def __call__(
        self,
        ids: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows seen"] | None,
        positions: Int[Tensor, "rows width"],
        cache: Any,
        *,
        every: bool,
    ) -> tuple[Tensor, Any]:
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": None if mask is None else mask.long()}
        if "position_ids" in self.accepts:
            given["position_ids"] = positions
        if "use_cache" in self.accepts:
            given["use_cache"] = self.cache_name is not None
        if "logits_to_keep" in self.accepts and not every:
            given["logits_to_keep"] = 1
        if self.cache_name is not None:
            given[self.cache_name] = cache
        output = self.model(**given)
        logits = output.logits if every else output.logits[:, -1]
        return logits, getattr(output, self.cache_name) if self.cache_name is not None else None

    def cannot_select(self, error: Exception) -> None:
        if self.can_select:
            warnings.warn(
                f"the cache of {type(self.model).__name__} cannot be expanded ({error}): every row runs its whole prompt, and "
                "rows that have ended stay in the batch",
                stacklevel=2,
            )
        self.can_select = False


class State:
    """Where a batch stands: the cache and which of its positions are real."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.cache = forward.new_cache()
        self.mask: Bool[Tensor, "rows seen"] | None = None
        self.ids: Int[Tensor, "rows seen"] | None = None  # kept only without a cache
        self.padded = False

    @property
    def can_select(self) -> bool:
        return self.forward.can_select or self.forward.cache_name is None

    def run(self, padded: Padded, *, every: bool = False) -> Tensor:
        """Append tokens to every row; logits of the last (`every`: of each)."""
        ids, mask = (part.to(self.forward.device) for part in padded)
        self.padded = self.padded or not bool(mask.all())
        seen = mask if self.mask is None else torch.cat([self.mask, mask], dim=1)
        positions = (seen.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        self.mask = seen
        if self.forward.cache_name is None:
            self.ids = ids if self.ids is None else torch.cat([self.ids, ids], dim=1)
            logits, _ = self.forward(self.ids, seen, (seen.cumsum(dim=1) - 1).clamp(min=0), None, every=every)
            return logits[:, -ids.shape[1] :] if every else logits
        shown = seen if self.padded else None
        logits, self.cache = self.forward(ids, shown, positions, self.cache, every=every)
        return logits

    def step(self, tokens: Int[Tensor, "rows"]) -> Tensor:
        ids = tokens.unsqueeze(1)
        return self.run((ids, torch.ones_like(ids, dtype=torch.bool)))

    def select(self, rows: Int[Tensor, "chosen"]) -> bool:
        """Keep, copy or reorder rows. False, said once, if this model's cache cannot."""
        rows = rows.to(self.forward.device)
        if self.forward.cache_name is not None:
            try:
                self.cache.reorder_cache(rows)
            except Exception as error:
                self.forward.cannot_select(error)
                return False
        self.mask = self.mask[rows] if self.mask is not None else None
        self.ids = self.ids[rows] if self.ids is not None else None
        if self.mask is not None:
            self.padded = not bool(self.mask.all())
        return True


class GrowingLayer(DynamicLayer):
    """A cache layer for full attention that grows in steps; transformers' own copies all keys and values at every token."""

    spare = 64

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buffers: list[Tensor] = []  # keys and values, with room to grow
        self._length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = [key_states, value_states]
        if not self.is_initialized:
            self.lazy_initialization(*new)
        end = self._length + key_states.shape[-2]
        if not self._buffers or end > self._buffers[0].shape[-2]:
            larger = [states.new_zeros(*states.shape[:-2], end + self.spare, states.shape[-1]) for states in new]
            for buffer, old in zip(larger, self._buffers, strict=False):
                buffer[..., : self._length, :] = old[..., : self._length, :]
            self._buffers = larger
        for buffer, states in zip(self._buffers, new, strict=True):
            buffer[..., self._length : end, :] = states
        self._length = end
        self.keys, self.values = (buffer[..., :end, :] for buffer in self._buffers)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self._buffers:
            self._buffers = [buffer.index_select(0, beam_idx.to(buffer.device)) for buffer in self._buffers]
            self.keys, self.values = (buffer[..., : self._length, :] for buffer in self._buffers)


def left_padded(prompts: Sequence[Sequence[int]]) -> Padded:
    """Prompts as one block, each ending at its right edge."""
    return _block(prompts, left=True)


def right_padded(sequences: Sequence[Sequence[int]]) -> Padded:
    """Sequences as one block, each beginning at its left edge."""
    return _block(sequences, left=False)


def _block(sequences: Sequence[Sequence[int]], *, left: bool) -> Padded:
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[row, place] = torch.tensor(sequence, dtype=torch.long)
        mask[row, place] = True
    return ids, mask


def _cache_layers(model: Any) -> list[Any]:
    try:
        return list(DynamicCache(config=model.config).layers)
    except Exception:
        return []  # a model whose cache transformers does not know: it makes its own
