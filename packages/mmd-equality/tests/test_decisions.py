"""Verdicts: corrections, composite nulls, repeats, planned looks, the ledger."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_equality import Ledger, Samples, SequentialAudit, adjust_pvalues, audit, vote_pvalue


def codes(report):
    return {c.code for row in report.rows for c in row.cautions}


def test_holm_by_hand():
    assert adjust_pvalues([0.01, 0.04, 0.03], "holm") == pytest.approx([0.03, 0.06, 0.06])


def test_bonferroni_by_hand():
    assert adjust_pvalues([0.01, 0.5], "bonferroni") == pytest.approx([0.02, 1.0])


def test_benjamini_hochberg_by_hand():
    assert adjust_pvalues([0.01, 0.04, 0.03, 0.005], "bh") == pytest.approx([0.02, 0.04, 0.04, 0.02])


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_bh_and_by_equal_scipy(pvalues):
    from scipy.stats import false_discovery_control

    for method in ("bh", "by"):
        expected = false_discovery_control(pvalues, method=method)
        assert adjust_pvalues(pvalues, method) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_holm_is_between_the_raw_p_and_bonferroni(pvalues):
    holm = adjust_pvalues(pvalues, "holm")
    assert (holm >= np.array(pvalues) - 1e-12).all()
    assert (holm <= adjust_pvalues(pvalues, "bonferroni") + 1e-12).all()


def test_unknown_correction_and_bad_p_are_refused():
    with pytest.raises(ValueError, match="correction must be one of"):
        adjust_pvalues([0.1], "sidak")
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        adjust_pvalues([float("nan")])


def test_a_vote_of_ten_rejects_exactly_when_five_do():
    assert vote_pvalue([0.001] * 5 + [0.9] * 5) <= 0.01
    assert vote_pvalue([0.001] * 4 + [0.9] * 6) > 0.01


def test_a_vote_is_valid_at_high_levels():
    rng = np.random.default_rng(0)
    votes = np.array([vote_pvalue(row) for row in rng.random((4000, 10))])
    for level in (0.01, 0.05, 0.2, 0.5):
        assert (votes <= level).mean() <= level + 3 * np.sqrt(level * (1 - level) / 4000)


def test_a_composite_null_passes_when_one_reference_fits(source):
    good, other = source(30, m=3, seed=1), source(30, m=3, shift=0.6, seed=2)
    report = audit({"fp32": good, "int4": other}, {"api": source(30, m=3, seed=3)}, n_permutations=999)
    (row,) = report.rows
    assert row.verdict == "same-not-rejected"
    assert row.pvalue == max(r.pvalue for r in row.results.values())
    assert row.results["int4"].pvalue <= 0.01
    each = audit({"fp32": good, "int4": other}, {"api": source(30, m=3, seed=3)}, composite="each", n_permutations=999)
    assert [r.verdict for r in each.rows] == ["same-not-rejected", "different"]


def test_many_endpoints_and_tasks_are_corrected_together(source):
    reference = {"a": source(20, m=2, seed=1), "b": source(20, m=2, seed=2, tables=9)}
    endpoints = {
        "bad": {"a": source(20, m=2, shift=0.7, seed=4), "b": source(20, m=2, seed=5, tables=9)},
        "good": {"a": source(20, m=2, seed=6), "b": source(20, m=2, seed=7, tables=9)},
    }
    report = audit({"ref": reference}, endpoints, n_permutations=1999, correction="bonferroni")
    assert len(report.rows) == 4
    for row in report.rows:
        assert row.adjusted == pytest.approx(min(1, 4 * row.pvalue))
    assert report.verdict_of("bad") == "different"
    assert report.verdict_of("good") == "same-not-rejected"
    assert report.verdict == "different"
    assert "identical" not in report.table()
    assert json.loads(report.to_json())["verdict"] == "different"


def test_repeats_split_the_sample_and_vote(source):
    report = audit(
        {"r": source(50, m=2, seed=1)}, {"e": source(50, m=2, shift=0.8, seed=2)}, repeats=5, n_permutations=999
    )
    assert report.rows[0].rejecting >= 0.5
    assert report.verdict == "different"


def test_too_few_permutations_for_the_corrected_level(source):
    with pytest.raises(ValueError, match="needs at least 199"):
        audit({"r": source(5, seed=1)}, {"a": source(5, seed=2), "b": source(5, seed=3)}, n_permutations=99)


def test_failed_requests_make_an_audit_inconclusive(source):
    x, y = source(30, seed=1), source(30, shift=0.7, seed=2)
    broken = Samples(y.prompt_ids, y.completions, failures={0: 5})
    report = audit({"r": x}, {"e": broken}, n_permutations=999)
    assert report.verdict == "inconclusive"
    assert "too-many-failures" in codes(report)
    assert audit({"r": x}, {"e": broken}, n_permutations=999, failure_limit=0.5).verdict == "different"


def test_a_pass_without_power_against_the_named_distortion_is_inconclusive(source):
    x, y, distorted = source(6, m=2, seed=1), source(6, m=2, seed=2), source(6, m=2, shift=0.15, seed=3)
    assert audit({"r": x}, {"e": y}, n_permutations=999).verdict == "same-not-rejected"
    report = audit({"r": x}, {"e": y}, n_permutations=999, distortion=0.001)
    assert report.verdict == "inconclusive"
    assert "low-power" in codes(report)
    assert audit({"r": x}, {"e": y}, n_permutations=999, distortion=0.9).verdict == "same-not-rejected"
    assert audit({"r": x}, {"e": y}, n_permutations=999, distortion=distorted).rows[0].power is not None


def test_a_test_that_cannot_reject_is_inconclusive(source):
    assert audit({"r": source(3, seed=1)}, {"e": source(3, seed=2)}, n_permutations=999).verdict == "inconclusive"


def test_looking_again_at_a_grown_sample_warns_and_cannot_reject(source):
    x, y = source(60, m=2, seed=1), source(60, m=2, shift=0.8, seed=2)
    book = Ledger()
    fair = source(10, m=2, seed=3)
    first = audit({"r": x}, {"grow": fair}, n_permutations=999, ledger=book)
    assert first.verdict == "same-not-rejected"
    assert audit({"r": x}, {"grow": fair}, n_permutations=999, ledger=book).rows[0].spent_alpha == pytest.approx(0.01)
    grown = Samples([*fair.prompt_ids, *y.prompt_ids], [*fair.completions, *y.completions])
    again = audit({"r": x}, {"grow": grown}, n_permutations=999, ledger=book)
    assert again.rows[0].adjusted <= 0.01
    assert again.verdict == "inconclusive"
    assert again.rows[0].spent_alpha == pytest.approx(0.02)
    assert "alpha-spent" in codes(again)


def test_an_audit_id_remembers_across_processes_by_its_file(source, tmp_path):
    x, path = source(20, seed=1), tmp_path / "ledger.json"
    audit({"r": x}, {"e": source(20, seed=2)}, n_permutations=999, audit_id="june", ledger=path)
    report = audit({"r": x}, {"e": source(20, seed=5)}, n_permutations=999, audit_id="june", ledger=path)
    assert "alpha-spent" in codes(report)
    assert audit({"r": x}, {"e": source(20, seed=5)}, n_permutations=999, audit_id="july", ledger=path).rows[
        0
    ].spent_alpha == pytest.approx(0.01)


@pytest.mark.parametrize("spending", ["equal", "obf", lambda t: 0.05 * t**2])
def test_looks_spend_no_more_than_alpha(spending):
    plan = SequentialAudit(0.05, [10, 20, 40], spending)
    assert sum(plan.alphas) <= 0.05 * (1 + 1e-9)
    assert all(a > 0 for a in plan.alphas)


def test_obf_spends_least_at_first():
    alphas = SequentialAudit(0.05, [10, 20, 40], "obf").alphas
    assert alphas[0] < alphas[1] < alphas[2]


def test_a_sequential_audit_stops_at_a_rejection_and_refuses_further_looks(source):
    x, y = source(40, m=2, seed=1), source(40, m=2, shift=0.8, seed=2)
    plan = SequentialAudit(0.05, [5, 10, 40])
    history = plan.run(x, y, n_permutations=999, random_state=0)
    assert history[-1].reject
    assert plan.spent <= 0.05
    with pytest.raises(RuntimeError, match="audit is over"):
        plan.look(x, y)


def test_a_look_before_its_sample_is_there_is_refused(source):
    with pytest.raises(ValueError, match="planned at 50"):
        SequentialAudit(0.05, [50]).look(source(10, seed=1), source(10, seed=2))


@pytest.mark.parametrize("looks", [[], [10, 10], [20, 10], [1, 5]])
def test_bad_looks(looks):
    with pytest.raises(ValueError, match="looks must"):
        SequentialAudit(0.05, looks)


def test_spending_beyond_alpha_is_refused():
    with pytest.raises(ValueError, match="end at alpha"):
        SequentialAudit(0.05, [5, 10], lambda t: 0.1 * t)


def test_sequential_looks_keep_the_level(source):
    rejections = 0
    for repeat in range(150):
        plan = SequentialAudit(0.1, [4, 8, 12])
        plan.run(source(12, seed=2 * repeat), source(12, seed=2 * repeat + 1), n_permutations=99, random_state=repeat)
        rejections += plan.rejected
    assert rejections <= 26  # 150 x 0.1 and three binomial standard deviations


@pytest.mark.parametrize("bad", [[float("nan"), 0.1], [2.0], [-0.1]])
def test_a_vote_over_something_else_is_refused(bad):
    with pytest.raises(ValueError, match="pvalues must be a flat sequence"):
        vote_pvalue(bad)


def test_a_repeat_counts_only_if_every_reference_is_rejected_in_it(source):
    e, one, two = source(60, seed=1), source(60, seed=2), source(60, seed=3)
    odd = source(30, shift=1.0, seed=4)
    halves = [bag.parts(2) for bag in (one, two)]

    def joined(a, b):
        return Samples([*a.prompt_ids, *b.prompt_ids], [*a.completions, *b.completions])

    references = {"first half off": joined(odd, halves[0][1]), "second half off": joined(halves[1][0], odd)}
    alone = [
        audit({name: bag}, {"e": e}, repeats=2, n_permutations=999).rows[0].rejecting
        for name, bag in references.items()
    ]
    assert alone == [0.5, 0.5]
    assert audit(references, {"e": e}, repeats=2, n_permutations=999).rows[0].rejecting == 0.0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"distortion": float("nan")}, ValueError, "distortion must be an MMD"),
        ({"distortion": -1.0}, ValueError, "distortion must be an MMD"),
        ({"distortion": "a"}, TypeError, "distortion must be Samples"),
        ({"distortion": {}}, ValueError, "distortion lacks tasks 'all'"),
        ({"max_length": 0}, ValueError, "max_length must be >= 1"),
        ({"n_permutations": "x"}, TypeError, "n_permutations must be an integer"),
    ],
)
def test_bad_audit_options_are_named(source, change, error, message):
    with pytest.raises(error, match=message):
        audit({"r": source(5, seed=1)}, {"e": source(5, seed=2)}, **change)


def test_samples_without_a_name_are_refused(source):
    with pytest.raises(TypeError, match="references must map names to Samples, got Samples"):
        audit(source(5), {"e": source(5, seed=2)})
    with pytest.raises(TypeError, match=r"endpoints\['e'\] must be Samples"):
        audit({"r": source(5)}, {"e": [1]})


def test_a_file_that_is_no_ledger_is_named(source, tmp_path):
    path = tmp_path / "l.json"
    path.write_text("a\nb", encoding="utf-8")
    with pytest.raises(ValueError, match="is not an audit ledger"):
        audit({"r": source(5, seed=1)}, {"e": source(5, seed=2)}, ledger=path)
