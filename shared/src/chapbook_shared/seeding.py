"""Seeds: set every generator there is, and derive independent seeds that are the same in every process."""

from __future__ import annotations

import hashlib
import operator
import random
import sys


def derive_seed(seed: int, *path: str | int) -> int:
    """A seed in [0, 2**63) for the stream that `path` names, fixed by `seed` and `path` alone.

    Streams of different paths are independent for all practical purposes (SHA-256), and stable across processes, platforms and
    versions: `derive_seed(0, "train", 3)` never changes.
    """
    # repr keeps 1 and "1" apart; the length prefix that repr of a tuple gives keeps ("ab",) and ("a", "b") apart.
    # The plain values: NumPy's print differently from version to version.
    plain = (
        str.__str__(p) if isinstance(p, str) else operator.index(p) if hasattr(p, "__index__") else p for p in path
    )
    digest = hashlib.sha256(repr((int(seed), *plain)).encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators; NumPy and torch only if they are already imported."""
    random.seed(seed)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    if torch is not None:
        torch.manual_seed(seed)
