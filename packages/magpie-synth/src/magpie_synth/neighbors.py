"""Distance to the nearest neighbour, and which rows repeat an earlier one (Xu et al. 2025, appendix on de-duplication).

Distances are squared Euclidean between unit vectors, d = 2 - 2 cos, as the official FAISS index has them. A row repeats another
if d < 0.05. The official scripts ask an index for 500 neighbours; here a blocked matrix product looks at all pairs, exactly, in
memory that does not grow with their number, and in half the work, since d is symmetric.

The keep rule "official" drops a row if any earlier row is near it, dropped itself or not: of a chain a~b~c it keeps a. "greedy"
looks at kept rows only: it keeps a and c. Both depend on the order of the rows: sort by id first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from threadpoolctl import threadpool_info, threadpool_limits

from chapbook_shared.embed import Embedder
from chapbook_shared.validate import check_choice, check_positive, import_extra

from .rows import Record, like, plain_rows

_BLOCK = 768
_NEAR = 1e-6
"""float32 products of unit vectors are this exact: pairs closer than that to the border are decided in float64."""


@dataclass(frozen=True)
class Neighbors:
    """What the search found about each of n rows."""

    distance: Float[np.ndarray, "rows"]
    """Squared distance to the nearest other row; infinity for a single row. Equal rows have 0 exactly."""
    repeats: Int[np.ndarray, "rows"]
    """How many other rows are closer than the threshold."""
    first_similar: Int[np.ndarray, "rows"]
    """The lowest index of those, -1 if there is none."""
    threshold: float

    @property
    def keep(self) -> Bool[np.ndarray, "rows"]:
        """Rows with no earlier row near them: the official rule."""
        return (self.first_similar < 0) | (self.first_similar > np.arange(len(self.first_similar)))


def unit_rows(
    vectors: Float[np.ndarray, "rows dim"], ids: Sequence[Any] | None = None
) -> Float[np.ndarray, "rows dim"]:
    """Rows of norm 1 in float32. Raises ValueError naming the rows that are not finite or have norm 0."""
    rows = np.asarray(vectors, dtype=np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    bad = np.flatnonzero(~np.isfinite(norms[:, 0]) | (norms[:, 0] == 0))
    if len(bad):
        names = [bad[i] if ids is None else ids[bad[i]] for i in range(min(5, len(bad)))]
        raise ValueError(
            f"embeddings must be finite and not 0, but {len(bad)} of {len(rows)} are not: rows {', '.join(map(str, names))}"
        )
    return np.ascontiguousarray(rows / norms, dtype=np.float32)


def nearest(
    vectors: Float[np.ndarray, "rows dim"],
    *,
    threshold: float = 0.05,
    block: int = _BLOCK,
    ids: Sequence[Any] | None = None,
) -> Neighbors:
    """All nearest neighbours and repeats of rows (made unit vectors first), exactly.

    `threshold` is the squared distance below which two rows repeat each other. Memory is `block`² float32 values a thread beside the rows.
    """
    check_positive("threshold", threshold)
    rows = unit_rows(vectors, ids)
    tally = _Tally(len(rows))
    with _alone() as workers, ThreadPoolExecutor(max_workers=workers) as pool:
        strips = range(0, len(rows), block)
        for _ in pool.map(lambda start: _strip(rows, start, block, threshold, tally), strips):
            pass  # raises what a strip raised
    distance = np.maximum(2 - 2 * tally.closest.astype(np.float64), 0)
    distance[_copies(rows, np.flatnonzero(distance < 4 * _NEAR))] = 0
    return Neighbors(distance, tally.repeats, np.where(tally.first == len(rows), -1, tally.first), threshold)


class _Tally:
    """What is known of each row so far. Strips that run at the same time add to it in turn."""

    def __init__(self, count: int) -> None:
        self.closest = np.full(count, -np.inf, dtype=np.float32)
        self.repeats = np.zeros(count, dtype=np.int64)
        self.first = np.full(count, count, dtype=np.int64)
        self.lock = threading.Lock()

    def see(self, start: int, similar: Float[np.ndarray, "some"]) -> None:
        """The largest cosine of rows from `start` on, as far as one block shows it."""
        part = self.closest[start : start + len(similar)]
        np.maximum(part, similar, out=part)

    def note(
        self,
        close: Bool[np.ndarray, "rows others"],
        rows: Int[np.ndarray, "rows"],
        others: Int[np.ndarray, "others"],
    ) -> None:
        """Count the close pairs of `rows`, and take note of the earliest of `others` (in rising order)."""
        counts = close.sum(axis=1)
        self.repeats[rows] += counts
        some = counts > 0
        self.first[rows[some]] = np.minimum(self.first[rows[some]], others[close[some].argmax(axis=1)])


def _strip(rows: Float[np.ndarray, "rows dim"], start: int, block: int, threshold: float, tally: _Tally) -> None:
    """Compare the rows of one block with each other and with all rows after them."""
    left = rows[start : start + block]
    border = np.float32(1 - threshold / 2)
    for j in range(start, len(rows), block):
        right = rows[j : j + block]
        similar = left @ right.T
        if j == start:
            np.fill_diagonal(similar, -np.inf)
        by_row, by_column = similar.max(axis=1), similar.max(axis=0)
        near = np.flatnonzero(by_row > border - _NEAR)
        close = _close(similar[near], left[near], right, threshold) if len(near) else None
        with tally.lock:
            tally.see(start, by_row)
            tally.see(j, by_column)
            if close is not None:
                tally.note(close, start + near, np.arange(j, j + len(right)))
                if j != start:  # within a block each pair is there in both directions
                    tally.note(close.T, np.arange(j, j + len(right)), start + near)


@contextmanager
def _alone() -> Iterator[int]:
    """One BLAS thread for each of as many workers as BLAS would have threads: blocks are too small to be shared well."""
    threads = [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]
    with threadpool_limits(limits=1, user_api="blas"):
        yield max(threads, default=1)


def nearest_faiss(vectors: Float[np.ndarray, "rows dim"], *, k: int = 500) -> Float[np.ndarray, "rows"]:
    """The nearest distances by FAISS's flat index with k neighbours, as the official scripts find them: for comparison."""
    faiss: Any = import_extra("faiss", "magpie-synth[faiss]")
    rows = unit_rows(vectors)
    if len(rows) < 2:
        return np.full(len(rows), np.inf)
    index = faiss.IndexFlatL2(rows.shape[1])
    index.add(rows)
    distances, found = index.search(rows, min(k, len(rows)))
    distances[found == np.arange(len(rows))[:, None]] = np.inf  # among equal rows a row need not find itself first
    return np.maximum(distances.min(axis=1), 0).astype(np.float64)


