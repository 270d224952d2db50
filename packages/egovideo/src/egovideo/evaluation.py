"""Zero-shot metrics of egocentric video models, on NumPy arrays.

    mir                  EPIC-KITCHENS-100 multi-instance retrieval: mAP and nDCG, both directions
    class_prototypes     one text embedding a class, from many narrations
    topk_accuracy, mean_class_accuracy, marginalise    classification
    egomcq               five videos a question, inter- and intra-video accuracy

A query ranks its gallery by falling similarity. What equal similarities mean is the argument `ties`:
"stable" keeps the gallery's order, "worst" puts the less relevant first, "average" is the expectation over all orders of the tied
(McSherry and Najork, ECIR 2008).
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray as Array

from chapbook_shared.validate import check_choice, check_int

__all__ = [
    "Precision",
    "Ties",
    "class_prototypes",
    "egomcq",
    "marginalise",
    "mean_class_accuracy",
    "mir",
    "narration_relevancy",
    "rank_metrics",
    "topk_accuracy",
]

Ties = Literal["stable", "average", "worst"]
Precision = Literal["graded", "binary"]
_CHUNK = 1 << 18  # similarities ranked at a time: the working set of a core, whatever the matrix's size


def mir(
    similarity: Float[Array, "videos texts"],
    relevancy: Float[Array, "_ _"],
    *,
    precision: Precision = "graded",
    ties: Ties = "stable",
) -> dict[str, dict[str, float]]:
    """mAP and nDCG of multi-instance retrieval (Damen et al., IJCV 2022), each as `v2t`, `t2v` and their mean `avg`.

    Args:
        similarity: any score that grows with similarity; only its order counts.
        relevancy: in [0, 1]; the ideal answer to a query has the items of relevancy 1 first.
        precision: how AP counts what was found so far; see `rank_metrics`. The default gives published numbers.

    A query without an item of relevancy 1 is left out of mAP, one whose relevancies are all 0 out of nDCG; how many is in
    `excluded_mAP` and `excluded_nDCG`. Raises ValueError for NaN, shapes that differ, relevancies outside [0, 1], and a direction in
    which no query is left.
    """
    _check_pair(similarity, relevancy, precision, ties)
    result: dict[str, dict[str, float]] = {"mAP": {}, "nDCG": {}, "excluded_mAP": {}, "excluded_nDCG": {}}
    for direction, transposed in (("v2t", False), ("t2v", True)):
        precisions, gains = _rank(similarity, relevancy, precision, ties, transposed)
        for metric, values, missing in (("mAP", precisions, "of relevancy 1"), ("nDCG", gains, "of any relevancy")):
            kept = values[~np.isnan(values)]
            if not len(kept):
                raise ValueError(f"relevancy has no item {missing} for any {direction} query: {metric} is not defined")
            result[metric][direction] = float(kept.mean())
            result[f"excluded_{metric}"][direction] = len(values) - len(kept)
    for metric in ("mAP", "nDCG"):
        result[metric]["avg"] = (result[metric]["v2t"] + result[metric]["t2v"]) / 2
    return result


def rank_metrics(
    similarity: Float[Array, "queries gallery"],
    relevancy: Float[Array, "_ _"],
    *,
    precision: Precision = "graded",
    ties: Ties = "stable",
) -> tuple[Float[Array, "queries"], Float[Array, "queries"]]:
    """Average precision and nDCG of each query (a row); NaN where they are not defined.

    AP is the mean, over the items of relevancy 1, of what was found up to there divided by the rank. "graded" counts each item found by
    its relevancy, as the benchmark's official code does and every published number; "binary" counts items of relevancy 1 alone.
    nDCG sums r / log2(rank + 1) over the first k ranks, k the number of items with r > 0, and divides by the greatest possible sum.
    """
    _check_pair(similarity, relevancy, precision, ties)
    return _rank(similarity, relevancy, precision, ties, False)


def narration_relevancy(
    verbs: Sequence[Hashable],
    nouns: Sequence[Sequence[Hashable]],
    text_verbs: Sequence[Hashable],
    text_nouns: Sequence[Sequence[Hashable]],
) -> Float[Array, "videos texts"]:
    """EPIC-KITCHENS' relevancy of a text to a clip: the mean of the verbs' agreement (0 or 1) and the nouns' intersection over union.

    Verbs and nouns are class numbers (or names); every clip and text has one verb and at least one noun.
    """
    if len(verbs) != len(nouns) or len(text_verbs) != len(text_nouns):
        raise ValueError(
            f"verbs and nouns must go in pairs, got {len(verbs)} and {len(nouns)}, {len(text_verbs)} and {len(text_nouns)}"
        )
    if any(not len(each) for each in [*nouns, *text_nouns]):
        raise ValueError("each clip and each text needs at least one noun")
    known = {noun: i for i, noun in enumerate(dict.fromkeys(n for each in [*nouns, *text_nouns] for n in each))}

    def multi_hot(lists: Sequence[Sequence[Hashable]]) -> Array:
        hot = np.zeros((len(lists), len(known)), np.float32)
        for row, each in enumerate(lists):
            hot[row, [known[noun] for noun in each]] = 1
        return hot

    left, right = multi_hot(nouns), multi_hot(text_nouns)
    both = left @ right.T
    union = left.sum(1)[:, None] + right.sum(1) - both
    codes = {verb: i for i, verb in enumerate(dict.fromkeys([*verbs, *text_verbs]))}
    ours, theirs = (np.array([codes[v] for v in each], int) for each in (verbs, text_verbs))
    return ((ours[:, None] == theirs) + both.astype(float) / union) / 2


def class_prototypes(
    embeddings: Float[Array, "texts dim"], classes: Sequence[Hashable]
) -> tuple[Float[Array, "classes dim"], list[Hashable]]:
    """One unit vector a class: the normalised mean of its texts' normalised embeddings. Classes in the order of their first text.

    Pass every distinct narration of a class once.
    """
    if len(classes) != len(embeddings):
        raise ValueError(
            f"there are {len(embeddings)} embeddings but {len(classes)} classes: one class a text is needed"
        )
    names = list(dict.fromkeys(classes))
    place = {name: i for i, name in enumerate(names)}
    unit = _unit(np.asarray(embeddings, float), "embeddings")
    sums = np.zeros((len(names), unit.shape[1]))
    np.add.at(sums, [place[name] for name in classes], unit)
    return _unit(sums, "the mean of a class"), names


def topk_accuracy(
    scores: Float[Array, "clips classes"], labels: Int[Array, "_"], k: int = 1, *, ties: Ties = "stable"
) -> float:
    """Share of the clips whose class is among the k with the highest scores.

    Of classes with equal scores, "stable" prefers the lower number, "worst" any but the right one, "average" draws.
    """
    check_choice("ties", ties, ("stable", "average", "worst"))
    check_int("k", k, minimum=1)
    _check_scores(scores, labels)
    own = scores[np.arange(len(labels)), labels][:, None]
    above = (scores > own).sum(1)
    equal = scores == own
    if ties == "stable":
        before = equal & (np.arange(scores.shape[1]) < labels[:, None])
        return float((above + before.sum(1) < k).mean())
    if ties == "worst":
        return float((above + equal.sum(1) <= k).mean())
    return float(np.clip((k - above) / equal.sum(1), 0, 1).mean())


def mean_class_accuracy(predicted: Int[Array, "_"], labels: Int[Array, "_"]) -> float:
    """The mean, over the classes that occur in `labels`, of the share of their clips that are predicted right."""
    if len(predicted) != len(labels) or not len(labels):
        raise ValueError(f"predicted and labels must have one entry a clip, got {len(predicted)} and {len(labels)}")
    _, codes = np.unique(labels, return_inverse=True)
    right = np.bincount(codes, weights=predicted == labels)
    return float((right / np.bincount(codes)).mean())


def marginalise(
    probabilities: Float[Array, "clips actions"], actions: Sequence[tuple[int, int]]
) -> tuple[Float[Array, "clips verbs"], Float[Array, "clips nouns"]]:
    """Probabilities of verbs and of nouns: sums over the actions (verb, noun) that have them. Columns are class numbers from 0."""
    if len(actions) != probabilities.shape[1]:
        raise ValueError(f"probabilities has {probabilities.shape[1]} columns but there are {len(actions)} actions")
    pairs = np.asarray(actions)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or (pairs < 0).any():
        raise ValueError("actions must be pairs (verb, noun) of class numbers >= 0")
    out = []
    for column in (pairs[:, 0], pairs[:, 1]):
        sums = np.zeros((column.max() + 1, len(probabilities)), probabilities.dtype)
        np.add.at(sums, column, probabilities.T)
        out.append(sums.T)
    return out[0], out[1]


def egomcq(
    similarity: Float[Array, "questions options"],
    answers: Int[Array, "_"],
    types: Int[Array, "_"],
    *,
    ties: Ties = "stable",
) -> dict[str, float]:
    """Accuracy on EgoMCQ: type 1 is `inter` (options of other videos), type 2 `intra` (of the same video). A type without a question is left out."""
    unknown = sorted(set(np.unique(types).tolist()) - {1, 2})
    if unknown:
        raise ValueError(f"types must be 1 (inter-video) or 2 (intra-video), got {unknown}")
    if len(types) != len(similarity):
        raise ValueError(f"there are {len(similarity)} questions but {len(types)} types")
    _check_scores(similarity, answers)
    parts: Mapping[str, Bool[Array, "questions"]] = {"inter": types == 1, "intra": types == 2}
    return {
        name: topk_accuracy(similarity[chosen], answers[chosen], 1, ties=ties)
        for name, chosen in parts.items()
        if chosen.any()
    }


def _check_pair(similarity: Array, relevancy: Array, precision: str, ties: str) -> None:
    check_choice("precision", precision, ("graded", "binary"))
    check_choice("ties", ties, ("stable", "average", "worst"))
    if similarity.shape != relevancy.shape:
        swapped = ": one of them is transposed" if similarity.shape == relevancy.shape[::-1] else ""
        raise ValueError(
            f"similarity is {similarity.shape} but relevancy is {relevancy.shape}{swapped}; both must be (videos, texts)"
        )
    if not similarity.size:
        raise ValueError(f"similarity must hold at least one video and one text, got {similarity.shape}")
    if np.isnan(similarity.min()):
        raise ValueError(f"similarity holds NaN: {int(np.isnan(similarity).sum())} of {similarity.size} entries")
    low, high = relevancy.min(), relevancy.max()
    if not (low >= 0 and high <= 1):
        raise ValueError(f"relevancy must lie in [0, 1], got values from {low} to {high}")


def _check_scores(scores: Array, labels: Array) -> None:
    if len(scores) != len(labels) or not len(labels):
        raise ValueError(f"there are {len(scores)} rows of scores but {len(labels)} labels")
    if np.isnan(scores).any():
        raise ValueError("scores hold NaN")
    if labels.min() < 0 or labels.max() >= scores.shape[1]:
        raise ValueError(f"labels must lie in [0, {scores.shape[1]}), got {labels.min()} to {labels.max()}")


def _unit(vectors: Array, name: str) -> Array:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not (np.isfinite(norms).all() and (norms > 0).all()):
        raise ValueError(f"{name} must be finite and not zero: there is no direction to normalise")
    return vectors / norms


def _rank(
    similarity: Array, relevancy: Array, precision: Precision, ties: Ties, transposed: bool
) -> tuple[Array, Array]:
    """Each query is ranked once, for both metrics; in chunks, on all cores (NumPy sorts without holding the interpreter)."""
    queries, gallery = similarity.shape[::-1] if transposed else similarity.shape
    rows = max(1, _CHUNK // gallery)
    precisions, gains = np.empty(queries), np.empty(queries)

    def work(start: int) -> None:
        part = slice(start, start + rows)
        if transposed:
            scores = np.ascontiguousarray(similarity[:, part].T)
            relevant = np.ascontiguousarray(relevancy[:, part].T)
        else:
            scores, relevant = similarity[part], relevancy[part]
        precisions[part], gains[part] = _rank_rows(scores, relevant, precision, ties)

    starts = range(0, queries, rows)
    if len(starts) == 1:
        work(0)
    else:
        with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as pool:
            list(pool.map(work, starts))
    return precisions, gains


def _rank_rows(scores: Array, relevancy: Array, precision: Precision, ties: Ties) -> tuple[Array, Array]:
    order, tied = _order(scores)
    if ties == "worst":
        for row in tied:
            order[row] = np.lexsort((relevancy[row], -scores[row]))
    found = np.take_along_axis(relevancy, order, 1)
    ranks = np.arange(1, scores.shape[1] + 1)
    discount = 1 / np.log2(ranks + 1)
    is_one = found == 1
    ones, related = is_one.sum(1), np.count_nonzero(found, axis=1)
    so_far = np.cumsum(found if precision == "graded" else is_one, axis=1, dtype=float)
    average = np.where(is_one, so_far, 0) @ (1 / ranks)
    gain = np.where(ranks <= related[:, None], found, 0) @ discount
    if ties == "average":
        for row in tied:
            average[row], gain[row] = _expected(scores[row][order[row]], found[row], precision, int(related[row]))
    ideal = np.sort(relevancy, axis=1)[:, ::-1] @ discount
    with np.errstate(invalid="ignore"):
        return average / ones, gain / ideal


def _order(scores: Array) -> tuple[Array, Array]:
    """Columns by falling score, the earlier first among equals; and the rows that have equals.

    NumPy sorts 32-bit numbers several times as fast as 64-bit ones, and keeps no order among equals. So the scores are sorted rounded, and
    what rounding and ties left in the wrong order, which are neighbours, is swapped into place.
    """
    with np.errstate(over="ignore"):  # beyond float32 is an infinity, in its place
        order = np.argsort(-scores.astype(np.float32), axis=1)
    ranked = np.take_along_axis(scores, order, 1)
    for _ in range(4):
        before, after = ranked[:, :-1], ranked[:, 1:]
        wrong = (before < after) | ((before == after) & (order[:, :-1] > order[:, 1:]))
        if not wrong.any():
            break
        wrong[:, 1:] &= ~wrong[:, :-1]  # no element is in two swaps
        rows, at = np.nonzero(wrong)
        for array in (order, ranked):
            array[rows, at], array[rows, at + 1] = array[rows, at + 1], array[rows, at]
    else:
        for row in np.flatnonzero(wrong.any(1)):  # long runs of equals
            order[row] = np.argsort(-scores[row], kind="stable")
            ranked[row] = scores[row][order[row]]
    return order, np.flatnonzero((ranked[:, 1:] == ranked[:, :-1]).any(1))


def _expected(scores: Array, relevancy: Array, precision: Precision, k: int) -> tuple[float, float]:
    """Sums behind AP and DCG of one ranked row, averaged over all orders of items with equal scores."""
    starts = np.flatnonzero(np.r_[True, scores[1:] != scores[:-1]])
    sizes = np.diff(np.r_[starts, len(scores)])
    group = np.repeat(np.arange(len(starts)), sizes)
    ranks = np.arange(1, len(scores) + 1)
    value = relevancy.astype(float)
    ones = np.add.reduceat((value == 1).astype(float), starts)
    total = np.add.reduceat(value, starts)
    worth = total if precision == "graded" else ones
    before = (np.cumsum(worth) - worth)[group]
    # Given that an item of relevancy 1 stands at place i of its group, the others before it are worth their mean each.
    others = (worth[group] - 1) / np.maximum(sizes[group] - 1, 1) * (ranks - 1 - starts[group])
    average = ones[group] / sizes[group] * (before + 1 + others) / ranks
    return float(average.sum()), float(((total / sizes)[group] / np.log2(ranks + 1))[:k].sum())
