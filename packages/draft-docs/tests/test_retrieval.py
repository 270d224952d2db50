import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_docs import HashedNgrams, bm25, ndcg, retrieval


def test_bm25_by_hand():
    # Two documents of two words: "cat" is in one. idf = ln(1 + 1.5 / 1.5), and the length is the mean.
    scores = bm25(["a cat", "a dog"])("cat")
    assert scores == pytest.approx([math.log(2), 0.0])


def test_ndcg_by_hand():
    assert ndcg([3, 2, 1], [0], 1) == 1
    assert ndcg([3, 2, 1], [1], 5) == pytest.approx(1 / math.log2(3))
    assert ndcg([3, 2, 1], [2], 2) == 0
    assert ndcg([0, 0], [1], 1) == 0.5  # a tie is worth the mean of its places


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
def test_ndcg_is_a_fraction_and_perfect_when_the_right_ones_lead(scores, data):
    right = data.draw(st.lists(st.integers(0, len(scores) - 1), min_size=1, unique=True))
    k = data.draw(st.integers(1, 10))
    assert 0 <= ndcg(scores, right, k) <= 1 + 1e-12
    lifted = [score + 10 * (i in right) for i, score in enumerate(scores)]
    assert ndcg(lifted, right, len(scores)) == pytest.approx(1)


def test_better_words_are_found_better():
    queries = [("how many feet is that", ["length"]), ("what time is it in Rome", ["clock"])]
    poor = {"length": "Convert.", "clock": "Get."}
    good = {"length": "Says how many feet a length in metres has.", "clock": "Says what time it is in a place."}
    for embedder in (None, HashedNgrams()):
        before, after = (retrieval(docs, queries, ks=[1], embedder=embedder) for docs in (poor, good))
        assert before[1] < after[1] == 1


def test_what_cannot_be_ranked_is_refused():
    with pytest.raises(KeyError, match="not there: clock"):
        retrieval({"a": "b"}, [("q", ["clock"])])
    with pytest.raises(ValueError, match="queries must not be empty"):
        retrieval({"a": "b"}, [])
    with pytest.raises(ValueError, match="k must be >= 1"):
        ndcg([1.0], [0], 0)
