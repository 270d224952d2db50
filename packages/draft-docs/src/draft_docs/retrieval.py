"""How well tools are found by their documents: NDCG@k of BM25, or of any embedder."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from draft_docs.embedders import Embedder

Scores = Callable[[str], Sequence[float]]
"""A query -> a score for each document, in order."""


def bm25(documents: Sequence[str], *, k1: float = 1.5, b: float = 0.75) -> Scores:
    """Okapi BM25 over lower-cased words (Robertson et al. 1994); the inverse frequency is ln(1 + (N - n + 0.5) / (n + 0.5))."""
    if not documents:
        raise ValueError("documents must not be empty")
    counts = [Counter(_words(document)) for document in documents]
    lengths = [sum(count.values()) for count in counts]
    mean = sum(lengths) / len(lengths) or 1.0
    holding = Counter(word for count in counts for word in count)
    rarity = {word: math.log(1 + (len(documents) - n + 0.5) / (n + 0.5)) for word, n in holding.items()}

    def scores(query: str) -> list[float]:
        words = [word for word in _words(query) if word in rarity]
        return [
            sum(rarity[w] * count[w] * (k1 + 1) / (count[w] + k1 * (1 - b + b * length / mean)) for w in words)
            for count, length in zip(counts, lengths, strict=True)
        ]

    return scores


def cosine_scores(documents: Sequence[str], embedder: Embedder) -> Scores:
    """Cosine similarity of an embedder's vectors."""
    rows = _unit(embedder.embed(documents))

    def scores(query: str) -> list[float]:
        return list(map(float, rows @ _unit(embedder.embed([query]))[0]))

    return scores


def ndcg(scores: Sequence[float], relevant: Sequence[int], k: int) -> float:
    """NDCG@k with gain 1 for the relevant documents, in [0, 1]. Documents of one score share the gains of their places."""
    if k < 1:
        raise ValueError(f"k must be >= 1, got {k!r}")
    if not relevant:
        raise ValueError("relevant must name at least one document")
    discounts = [1 / math.log2(place + 2) if place < k else 0.0 for place in range(len(scores))]
    right, total, place = set(relevant), 0.0, 0
    for score in sorted(set(scores), reverse=True):
        tied = [i for i, value in enumerate(scores) if value == score]
        share = sum(discounts[place : place + len(tied)]) / len(tied)
        total += share * len(right.intersection(tied))
        place += len(tied)
    return total / sum(discounts[: len(right)])


def retrieval(
    documents: Mapping[str, str],
    queries: Sequence[tuple[str, Sequence[str]]],
    *,
    ks: Sequence[int] = (1, 5, 10),
    embedder: Embedder | None = None,
) -> dict[int, float]:
    """Mean NDCG@k of finding the right tools.

    Args:
        documents: the text of each tool, by name.
        queries: each with the names of its right tools.
        ks: the depths.
        embedder: rank by its vectors; None ranks by BM25.

    Raises KeyError for a right tool that is no document.
    """
    if not queries:
        raise ValueError("queries must not be empty")
    names = list(documents)
    missing = sorted({tool for _, tools in queries for tool in tools} - set(names))
    if missing:
        raise KeyError(f"the queries name tools that are not there: {', '.join(missing)}")
    texts = [documents[name] for name in names]
    score = bm25(texts) if embedder is None else cosine_scores(texts, embedder)
    ranked = [(score(query), [names.index(tool) for tool in tools]) for query, tools in queries]
    return {k: sum(ndcg(scores, right, k) for scores, right in ranked) / len(ranked) for k in ks}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _unit(rows: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1))
