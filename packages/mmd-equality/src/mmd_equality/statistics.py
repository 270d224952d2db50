"""The statistics of section 3 and appendix B of the paper, as functions of sums and counts.

Symbols   paper             here
          S_XX, S_YY, S_XY  `Sums.xx`, `.yy`, `.xy`: kernel sums over ordered pairs i != j inside a sample, over cross pairs
          N, m              rows of a sample, number of prompts
          c^1_i, c^2_i      counts of a distinct (prompt, completion) row in each sample

Everything works on arrays whose last axis runs over label assignments, so one call serves the data and all permutations.

Three normalisations, because the paper and its code differ:
- "pairs" (the official code; default): each sum is divided by the number of *same-prompt* pairs it runs over.
- "paper" (eq. 4): by N1 (N1 - 1), N2 (N2 - 1) and N1 N2.
- "per_prompt": the weighted mean over prompts of the one-prompt MMD^2. Equals "pairs" when all prompts have equal counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BASELINES", "NORMALIZATIONS", "Sums", "baseline_from_counts", "combine", "mmd2", "per_prompt_mmd2"]

NORMALIZATIONS = ("pairs", "paper", "per_prompt")
BASELINES = ("l1", "l2", "chi2")

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Sums:
    """Kernel sums of m prompts for B label assignments; every field is float64 [m, B] (or broadcasts to it)."""

    xx: Array
    xy: Array
    yy: Array
    n_x: Array
    n_y: Array

    @classmethod
    def of_labels(cls, values: NDArray[Any], scale: float, in_x: NDArray[np.bool_]) -> Sums:
        """Sums of one prompt and one assignment: values [n, n] symmetric, in_x bool [n]."""
        off = np.asarray(values, dtype=np.float64).copy()
        np.fill_diagonal(off, 0.0)
        x, y = in_x, ~in_x
        cell = [off[np.ix_(a, b)].sum() / scale for a, b in ((x, x), (x, y), (y, y))]
        return cls(*(np.array([[v]]) for v in (*cell, float(x.sum()), float(y.sum()))))


def per_prompt_mmd2(sums: Sums) -> Array:
    """MMD^2 of each prompt alone, unbiased (eq. 4 with one prompt), [m, B]. NaN where a side has fewer than 2 rows."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(
            sums.xx / (sums.n_x * (sums.n_x - 1))
            - 2 * sums.xy / (sums.n_x * sums.n_y)
            + sums.yy / (sums.n_y * (sums.n_y - 1))
        )


def mmd2(sums: Sums, normalization: str = "pairs", weights: Array | None = None) -> Array:
    """MMD^2 over all prompts (eq. 4), float64 [B]. weights: float [m] for "per_prompt", default equal.

    A label assignment that leaves no pair for some term gives +inf, so that it counts against rejection; never NaN.
    """
    if normalization == "per_prompt":
        each = per_prompt_mmd2(sums)
        share = np.full(len(each), 1 / len(each)) if weights is None else weights / weights.sum()
        total = np.asarray(share @ each)
    else:
        n_x, n_y = np.atleast_2d(sums.n_x), np.atleast_2d(sums.n_y)
        if normalization == "pairs":
            n_xx, n_xy, n_yy = ((n_x * (n_x - 1)).sum(0), (n_x * n_y).sum(0), (n_y * (n_y - 1)).sum(0))
        else:
            a, b = n_x.sum(0), n_y.sum(0)
            n_xx, n_xy, n_yy = a * (a - 1), a * b, b * (b - 1)
        total = combine(sums.xx.sum(0), sums.xy.sum(0), sums.yy.sum(0), n_xx, n_xy, n_yy)
    return np.where(np.isnan(total), np.inf, total)


def combine(xx: Any, xy: Any, yy: Any, n_xx: Any, n_xy: Any, n_yy: Any) -> Array:
    """S_XX / n_XX - 2 S_XY / n_XY + S_YY / n_YY, with NaN where a count is zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        terms = [np.where(n > 0, s / np.where(n > 0, n, 1), np.nan) for s, n in ((xx, n_xx), (xy, n_xy), (yy, n_yy))]
    return np.asarray(terms[0] - 2 * terms[1] + terms[2], dtype=np.float64)


def baseline_from_counts(name: str, c1: NDArray[Any], total: NDArray[Any], n1: int, n2: int) -> Array:
    """Sum over distinct rows of a baseline statistic; c1 int [k, B] counts in sample 1, total int [k, 1] in both; float64 [B].

    l1 = sum |c1/N1 - c2/N2|; l2 = sum (c1/N1 - c2/N2)^2;
    chi2 = sum ((N2 c1 - N1 c2)^2 - N2^2 c1 - N1^2 c2) / (c1 + c2) (eq. 9, in the unequal-size form; the whole bracket is divided).
    Sums run over integers, so that equal statistics are equal numbers; floats where the squares would not fit 64 bits.
    """
    dtype = np.int64 if (n1 * n2) ** 2 < 2**60 else np.float64
    c1 = np.asarray(c1, dtype=dtype)
    c2 = np.asarray(total, dtype=dtype) - c1
    gap = n2 * c1 - n1 * c2
    if name == "l1":
        return np.abs(gap).sum(axis=0) / (n1 * n2)
    if name == "l2":
        return (gap * gap).sum(axis=0) / float(n1 * n2) ** 2
    bracket = gap * gap - n2 * n2 * c1 - n1 * n1 * c2
    # Rows with the same total share a denominator: add their integers first.
    sizes = np.asarray(total, dtype=np.int64).reshape(-1)
    out = np.zeros(c1.shape[1])
    for size in np.unique(sizes):
        out += bracket[sizes == size].sum(axis=0) / float(size)
    return out
