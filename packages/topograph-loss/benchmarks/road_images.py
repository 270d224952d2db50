"""Road-like test images: the ridges of a smooth random field, and a noisy prediction of them."""

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor


def roads(side: int, *, noise: float, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and targets, (batch, 1, side, side). Logits are the distance to the road's edge, disturbed by smooth noise."""
    rng = np.random.default_rng(seed)

    def field(sigma: float) -> np.ndarray:
        smooth = gaussian_filter(rng.normal(size=(batch, side, side)), (0, sigma, sigma), mode="wrap")
        return smooth / smooth.std()

    height = 0.25 - np.abs(field(12))
    logits = 8 * (height + noise * field(2))
    return torch.from_numpy(logits).float()[:, None], torch.from_numpy(height > 0).float()[:, None]
