"""Zero-shot metrics against the official values, a brute-force reference and cases to count by hand."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from egovideo import (
    class_prototypes,
    egomcq,
    marginalise,
    mean_class_accuracy,
    mir,
    narration_relevancy,
    rank_metrics,
    topk_accuracy,
)

DATA = Path(__file__).parent / "data"


def brute_force(similarity, relevancy, graded=True):
    """AP and nDCG of one query by their definitions; earlier items win ties."""
    order = sorted(range(len(similarity)), key=lambda j: (-similarity[j], j))
    found, precision = 0, []
    for rank, j in enumerate(order, 1):
        found += relevancy[j] if graded else relevancy[j] == 1
        if relevancy[j] == 1:
            precision.append(found / rank)
    k = sum(r > 0 for r in relevancy)
    gain = sum(relevancy[j] / np.log2(rank + 1) for rank, j in enumerate(order[:k], 1))
    ideal = sum(r / np.log2(rank + 1) for rank, r in enumerate(sorted(relevancy, reverse=True)[:k], 1))
    return (np.mean(precision) if precision else np.nan), (gain / ideal if ideal else np.nan)


def test_the_official_values():
    golden = np.load(DATA / "mir.npz")
    result = mir(golden["sim"], golden["rel"])
    for name in ("mAP", "nDCG"):
        values = [result[name][direction] for direction in ("v2t", "t2v", "avg")]
        assert values == pytest.approx(golden[name].tolist(), abs=1e-10)
    assert result["excluded_mAP"] == {"v2t": 0, "t2v": 0}


def test_a_query_counted_by_hand():
    # Ranked: 0.9 (r = 1), 0.8 (r = 0), 0.7 (r = 1): AP = (1/1 + 2/3) / 2; nDCG: k = 2, gain 1, ideal 1 + 1/log2(3).
    precision, gain = rank_metrics(np.array([[0.7, 0.9, 0.8]]), np.array([[1.0, 1.0, 0.0]]))
    assert precision[0] == pytest.approx(5 / 6)
    # With a relevancy of 0.5 in the middle the official code counts it as half an item found.
    graded, _ = rank_metrics(np.array([[0.7, 0.9, 0.8]]), np.array([[1.0, 1.0, 0.5]]))
    binary, _ = rank_metrics(np.array([[0.7, 0.9, 0.8]]), np.array([[1.0, 1.0, 0.5]]), precision="binary")
    assert (graded[0], binary[0]) == pytest.approx(((1 + 2.5 / 3) / 2, 5 / 6))
    assert gain[0] == pytest.approx(1 / (1 + 1 / np.log2(3)))


matrices = st.tuples(st.integers(1, 6), st.integers(1, 7)).flatmap(
    lambda shape: st.tuples(
        hnp.arrays(np.float64, shape, elements=st.sampled_from([-1.0, 0.0, 0.25, 0.5, 0.75, 1.0])),
        hnp.arrays(np.float64, shape, elements=st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0])),
    )
)


@given(matrices)
@settings(deadline=None, max_examples=200)
def test_equals_brute_force_with_many_ties(pair):
    similarity, relevancy = pair
    for kind in ("graded", "binary"):
        precision, gain = rank_metrics(similarity, relevancy, precision=kind)
        for row in range(len(similarity)):
            assert (precision[row], gain[row]) == pytest.approx(
                brute_force(similarity[row], relevancy[row], kind == "graded"), abs=1e-12, nan_ok=True
            )


def test_float64_scores_that_float32_cannot_tell_apart():
    rng = np.random.default_rng(0)
    similarity = 1 + rng.integers(0, 40, (30, 200)) * 1e-12
    relevancy = rng.choice([0, 0.5, 1], (30, 200))
    precision, gain = rank_metrics(similarity, relevancy)
    for row in range(30):
        assert (precision[row], gain[row]) == pytest.approx(brute_force(similarity[row], relevancy[row]), abs=1e-12)


@given(matrices)
@settings(deadline=None, max_examples=60)
def test_ties_average_is_the_mean_over_all_orders_and_worst_the_least(pair):
    similarity, relevancy = (part[:1, :5] for part in pair)
    orders = [list(p) for p in itertools.permutations(range(similarity.shape[1]))]
    for kind in ("graded", "binary"):
        every = [brute_force(similarity[0][order], relevancy[0][order], kind == "graded") for order in orders]
        average = np.array(rank_metrics(similarity, relevancy, precision=kind, ties="average"))[:, 0]
        assert average == pytest.approx(np.mean(every, 0), abs=1e-12, nan_ok=True)
    every = np.array(every)  # less relevant items first is the least AP only where they count nothing
    worst = np.array(rank_metrics(similarity, relevancy, precision="binary", ties="worst"))[:, 0]
    assert worst == pytest.approx(every.min(0), abs=1e-12, nan_ok=True)


def test_chunks_and_dtypes_change_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    similarity = rng.normal(size=(61, 47)).astype(np.float32)
    relevancy = rng.choice([0, 0, 0.5, 1], size=(61, 47)).astype(np.float32)
    whole = mir(similarity, relevancy)
    monkeypatch.setattr("egovideo.evaluation._CHUNK", 200)
    assert mir(similarity, relevancy) == whole
    assert mir(similarity.astype(float), relevancy.astype(float))["mAP"] == pytest.approx(whole["mAP"])
    assert mir(similarity[::-1, ::-1], relevancy[::-1, ::-1])["nDCG"] == pytest.approx(whole["nDCG"])


def test_only_the_order_of_similarities_counts():
    rng = np.random.default_rng(1)
    similarity, relevancy = rng.uniform(-1, 1, (20, 9)), rng.choice([0, 0.5, 1], (20, 9))
    assert mir((similarity + 1) / 2, relevancy) == mir(similarity, relevancy)


def test_queries_without_a_relevant_item_are_left_out_and_counted():
    similarity = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    relevancy = np.array([[1.0, 0.5], [0.5, 0.0], [0.0, 0.0]])
    result = mir(similarity, relevancy)
    assert result["excluded_mAP"] == {"v2t": 2, "t2v": 1}
    assert result["excluded_nDCG"] == {"v2t": 1, "t2v": 0}
    assert result["mAP"]["v2t"] == 1.0


@pytest.mark.parametrize(
    ("similarity", "relevancy", "message"),
    [
        (
            np.zeros((3, 2)),
            np.ones((2, 3)),
            r"similarity is \(3, 2\) but relevancy is \(2, 3\): one of them is transposed",
        ),
        (np.zeros((3, 2)), np.ones((3, 3)), "both must be"),
        (np.array([[np.nan, 1.0]]), np.ones((1, 2)), "similarity holds NaN: 1 of 2"),
        (np.zeros((1, 2)), np.array([[2.0, 0.0]]), r"relevancy must lie in \[0, 1\]"),
        (np.zeros((1, 2)), np.array([[np.nan, 0.0]]), r"relevancy must lie in \[0, 1\]"),
        (np.zeros((0, 2)), np.zeros((0, 2)), "at least one video"),
        (np.zeros((1, 2)), np.array([[0.5, 0.0]]), "no item of relevancy 1 for any v2t query"),
        (np.zeros((1, 2)), np.zeros((1, 2)), "no item of relevancy 1"),
    ],
)
def test_mir_refuses(similarity, relevancy, message):
    with pytest.raises(ValueError, match=message):
        mir(similarity, relevancy)


def test_infinite_similarities_have_an_order():
    assert mir(np.array([[np.inf, 0.0], [-np.inf, 1.0]]), np.eye(2))["mAP"]["avg"] == 1.0


def test_relevancy_is_half_verb_half_noun_overlap():
    values = narration_relevancy([0, 1], [[3], [3, 4]], [0, 1], [[3], [4, 5]])
    assert values == pytest.approx(np.array([[1.0, 0.0], [0.25, 0.5 + 1 / 6]]))
    with pytest.raises(ValueError, match="at least one noun"):
        narration_relevancy([0], [[]], [0], [[1]])
    with pytest.raises(ValueError, match="in pairs"):
        narration_relevancy([0, 1], [[1]], [0], [[1]])


def test_prototypes_are_normalised_means_of_normalised_embeddings():
    prototypes, names = class_prototypes(np.array([[2.0, 0.0], [0.0, 5.0], [0.0, -1.0]]), ["cut", "cut", "wash"])
    assert names == ["cut", "wash"]
    assert prototypes == pytest.approx(np.array([[0.5**0.5, 0.5**0.5], [0.0, -1.0]]))
    with pytest.raises(ValueError, match="3 embeddings but 1 classes"):
        class_prototypes(np.ones((3, 2)), ["cut"])
    with pytest.raises(ValueError, match="embeddings must be finite and not zero"):
        class_prototypes(np.zeros((1, 2)), ["cut"])


def test_topk_and_ties():
    scores = np.array([[0.1, 0.9, 0.5], [0.3, 0.3, 0.3]])
    labels = np.array([2, 1])
    assert topk_accuracy(scores, labels, 1) == 0.0
    assert topk_accuracy(scores, labels, 2) == 1.0
    assert topk_accuracy(scores, labels, 2, ties="worst") == 0.5
    assert topk_accuracy(scores, labels, 2, ties="average") == pytest.approx((1 + 2 / 3) / 2)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 3\)"):
        topk_accuracy(scores, np.array([0, 3]))
    with pytest.raises(ValueError, match="2 rows of scores but 1 labels"):
        topk_accuracy(scores, np.array([0]))
    with pytest.raises(ValueError, match="scores hold NaN"):
        topk_accuracy(scores * np.nan, labels)


def test_mean_class_accuracy_weighs_classes_alike():
    assert mean_class_accuracy(np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1])) == 0.75
    assert mean_class_accuracy(np.array([0, 0, 0, 0]), np.array([0, 0, 0, 7])) == 0.5


def test_verb_and_noun_probabilities_are_sums_over_actions():
    verbs, nouns = marginalise(np.array([[0.5, 0.3, 0.2]]), [(0, 1), (0, 2), (1, 1)])
    assert verbs == pytest.approx(np.array([[0.8, 0.2]]))
    assert nouns == pytest.approx(np.array([[0.0, 0.7, 0.3]]))
    with pytest.raises(ValueError, match="3 columns but there are 2 actions"):
        marginalise(np.ones((1, 3)), [(0, 0), (0, 1)])


def test_egomcq_by_type():
    similarity = np.array([[0.9, 0, 0, 0, 0], [0, 0.9, 0, 0, 0], [0, 0, 0, 0, 0.9]])
    assert egomcq(similarity, np.array([0, 0, 4]), np.array([1, 1, 2])) == {"inter": 0.5, "intra": 1.0}
    assert egomcq(similarity, np.array([0, 1, 4]), np.array([1, 1, 1])) == {"inter": 1.0}
    with pytest.raises(ValueError, match="types must be 1"):
        egomcq(similarity, np.array([0, 1, 4]), np.array([0, 1, 2]))
