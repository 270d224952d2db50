"""Loops compiled by numba, when numba is installed (`pip install 'mmd-equality[fast]'`). Everything also runs without."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


def available() -> bool:
    """Whether numba can be used; MMD_EQUALITY_NO_NUMBA=1 switches it off."""
    return os.environ.get("MMD_EQUALITY_NO_NUMBA", "") in ("", "0") and importlib.util.find_spec("numba") is not None


@cache
def _hamming_loop() -> Any:
    import numba

    @numba.njit(nogil=True, cache=False)
    def loop(codes: Any, out: Any) -> None:
        n, length = codes.shape
        for i in range(n):
            out[i, i] = length
            for j in range(i + 1, n):
                same = 0
                for k in range(length):
                    same += codes[i, k] == codes[j, k]
                out[i, j] = same
                out[j, i] = same

    return loop


def hamming_counts(codes: NDArray[Any]) -> NDArray[np.int32]:
    """Equal positions of all pairs of rows: unsigned int [n, L] -> int32 [n, n]."""
    out = np.empty((len(codes), len(codes)), dtype=np.int32)
    _hamming_loop()(codes, out)
    return out