def keep_greedy(
    vectors: Float[np.ndarray, "rows dim"], found: Neighbors, *, block: int = 256
) -> Bool[np.ndarray, "rows"]:
    """Rows to keep when a row is compared with earlier kept rows only. `found` is what `nearest` says of the same rows."""
    keep = found.keep.copy()
    rows = unit_rows(vectors)
    suspects = np.flatnonzero(~keep)
    for part in (suspects[i : i + block] for i in range(0, len(suspects), block)):
        close = _close(rows[part] @ rows.T, rows[part], rows, found.threshold)
        for place, row in enumerate(part):
            keep[row] = not bool((close[place, :row] & keep[:row]).any())
    return keep


def annotate_neighbors(
    rows: Any,
    *,
    embedder: Embedder,
    threshold: float = 0.05,
    dedupe: str = "official",
    block: int = _BLOCK,
) -> Any:
    """Rows (dictionaries or a Dataset), in the order of their ids, with the columns of the official release.

    `min_neighbor_distance`, `repeat_count`, and `min_similar_id`: the id of the earliest row near this one if that is earlier, else
    its own; None where nothing is near. With `dedupe="greedy"` it is the earliest *kept* row. A row that is kept has None or its
    own id. `dedupe` is "official" or "greedy".
    """
    check_choice("dedupe", dedupe, ("official", "greedy"))
    plain = sorted(plain_rows(rows), key=lambda row: row["id"])
    ids = [row["id"] for row in plain]
    vectors = embedder.embed([row["instruction"] for row in plain]) if plain else np.zeros((0, 1), dtype=np.float32)
    found = nearest(vectors, threshold=threshold, block=block, ids=ids)
    keep = found.keep if dedupe == "official" else keep_greedy(vectors, found)
    made: list[Record] = []
    for place, row in enumerate(plain):
        similar = int(found.first_similar[place])
        representative = None if similar < 0 else ids[place] if keep[place] else ids[similar]
        made.append(
            {
                **row,
                "min_neighbor_distance": float(found.distance[place]),
                "repeat_count": int(found.repeats[place]),
                "min_similar_id": representative,
            }
        )
    return like(rows, made)


def _close(
    similar: Float[np.ndarray, "left right"],
    left: Float[np.ndarray, "left dim"],
    right: Float[np.ndarray, "right dim"],
    threshold: float,
) -> Bool[np.ndarray, "left right"]:
    """Which pairs are closer than the threshold; those too close to it to tell in float32 are measured in float64."""
    border = 1 - threshold / 2
    close = similar > border
    for place, other in np.argwhere(np.abs(similar - border) <= _NEAR):
        gap = left[place].astype(np.float64) - right[other].astype(np.float64)
        close[place, other] = float(gap @ gap) < threshold
    return close


def _copies(rows: Float[np.ndarray, "rows dim"], candidates: Int[np.ndarray, "some"]) -> list[int]:
    """Those of `candidates` that equal another row to the last bit."""
    groups: dict[bytes, list[int]] = {}
    for row in candidates:
        groups.setdefault(rows[row].tobytes(), []).append(int(row))
    return [row for group in groups.values() if len(group) > 1 for row in group]


def pairs_below(
    vectors: Float[np.ndarray, "rows dim"], threshold: float, *, block: int = _BLOCK
) -> Iterator[tuple[int, int]]:
    """Every pair of rows (i < j) closer than `threshold`: to check that a de-duplicated set has none."""
    rows = unit_rows(vectors)
    for i in range(0, len(rows), block):
        for j in range(i, len(rows), block):
            left, right = rows[i : i + block], rows[j : j + block]
            close = _close(left @ right.T, left, right, threshold)
            for a, b in np.argwhere(close):
                if i + a < j + b:
                    yield int(i + a), int(j + b)
