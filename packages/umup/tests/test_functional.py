"""The op table. tests/data holds values computed by the authors' library, unit-scaling 0.3.5, in float64."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import umup.functional as U
from umup.scaling import apply_constraint, scale_bwd, scale_fwd

DATA = Path(__file__).parent / "data"
OPS = json.loads((DATA / "ops.json").read_text(encoding="utf-8"))
ARRAYS = dict(np.load(DATA / "ops.npz"))


def run_op(name, inputs, kwargs):
    op = name.split(".")[0]
    if op == "sdpa":
        return U.scaled_dot_product_attention(*inputs, **kwargs)
    if op == "embedding":
        return U.embedding(inputs[1], inputs[0])
    if op in ("layer_norm", "rms_norm"):
        return getattr(U, op)(inputs[0], (inputs[0].shape[-1],), *inputs[1:], **kwargs)
    if op == "residual":
        x, w = inputs
        return U.residual_apply(lambda b: U.linear(torch.tanh(b), w), x, kwargs["tau"])
    if op == "conv1d":
        return U.conv1d(*inputs, padding=1, **kwargs)
    return getattr(U, op)(*inputs, **kwargs)


@pytest.mark.parametrize("name", list(OPS))
def test_values_and_gradients_equal_the_reference_librarys(name):
    count = sum(key.startswith(f"{name}.in") for key in ARRAYS)
    inputs = [torch.tensor(ARRAYS[f"{name}.in{i}"]) for i in range(count)]
    for i, x in enumerate(inputs):
        x.requires_grad_(f"{name}.grad{i}" in ARRAYS)
    y = run_op(name, inputs, OPS[name])
    y.backward(torch.tensor(ARRAYS[f"{name}.gy"]))
    rtol = 1e-5 if name == "rms_norm" else 1e-9  # the reference takes the root mean square in float32
    np.testing.assert_allclose(y.detach(), ARRAYS[f"{name}.y"], rtol=rtol, atol=rtol * 1e-2)
    checked = 0
    for i, x in enumerate(inputs):
        if x.requires_grad:
            np.testing.assert_allclose(x.grad, ARRAYS[f"{name}.grad{i}"], rtol=rtol, atol=rtol * 1e-1)
            checked += 1
    assert checked >= 1


def test_attention_scale_equals_the_reference_librarys():
    cases = json.loads((DATA / "scales.json").read_text(encoding="utf-8"))["sdpa"]
    assert len(cases) > 10
    for c in cases:
        if c["seq"] == 1:
            continue
        ours = U.sdpa_scale(c["seq"], c["d_head"], is_causal=c["causal"], mult=c["mult"])
        assert ours == pytest.approx(c["out_scale"], rel=1e-9)
        assert c["mult"] / c["d_head"] == pytest.approx(c["logit_scale"], rel=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_over_one_key_has_scale_one_and_finite_values(causal):
    assert U.sdpa_scale(1, 8, is_causal=causal) == pytest.approx(1.0)
    v = torch.randn(1, 2, 1, 4)
    out = U.scaled_dot_product_attention(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4), v, is_causal=causal)
    torch.testing.assert_close(out, v)


def test_grouped_query_attention_equals_attention_with_repeated_keys():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    ours = U.scaled_dot_product_attention(q, k, v, is_causal=True)
    repeated = U.scaled_dot_product_attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), is_causal=True)
    torch.testing.assert_close(ours, repeated)


def test_a_fixed_scale_length_makes_a_prefix_independent_of_what_follows():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    long = U.scaled_dot_product_attention(q, k, v, is_causal=True, scale_seq_len=16)[:, :, :8]
    short = U.scaled_dot_product_attention(*(t[:, :, :8] for t in (q, k, v)), is_causal=True, scale_seq_len=16)
    torch.testing.assert_close(long, short)


def test_a_causal_mask_tensor_gives_the_causal_result():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(
        U.scaled_dot_product_attention(q, k, v, attn_mask=mask, causal_scale=True),
        U.scaled_dot_product_attention(q, k, v, is_causal=True),
    )


def test_rope_keeps_norms_and_depends_on_relative_position_only():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def dot(i, j):
        return (U.rope(q, torch.tensor([i])) * U.rope(k, torch.tensor([j]))).sum()

    torch.testing.assert_close(dot(3, 1), dot(12, 10), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(U.rope(q, torch.tensor([7])).norm(), q.norm())
    with pytest.raises(ValueError, match="even head dimension"):
        U.rope(torch.randn(1, 1, 1, 7), torch.tensor([0]))


def test_cross_entropy_mean_is_over_targets_that_are_not_ignored():
    logits = torch.randn(6, 5, dtype=torch.float64)
    target = torch.tensor([1, 2, -100, 0, -100, 4])
    torch.testing.assert_close(U.cross_entropy(logits, target), torch.nn.functional.cross_entropy(logits, target))


def test_ignored_targets_change_parameter_gradients_as_dropping_their_rows_does():
    torch.manual_seed(0)
    x, w = torch.randn(6, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    target = torch.tensor([1, 2, -100, 0, -100, 4])

    def weight_grad(x, target):
        leaf = w.clone().requires_grad_()
        U.cross_entropy(U.linear_readout(x, leaf), target).backward()
        return leaf.grad

    keep = target != -100
    torch.testing.assert_close(weight_grad(x, target), weight_grad(x[keep], target[keep]))


def test_cross_entropy_takes_any_leading_shape_and_reduction_none():
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    target = torch.randint(7, (2, 3))
    each = U.cross_entropy(logits, target, reduction="none")
    assert each.shape == (2, 3)
    torch.testing.assert_close(each.sum(), U.cross_entropy(logits, target, reduction="sum"))
    (g_each,) = torch.autograd.grad(each.sum(), logits, retain_graph=True)
    (g_mean,) = torch.autograd.grad(U.cross_entropy(logits, target), logits)
    torch.testing.assert_close(g_each, g_mean)


def test_all_targets_ignored_gives_zero_loss_zero_gradient_and_a_warning():
    logits = torch.randn(3, 5, requires_grad=True)
    with pytest.warns(UserWarning, match="every target is ignored"):
        loss = U.cross_entropy(logits, torch.full((3,), -100))
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("parts", [[6], [2, 4], [1, 2, 3]])
def test_gradients_of_parts_with_the_steps_total_sum_to_the_whole(parts):
    torch.manual_seed(0)
    x, w = torch.randn(6, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    target = torch.tensor([1, -100, 3, 0, 2, -100])
    valid = int((target != -100).sum())

    def run(pieces):
        leaf = w.clone().requires_grad_()
        total = 0.0
        for xs, ts in pieces:
            loss = U.cross_entropy(U.linear_readout(xs, leaf), ts, total=valid)
            loss.backward()
            total += loss.item()
        return leaf.grad, total

    grad, loss = run(zip(x.split(parts), target.split(parts), strict=True))
    leaf = w.clone().requires_grad_()
    whole = U.cross_entropy(U.linear_readout(x, leaf), target)
    whole.backward()
    torch.testing.assert_close(grad, leaf.grad)
    assert loss == pytest.approx(whole.item())


def unchecked(function):
    """Without the shape checks that tests run under, as users call it."""
    return getattr(function, "__wrapped__", function)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_of_half_precision_inputs_are_summed_in_float32(dtype):
    torch.manual_seed(0)
    logits = (torch.randn(4096, 5) * 100).to(dtype).requires_grad_()
    target = torch.randint(5, (4096,))
    loss = U.cross_entropy(logits, target)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.float(), target))
    loss.backward()
    assert logits.grad.dtype == dtype
    assert torch.isfinite(logits.grad).all()
    x = torch.full((4096,), 30.0, dtype=dtype, requires_grad=True)
    loss = U.mse_loss(x, torch.zeros_like(x))
    assert loss.item() == 900
    loss.backward()
    assert x.grad.float().mean().item() == pytest.approx(60 * 8**-0.5, rel=1e-2)


def test_second_derivatives_are_those_of_the_plain_function():
    torch.manual_seed(0)
    x, gate = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: U.silu_glu(a, b, 2.0), (x, gate))
    assert torch.autograd.gradgradcheck(lambda a, b: U.silu_glu(a, b, 2.0), (x, gate))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: U.cross_entropy(torch.randn(3, 1), torch.zeros(3, dtype=torch.long)), "vocabulary of at least 2"),
        (lambda: U.cross_entropy(torch.randn(3, 5), torch.zeros(3, dtype=torch.long), reduction="avg"), "reduction"),
        (lambda: U.cross_entropy(torch.randn(3, 5), torch.zeros(3, dtype=torch.long), mult=0.0), "mult"),
        (
            lambda: U.cross_entropy(torch.randn(3, 5), torch.zeros(3, dtype=torch.long), reduction="sum", total=3),
            "total",
        ),
        (lambda: U.softmax(torch.randn(3), mult=0.0), "mult must be a positive"),
        (lambda: U.gelu(torch.randn(3), mult=-1.0), "mult must be a positive"),
        (lambda: U.silu(torch.randn(3), mult=math.inf), "mult must be a positive"),
        (lambda: U.silu_glu(torch.randn(3), torch.randn(3), mult=math.nan), "mult must be a positive"),
        (lambda: unchecked(U.silu_glu)(torch.randn(2, 3), torch.randn(1, 3)), r"one shape, got \(2, 3\) and \(1, 3\)"),
        (lambda: U.dropout(torch.randn(3), 1.0), r"\[0, 1\)"),
        (lambda: U.dropout(torch.randn(3), -0.1), r"\[0, 1\)"),
        (lambda: U.sdpa_scale(0, 8, is_causal=True), "at least 1"),
        (lambda: U.linear(torch.randn(2, 3), torch.randn(4, 3), constraint="to_the_moon"), "hmean"),
        (lambda: U.linear(torch.randn(2, 3), torch.randn(4, 3), constraint="to_left_grad_scale"), "2 input"),
        (lambda: U.residual_add(torch.randn(2), torch.randn(2), -1.0), "tau"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_wrong_feature_size_is_refused():
    with pytest.raises(Exception, match=r"fan_in|features"):
        U.linear(torch.randn(2, 3), torch.randn(4, 5))


def test_a_callable_constraint_gets_the_scales():
    assert apply_constraint(lambda *s: max(s), 0.5, 2.0) == (2.0, 2.0)
    assert apply_constraint(None, 0.5, 2.0) == (0.5, 2.0)


def test_primitives_scale_one_direction_only():
    x = torch.tensor([2.0], requires_grad=True)
    y = scale_fwd(x, 3.0)
    y.backward()
    assert (y.item(), x.grad.item()) == (6.0, 1.0)
    x.grad = None
    y = scale_bwd(x, 3.0)
    y.backward()
    assert (y.item(), x.grad.item()) == (2.0, 3.0)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 6),
    fan_in=st.integers(1, 9),
    fan_out=st.integers(1, 9),
    constraint=st.sampled_from(["to_output_scale", "to_grad_input_scale", "gmean", "hmean", "amean", None]),
    bias=st.booleans(),
)
def test_linear_is_the_plain_map_with_three_factors(tokens, fan_in, fan_out, constraint, bias):
    torch.manual_seed(0)
    x = torch.randn(tokens, fan_in, dtype=torch.float64, requires_grad=True)
    w = torch.randn(fan_out, fan_in, dtype=torch.float64, requires_grad=True)
    b = torch.randn(fan_out, dtype=torch.float64, requires_grad=True) if bias else None
    leaves = [x, w] + ([b] if bias else [])
    g = torch.randn(tokens, fan_out, dtype=torch.float64)
    plain = torch.nn.functional.linear(x, w, b)
    plain_grads = torch.autograd.grad(plain, leaves, g)
    ours = U.linear(x, w, b, constraint)
    grads = torch.autograd.grad(ours, leaves, g)
    a, o = fan_in**-0.5, fan_out**-0.5
    merged = {"to_output_scale": a, "to_grad_input_scale": o, "gmean": (a * o) ** 0.5, "hmean": 2 / (1 / a + 1 / o)}
    merged["amean"] = (a + o) / 2
    alpha, beta = (a, o) if constraint is None else (merged[constraint],) * 2
    torch.testing.assert_close(ours, plain * alpha)
    torch.testing.assert_close(grads[0], plain_grads[0] * beta)
    for got, plain_grad in zip(grads[1:], plain_grads[1:], strict=True):
        torch.testing.assert_close(got, plain_grad * tokens**-0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_op_keeps_dtype_and_stays_finite_on_large_inputs(dtype):
    x = torch.full((4, 8), 100.0, dtype=dtype)
    x[::2] = -100.0
    x[0, 0] = 0.0
    x.requires_grad_()
    w = torch.randn(8, 8, dtype=dtype)
    for op in (
        lambda: U.linear(x, w),
        lambda: U.gelu(x),
        lambda: U.silu(x, 2.0),
        lambda: U.silu_glu(x, x),
        lambda: U.softmax(x),
        lambda: U.rms_norm(x, (8,)),
        lambda: U.layer_norm(x, (8,)),
        lambda: U.dropout(x, 0.5),
        lambda: U.add(x, x),
        lambda: U.residual_apply(torch.tanh, x, 0.5),
    ):
        y = op()
        assert y.dtype == dtype
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.isfinite(y).all()
        assert torch.isfinite(grad).all()


def test_fp16_rms_norm_of_values_whose_square_overflows():
    y = U.rms_norm(torch.full((2, 4), 1000.0, dtype=torch.float16), (4,))
    torch.testing.assert_close(y, torch.ones(2, 4, dtype=torch.float16))


def test_empty_batches_and_strided_inputs():
    w = torch.randn(3, 4, requires_grad=True)
    assert U.linear(torch.randn(0, 4), w).shape == (0, 3)
    assert U.embedding(torch.zeros(0, dtype=torch.long), w).shape == (0, 4)
    x = torch.randn(4, 6, dtype=torch.float64).t()
    torch.testing.assert_close(U.linear(x, w.detach().double()), U.linear(x.contiguous(), w.detach().double()))


def test_linear_without_gradients_wanted():
    with torch.no_grad():
        assert not U.linear(torch.randn(2, 4), torch.randn(3, 4, requires_grad=True)).requires_grad
    x = torch.randn(2, 4, requires_grad=True)
    U.linear(x, torch.randn(3, 4)).sum().backward()
    assert x.grad is not None


def test_add_of_a_number_leaves_the_scale_alone():
    x = torch.randn(3)
    torch.testing.assert_close(U.add(x, 2.0), x + 2)
    torch.testing.assert_close(U.add(x, torch.ones(1)), x + 1)


def test_per_sample_gradients_through_torch_func():
    torch.manual_seed(0)
    w = torch.randn(3, 4)
    x = torch.randn(5, 4)
    grads = torch.func.vmap(torch.func.grad(lambda w, x: U.linear(x, w).square().sum()), in_dims=(None, 0))(
        w, x[:, None]
    )
    assert grads.shape == (5, 3, 4)
    leaf = w.clone().requires_grad_()
    U.linear(x[2:3], leaf).square().sum().backward()
    torch.testing.assert_close(grads[2], leaf.grad)
