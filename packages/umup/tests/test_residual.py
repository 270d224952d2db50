"""Residual branches and the tau rule. tests/data/scales.json: computed by unit-scaling 0.3.5."""

import json
from pathlib import Path

import pytest
import torch

import umup.functional as U
from umup.residual import ResidualPairError, check_residual_pairs, residual_add, residual_split, transformer_taus

DATA = Path(__file__).parent / "data"


def test_taus_equal_the_reference_librarys():
    cases = json.loads((DATA / "scales.json").read_text(encoding="utf-8"))["tau"]
    for c in cases:
        taus = transformer_taus(c["layers"], alpha_res=c["res_mult"], alpha_res_attn_ratio=c["attn_ratio"])
        assert taus == pytest.approx(c["tau"], rel=1e-12)


def test_taus_of_four_layers_by_hand():
    wanted = [0.5, 0.447214, 0.408248, 0.377964, 0.353553, 0.333333, 0.316228, 0.301511]
    assert transformer_taus(4) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(("alpha", "ratio"), [(1.0, 1.0), (0.25, 1.0), (2.0, 0.5)])
def test_the_rule_telescopes_to_a_plain_residual_net(alpha, ratio):
    """Scaled by its last factor, the stream is x + sum of a_k / sqrt(L) f_k, the plain net with branch weights a_k."""
    torch.manual_seed(0)
    layers = 3
    weights = [torch.randn(5, 5, dtype=torch.float64) for _ in range(2 * layers)]

    def branch(x, w):  # depends on the direction of x only, as after a norm
        return torch.tanh(torch.nn.functional.normalize(x, dim=-1) @ w)

    x = torch.randn(4, 5, dtype=torch.float64)
    start, plain_start = x.clone().requires_grad_(), x.clone().requires_grad_()
    stream = start
    for w, tau in zip(weights, transformer_taus(layers, alpha_res=alpha, alpha_res_attn_ratio=ratio), strict=True):
        stream = U.residual_apply(lambda b, w=w: branch(b, w), stream, tau)
    a_ffn = alpha * (2 / (1 + ratio**2)) ** 0.5
    plain = plain_start
    for k, w in enumerate(weights):
        a = ratio * a_ffn if k % 2 == 0 else a_ffn
        plain = plain + a / layers**0.5 * branch(plain, w)
    factor = (1 + alpha**2 * 2) ** 0.5  # sqrt(1 + L (a_attn^2 + a_ffn^2) / L)
    torch.testing.assert_close(stream * factor, plain)
    g = torch.randn_like(x)
    (ours,) = torch.autograd.grad(stream, start, g)
    (theirs,) = torch.autograd.grad(plain, plain_start, g)
    torch.testing.assert_close(ours * factor, theirs)


def test_post_norm_taus_have_no_running_sum():
    assert transformer_taus(4, norm="post") == pytest.approx([0.5] * 8)


def test_branch_and_skip_gradients_have_their_weights():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    branch, skip = residual_split(x, 0.75)
    (g,) = torch.autograd.grad(branch.sum(), x, retain_graph=True)
    torch.testing.assert_close(g, torch.full_like(x, 0.6))
    (g,) = torch.autograd.grad(skip.sum(), x)
    torch.testing.assert_close(g, torch.full_like(x, 0.8))


def test_pairs_are_checked_on_request():
    x = torch.randn(3)
    with check_residual_pairs():
        branch, skip = residual_split(x, 0.5)
        residual_add(branch, skip, 0.5)
        with pytest.raises(ResidualPairError, match=r"tau=0.25.*tau=0.5"):
            residual_add(branch, skip, 0.25)
        with pytest.raises(ResidualPairError, match="no residual_split"):
            residual_add(branch, x, 0.5)
    residual_add(branch, x, 0.5)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"layers": 0}, "layers"),
        ({"layers": 2, "alpha_res": 0.0}, "alpha_res"),
        ({"layers": 2, "alpha_res_attn_ratio": float("nan")}, "alpha_res_attn_ratio"),
        ({"layers": 2, "norm": "mid"}, "norm"),
    ],
)
def test_bad_rules_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        transformer_taus(**kwargs)


def test_branches_of_several_models_share_one_input_under_vmap():
    x = torch.randn(4, 3, dtype=torch.float64)
    weights = torch.randn(5, 3, 3, dtype=torch.float64)
    got = torch.func.vmap(lambda w: U.residual_apply(lambda b: b @ w, x, 0.5))(weights)
    each = [U.residual_apply(lambda b, w=w: b @ w, x, 0.5) for w in weights]
    torch.testing.assert_close(got, torch.stack(each))
