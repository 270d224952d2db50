"""When a document has stopped changing, and when a query is new (DRAFT, sections on termination and diversity).

Symbols   paper   here
          t_i     `new`, t_(i-1) `old`: two versions of a document
          Δ       `stability`: high means little change (the paper's word for it, degree of change, is inverted)
          φ       `phi`: a query counts as new below this similarity
          τ       `tau`: a document has converged above this stability
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.floating]

_MAX_ORDER = 4
_SMOOTHING = 5.0  # the constant of Chen & Cherry's method 4


def bleu4(hypothesis: str, reference: str) -> float:
    """Sentence BLEU-4 in [0, 1] on lower-cased words, uniform weights (Papineni et al. 2002).

    An n-gram order without a match is smoothed by method 4 of Chen & Cherry (2014): its k-th occurrence counts as
    ln(len) / (5 * 2^k) matches. Two texts without a common word give 0. Identical texts of fewer than four words stay far below 1,
    since their missing orders are smoothed too.
    """
    hyp, ref = hypothesis.lower().split(), reference.lower().split()
    if not hyp or not ref:
        return 0.0
    log_precision, unmatched = 0.0, 0
    for order in range(1, _MAX_ORDER + 1):
        grams, known = _ngrams(hyp, order), _ngrams(ref, order)
        matches: float = sum((grams & known).values())
        if matches == 0:
            if order == 1:
                return 0.0
            unmatched += 1
            if len(hyp) == 1:  # ln(1) = 0 leaves nothing to smooth with: the order does not count
                continue
            matches = math.log(len(hyp)) / (2**unmatched * _SMOOTHING)
        log_precision += math.log(matches / max(1, grams.total())) / _MAX_ORDER
    brevity = min(0.0, 1.0 - len(ref) / len(hyp))
    return math.exp(brevity + log_precision)


def cosine(a: Vector, b: Vector) -> float:
    """Cosine similarity of two vectors; 0 if one of them is zero or not finite, so that a comparison never sees NaN."""
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    similarity = float(np.dot(a, b)) / norm if norm > 0 else 0.0
    return similarity if math.isfinite(similarity) else 0.0


def stability(old: str, new: str, old_vector: Vector, new_vector: Vector) -> float:
    """Δ: the mean of the cosine similarity and BLEU-4 (the older text is the reference).

    Texts that differ in white space alone are equal and give 1, whatever BLEU makes of their length.
    """
    if old.split() == new.split():
        return 1.0
    return (cosine(old_vector, new_vector) + bleu4(new, old)) / 2


def is_diverse(query: Vector, earlier: Sequence[Vector], *, phi: float) -> bool:
    """Whether the query is less similar than φ to every earlier one (strictly)."""
    return all(cosine(query, other) < phi for other in earlier)


def _ngrams(words: list[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))
