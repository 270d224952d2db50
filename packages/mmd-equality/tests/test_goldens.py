"""Golden values: computed by the official implementation (0.0.2) and by a double loop in float64, as said in each test."""

import json
from pathlib import Path

import numpy as np
import pytest

from mmd_equality import AllSubstrings, Hamming, KSpectrum, Samples, goodness_of_fit, two_sample_test
from mmd_equality.kernels import Block
from mmd_equality.permutation import GramProblem, Stratum

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "statistics.json").read_text(encoding="utf-8"))["two_sample"]
PERMUTED = json.loads((DATA / "fixed_permutations.json").read_text(encoding="utf-8"))
EXACT = json.loads((DATA / "exact_stratified.json").read_text(encoding="utf-8"))["cases"]
KERNELS = {
    "hamming": Hamming(),
    "kspectrum_k1_cum": KSpectrum(1, include_padding=True),
    "kspectrum_k3_cum": KSpectrum(3, include_padding=True),
    "kspectrum_k5_cum": KSpectrum(5, include_padding=True),
    "kspectrum_k3_only": KSpectrum(3, cumulative=False, include_padding=True),
    "all_substrings": AllSubstrings(include_padding=True),
}


def unpadded(rows):
    return [[t for t in row if t != -1] for row in rows]


def pair(case):
    rows = [case.get(f"completions_{i}", case.get(f"codepoints_{i}")) for i in (1, 2)]
    return [
        Samples(case[f"prompts_{i}"], unpadded(r), level="token", design="random")
        for i, r in zip((1, 2), rows, strict=True)
    ]


def statistic(case, **options):
    x, y = pair(case)
    length = len((case.get("completions_1") or case["codepoints_1"])[0])
    return two_sample_test(x, y, max_length=length, n_permutations=99, random_state=0, **options)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_statistics_equal_the_official_ones(case, name):
    assert statistic(case, kernel=KERNELS[name]).statistic == pytest.approx(case["official"][name], abs=1e-9)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
@pytest.mark.parametrize("name", ["L1", "L2", "chi2"])
def test_baselines_equal_the_official_ones(case, name):
    result = statistic(case, statistic=name.lower())
    assert result.statistic == pytest.approx(case["official"][name], abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_hamming_equals_a_float64_double_loop_under_both_denominators_and_for_each_prompt(case):
    brute = case["float64_bruteforce"]
    assert statistic(case).statistic == pytest.approx(brute["hamming_pairs_denominator"], abs=1e-12)
    paper = statistic(case, normalization="paper")
    assert paper.statistic == pytest.approx(brute["hamming_paper_denominator"], abs=1e-12)
    each = {e.prompt_id: e.mmd2 for e in paper.per_prompt}
    for prompt, value in enumerate(brute.get("hamming_per_prompt", [])):
        assert each[prompt] == pytest.approx(value, abs=1e-12)


def test_strings_and_their_code_points_give_the_same_statistic():
    case = next(c for c in CASES if "texts_1" in c)
    x, y = (Samples(case[f"prompts_{i}"], case[f"texts_{i}"]) for i in (1, 2))
    result = two_sample_test(x, y, max_length=case["L"], n_permutations=99, random_state=0)
    assert result.statistic == pytest.approx(case["official"]["hamming"], abs=1e-12)
    assert x.encode(case["L"]).tolist() == case["codepoints_1"]
    assert y.encode(case["L"]).tolist() == case["codepoints_2"]


@pytest.mark.parametrize("name", ["hamming", "kspectrum_k3_cum"])
def test_statistics_of_fixed_permutations_equal_the_official_ones(name):
    prompts = np.array(PERMUTED["prompts_1"] + PERMUTED["prompts_2"])
    rows = np.array(PERMUTED["completions_1"] + PERMUTED["completions_2"], dtype=np.int32)
    strata, orders = [], []
    for prompt in range(PERMUTED["m"]):
        index = np.flatnonzero(prompts == prompt)
        values, scale = KERNELS[name].counts(Block(rows[index], list(rows[index]), index))
        strata.append(Stratum(values, scale, n_x=8))
        orders.append(index)
    columns = [p["order"][: PERMUTED["n1"]] for p in PERMUTED["permutations"]]
    labels = np.zeros((len(rows), len(columns)), dtype=np.float32)
    for column, members in enumerate(columns):
        labels[members, column] = 1
    values = GramProblem(strata).evaluate_pooled(labels[np.concatenate(orders)])
    expected = [p[name] for p in PERMUTED["permutations"]]
    assert values == pytest.approx(expected, abs=1e-9)
    observed = PERMUTED["observed"][name]
    assert int((values >= observed - 1e-11).sum()) == sum(v >= observed for v in expected)


@pytest.mark.parametrize("case", EXACT, ids=lambda c: f"{c['n_assignments']}-assignments")
def test_exact_p_equals_full_enumeration(case):
    result = statistic(case, null="exact", strata="prompt")
    assert result.n_draws == case["n_assignments"]
    assert round(result.pvalue * result.n_draws) == case["n_ge_observed"]
    assert result.pvalue == pytest.approx(case["exact_p"], abs=1e-12)
    assert result.statistic == pytest.approx(case["observed_hamming"], abs=1e-12)


FIT = json.loads((DATA / "goodness_of_fit.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("g2", "g_squared"),
        ("chi2", "chi_squared"),
        ("truncated_chi2", "truncated_chi_squared"),
        ("l1", "L1"),
        ("l2", "L2"),
    ],
)
def test_goodness_of_fit_equals_the_official_statistics(name, key):
    table = {
        prompt: {tuple(s): float(np.log(p)) for s, p in zip(FIT["sequences"], FIT["probs"][prompt], strict=True)}
        for prompt in (0, 1)
    }
    sample = Samples(FIT["prompts"], FIT["completions"], design="random")
    result = goodness_of_fit(
        sample, table, prompt_distribution=dict(enumerate(FIT["prompt_distribution"])), statistic=name,
        n_simulations=199, random_state=0,
    )  # fmt: skip
    assert result.statistic == pytest.approx(FIT["official"][key], rel=1e-4)
    assert 0 < result.pvalue <= 1
