"""The two similarity tests against golden values and against slow code written from the definitions.

tests/data/delta.json: BLEU-4 by nltk 3.10 (`sentence_bleu`, smoothing method 4, lower-cased `split`, the older text as reference), cosine by
numpy, over fixed vectors.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_docs import bleu4, is_diverse, stability
from draft_docs.stability import cosine

PAIRS = json.loads((Path(__file__).parent / "data" / "delta.json").read_text(encoding="utf-8"))["pairs"]

texts = st.lists(st.sampled_from(["a", "b", "c", "The", "the", "tool"]), max_size=9).map(" ".join)
vectors = st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3).map(np.array)


def slow_bleu(hypothesis, reference):
    hyp, ref = hypothesis.lower().split(), reference.lower().split()
    if not set(hyp) & set(ref):
        return 0.0
    precisions, missing = [], 0
    for n in (1, 2, 3, 4):
        candidates = [tuple(hyp[i : i + n]) for i in range(max(0, len(hyp) - n + 1))]
        pool = [tuple(ref[i : i + n]) for i in range(max(0, len(ref) - n + 1))]
        matches = 0
        for candidate in candidates:
            if candidate in pool:
                pool.remove(candidate)
                matches += 1
        if matches == 0 and len(hyp) > 1:
            missing += 1
            precisions.append(math.log(len(hyp)) / 5 / 2**missing / max(1, len(candidates)))
        elif matches:
            precisions.append(matches / len(candidates))
    brevity = 1.0 if len(hyp) > len(ref) else math.exp(1 - len(ref) / len(hyp))
    return brevity * math.prod(p**0.25 for p in precisions)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["new"][:20] or "empty")
def test_golden_values(pair):
    old, new = pair["old"], pair["new"]
    a, b = np.array(pair["old_vec"]), np.array(pair["new_vec"])
    assert bleu4(new, old) == pytest.approx(pair["bleu"], abs=1e-12)
    assert cosine(a, b) == pytest.approx(pair["cosine"], abs=1e-12)
    if old.split() != new.split():
        delta = stability(old, new, a, b)
        assert delta == pytest.approx(pair["delta"], abs=1e-12)
        assert (delta > 0.75) == pair["stop"]


@settings(max_examples=300, deadline=None)
@given(texts, texts)
def test_bleu_is_that_of_the_slow_definition(hypothesis, reference):
    assert bleu4(hypothesis, reference) == pytest.approx(slow_bleu(hypothesis, reference), abs=1e-12)


@settings(max_examples=200, deadline=None)
@given(vectors, st.lists(vectors, max_size=4), st.floats(-1, 1))
def test_a_query_is_new_if_the_largest_cosine_is_below_phi(query, earlier, phi):
    def angle(a, b):
        norm = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
        return sum(x * y for x, y in zip(a, b, strict=True)) / norm if norm else 0.0

    largest = max((angle(query, other) for other in earlier), default=-math.inf)
    if abs(largest - phi) > 1e-9:
        assert is_diverse(query, earlier, phi=phi) == (largest < phi)


def test_both_tests_are_strict():
    one = np.array([1.0, 0.0])
    assert not is_diverse(one, [np.array([1.0, 0.0])], phi=1.0)
    assert is_diverse(one, [np.array([0.0, 1.0])], phi=1e-9)
    assert not is_diverse(one, [np.array([0.0, 1.0])], phi=0.0)


def test_texts_that_differ_in_white_space_alone_are_equal_however_short():
    a, b = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    assert stability("one two", " one\n two ", a, b) == 1.0
    assert bleu4("one two three", "one two three") == pytest.approx(0.5757197301274735)


@pytest.mark.parametrize("bad", [np.zeros(2), np.array([np.nan, 1]), np.array([np.inf, 1])])
def test_a_vector_without_direction_is_similar_to_nothing(bad):
    assert cosine(bad, np.array([1.0, 0.0])) == 0.0
    assert cosine(bad, bad) == 0.0
    assert is_diverse(bad, [bad], phi=0.9)
