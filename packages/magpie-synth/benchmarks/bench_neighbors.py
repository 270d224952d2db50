"""Exact nearest neighbours of unit vectors against FAISS's flat index with the k = 500 of the official scripts."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from chapbook_shared.bench import Comparison, compare, main
from magpie_synth.neighbors import nearest, nearest_faiss


def all_pairs(rows: np.ndarray) -> np.ndarray:
    """The obvious way: one matrix of all products."""
    similar = rows @ rows.T
    np.fill_diagonal(similar, -np.inf)
    return 2 - 2 * similar.max(axis=1)


def run() -> Iterator[Comparison]:
    generator = np.random.default_rng(0)
    for count in (3_000, 6_000, 12_000):
        rows = generator.standard_normal((count, 384)).astype(np.float32)
        rows[:50] = rows[50:100]
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        ours = partial(nearest, rows)
        assert np.abs(ours().distance - nearest_faiss(rows)).max() < 5e-6
        yield compare(
            f"{count:,} x 384",
            ours=ours,
            peer=partial(nearest_faiss, rows),
            peer_name="faiss IndexFlatL2, k = 500",
            goal=4.0,
            repeats=3,
        )
        yield compare(f"{count:,} x 384", ours=ours, peer=partial(all_pairs, rows), peer_name="one matrix", repeats=3)


if __name__ == "__main__":
    main(run)
