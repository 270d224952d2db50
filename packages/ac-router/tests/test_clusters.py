"""The statistics and the weights.

Golden values: `official_*` were computed by the official implementation's gate (language models, Swin) on a CPU in float32, `brute.*`
by an independent loop in float64.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from ac_router import causal_token_weights, feature_weights, scale_tokens, token_weights
from ac_router.clusters import cluster_statistics

GOLDEN = np.load(Path(__file__).parent / "data" / "router.npz")


def golden(name: str) -> torch.Tensor:
    return torch.from_numpy(np.asarray(GOLDEN[name]))


def close(ours: torch.Tensor, expected: torch.Tensor, rtol: float = 2e-6) -> bool:
    return torch.allclose(ours.to(expected.dtype), expected, rtol=rtol, atol=rtol)


def slow_weights(x, labels, experts, *, dispersion="mad", norm="feature", eps=1e-4, clip=10.0, min_count=2):
    """The definition, one number at a time, in plain Python."""
    x, labels, d = x.double().tolist(), labels.tolist(), x.shape[1]
    w = {}
    for k in range(experts):
        rows = [row for row, label in zip(x, labels, strict=True) if label == k]
        if len(rows) < min_count:
            continue
        for q in range(d):
            column = [row[q] for row in rows]
            mean = sum(column) / len(column)
            if dispersion == "mad":
                s = sum(abs(value - mean) for value in column) / len(column)
            elif dispersion == "variance":
                s = sum((value - mean) ** 2 for value in column) / len(column)
            else:
                pairs = [abs(a - b) for i, a in enumerate(column) for b in column[:i]]
                s = sum(pairs) / max(1, len(pairs))
            w[k, q] = 1 / (s + eps)
    if not w:
        return torch.ones(experts, d, dtype=torch.float64)
    overall = sum(w.values()) / len(w)
    if clip is not None:
        w = {key: min(value, clip * overall) for key, value in w.items()}
    present = sorted({k for k, _ in w})
    clipped = sum(w.values()) / len(w)
    out = torch.ones(experts, d, dtype=torch.float64)
    for k, q in w:
        scale = {
            "feature": sum(w[j, q] for j in present) / len(present),
            "cluster": sum(w[k, p] for p in range(d)) / d,
            "global": overall,
            "global_clipped": clipped,
            None: 1.0,
        }[norm]
        out[k, q] = w[k, q] / scale
    return out


@pytest.mark.parametrize("case", ["a", "b"])
@pytest.mark.parametrize(
    ("official", "options"),
    [
        ("official_lm_token_weights", {}),
        ("official_lm_var_token_weights", {"dispersion": "variance", "eps": 0.1, "clip": None, "norm": None}),
        ("official_swin_token_weights", {"clip": 1.5, "norm": "global"}),
        ("official_swin_var_token_weights", {"dispersion": "variance", "norm": "global"}),
        ("official_pairwise_token_weights", {"dispersion": "pairwise", "clip": None, "norm": None}),
    ],
)
def test_token_weights_equal_the_official_ones(case, official, options):
    prev = golden(f"{case}.prev_idx")
    w = feature_weights(golden(f"{case}.x"), prev, len(golden(f"{case}.e")), **options)
    expected = golden(f"{case}.{official}")
    # The official variance is E[x^2] - E[x]^2 in float32, which loses four digits here; ours is two-pass and is held to a
    # float64 loop at 1e-9 below.
    assert close(token_weights(w, prev), expected, rtol=1e-4 if "_var_" in official else 2e-6)


@pytest.mark.parametrize("case", ["a", "b"])
def test_mixed_token_weights_equal_the_official_ones(case):
    prev = golden(f"{case}.prev_idx")
    w = feature_weights(golden(f"{case}.x"), prev, len(golden(f"{case}.e")))
    mixed = token_weights(w, prev, golden(f"{case}.prev_w"))
    assert close(mixed, golden(f"{case}.official_lm_mixed_token_weights"))


@pytest.mark.parametrize("case", ["a", "b"])
@pytest.mark.parametrize("norm", ["feature", "global", "cluster", None])
@pytest.mark.parametrize(("dispersion", "short"), [("mad", "mad"), ("variance", "var")])
def test_weights_equal_a_float64_loop(case, norm, dispersion, short):
    x, prev = golden(f"{case}.x").double(), golden(f"{case}.prev_idx")
    expected = golden(f"{case}.brute.{short}.{norm}.W")
    w = feature_weights(x, prev, len(expected), dispersion=dispersion, norm=norm)
    assert w.dtype == torch.float64
    torch.testing.assert_close(w, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", ["a", "b"])
@pytest.mark.parametrize(("dispersion", "short"), [("mad", "mad"), ("variance", "var")])
def test_statistics_equal_a_float64_loop(case, dispersion, short):
    x, prev = golden(f"{case}.x").double(), golden(f"{case}.prev_idx")
    expected = golden(f"{case}.brute.{short}.s")
    count, spread = cluster_statistics(x, prev[:, 0], len(expected), dispersion=dispersion)
    assert count.long().tolist() == golden(f"{case}.brute.count").tolist()
    torch.testing.assert_close(spread, expected, rtol=1e-9, atol=1e-9)


def test_empty_and_single_token_clusters_have_weight_one_and_leave_the_others_alone():
    x, prev = golden("deg.x").double(), golden("deg.prev_idx")
    torch.testing.assert_close(feature_weights(x, prev, 5), golden("deg.W_safe"), rtol=1e-9, atol=1e-9)


def test_masked_tokens_do_not_count():
    x, prev, mask = golden("deg.x").double(), golden("deg.prev_idx"), golden("deg.mask")
    w = feature_weights(x, prev, 5, mask=mask)
    torch.testing.assert_close(w, golden("deg.masked.W_safe"), rtol=1e-9, atol=1e-9)
    assert torch.equal(w, feature_weights(x[mask], prev[mask], 5))


def test_official_compat_reproduces_the_official_collapse():
    prev = golden("deg.prev_idx")
    w = feature_weights(golden("deg.x"), prev, 5, official_compat=True)
    assert close(token_weights(w, prev), golden("deg.official_lm_token_weights"))
    assert token_weights(w, prev)[prev[:, 0] == 0].mean() < 0.01


def test_a_trailing_empty_expert_is_no_row_of_the_official_code():
    x, prev = torch.randn(30, 4), torch.arange(30) % 3
    w = feature_weights(x, prev, 5, official_compat=True)
    torch.testing.assert_close(w[:3], feature_weights(x, prev, 3))
    assert torch.equal(w[3:], torch.ones(2, 4))


def test_two_clusters_counted_by_hand():
    # Cluster 0: feature 0 is 0 and 2 (mean 1, MAD 1), feature 1 is 0 and 8 (MAD 4). Cluster 1: MADs 3 and 4.
    x = torch.tensor([[0.0, 0.0], [2.0, 8.0], [0.0, 0.0], [6.0, 8.0]], dtype=torch.float64)
    prev = torch.tensor([0, 0, 1, 1])
    w = feature_weights(x, prev, 2, eps=1e-12)
    # Feature 0: weights 1 and 1/3 have mean 2/3; feature 1: equal.
    torch.testing.assert_close(w, torch.tensor([[1.5, 1.0], [0.5, 1.0]], dtype=torch.float64))


def test_pairwise_distance_of_three_numbers_by_hand():
    # |0-1|, |0-4|, |1-4| = 1, 4, 3: mean 8/3. Variance of 0, 1, 4 about 5/3: 26/9.
    x, labels = torch.tensor([[4.0], [0.0], [1.0], [9.0]]), torch.tensor([1, 1, 1, 0])
    assert cluster_statistics(x, labels, 2, dispersion="pairwise").dispersion[1].item() == pytest.approx(8 / 3)
    assert cluster_statistics(x, labels, 2, dispersion="variance").dispersion[1].item() == pytest.approx(26 / 9)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(0, 30),
    dim=st.integers(1, 5),
    experts=st.integers(1, 6),
    dispersion=st.sampled_from(["mad", "variance", "pairwise"]),
    norm=st.sampled_from(["feature", "global", "global_clipped", "cluster", None]),
    clip=st.sampled_from([None, 1.0, 1.5, 10.0]),
    min_count=st.integers(1, 4),
)
def test_weights_equal_the_definition(seed, tokens, dim, experts, dispersion, norm, clip, min_count):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, dim, generator=generator, dtype=torch.float64)
    labels = torch.randint(-1, experts, (tokens,), generator=generator)
    options = {"dispersion": dispersion, "norm": norm, "clip": clip, "min_count": min_count}
    ours = feature_weights(x, labels, experts, **options)
    assert torch.isfinite(ours).all()
    torch.testing.assert_close(ours, slow_weights(x, labels, experts, **options), rtol=1e-8, atol=1e-8)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(2, 40))
def test_order_of_tokens_and_names_of_clusters_do_not_matter(seed, tokens):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (tokens,), generator=generator)
    w = feature_weights(x, labels, 4)
    order, names = torch.randperm(tokens, generator=generator), torch.randperm(4, generator=generator)
    torch.testing.assert_close(feature_weights(x[order], labels[order], 4), w)
    torch.testing.assert_close(feature_weights(x, names[labels], 4)[names], w)
    torch.testing.assert_close(feature_weights(x + 7, labels, 4), w, rtol=1e-7, atol=1e-7)


def test_many_blocks_of_tokens_equal_one(monkeypatch):
    x, labels = torch.randn(300, 8), torch.randint(0, 5, (300,))
    whole = feature_weights(x, labels, 5)
    scaled = scale_tokens(x, whole, labels[:, None])
    monkeypatch.setattr("ac_router.clusters.BLOCK_ELEMENTS", 56)
    torch.testing.assert_close(feature_weights(x, labels, 5), whole)
    assert torch.equal(scale_tokens(x, whole, labels[:, None]), scaled)


@pytest.mark.parametrize("shape", [(24,), (24, 2), (4, 6), (4, 6, 2), (4, 6, 1)])
def test_every_shape_of_assignment_is_taken(shape):
    top1 = torch.arange(24) % 3
    prev = top1.reshape(4, 6) if len(shape) == 2 and shape[0] == 4 else top1
    if len(shape) == 3 or shape == (24, 2):
        prev = torch.stack([top1, (top1 + 1) % 3], dim=-1)[..., : shape[-1]]
    x = torch.randn(4, 6, 5)
    assert torch.equal(feature_weights(x, prev.reshape(shape), 3), feature_weights(x.reshape(24, 5), top1, 3))


def test_square_two_dimensional_assignment_is_read_by_the_shape_of_the_tokens():
    # hidden [2, 3, d] with prev [2, 3] is one index a token, not three indices for two tokens.
    x, prev = torch.randn(2, 3, 4), torch.tensor([[0, 1, 0], [1, 0, 1]])
    assert torch.equal(feature_weights(x, prev, 2), feature_weights(x.reshape(6, 4), prev.reshape(6), 2))


def test_a_token_count_that_differs_names_both_counts():
    with pytest.raises(ValueError, match=r"10 tokens but prev has assignments for 9"):
        feature_weights(torch.randn(10, 4), torch.zeros(9, dtype=torch.long), 3)


@pytest.mark.parametrize("index", [-2, 3])
def test_an_index_outside_the_experts_is_an_error(index):
    prev = torch.tensor([0, 1, 2, index])
    with pytest.raises(ValueError, match=r"must lie in \[0, 3\)"):
        feature_weights(torch.randn(4, 2), prev, 3)
    assert torch.isfinite(feature_weights(torch.randn(4, 2), prev, 3, check=False)).all()


def test_minus_one_is_a_token_that_does_not_count_and_has_weight_one():
    x, prev = torch.randn(9, 2), torch.tensor([0, 0, 0, 1, 1, 1, -1, -1, -1])
    w = feature_weights(x, prev, 2)
    assert torch.equal(w, feature_weights(x[:6], prev[:6], 2))
    assert torch.equal(token_weights(w, prev[:, None])[6:], torch.ones(3, 2))
    gates = torch.full((9, 1), 1.0)
    torch.testing.assert_close(token_weights(w, prev[:, None], gates), token_weights(w, prev[:, None]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_token_is_left_out_with_a_warning(bad):
    x, prev = torch.randn(20, 3), torch.arange(20) % 2
    broken = x.clone()
    broken[4, 1] = bad
    with pytest.warns(UserWarning, match="NaN or infinite"):
        w = feature_weights(broken, prev, 2)
    keep = torch.arange(20) != 4
    torch.testing.assert_close(w, feature_weights(x[keep], prev[keep], 2))


def test_a_broken_token_under_the_mask_is_no_reason_to_warn(recwarn):
    x, prev = torch.randn(20, 3), torch.arange(20) % 2
    x[3] = float("nan")
    assert torch.isfinite(feature_weights(x, prev, 2, mask=torch.arange(20) != 3)).all()
    assert not recwarn.list


def test_sums_that_overflow_float32_do_not():
    x = torch.tensor([[3e38], [3e38], [1.0], [2.0]])
    w = feature_weights(x, torch.tensor([0, 0, 1, 1]), 2)
    assert torch.isfinite(w).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_tokens_have_float32_statistics(dtype):
    x = (torch.randn(64, 4) * 2e4).to(dtype).clamp(-6e4, 6e4)
    prev = torch.arange(64) % 4
    w = feature_weights(x, prev, 4)
    assert w.dtype == torch.float32
    torch.testing.assert_close(w, feature_weights(x.float(), prev, 4))
    assert scale_tokens(x, w, prev[:, None]).dtype == dtype


def test_all_masked_all_dropped_and_no_tokens_give_weight_one():
    ones = torch.ones(3, 4)
    prev = torch.zeros(8, dtype=torch.long)
    assert torch.equal(feature_weights(torch.randn(8, 4), prev, 3, mask=torch.zeros(8, dtype=torch.bool)), ones)
    assert torch.equal(feature_weights(torch.randn(8, 4), prev - 1, 3), ones)
    assert torch.equal(feature_weights(torch.randn(0, 4), prev[:0], 3), ones)


def test_constant_features_have_finite_weights():
    x = torch.zeros(12, 3)
    x[:, 0] = torch.arange(12.0)
    w = feature_weights(x, torch.arange(12) % 3, 3)
    assert torch.isfinite(w).all()
    assert torch.equal(w[:, 1:], torch.ones(3, 2))


def test_a_mask_of_another_size_is_an_error():
    with pytest.raises(ValueError, match="mask has 5 entries"):
        feature_weights(torch.randn(6, 2), torch.zeros(6, dtype=torch.long), 1, mask=torch.ones(5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 0.0}, "eps must be positive"),
        ({"eps": -1.0}, "eps must be positive"),
        ({"clip": 0.5}, "clip is a multiple"),
        ({"clip": float("nan")}, "clip is a multiple"),
        ({"dispersion": "mda"}, "dispersion must be one of"),
        ({"norm": "token"}, "norm must be one of"),
        ({"min_count": 0}, "min_count must be >= 1"),
        ({"dispersion": "pairwise", "process_group": "world"}, "does not add up over processes"),
    ],
)
def test_bad_options_are_errors_that_name_them(options, message):
    with pytest.raises((ValueError, TypeCheckError)) as caught:
        feature_weights(torch.randn(4, 2), torch.zeros(4, dtype=torch.long), 1, **options)
    if isinstance(caught.value, ValueError):
        assert message in str(caught.value)


def test_weights_have_no_gradient_and_scaled_tokens_pass_it_scaled():
    x = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    prev = (torch.arange(12) % 2)[:, None]
    w = feature_weights(x, prev, 2)
    assert not w.requires_grad
    scale_tokens(x, w, prev).sum().backward()
    torch.testing.assert_close(x.grad, w[prev[:, 0]])
    gates = torch.rand(12, 2, dtype=torch.float64)
    both = torch.cat([prev, 1 - prev], dim=1)
    assert torch.autograd.gradcheck(lambda h: scale_tokens(h, w, both, gates), x)
    assert torch.autograd.gradgradcheck(lambda h: scale_tokens(h, w, prev) ** 2, x)


def test_scaled_tokens_pass_functional_gradients():
    x, prev = torch.randn(12, 3), (torch.arange(12) % 2)[:, None]
    w = feature_weights(x, prev, 2)
    torch.testing.assert_close(torch.func.grad(lambda h: scale_tokens(h, w, prev).sum())(x), w[prev[:, 0]])


@pytest.mark.parametrize(
    ("prev", "found"),
    [
        (torch.zeros(4), "a tensor of torch.float32"),
        (torch.zeros(4) > 0, "a tensor of torch.bool"),
        ([0, 0, 0, 0], "list"),
    ],
)
def test_assignments_that_are_no_integers_are_an_error(prev, found):
    with pytest.raises((TypeError, TypeCheckError)) as caught:
        feature_weights(torch.randn(4, 2), prev, 1)
    if not isinstance(caught.value, TypeCheckError):
        assert f"prev must be a tensor of integers, the previous layer's expert indices, got {found}" in str(
            caught.value
        )


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_small_integers_are_assignments_too(dtype):
    x, prev = torch.randn(20, 2), torch.arange(20) % 4
    assert torch.equal(feature_weights(x, prev.to(dtype), 4), feature_weights(x, prev, 4))


def test_assignments_without_tokens_or_choices_are_errors():
    with pytest.raises(ValueError, match=r"hidden has 4 tokens but prev has assignments for 1 .*and \(\)\)"):
        feature_weights(torch.randn(4, 2), torch.tensor(0), 1)
    with pytest.raises(ValueError, match=r"prev has no choice for any token \(shape \(4, 0\)\)"):
        feature_weights(torch.randn(4, 2), torch.zeros(4, 0, dtype=torch.long), 1)


@pytest.mark.parametrize("norm", ["feature", "global", "cluster", None])
@pytest.mark.parametrize("dispersion", ["mad", "variance", "pairwise"])
def test_dispersions_that_overflow_float32_give_finite_weights(dispersion, norm):
    x = 1e38 * torch.tensor([[3.0], [-3.0], [2.0], [-2.0], [1.0], [-1.0], [3.0], [-3.0]])
    prev = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    w = feature_weights(x, prev, 2, dispersion=dispersion, norm=norm)
    assert torch.isfinite(w).all()
    if dispersion == "mad" and norm == "feature":  # Deviations 2.5e38 and 2e38.
        torch.testing.assert_close(w, torch.tensor([[8 / 9], [10 / 9]]))


def test_strided_tokens_are_read_right():
    x = torch.randn(6, 40)
    prev = torch.arange(40) % 3
    assert torch.equal(feature_weights(x.T, prev, 3), feature_weights(x.T.contiguous(), prev, 3))


@pytest.mark.parametrize("norm", ["feature", "global", "cluster", None])
@pytest.mark.parametrize("dispersion", ["mad", "variance"])
def test_causal_weights_are_the_weights_of_each_prefix(norm, dispersion):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 17, 3, generator=generator, dtype=torch.float64)
    prev = torch.randint(-1, 3, (2, 17, 2), generator=generator)
    mask = torch.rand(2, 17, generator=generator) > 0.2
    ours = causal_token_weights(x, prev, 3, norm=norm, dispersion=dispersion, mask=mask)
    for b in range(2):
        for t in range(17):
            k = prev[b, t, 0] if mask[b, t] else torch.tensor(-1)
            prefix = slice(0, t + 1)
            options = {"norm": norm, "dispersion": dispersion, "mask": mask[b, prefix]}
            w = feature_weights(x[b, prefix], prev[b, prefix], 3, **options)
            expected = w[k] if k >= 0 else torch.ones(3, dtype=torch.float64)
            torch.testing.assert_close(ours[b, t], expected, rtol=1e-9, atol=1e-9)


def test_causal_weights_do_not_see_the_future_or_other_sequences():
    x, prev = torch.randn(2, 12, 4), torch.randint(0, 3, (2, 12))
    w = causal_token_weights(x, prev, 3)
    changed, changed_prev = x.clone(), prev.clone()
    changed[0, 7:] = 99.0
    changed_prev[0, 7:] = 0
    changed[1] = -5.0
    assert torch.equal(causal_token_weights(changed, changed_prev, 3)[0, :7], w[0, :7])
