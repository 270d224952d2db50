"""Label images from files: .npy, .png and other pictures, .nii and .nii.gz. A TIFF of several pages is a volume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from chapbook_shared.validate import import_extra

PICTURES = (".png", ".tif", ".tiff", ".bmp")
SUFFIXES = (".npy", *PICTURES, ".nii", ".nii.gz")


def suffix_of(path: Path) -> str:
    """The suffix that tells the format, lower case; "" if it is none of `SUFFIXES`."""
    name = path.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def read_labels(path: Path) -> Shaped[np.ndarray, "*space"]:
    """The image as an array of labels, 2D or 3D.

    Raises ValueError, naming the file, for what is not a readable label image, and ImportError naming the extra for its format.
    """
    suffix = suffix_of(path)
    if not suffix:
        raise ValueError(f"{path}: unknown format, use one of {', '.join(SUFFIXES)}")
    if suffix == ".npy":
        labels = _read(path, lambda: np.load(path, allow_pickle=False))
    elif suffix in PICTURES:
        pillow = import_extra("PIL.Image", "topograph-loss[images]")
        labels = _read(path, lambda: _pages(pillow, path))
    else:
        nibabel = import_extra("nibabel", "topograph-loss[images]")
        labels = _read(path, lambda: np.asanyarray(nibabel.load(path).dataobj))
    if labels.ndim not in (2, 3) or labels.size == 0:
        raise ValueError(f"{path}: needs 2 or 3 axes and at least one pixel, got shape {labels.shape}")
    if labels.dtype.kind not in "buif" or not (labels == np.rint(labels)).all():
        raise ValueError(f"{path}: labels must be whole numbers, got {labels.dtype} values; threshold scores first")
    return labels


def _read(path: Path, load: Callable[[], Any]) -> np.ndarray:
    try:
        return np.asarray(load())
    except Exception as error:  # each format has errors of its own
        raise ValueError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error


def _pages(pillow: Any, path: Path) -> np.ndarray:
    """The picture as an array; one of several pages as a volume."""
    with pillow.open(path) as picture:
        if picture.mode not in ("1", "L", "P", "I", "I;16", "I;16B", "F"):
            raise ValueError(f"a {picture.mode} picture has no labels: save masks with one channel")
        pages = []
        for page in range(getattr(picture, "n_frames", 1)):
            picture.seek(page)
            pages.append(np.array(picture))
    return pages[0] if len(pages) == 1 else np.stack(pages)
