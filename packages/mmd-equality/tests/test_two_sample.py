"""The test itself: nulls, ties, levels, intervals, and every row of what can go wrong."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_equality import Samples, goodness_of_fit, plan, two_sample_test
from mmd_equality.kernels import Block, Hamming, OneHot, Precomputed, hamming_counts
from mmd_equality.permutation import (
    GramProblem,
    MatchProblem,
    Stratum,
    draw_labels,
    permutation_null,
    pvalue,
    simulated_null,
)
from mmd_equality.statistics import baseline_from_counts


def codes(result):
    return {caution.code for caution in result.warnings}


# -- the engine


def test_labels_are_uniform_over_all_subsets():
    labels = draw_labels(5, 2, 60_000, np.random.default_rng(0))[0].T
    seen = {tuple(row): 0 for row in np.unique(labels, axis=0)}
    assert len(seen) == 10
    keys, counts = np.unique(labels @ (2 ** np.arange(5)), return_counts=True)
    assert len(keys) == 10
    assert ((counts - 6000) ** 2 / 6000).sum() < 27.9  # chi-square, 9 degrees of freedom, p = 0.001


@pytest.mark.parametrize("normalization", ["pairs", "paper", "per_prompt"])
def test_all_permutations_at_once_equal_one_at_a_time(source, normalization):
    x, y = source(5, m=3, seed=1), source(4, m=3, seed=2)
    gram = Hamming().gram(np.concatenate([x.encode(8), y.encode(8)]), [*x.prompt_ids, *y.prompt_ids])
    prompts = np.array([*x.prompt_ids, *y.prompt_ids])

    def slow(in_x):
        sums, counts, each = np.zeros(3), np.zeros(3), []
        for q in range(3):
            a, b = np.flatnonzero(in_x & (prompts == q)), np.flatnonzero(~in_x & (prompts == q))
            cells = (
                [gram[i, j] for i, j in itertools.permutations(a, 2)],
                [gram[i, j] for i in a for j in b],
                [gram[i, j] for i, j in itertools.permutations(b, 2)],
            )
            sums += [sum(c) for c in cells]
            counts += [len(c) for c in cells]
            each.append(np.mean(cells[0]) - 2 * np.mean(cells[1]) + np.mean(cells[2]))
        if normalization == "per_prompt":
            return np.mean(each)
        if normalization == "paper":
            n, k = in_x.sum(), (~in_x).sum()
            counts = np.array([n * (n - 1), n * k, k * (k - 1)])
        return sums[0] / counts[0] - 2 * sums[1] / counts[1] + sums[2] / counts[2]

    rng, labels = np.random.default_rng(3), [np.zeros((9, 20), dtype=np.float32) for _ in range(3)]
    expected = []
    for column in range(20):
        in_x = np.zeros(len(prompts), dtype=bool)
        for q in range(3):
            rows = np.flatnonzero(prompts == q)
            chosen = rng.permutation(9)[:5]
            in_x[rows[chosen]] = True
            labels[q][chosen, column] = 1
        expected.append(slow(in_x))
    strata = []
    for q in range(3):
        rows = np.flatnonzero(prompts == q)
        strata.append(Stratum(gram[np.ix_(rows, rows)], 1.0, 5))
    assert GramProblem(strata, normalization).evaluate(labels)[0] == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 6), st.integers(2, 6), st.integers(1, 5), st.integers(0, 10_000))
def test_counting_matches_equals_the_gram_matrix(n_x, n_y, length, seed):
    rng = np.random.default_rng(seed)
    rows = [rng.integers(-1, 3, (n_x + n_y, length)).astype(np.int32) for _ in range(2)]
    strata = [Stratum(*Hamming().counts(Block(r)), n_x) for r in rows]
    gram, match = GramProblem(strata), MatchProblem(rows, [(n_x, n_y)] * 2)
    labels = [draw_labels(n_x + n_y, n_x, 7, rng)[0] for _ in rows]
    assert match.evaluate(labels)[0] == pytest.approx(gram.evaluate(labels)[0], abs=1e-12)
    assert match.evaluate_pooled(np.concatenate(labels)) == pytest.approx(
        gram.evaluate_pooled(np.concatenate(labels)), abs=1e-12
    )
    for a, b in zip(match.row_sums(0), gram.row_sums(0), strict=True):
        assert a == pytest.approx(b, abs=1e-12)


@pytest.mark.parametrize("kernel", [Hamming(), OneHot()])
def test_a_test_without_a_gram_matrix_gives_the_same_answer(source, monkeypatch, kernel):
    from mmd_equality import two_sample

    x, y = source(30, m=2, seed=1), source(20, m=2, shift=0.4, seed=2)
    with_gram = two_sample_test(x, y, kernel=kernel, n_permutations=299, random_state=0)
    monkeypatch.setattr(two_sample, "GRAM_BYTES", 0)
    without = two_sample_test(x, y, kernel=kernel, n_permutations=299, random_state=0)
    assert without.statistic == pytest.approx(with_gram.statistic, abs=1e-12)
    assert without.pvalue == with_gram.pvalue
    assert without.ci == pytest.approx(with_gram.ci)


def test_the_same_seed_gives_the_same_result_whatever_the_threads(source):
    x, y = source(300, seed=1), source(300, seed=2)
    runs = [two_sample_test(x, y, n_permutations=20_000, random_state=4, n_jobs=jobs) for jobs in (1, 2)]
    assert (runs[0].null_distribution == runs[1].null_distribution).all()


def test_swapping_the_samples_changes_nothing_but_the_draws(source):
    x, y = source(4, seed=1), source(3, seed=2)
    a, b = two_sample_test(x, y), two_sample_test(y, x)
    assert a.null == "exact"
    assert a.pvalue == b.pvalue
    assert a.statistic == pytest.approx(b.statistic)


def test_monte_carlo_approaches_the_exact_p(source):
    x, y = source(4, m=2, seed=1), source(4, m=2, shift=0.3, seed=2)
    exact = two_sample_test(x, y, null="exact")
    drawn = two_sample_test(x, y, null="permutation", n_permutations=20_000, random_state=0)
    assert exact.n_draws == 4900
    assert abs(exact.pvalue - drawn.pvalue) < 0.015
    assert {e.prompt_id: e.pvalue for e in drawn.per_prompt} == pytest.approx(
        {e.prompt_id: e.pvalue for e in exact.per_prompt}, abs=0.015
    )


def test_p_is_never_zero(source):
    x = Samples([0] * 40, ["a" * 5] * 20 + ["b" * 5] * 20)
    y = Samples([0] * 40, ["x" * 5] * 20 + ["y" * 5] * 20)
    assert two_sample_test(x, y, n_permutations=199, random_state=0).pvalue == 1 / 200


def test_early_stopping_is_valid_and_stops(source):
    x, y = source(20, seed=1), source(20, seed=2)
    result = two_sample_test(x, y, n_permutations=9999, stop_after=10, random_state=0)
    assert result.n_draws < 9999
    assert result.pvalue == 10 / result.n_draws
    different = two_sample_test(x, source(20, shift=0.9, seed=3), n_permutations=999, stop_after=10, random_state=0)
    assert different.pvalue == 1 / 1000


def test_early_stopping_keeps_the_level(source):
    hits = sum(
        two_sample_test(source(6, seed=2 * i), source(6, seed=2 * i + 1), null="permutation", n_permutations=99, stop_after=10,
                        random_state=i).pvalue <= 0.1
        for i in range(400)
    )  # fmt: skip
    assert hits <= 58  # 40 and three binomial standard deviations


def test_the_simulated_null_draws_disjoint_samples_without_replacement(source):
    pool = source(40, m=2, seed=5)
    x, y = source(10, m=2, seed=1), source(10, m=2, shift=0.8, seed=2)
    result = two_sample_test(x, y, null="simulated", alternative_pool=pool, n_permutations=999, random_state=0)
    assert result.pvalue <= 0.01
    assert result.null == "simulated"
    with pytest.raises(ValueError, match=r"needs 10 \+ 10"):
        two_sample_test(x, y, null="simulated", alternative_pool=source(12, m=2, seed=5), n_permutations=999)
    values, scale = Hamming().counts(Block(pool.encode()[:40]))
    centred = simulated_null([(values, scale)], [(10, 10)], 4000, np.random.SeedSequence(0))
    assert abs(centred.mean()) < 4 * centred.std() / np.sqrt(4000)  # with replacement it would sit well above zero


def test_a_simulated_null_is_made_once_for_all_endpoints(source, monkeypatch):
    from mmd_equality import two_sample

    pool, x = source(40, m=2, seed=5), source(10, m=2, seed=1)
    options = {"null": "simulated", "alternative_pool": pool, "n_permutations": 199, "random_state": 3}
    first = two_sample_test(x, source(10, m=2, seed=6), **options)
    monkeypatch.setattr(two_sample, "simulated_null", lambda *a, **k: pytest.fail("computed again"))
    second = two_sample_test(x, source(10, m=2, seed=7), **options)
    assert (first.null_distribution == second.null_distribution).all()


def test_a_pooled_shuffle_that_leaves_no_pair_counts_against_rejection():
    x = Samples([0, 0, 1], ["a", "b", "c"], design="random")
    y = Samples([0, 0, 1], ["a", "c", "d"], design="random")
    result = two_sample_test(x, y)
    assert result.strata == "pooled"
    assert np.isfinite(result.statistic)
    assert 0 < result.pvalue <= 1
    assert json.loads(result.to_json())["null_standard_deviation"] >= 0


def test_a_pooled_shuffle_wastes_level_under_a_fixed_design_and_the_stratified_one_does_not():
    """Two rows a prompt: the pooled shuffle makes uneven splits that the data cannot show (official code: 2.3% at 5%)."""
    gold = json.loads(
        (__import__("pathlib").Path(__file__).parent / "data" / "null_calibration.json").read_text(encoding="utf-8")
    )
    assert next(r for r in gold["rows"] if r["prompts"] == 5 and r["design"] == "fixed")["rate_p_le_0.05"] < 0.03
    stratified, pooled = (
        rejection_rates(1500, m=5, n=2, strata=s, length=150, symbols=12) for s in ("prompt", "pooled")
    )
    assert pooled < stratified


def rejection_rates(repeats, *, m, n, strata, draws=99, level=0.05, length=8, symbols=4):
    rng = np.random.default_rng(11)
    probabilities = np.cumsum(rng.dirichlet(np.full(symbols, 0.4), size=(m, 1, length)), axis=3)
    uniform = rng.random((repeats, m, 2 * n, length, 1), dtype=np.float32)
    rows = (uniform > probabilities).sum(axis=4, dtype=np.int32).clip(max=symbols - 1)
    grams = hamming_counts(rows.reshape(repeats * m, 2 * n, length)).reshape(repeats, m, 2 * n, 2 * n)
    hits = 0
    for gram, seed in zip(grams, np.random.SeedSequence(5).spawn(repeats), strict=True):
        problem = GramProblem([Stratum(values, float(length), n) for values in gram])
        hits += pvalue(permutation_null(problem, draws, seed, pooled=strata == "pooled")) <= level
    return hits / repeats


@pytest.mark.parametrize(("m", "n"), [(1, 8), (5, 2)])
def test_the_stratified_test_rejects_a_true_null_at_its_level(m, n):
    assert 0.035 <= rejection_rates(2000, m=m, n=n, strata="prompt", length=150, symbols=12) <= 0.065


def test_ties_between_short_completions_only_ever_make_the_test_cautious():
    """Eight positions of four symbols, two rows a prompt: 11% of the permuted statistics tie with the observed one."""
    assert rejection_rates(1000, m=5, n=2, strata="prompt") <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1000)


@pytest.mark.slow
def test_the_pooled_test_rejects_a_true_null_at_its_level_when_prompts_are_drawn():
    rng = np.random.default_rng(3)
    hits = 0
    for i in range(2000):
        probabilities = np.cumsum(rng.dirichlet(np.full(4, 0.4), size=(5, 8)), axis=2)
        sides = []
        for _ in range(2):
            prompts = rng.integers(0, 5, 10)
            rows = (rng.random((10, 8, 1)) > probabilities[prompts]).sum(axis=2).clip(max=3)
            sides.append(Samples(prompts.tolist(), rows.tolist(), design="random"))
        hits += two_sample_test(*sides, n_permutations=99, random_state=i).pvalue <= 0.05
    assert 0.035 <= hits / 2000 <= 0.065


@pytest.mark.slow
def test_the_interval_covers_the_true_effect_about_as_often_as_it_says(source):
    probabilities = np.random.default_rng(7).dirichlet(np.full(4, 0.4), size=(1, 8))
    for shift in (0.0, 0.3, 0.8):
        moved = (1 - shift) * probabilities + shift * np.roll(probabilities, 1, axis=2)
        truth = ((probabilities - moved) ** 2).sum(axis=2).mean()
        covered = 0
        for i in range(400):
            low, high = two_sample_test(
                source(25, seed=2 * i), source(25, shift=shift, seed=2 * i + 1), n_permutations=19, random_state=0
            ).ci
            covered += low <= truth <= high
        assert covered / 400 >= 0.92, shift


def test_the_statistic_estimates_the_distance_between_the_marginals(source):
    """Hamming MMD^2 is the mean over positions of the squared distance between symbol distributions."""
    p = np.random.default_rng(7).dirichlet(np.full(4, 0.4), size=(1, 8))
    q = 0.5 * p + 0.5 * np.roll(p, 1, axis=2)
    truth = ((p - q) ** 2).sum(axis=2).mean()
    result = two_sample_test(source(2000, seed=1), source(2000, shift=0.5, seed=2), n_permutations=99, random_state=0)
    assert result.statistic == pytest.approx(truth, abs=4 * result.standard_error)
    assert result.ci[0] < truth < result.ci[1]


# -- what can go wrong


def test_fewer_than_two_completions_names_the_prompts():
    x, y = Samples(["p", "p", "q"], ["a", "b", "c"]), Samples(["p", "p", "q", "q"], ["a", "c", "d", "e"])
    with pytest.raises(ValueError, match="fewer than 2 completions on a side for prompts 'q'"):
        two_sample_test(x, y)
    dropped = two_sample_test(x, y, on_small="drop")
    assert [e.prompt_id for e in dropped.per_prompt] == ["p"]
    assert "prompts-dropped" in codes(dropped)


def test_one_completion_each_is_an_error_and_never_p_zero():
    x, y = Samples([0, 1], ["a", "b"]), Samples([0, 1], ["a", "c"])
    with pytest.raises(ValueError, match="fewer than 2"):
        two_sample_test(x, y)
    with pytest.raises(ValueError, match="nothing is left"):
        two_sample_test(x, y, on_small="drop")
    with pytest.raises(ValueError, match="no pair to compare"):
        two_sample_test(x, y, strata="pooled")


def test_prompts_of_one_side_only_are_named():
    x, y = Samples(["p", "p", "q", "q"], list("abcd")), Samples(["p", "p", "r", "r"], list("abcd"))
    with pytest.raises(ValueError, match="in one sample only: prompts 'q', 'r'"):
        two_sample_test(x, y)
    assert "prompts-dropped" in codes(two_sample_test(x, y, on_missing="drop"))
    with pytest.raises(ValueError, match="no prompt is in both samples"):
        two_sample_test(x, Samples(["z", "z"], ["a", "b"]))


def test_greedy_on_both_sides_gives_p_one_and_asks_about_temperature():
    x = Samples([0] * 6, ["same"] * 6)
    result = two_sample_test(x, Samples([0] * 6, ["same"] * 6))
    assert (result.statistic, result.pvalue) == (0, 1)
    assert "no-variation" in codes(result)


def test_greedy_on_one_side_is_noticed(source):
    y = Samples([0] * 12, [f"text {i}" for i in range(12)])
    assert "duplicates" in codes(two_sample_test(Samples([0] * 12, ["same"] * 12), y, random_state=0))


def test_empty_strings_are_valid_rows():
    x, y = Samples([0] * 4, ["", "", "a", "b"]), Samples([0] * 4, ["", "c", "", "ab"])
    for kernel in ("hamming", "all_substrings", "kspectrum3", "onehot"):
        result = two_sample_test(x, y, kernel=kernel)
        assert np.isfinite(result.statistic)
    empty = two_sample_test(Samples([0] * 4, [""] * 4), Samples([0] * 4, [""] * 4))
    assert (empty.statistic, empty.pvalue) == (0, 1)


def test_text_and_token_ids_do_not_mix():
    with pytest.raises(TypeError, match="by char but y by token"):
        two_sample_test(Samples([0, 0], ["a", "b"]), Samples([0, 0], [[1], [2]]))


@pytest.mark.parametrize("bad", [b"a", None, [1, 2], 3])
def test_a_wrong_completion_is_named_by_its_row(bad):
    with pytest.raises(TypeError, match=r"completions\[1\] must be a str"):
        Samples([0, 0], ["a", bad])


@pytest.mark.parametrize("bad", ["a", b"a", None, [1.5], [[1]]])
def test_a_wrong_token_sequence_is_named_by_its_row(bad):
    with pytest.raises(TypeError, match=r"completions\[1\] must be a"):
        Samples([0, 0], [[1], bad])


def test_token_ids_out_of_range_are_refused():
    with pytest.raises(ValueError, match="token id outside"):
        Samples([0], [[-1]])
    with pytest.raises(ValueError, match="token id outside"):
        Samples([0], [[2**31]])


def test_uneven_counts_are_allowed_and_noted(source):
    x = Samples([0] * 5 + [1] * 8, [f"a{i}" for i in range(13)])
    y = Samples([0] * 6 + [1] * 4, [f"b{i}" for i in range(10)])
    assert "uneven-counts" in codes(two_sample_test(x, y, random_state=0, n_permutations=199))


def test_too_few_permutations_for_alpha():
    x, y = Samples([0] * 10, list("abcdefghij")), Samples([0] * 10, list("klmnopqrst"))
    with pytest.raises(ValueError, match="at least 99"):
        two_sample_test(x, y, alpha=0.01, n_permutations=98)
    assert two_sample_test(x, y, alpha=0.01, n_permutations=99, random_state=0).n_draws == 99


def test_too_few_assignments_for_alpha_is_said():
    result = two_sample_test(Samples([0] * 3, list("abc")), Samples([0] * 3, list("abd")), alpha=0.01)
    assert result.n_draws == 20
    assert "cannot-reject" in codes(result)


def test_the_same_sample_twice_is_an_error(source):
    x = source(10, seed=1)
    with pytest.raises(ValueError, match="the same sample"):
        two_sample_test(x, x)
    with pytest.raises(ValueError, match="the same sample"):
        two_sample_test(x, Samples(x.prompt_ids, x.completions))


def test_short_answers_that_agree_by_chance_are_not_taken_for_the_same_file():
    result = two_sample_test(Samples([0] * 4, ["y", "n", "y", "y"]), Samples([0] * 4, ["y", "n", "y", "y"]))
    assert result.pvalue == 1


def test_a_leading_blank_on_one_side_is_reported_with_the_p_after_stripping():
    texts = [f"{a}{b}{c}" for a in "abc" for b in "def" for c in "gh"]
    rng = np.random.default_rng(0)
    x = Samples([0] * 30, [str(t) for t in rng.choice(texts, 30)])
    y = Samples([0] * 30, [" " + str(t) for t in rng.choice(texts, 30)])
    result = two_sample_test(x, y, n_permutations=999, random_state=0)
    assert result.pvalue <= 0.01
    note = next(c for c in result.warnings if c.code == "formatting")
    stripped = two_sample_test(x, y.map(str.lstrip), n_permutations=999, random_state=0)
    assert f"p = {stripped.pvalue:.4g}"[:6] in note.message
    assert stripped.pvalue > 0.01


def test_nfc_and_nfd_differ_unless_normalised():
    x, y = (
        Samples([0] * 8, ["café", "thé", "été", "fée"] * 2),
        Samples([0] * 8, ["cafe\u0301", "the\u0301", "e\u0301te\u0301", "fe\u0301e"] * 2),
    )
    assert (
        two_sample_test(x, y, random_state=0).pvalue
        < two_sample_test(x, y, normalize="NFC", random_state=0).pvalue
        == 1
    )
    assert two_sample_test(x, y, kernel="onehot", random_state=0).statistic > 0
    with pytest.raises(ValueError, match="normalize must be one of"):
        two_sample_test(x, y, normalize="nfc")


def test_a_cut_is_reported():
    result = two_sample_test(Samples([0] * 4, ["abcdef", "ab", "b", "c"]), Samples([0] * 4, list("abcd")), max_length=3)
    assert result.share_cut == (0.25, 0.0)
    assert "cut" in codes(result)


def test_per_prompt_normalisation_cannot_be_pooled(source):
    with pytest.raises(ValueError, match="needs strata='prompt'"):
        two_sample_test(source(4, seed=1), source(4, seed=2), strata="pooled", normalization="per_prompt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0}, "alpha must be"),
        ({"alpha": 1.5}, "alpha must be"),
        ({"normalization": "sum"}, "normalization must be one of"),
        ({"strata": "rows"}, "strata must be one of|violates"),
        ({"statistic": "t"}, "statistic must be one of"),
        ({"null": "bootstrap"}, "null must be one of|violates"),
        ({"n_permutations": 0}, "n_permutations must be"),
        ({"max_length": 0}, "max_length must be"),
        ({"ci_level": 1.0}, "ci_level must be"),
        ({"prompt_weights": {}, "normalization": "per_prompt"}, "prompt_weights lacks"),
        ({"prompt_weights": {0: 1.0}}, "prompt_weights needs normalization='per_prompt'"),
        ({"random_state": -1}, "random_state must be >= 0"),
        ({"max_length": 10**9}, "pass a smaller max_length"),
    ],
)
def test_bad_options_are_named(source, options, message):
    with pytest.raises(Exception, match=message):
        two_sample_test(source(4, seed=1), source(4, seed=2), **options)


def test_an_empty_sample_and_something_else_are_refused(source):
    with pytest.raises(ValueError, match="has no completions"):
        two_sample_test(source(4), Samples([], []))
    with pytest.raises(Exception, match=r"must be Samples|violates"):
        two_sample_test(source(4), ["a"])


def test_weights_change_the_mean_over_prompts(source):
    x, y = source(6, m=2, seed=1), source(6, m=2, shift=0.5, seed=2)
    only = two_sample_test(
        x, y, normalization="per_prompt", prompt_weights={0: 1.0, 1: 0.0}, n_permutations=99, random_state=0
    )
    assert only.statistic == pytest.approx(only.per_prompt[0].mmd2)
    even = two_sample_test(x, y, normalization="per_prompt", n_permutations=99, random_state=0)
    assert even.statistic == pytest.approx(two_sample_test(x, y, n_permutations=99, random_state=0).statistic)


def test_results_go_to_json_and_text(source, tmp_path):
    result = two_sample_test(source(10, m=2, seed=1), source(10, m=2, seed=2), n_permutations=99, random_state=0)
    document = json.loads(result.to_json(tmp_path / "r.json"))
    assert document["pvalue"] == result.pvalue
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8")) == document
    assert "not rejected" in result.summary()


# -- goodness of fit


def test_goodness_of_fit_accepts_its_own_distribution_and_rejects_another():
    table = {0: {"a": np.log(0.7), "b": np.log(0.2)}}
    own = Samples([0] * 200, ["a"] * 141 + ["b"] * 39 + ["c"] * 20)
    assert goodness_of_fit(own, table, random_state=0, n_simulations=999).pvalue > 0.05
    assert goodness_of_fit(own, table, random_state=0, n_simulations=999).unlisted == 20
    other = Samples([0] * 200, ["a"] * 100 + ["b"] * 100)
    assert goodness_of_fit(other, table, random_state=0, n_simulations=999).pvalue == 1 / 1000


def test_an_impossible_row_has_the_smallest_p():
    result = goodness_of_fit(Samples([0, 0], ["a", "z"]), {0: {"a": 0.0}}, n_simulations=99, random_state=0)
    assert result.statistic == np.inf
    assert result.pvalue == 1 / 100


def test_goodness_of_fit_refuses_a_bad_table():
    with pytest.raises(ValueError, match=r"sum to 1\.4"):
        goodness_of_fit(Samples([0], ["a"]), {0: {"a": np.log(0.7), "b": np.log(0.7)}})
    with pytest.raises(ValueError, match="lacks prompts 1"):
        goodness_of_fit(Samples([1], ["a"]), {0: {"a": 0.0}})


# -- planning


def test_a_plan_finds_the_level_under_the_null_and_power_under_an_alternative(source):
    ref = source(40, m=3, seed=1)
    null = plan(ref, source(40, m=3, seed=2), grid=[10], alpha=0.1, n_permutations=99, random_state=0)
    assert null.rows[0].power < 0.25
    found = plan(ref, source(40, m=3, shift=0.6, seed=3), grid=[3, 10, 20, 80], alpha=0.05, random_state=0)
    powers = [row.power for row in found.rows]
    assert powers[0] < powers[1] <= powers[2]
    assert found.recommended in (3, 10, 20)
    assert not found.rows[-1].simulated
    assert found.rows[-1].power_ci is None
    detectable = [row.detectable for row in found.rows]
    assert detectable == sorted(detectable, reverse=True)


def test_a_plan_prices_one_endpoint(source):
    x, y = source(10, m=2, seed=1), source(10, m=2, shift=0.6, seed=2)
    found = plan(x, y, grid=[5], price_per_million=(1.0, 10.0), prompt_tokens=100, n_simulations=5, random_state=0)
    assert found.rows[0].requests == 10
    assert found.rows[0].cost == pytest.approx(10 * (100 * 1 + 8 * 10) / 1e6)
    assert "no size in the grid" in str(found)


def test_a_plan_refuses_what_it_cannot_do(source):
    x, y = source(10, seed=1), source(10, seed=2)
    with pytest.raises(ValueError, match="grid must list"):
        plan(x, y, grid=[1])
    with pytest.raises(ValueError, match="at least 99"):
        plan(x, y, n_permutations=50)
    with pytest.raises(ValueError, match="no prompt is in both"):
        plan(x, Samples(["z", "z"], [[1], [2]]))


@pytest.mark.parametrize("factor", [1e-12, 1.0, 1e12])
def test_the_scale_of_a_user_kernel_does_not_matter(source, factor):
    x, y = source(10, m=2, seed=1), source(10, m=2, shift=0.3, seed=2)
    gram = Hamming().gram(np.concatenate([x.encode(), y.encode()]), [*x.prompt_ids, *y.prompt_ids])
    plain = two_sample_test(x, y, n_permutations=199, random_state=0)
    scaled = two_sample_test(
        x, y, kernel=Precomputed(gram * factor, normalize=False), n_permutations=199, random_state=0
    )
    assert scaled.pvalue == plain.pvalue
    assert scaled.statistic == pytest.approx(plain.statistic * factor)


@pytest.mark.parametrize("name", ["l2", "chi2"])
def test_baselines_of_large_samples_do_not_overflow(name):
    n = 100_000  # n^4 is more than 64 bits hold
    # Symbol a: n against n / 2; symbol b: 0 against n / 2.
    gap_a, gap_b = n * n / 2, -n * n / 2
    by_hand = {
        "l2": (gap_a**2 + gap_b**2) / n**4,
        "chi2": (gap_a**2 - 1.5 * n**3) / (1.5 * n) + (gap_b**2 - 0.5 * n**3) / (0.5 * n),
    }[name]
    counts, totals = np.array([[n], [0]]), np.array([[n + n // 2], [n // 2]])
    assert baseline_from_counts(name, counts, totals, n, n) == pytest.approx(by_hand, rel=1e-12)


def test_numpy_numbers_are_numbers(source):
    result = two_sample_test(
        source(5, seed=1),
        source(5, seed=2),
        alpha=np.float32(0.05),
        n_permutations=np.int64(99),
        random_state=np.int64(0),
    )
    assert json.loads(result.to_json())["n_draws"] == 99


def test_one_text_is_not_a_sequence_of_completions():
    with pytest.raises(TypeError, match="completions must be a sequence"):
        Samples([0, 0, 0], "abc")
    with pytest.raises(TypeError, match="prompt_ids must be a sequence"):
        Samples("abc", ["a", "b", "c"])
    with pytest.raises(ValueError, match="failures\\[0\\] must be >= 0"):
        Samples([0], ["a"], failures={0: -1})
