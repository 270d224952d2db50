"""The slow, obvious Topograph: upsample 5x, thicken every foreground pixel, label with scipy, look at each region in turn.

It shares no code and no idea but the definition with the package: tests compare against it, benchmarks time it.
"""

from collections.abc import Iterator

import numpy as np
from scipy import ndimage

FACES = {d: ndimage.generate_binary_structure(d, 1) for d in (2, 3)}
BOX = {d: ndimage.generate_binary_structure(d, d) for d in (2, 3)}


def thickened(P: np.ndarray, G: np.ndarray, *, fully_connected: bool = True, framed: bool = True) -> np.ndarray:
    """Class map P + 2 G of the 5x upsampled image with the foreground (or the background) thickened by one."""
    if framed:
        P, G = np.pad(P, 1), np.pad(G, 1)

    def thicken(mask: np.ndarray) -> np.ndarray:
        large = np.kron(mask, np.ones([5] * mask.ndim, bool)).astype(bool)
        if fully_connected:
            return ndimage.binary_dilation(large, BOX[mask.ndim])
        return ~ndimage.binary_dilation(~large, BOX[mask.ndim])

    return thicken(P).astype(int) + 2 * thicken(G)


def components(mask: np.ndarray) -> tuple[np.ndarray, int]:
    return ndimage.label(mask, FACES[mask.ndim])


def critical_masks(P: np.ndarray, G: np.ndarray, **options: bool) -> Iterator[np.ndarray]:
    """The pixels of each wrong region that does not touch exactly one TP and one TN region."""
    classes = thickened(P, G, **options)
    middle = 2 + 5 * options.get("framed", True)
    at_pixels = tuple(slice(middle, n - middle + 2, 5) for n in classes.shape)
    right = {c: components(classes == c)[0] for c in (3, 0)}
    for wrong in (1, 2):
        labels, n = components(classes == wrong)
        for i in range(1, n + 1):
            region = labels == i
            ring = ndimage.binary_dilation(region, FACES[P.ndim])
            touched = [len(np.unique(right[c][ring & (right[c] > 0)])) for c in (3, 0)]
            if touched != [1, 1]:
                yield region[at_pixels][tuple(slice(n) for n in P.shape)]


def loss(P: np.ndarray, G: np.ndarray, q: np.ndarray, **options: bool) -> float:
    """Sum over critical regions of the mean of q."""
    return sum(float(q[mask].mean()) for mask in critical_masks(P, G, **options))


def diu_terms(P: np.ndarray, G: np.ndarray, **options: bool) -> list[int]:
    """ker i0, coker i0, ker j0, coker j0."""
    classes = thickened(P, G, **options)
    terms = []
    for small, large in ((classes == 3, classes > 0), (classes == 0, classes < 3)):
        labels, n = components(large)
        hit = len(np.unique(labels[small]))
        terms += [components(small)[1] - hit, n - hit]
    return terms
