"""Masks from a caller as boolean arrays, checked."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor


def as_masks(pred: Any, target: Any) -> tuple[Bool[np.ndarray, "*space"], Bool[np.ndarray, "*space"]]:
    """Both masks as contiguous boolean arrays of one shape, 2D or 3D, not empty. Raises ValueError otherwise."""
    P, G = _as_mask("pred", pred), _as_mask("target", target)
    if P.shape != G.shape:
        raise ValueError(f"pred has shape {P.shape} but target has shape {G.shape}: they must be equal")
    if P.ndim not in (2, 3):
        raise ValueError(f"masks must have 2 or 3 dimensions and no batch or channel axis, got shape {P.shape}")
    if P.size == 0:
        raise ValueError(f"masks must have at least one pixel, got shape {P.shape}")
    return P, G


def _as_mask(name: str, mask: Any) -> np.ndarray:
    if isinstance(mask, Tensor):
        mask = mask.detach().cpu()
        mask = mask.float() if mask.dtype == torch.bfloat16 else mask  # which numpy does not know
    array = np.asarray(mask)
    if array.dtype != np.bool_ and not np.isin(array, (0, 1)).all():
        wrong = array[~np.isin(array, (0, 1))][0]
        raise ValueError(f"{name} must be a binary mask of zeros and ones, got a value {wrong}: threshold scores first")
    return np.ascontiguousarray(array, dtype=np.bool_)
