"""Kernels against slow, obvious references, hand-countable cases, and what they refuse."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_equality import AllSubstrings, Callable, Hamming, KSpectrum, OneHot, Precomputed, Samples, two_sample_test
from mmd_equality import kernels as kernel_module
from mmd_equality.kernels import Block, kernel_from_name, substring_counts

TEXTS = st.lists(st.text(alphabet="abc", max_size=7), min_size=2, max_size=6)


def shared_substrings(a, b, lengths):
    def occurrences(text):
        return [text[i : i + k] for k in lengths for i in range(len(text) - k + 1)]

    return sum(s == t for s, t in itertools.product(occurrences(a), occurrences(b)))


def normal(matrix):
    norm = np.sqrt(np.diag(matrix))
    norm[norm == 0] = 1
    return matrix / np.outer(norm, norm)


@settings(deadline=None, max_examples=60)
@given(TEXTS)
def test_all_substrings_equals_counting_every_pair_of_occurrences(texts):
    slow = np.array([[shared_substrings(a, b, range(1, 8)) for b in texts] for a in texts], dtype=float)
    assert AllSubstrings().gram(texts) == pytest.approx(normal(slow), abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.integers(1, 4), st.booleans())
def test_k_spectrum_equals_counting_every_pair_of_occurrences(texts, k, cumulative):
    lengths = range(1, k + 1) if cumulative else [k]
    slow = np.array([[shared_substrings(a, b, lengths) for b in texts] for a in texts], dtype=float)
    assert KSpectrum(k, cumulative=cumulative).gram(texts) == pytest.approx(normal(slow), abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(TEXTS)
def test_hamming_equals_a_double_loop(texts):
    length = max(max(map(len, texts)), 1)
    padded = [t.ljust(length, "\0") for t in texts]
    slow = [[sum(a == b for a, b in zip(s, t, strict=True)) / length for t in padded] for s in padded]
    assert Hamming().gram(texts) == pytest.approx(np.array(slow), abs=1e-15)


def test_substrings_of_aab_and_ab_by_hand():
    # a: 2 x 1, b: 1 x 1, ab: 1 x 1; aab with itself: a 4, b 1, aa 1, ab 1, aab 1; ab with itself: a, b, ab.
    rows = Samples([0, 0], ["aab", "ab"]).encode()
    assert substring_counts(rows, 1, None).tolist() == [[8, 4], [4, 3]]


def test_trailing_padding_is_not_text_but_padding_matches_under_hamming():
    assert Hamming().gram(["ab", "abc"])[0, 1] == pytest.approx(2 / 3)
    assert Hamming().gram([[1, -1, -1], [2, -1, -1]])[0, 1] == pytest.approx(2 / 3)
    assert AllSubstrings().gram([[1, -1, -1], [2, -1, -1]])[0, 1] == 0
    assert AllSubstrings(include_padding=True).gram([[1, -1, -1], [2, -1, -1]])[0, 1] > 0


def test_an_empty_string_has_norm_one_under_a_substring_kernel():
    gram = AllSubstrings().gram(["", "ab", ""])
    assert gram == pytest.approx(np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0]]), abs=1e-12)


def test_rows_of_other_prompts_are_unlike():
    gram = Hamming().gram(["ab", "ab", "ab"], ["p", "q", "p"])
    assert gram.tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]


def test_one_hot_is_equality():
    assert OneHot().gram(["a", "b", "a"]).tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("length", [254, 255, 256, 511])
def test_byte_counters_do_not_overflow(length):
    rows = np.zeros((3, length), dtype=np.int32)
    assert Hamming().counts(Block(rows))[0].tolist() == [[length] * 3] * 3


@pytest.mark.parametrize("symbols", [3, 300, 70_000])
def test_hamming_with_any_size_of_alphabet_and_the_compiled_loop_agree(symbols, monkeypatch):
    pytest.importorskip("numba")
    rows = np.random.default_rng(0).integers(0, symbols, (40, 2000)).astype(np.int32)
    rows[1] = rows[0]
    plain = Hamming().counts(Block(rows))[0]
    monkeypatch.setattr(kernel_module, "COMPILED_FROM", 0)
    compiled = Hamming().counts(Block(rows))[0]
    assert (plain == compiled).all()
    monkeypatch.setenv("MMD_EQUALITY_NO_NUMBA", "1")
    assert (Hamming().counts(Block(rows))[0] == plain).all()


def test_a_user_kernel_on_two_strings_and_one_on_features(source):
    x, y = Samples([0] * 5, ["a", "b", "a", "c", "a"]), Samples([0] * 5, ["c", "c", "a", "c", "b"])
    by_pair = two_sample_test(x, y, kernel=Callable(lambda a, b: float(a == b)), random_state=0)
    built_in = two_sample_test(x, y, kernel="onehot", random_state=0)
    assert by_pair.statistic == pytest.approx(built_in.statistic)
    assert by_pair.pvalue == built_in.pvalue
    one_hot = Callable(lambda a, b: a @ b.T, features=lambda texts: [[t == s for s in "abc"] for t in texts])
    assert two_sample_test(x, y, kernel=one_hot, random_state=0).pvalue == built_in.pvalue


def test_a_precomputed_gram_follows_the_rows_even_when_prompts_interleave_and_are_dropped():
    x = Samples(["p", "q", "p", "alone", "q", "p"], ["aa", "bb", "ab", "zz", "bc", "aa"])
    y = Samples(["q", "p", "q", "p"], ["bd", "ax", "bb", "xx"])
    pooled = [*x.completions, *y.completions]
    matrix = Hamming().gram(pooled)
    given_gram = two_sample_test(x, y, kernel=Precomputed(matrix), on_missing="drop", random_state=0)
    computed = two_sample_test(x, y, on_missing="drop", random_state=0)
    assert given_gram.statistic == pytest.approx(computed.statistic)
    assert given_gram.pvalue == computed.pvalue


def test_a_gram_with_nan_or_without_symmetry_is_refused_with_its_indices():
    broken = np.eye(4)
    broken[1, 2] = np.nan
    with pytest.raises(ValueError, match="rows 1 and 2 is nan"):
        Precomputed(broken)
    uneven = np.eye(4)
    uneven[0, 3] = 0.5
    with pytest.raises(ValueError, match="not symmetric: rows 0 and 3"):
        Precomputed(uneven)
    with pytest.raises(ValueError, match="square"):
        Precomputed(np.ones((2, 3)))
    with pytest.raises(ValueError, match="rows 0 and 0 is nan"):
        Callable(lambda a, b: float("nan")).gram(["a", "b"])


def test_a_gram_that_is_too_small_is_refused():
    x = Samples([0, 0], ["a", "b"])
    with pytest.raises(ValueError, match="Gram matrix has 3 rows"):
        two_sample_test(x, Samples([0, 0], ["c", "a"]), kernel=Precomputed(np.eye(3)))


@pytest.mark.parametrize("bad", ["levenshtein", "kspectrum0", ""])
def test_an_unknown_kernel_name_is_refused(bad):
    with pytest.raises(ValueError, match="kernel must be one of"):
        kernel_from_name(bad)


def test_something_that_is_no_kernel_is_refused():
    with pytest.raises(TypeError, match="kernel must be a name"):
        kernel_from_name(3)


@pytest.mark.parametrize("k", [0, -1, True, 2.5])
def test_k_must_be_a_positive_integer(k):
    with pytest.raises((ValueError, Exception), match=r"k must be|violates"):
        KSpectrum(k)


def test_kernel_names():
    assert kernel_from_name("kspectrum3").name == KSpectrum(3).name
    assert kernel_from_name("all-substrings") == AllSubstrings()


def test_a_negative_norm_is_refused():
    with pytest.raises(ValueError, match="completion with itself is -1"):
        Precomputed(-np.eye(3)).gram(["a", "b", "c"])


def test_a_complex_gram_is_refused():
    with pytest.raises(TypeError, match="real numbers, got dtype complex128"):
        Precomputed(np.eye(3) * 1j)


def test_a_kernel_class_in_place_of_a_kernel_is_refused():
    with pytest.raises(TypeError, match="got Hamming"):
        kernel_from_name(Hamming)


def test_substring_counts_of_many_rows_are_added_in_parts(monkeypatch):
    texts = [chr(97 + i % 7) * (1 + i % 5) + "z" for i in range(1500)]  # 1,333 rows of the product at a time
    gram = AllSubstrings().gram(texts)
    assert gram[::100, ::100] == pytest.approx(AllSubstrings().gram(texts[::100]), abs=1e-12)
