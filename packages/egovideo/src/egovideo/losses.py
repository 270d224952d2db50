"""Contrastive losses over the global batch, right under distributed data parallelism.

Symbols   here
    V, T  video, text: unit rows, row i of one belongs to row i of the other
    s     scale: exp(logit_scale), 1 / temperature
    S     s V T^t

Each rank passes its own rows; ranks may hold different numbers. With `gather="grad"` each rank computes its own rows of S against all
columns and returns its share times the number of ranks, so that the mean over ranks, which DDP takes of gradients and trainers of
logged losses, is the loss of one process on the whole batch. `gather="local"` is what CLIP-style code often does: features of
other ranks are constants, and the averaged gradient is the true one divided by the number of ranks.
"""

from __future__ import annotations

# ruff: noqa: E402
from typing import Any, Literal

from chapbook_shared.validate import check_choice, check_nonnegative, import_extra

import_extra("torch", "egovideo[torch]")

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

__all__ = ["Gather", "clip_loss", "ego_nce", "gather_rows", "in_batch_accuracy", "max_margin_loss", "same_action"]

Gather = Literal["grad", "local"] | None
Scale = float | Float[Tensor, ""]


def clip_loss(
    video: Float[Tensor, "local dim"], text: Float[Tensor, "local dim"], scale: Scale, *, gather: Gather = "grad"
) -> Float[Tensor, ""]:
    """Symmetric InfoNCE, in nats: (CE(S, diagonal) + CE(S^t, diagonal)) / 2.

    `gather` says what happens when torch.distributed runs (see the module); None uses this rank's rows alone.
    """
    batch = _Batch(video, text, gather)
    rows, columns = batch.logits(scale)
    own = torch.arange(batch.first, batch.first + len(rows), device=rows.device)
    positive = rows.gather(1, own[:, None]).squeeze(1)
    return batch.mean(rows.logsumexp(1) + columns.logsumexp(1) - 2 * positive) / 2


def ego_nce(
    video: Float[Tensor, "local dim"],
    text: Float[Tensor, "local dim"],
    scale: Scale,
    nouns: Shaped[Tensor, "local nouns"],
    verbs: Shaped[Tensor, "local verbs"],
    *,
    gather: Gather = "grad",
) -> Float[Tensor, ""]:
    """EgoNCE (Lin et al., NeurIPS 2022, eq. 4-5), in nats: positives are all items that share a noun and a verb with the query.

    -log of the probability that falls on the positives, symmetric. `nouns` and `verbs` are multi-hot. Its hard negatives are neighbouring
    clips of the same video: append them to the batch (`HardNegatives` and the collator do).
    """
    batch = _Batch(video, text, gather)
    rows, columns = batch.logits(scale)
    all_nouns, all_verbs = (
        gather_rows(part.to(video.dtype), grad=False) if batch.many else part.to(video.dtype) for part in (nouns, verbs)
    )
    share = same_action(all_nouns, all_verbs)[batch.first : batch.first + len(rows)]
    hidden = ~share
    loss = sum(side.logsumexp(1) - side.masked_fill(hidden, -torch.inf).logsumexp(1) for side in (rows, columns))
    assert isinstance(loss, Tensor)
    return batch.mean(loss) / 2


def same_action(
    nouns: Shaped[Tensor, "batch nouns"], verbs: Shaped[Tensor, "batch verbs"]
) -> Bool[Tensor, "batch batch"]:
    """Which pairs share at least one noun and at least one verb; every item does with itself."""
    nouns, verbs = nouns.float(), verbs.float()
    shared = (nouns @ nouns.T > 0) & (verbs @ verbs.T > 0)
    return shared | torch.eye(len(nouns), dtype=torch.bool, device=nouns.device)


def max_margin_loss(
    video: Float[Tensor, "local dim"], text: Float[Tensor, "local dim"], *, margin: float = 0.2, gather: Gather = "grad"
) -> Float[Tensor, ""]:
    """Bidirectional max-margin ranking: the mean over all wrong pairs of max(0, margin + wrong - right), cosine similarities.

    A batch of one pair has no wrong pair; its loss is 0.
    """
    check_nonnegative("margin", margin)
    batch = _Batch(video, text, gather)
    rows, columns = batch.logits(1.0)
    own = torch.arange(batch.first, batch.first + len(rows), device=rows.device)
    right = rows.gather(1, own[:, None])
    wrong = torch.ones_like(rows, dtype=torch.bool).scatter(1, own[:, None], False)
    violations = [(side + margin - right).clamp(min=0).masked_fill(~wrong, 0).sum(1) for side in (rows, columns)]
    return batch.mean(violations[0] + violations[1]) / max(2 * (batch.total - 1), 1)


def in_batch_accuracy(video: Float[Tensor, "batch dim"], text: Float[Tensor, "batch dim"]) -> float:
    """Share of the videos whose own text is the most similar of the batch."""
    return float(((video @ text.T).argmax(1) == torch.arange(len(video), device=video.device)).float().mean())


def gather_rows(rows: Float[Tensor, "local dim"], *, grad: bool = True) -> Float[Tensor, "all dim"]:
    """The rows of all ranks, in the order of ranks, which may hold different numbers. Without torch.distributed: the rows themselves.

    With `grad=True` gradients reach the rank that a row came from, from every rank; otherwise the rows of others are constants.
    """
    if not _distributed():
        return rows
    if grad:
        gathered: Tensor = _GatherRows.apply(rows)
        return gathered
    sizes = _sizes(rows)
    with torch.no_grad():
        parts = list(_gather(rows, sizes).split(sizes))
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


class _Batch:
    """This rank's rows against everybody's."""

    def __init__(self, video: Tensor, text: Tensor, gather: Gather):
        check_choice("gather", gather, ("grad", "local", None))
        if video.shape != text.shape or not len(video):
            raise ValueError(
                f"video and text must be (batch, dim) of one shape and not empty, got {tuple(video.shape)}, {tuple(text.shape)}"
            )
        self.many = gather is not None and _distributed()
        self.local = gather == "local" and self.many
        self.world, self.first = 1, 0
        self.video, self.text = self.all_video, self.all_text = video, text
        if self.many:
            sizes = _sizes(video)
            self.world, self.first = len(sizes), sum(sizes[: dist.get_rank()])
            self.all_video, self.all_text = (gather_rows(part, grad=not self.local) for part in (video, text))
            if self.local:  # every rank takes the whole loss
                self.video, self.text, self.first = self.all_video, self.all_text, 0
        self.total = len(self.all_video)

    def logits(self, scale: Scale) -> tuple[Tensor, Tensor]:
        """S and S^t, the rows of this rank."""
        return scale * self.video @ self.all_text.T, scale * self.text @ self.all_video.T

    def mean(self, losses: Tensor) -> Tensor:
        """The mean over the global batch once ranks are averaged."""
        return losses.sum() * (1 if self.local else self.world) / self.total


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.sizes = _sizes(rows)
        return _gather(rows, ctx.sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        # gloo has no reduce-scatter; the features of a batch are small.
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total.split(ctx.sizes)[dist.get_rank()]


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _sizes(rows: Tensor) -> list[int]:
    mine = torch.tensor([len(rows)], device=rows.device)
    sizes = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, mine)
    return [int(size) for size in sizes]


def _gather(rows: Tensor, sizes: list[int]) -> Tensor:
    longest = max(sizes)
    padded = rows.new_zeros(longest, rows.shape[1])
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
