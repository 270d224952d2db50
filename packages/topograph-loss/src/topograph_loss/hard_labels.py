"""From scores and targets to hard labels: the class each pixel is predicted as, and the class it is.

Symbols   paper   here
          x       scores, after the activation p
          a       argmax_c p, ties to the lowest class; for one channel: foreground if and only if p > threshold
          k       one class, counted as a binary problem P = [a = k], G = [target = k]

Channels are exclusive (argmax) unless there is only one or they went through a sigmoid: then each is a binary problem of its own.
Nothing here carries gradient.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer, Shaped
from torch import Tensor

NOISES: dict[str | None, Callable[..., Tensor] | None] = {None: None, "uniform": torch.rand, "normal": torch.randn}


def channels_are_exclusive(n_channels: int, *, sigmoid: bool) -> bool:
    """Whether a pixel has one class (argmax over channels) or each channel is decided alone."""
    return n_channels > 1 and not sigmoid


def hard_prediction(
    p: Float[Tensor, "batch channel *space"], *, exclusive: bool, threshold: float = 0.5
) -> Integer[Tensor, "batch *space"] | Bool[Tensor, "batch channel *space"]:
    """Class index a (exclusive channels), or foreground per channel."""
    return p.argmax(1) if exclusive else p > threshold


def hard_target(
    target: Shaped[Tensor, "..."],
    shape: torch.Size,
    *,
    to_onehot_y: bool,
    exclusive: bool,
    soft_label: bool = False,
    ignore: Bool[Tensor, "batch *space"] | None = None,
) -> Integer[Tensor, "batch *space"] | Bool[Tensor, "batch channel *space"]:
    """The target in the form of `hard_prediction`, checked against scores of `shape`.

    Pixels under `ignore` may hold any value. Raises ValueError for a wrong shape, a label out of range, or a target that is not
    one-hot (exclusive) or not binary (otherwise) and is not declared a soft label.
    """
    n_channels, space = shape[1], shape[2:]
    if to_onehot_y:
        labels = _checked_labels(target, shape, ignore)
        if exclusive:
            return labels
        if n_channels == 1:
            return labels.bool().unsqueeze(1)
        return torch.stack([labels == k for k in range(n_channels)], 1)
    if target.shape != shape:
        hint = ": pass to_onehot_y=True for label maps" if target.shape in _label_map_shapes(shape) else ""
        raise ValueError(f"target has shape {tuple(target.shape)} but input has shape {tuple(shape)}{hint}")
    keep = torch.ones((), dtype=torch.bool, device=target.device) if ignore is None else ~ignore.unsqueeze(1)
    if soft_label:
        in_range = ((target >= 0) & (target <= 1)) | ~keep
        if not in_range.all():
            raise ValueError(f"soft target must lie in [0, 1], got {target[~in_range].flatten()[0].item()}")
        if exclusive and ((target.sum(1, keepdim=True) - 1).abs() * keep > 1e-3).any():
            raise ValueError("soft target must sum to 1 over the channels")
        return target.argmax(1) if exclusive else target > 0.5
    is_binary = (target == 0) | (target == 1) | ~keep
    if not is_binary.all():
        value = target.expand(shape)[~is_binary].flatten()[0].item()
        raise ValueError(
            f"target must be {'one-hot' if exclusive else 'binary'}, got a value {value}: pass soft_label=True"
        )
    if not exclusive:
        return target != 0
    total = target.sum(1, keepdim=True, dtype=torch.int64)
    if ((total != 1) & keep).any():
        raise ValueError(
            f"target must be one-hot: {int(((total != 1) & keep).sum())} pixels do not have exactly one class"
        )
    return target.to(torch.uint8).argmax(1).reshape(shape[0], *space)


def _label_map_shapes(shape: torch.Size) -> tuple[torch.Size, torch.Size]:
    batch, space = shape[0], shape[2:]
    return torch.Size([batch, 1, *space]), torch.Size([batch, *space])


def _checked_labels(target: Tensor, shape: torch.Size, ignore: Tensor | None) -> Tensor:
    with_channel, without = _label_map_shapes(shape)
    if target.shape not in (with_channel, without):
        raise ValueError(
            f"target has shape {tuple(target.shape)} but input has shape {tuple(shape)}: "
            f"with to_onehot_y=True a label map of shape {tuple(with_channel)} is needed"
        )
    target = target.reshape(without)
    labels = target.long()
    n_labels = max(shape[1], 2)  # one channel: 0 is background, 1 foreground
    bad = (labels != target) | (labels < 0) | (labels >= n_labels)
    if ignore is not None:
        labels = labels.masked_fill(bad & ignore, 0)
        bad &= ~ignore
    if bad.any():
        raise ValueError(
            f"target has label {target[bad][0].item()} but input has {shape[1]} channels: "
            f"labels must be integers in 0..{n_labels - 1}; ignore pixels with mask"
        )
    return labels


def shifted_scores(
    p: Float[Tensor, "batch channel *space"],
    *,
    exclusive: bool,
    noise: str,
    scale: float,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "batch channel *space"]:
    """p with one class of each sample raised and the others lowered: a random threshold, to see topology near the decision border.

    Per sample one class j and one r ~ U(0, 1) or N(0, 1) are drawn; t = scale * r / (C - 1); p_j gains t, every other class loses
    t / (C - 1). A channel that is decided alone is the foreground of a two-class problem (C = 2) with a draw of its own.
    """
    draw = NOISES[noise]
    assert draw is not None
    device = "cpu" if generator is None else generator.device
    batch, channels = p.shape[:2]
    classes = channels if exclusive else 2
    rows = (batch,) if exclusive else (batch, channels)
    j = torch.randint(classes, rows, generator=generator, device=device)
    t = draw(rows, generator=generator, device=device, dtype=p.dtype) * scale / (classes - 1)
    if exclusive:
        shift = (-t / (classes - 1)).unsqueeze(1).repeat(1, channels).scatter(1, j.unsqueeze(1), t.unsqueeze(1))
    else:
        shift = torch.where(j == 1, t, -t)
    return p + shift.to(p.device).reshape(batch, channels, *[1] * (p.ndim - 2))


def binary_problem(labels: np.ndarray, sample: int, k: int, *, exclusive: bool) -> Bool[np.ndarray, "*space"]:
    """The mask of class k in one sample."""
    mask: np.ndarray = labels[sample] == k if exclusive else labels[sample, k]
    return mask
