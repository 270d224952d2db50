"""Facts about nearest neighbours, against sums over all pairs."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from magpie_synth.neighbors import annotate_neighbors, keep_greedy, nearest, nearest_faiss, pairs_below, unit_rows

# 64 unit vectors with copies, pairs just inside and outside 0.05 and a chain; brute force in float64, checked with FAISS
GOLDEN = np.load(Path(__file__).parent / "data" / "neighbours.npz")


@pytest.mark.parametrize("block", [1, 7, 64, 4096])
def test_golden_neighbours(block):
    found = nearest(GOLDEN["x"], threshold=float(GOLDEN["threshold"]), block=block)
    np.testing.assert_allclose(found.distance, GOLDEN["min_neighbor_distance"], atol=1e-6)
    np.testing.assert_array_equal(found.repeats, GOLDEN["repeat_count"])
    np.testing.assert_array_equal(found.first_similar, GOLDEN["first_similar"])
    np.testing.assert_array_equal(found.keep, GOLDEN["keep_official"])
    np.testing.assert_array_equal(keep_greedy(GOLDEN["x"], found, block=max(block, 2)), GOLDEN["keep_greedy"])


def circle(*degrees):
    angles = np.deg2rad(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def test_a_chain_loses_all_but_the_first_or_all_but_the_ends():
    chain = circle(0, 10, 20)  # neighbours at 2 - 2 cos 10° = 0.0304, the ends at 0.12
    found = nearest(chain)
    assert found.keep.tolist() == [True, False, False]
    assert keep_greedy(chain, found).tolist() == [True, False, True]
    assert found.repeats.tolist() == [1, 2, 1]


def test_copies_have_distance_zero_exactly():
    rows = np.random.default_rng(0).standard_normal((50, 384)).astype(np.float32)
    rows[33] = rows[7]
    found = nearest(rows)
    assert found.distance[[7, 33]].tolist() == [0, 0]
    assert (found.distance[np.setdiff1d(np.arange(50), [7, 33])] > 0).all()
    assert found.first_similar[[7, 33]].tolist() == [33, 7]


def test_one_row_is_infinitely_far_and_none_is_nothing():
    assert nearest(np.ones((1, 3), dtype=np.float32)).distance.tolist() == [np.inf]
    assert len(nearest(np.zeros((0, 3), dtype=np.float32)).distance) == 0
    assert nearest_faiss(np.ones((1, 3), dtype=np.float32)).tolist() == [np.inf]


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float64, st.tuples(st.integers(1, 12), st.just(3)), elements=st.integers(-3, 3)),
    st.floats(0.01, 1.5),
    st.integers(1, 5),
)
def test_it_is_the_sum_over_all_pairs(rows, threshold, block):
    rows = rows[np.abs(rows).sum(axis=1) > 0]
    unit = unit_rows(rows).astype(np.float64)
    squared = ((unit[:, None] - unit[None]) ** 2).sum(axis=2)
    np.fill_diagonal(squared, np.inf)
    found = nearest(rows, threshold=threshold, block=block)
    np.testing.assert_allclose(found.distance, squared.min(axis=1, initial=np.inf), atol=1e-6)
    if not (np.abs(squared - threshold) < 1e-6).any():
        close = squared < threshold
        assert found.repeats.tolist() == close.sum(axis=1).tolist()
        assert found.first_similar.tolist() == [int(np.flatnonzero(row)[0]) if row.any() else -1 for row in close]
        kept = []
        for i in range(len(rows)):
            if not any(close[i, j] for j in kept):
                kept.append(i)
        assert np.flatnonzero(keep_greedy(rows, found)).tolist() == kept
        assert sorted(pairs_below(rows, threshold, block=block)) == [tuple(p) for p in np.argwhere(np.triu(close))]


def test_scaling_rows_changes_nothing_and_dtypes_are_taken():
    rows = np.random.default_rng(1).standard_normal((40, 16))
    expected = nearest(rows).distance
    for other in (rows * 7, rows.astype(np.float32), np.asfortranarray(rows), rows[::1]):
        np.testing.assert_allclose(nearest(other).distance, expected, atol=1e-6)
    np.testing.assert_allclose(nearest(rows.astype(np.float16)).distance, expected, atol=1e-2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_rows_that_are_no_direction_are_named(bad):
    rows = np.ones((5, 4), dtype=np.float32)
    rows[3] = bad
    with pytest.raises(ValueError, match="1 of 5 are not: rows c3"):
        nearest(rows, ids=[f"c{i}" for i in range(5)])
    with pytest.raises(ValueError, match="threshold must be positive"):
        nearest(rows, threshold=0.0)


def test_faiss_finds_the_same():
    rows = np.random.default_rng(2).standard_normal((700, 32)).astype(np.float32)
    rows[100:120] = rows[0]
    np.testing.assert_allclose(nearest(rows).distance, nearest_faiss(rows), atol=2e-6)


def test_memory_does_not_grow_with_the_pairs():
    rows = np.random.default_rng(3).standard_normal((6000, 8)).astype(np.float32)
    tracemalloc.start()
    nearest(rows, block=256)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6e6  # all pairs would be 144 MB


class Letters:
    """Embeds a text by its first two letters."""

    name = "letters"

    def embed(self, texts):
        return circle(*(10 * (ord(text[0]) - ord("a")) for text in texts))


def test_columns_are_those_of_the_release():
    rows = [{"id": i, "instruction": text} for i, text in ((2, "c"), (0, "a"), (1, "b"), (3, "k"))]
    official = annotate_neighbors(rows, embedder=Letters())
    assert [(row["id"], row["min_similar_id"], row["repeat_count"]) for row in official] == [
        (0, 0, 1),
        (1, 0, 2),
        (2, 1, 1),
        (3, None, 0),
    ]
    greedy = annotate_neighbors(rows, embedder=Letters(), dedupe="greedy")
    assert [row["min_similar_id"] for row in greedy] == [0, 0, 2, None]
    assert annotate_neighbors([], embedder=Letters()) == []
    with pytest.raises(ValueError, match="dedupe must be one of"):
        annotate_neighbors(rows, embedder=Letters(), dedupe="best")


def test_a_dataset_comes_back_as_one():
    datasets = pytest.importorskip("datasets")
    made = annotate_neighbors(datasets.Dataset.from_list([{"id": "x", "instruction": "a"}]), embedder=Letters())
    assert isinstance(made, datasets.Dataset)
    assert made[0]["min_neighbor_distance"] == np.inf
