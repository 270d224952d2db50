"""FP8. tests/data/fp8.npz: torch's own saturating casts, and the nearest mode of unit-scaling 0.3.5."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import umup.nn as unn
from umup.precision import FORMATS, cast_fp8, fp8, fp8_available, simulate_fp8

ARRAYS = dict(np.load(Path(__file__).parent / "data" / "fp8.npz"))


@pytest.mark.parametrize("name", list(FORMATS))
def test_nearest_casts_are_exact(name):
    ours = cast_fp8(torch.tensor(ARRAYS["x"]), name)
    np.testing.assert_array_equal(ours.numpy(), ARRAYS[f"{name}.saturated"])


def test_ties_go_to_even_where_the_reference_librarys_go_to_zero():
    assert cast_fp8(torch.tensor([272.0, 304.0]), "e4m3fn").tolist() == [256.0, 320.0]  # steps of 32
    assert cast_fp8(torch.tensor([1.0625, 1.1875]), "e4m3fn").tolist() == [1.0, 1.25]  # steps of 1/8
    for ours, theirs in (("e4m3fnuz", "FPFormat43"), ("e5m2fnuz", "FPFormat52")):
        y = cast_fp8(torch.tensor(ARRAYS["x"]), ours).numpy()
        differ = y != ARRAYS[f"{theirs}.nearest"]
        assert (np.abs(y[differ]) > np.abs(ARRAYS[f"{theirs}.nearest"][differ])).all()


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_special_values(name, rounding):
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 1e30, -1e30])
    y = cast_fp8(x, name, rounding=rounding)
    top = FORMATS[name].max_value
    assert y[:2].tolist() == [top, -top]
    assert math.isnan(y[2])
    assert y[3:].tolist() == [0.0, top, -top]


@settings(max_examples=60, deadline=None)
@given(x=st.floats(-500, 500, width=32), name=st.sampled_from(list(FORMATS)), seed=st.integers(0, 100))
def test_stochastic_rounding_gives_a_neighbour_in_the_format(x, name, seed):
    value = torch.tensor([x])
    y = cast_fp8(value, name, rounding="stochastic", generator=torch.Generator().manual_seed(seed))
    assert cast_fp8(y, name).item() == y.item()  # it is in the format
    clamped = max(min(x, FORMATS[name].max_value), -FORMATS[name].max_value)
    gap = max(2.0 ** (math.floor(math.log2(abs(clamped))) if clamped else -99), 2.0 ** FORMATS[name].min_exponent)
    assert abs(y.item() - clamped) < gap * 2.0 ** -FORMATS[name].mantissa_bits * 1.0001


def test_stochastic_rounding_keeps_the_mean():
    x = torch.full((100_000,), 1.03)
    y = cast_fp8(x, "e4m3fn", rounding="stochastic", generator=torch.Generator().manual_seed(0))
    assert set(y.tolist()) == {1.0, 1.125}
    assert y.mean().item() == pytest.approx(1.03, abs=0.002)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts_keep_the_dtype(dtype):
    assert cast_fp8(torch.tensor([0.3, 999.0], dtype=dtype)).dtype == dtype


def decoder():
    torch.manual_seed(0)
    return unn.TransformerDecoder(32, 32, 2, 2, intermediate_size=48, scale_seq_len=16)


def test_the_recipe_keeps_critical_matmuls_and_reports_all():
    model = decoder()
    ids = torch.randint(32, (2, 16))
    exact = model.loss(ids)
    exact.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    with simulate_fp8(model, count=True) as report:
        loss = model.loss(ids)
        loss.backward()
    assert {name.rpartition(".")[2] for name in report.fp8} == {"q_proj", "k_proj", "v_proj", "up_proj", "gate_proj"}
    assert {name.rpartition(".")[2] for name in report.critical} == {"o_proj", "down_proj", "lm_head"}
    assert len(report.fp8) + len(report.critical) == 15
    assert 0.5 < report.share_of_weights < 0.8
    assert loss.item() != exact.item()
    assert loss.item() == pytest.approx(exact.item(), abs=0.02)
    for name, parameter in model.named_parameters():
        cosine = nn.functional.cosine_similarity(parameter.grad.flatten(), wanted[name].flatten(), dim=0)
        assert cosine > 0.98, name
    assert report.share("x") < 0.01
    assert report.share("x", saturated=True) == 0
    torch.testing.assert_close(model.loss(ids), exact)  # outside, nothing is left behind


def test_fp8_products_are_those_of_the_cast_operands():
    torch.manual_seed(0)
    layer = unn.Linear(16, 32, bias=True)
    x = torch.randn(5, 16, requires_grad=True)
    g = torch.randn(5, 32)
    with simulate_fp8(layer):
        y = layer(x)
        y.backward(g)
    x8, w8, g8 = cast_fp8(x), cast_fp8(layer.weight), cast_fp8(g, "e5m2")
    torch.testing.assert_close(y, x8 @ w8.t() / 4)
    torch.testing.assert_close(x.grad, g8 @ w8 / 4)
    torch.testing.assert_close(layer.weight.grad, g8.t() @ x8 / 5**0.5)
    torch.testing.assert_close(layer.bias.grad, g.sum(0) / 5**0.5)


def test_e5m2_never_meets_e5m2():
    torch.manual_seed(0)
    layer = unn.LinearReadout(16, 32)
    x = torch.randn(5, 16)
    g = torch.randn(5, 32)
    with simulate_fp8(layer, critical="e5m2") as report:
        y = layer(x)
        y.backward(g)
    assert report.fp8 == [""]
    torch.testing.assert_close(y, cast_fp8(x, "e5m2") @ cast_fp8(layer.weight).t() / 16)
    torch.testing.assert_close(layer.weight.grad, cast_fp8(g, "e5m2").t() @ cast_fp8(x) / 5**0.5)


@pytest.mark.skipif(not hasattr(nn.functional, "scaled_mm"), reason="this torch has no public scaled_mm")
def test_the_real_cast_equals_the_simulation():
    """torch's CPU implementation of the call that runs on hardware."""
    torch.manual_seed(0)
    layer = unn.Linear(32, 48)
    x = torch.randn(16, 32, requires_grad=True)
    g = torch.randn(16, 48)
    results = []
    for backend in ("simulate", "scaled_mm"):
        x.grad = layer.weight.grad = None
        with fp8(layer, backend=backend) as report:
            y = layer(x)
            y.backward(g)
        assert report.fp8 == [""]
        results.append((y.detach(), x.grad, layer.weight.grad))
    for simulated, real in zip(*results, strict=True):
        assert real.dtype == torch.float32
        torch.testing.assert_close(real, simulated, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not hasattr(nn.functional, "scaled_mm"), reason="this torch has no public scaled_mm")
@pytest.mark.parametrize("critical", ["high", "e5m2", "fp8"])
def test_what_is_handed_to_the_hardware_fits_its_rules(critical, monkeypatch):
    """Row-major times column-major, never two E5M2, sizes in multiples of 16; here 15 tokens, whose sum must be padded."""
    calls = []

    def kernel(a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype):
        assert (a.stride(1), b.stride(0)) == (1, 1)
        assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0
        assert {a.dtype, b.dtype} <= {torch.float8_e4m3fn, torch.float8_e5m2}
        assert (a.dtype, b.dtype) != (torch.float8_e5m2, torch.float8_e5m2)
        assert scale_a.dtype == scale_b.dtype == torch.float32
        calls.append((a.dtype, b.dtype))
        return ((a.float() @ b.float()) * scale_a * scale_b).to(output_dtype)

    monkeypatch.setattr(nn.functional, "scaled_mm", kernel)
    torch.manual_seed(0)
    model = unn.TransformerDecoder(64, 32, 1, 2, intermediate_size=48, scale_seq_len=5)
    ids = torch.randint(64, (3, 5))
    grads = []
    for backend in ("simulate", "scaled_mm"):
        model.zero_grad()
        with fp8(model, backend=backend, critical=critical) as report:
            model.loss(ids).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert len(calls) == 3 * len(report.fp8)
    for simulated, real in zip(*grads, strict=True):
        torch.testing.assert_close(real, simulated, rtol=1e-4, atol=1e-4)


def test_scaled_mm_without_the_call_says_so(monkeypatch):
    monkeypatch.delattr(nn.functional, "scaled_mm", raising=False)
    with pytest.raises(RuntimeError, match="simulate"), fp8(decoder(), backend="scaled_mm"):
        pass


def test_contexts_nest_and_leave_what_they_found():
    model = nn.Sequential(unn.Linear(16, 16), nn.Linear(16, 16))
    x = torch.randn(4, 16)
    exact = model(x)
    with simulate_fp8(model, plain=True):
        outer = model(x)
        with simulate_fp8(model, plain=True, fnuz=True):
            assert not torch.equal(model(x), outer)
        assert torch.equal(model(x), outer)
    assert torch.equal(model(x), exact)
    assert not torch.equal(outer, exact)


@pytest.mark.gpu
def test_the_real_cast_runs_on_the_gpu():
    if not fp8_available("cuda"):
        pytest.skip("this GPU has no FP8")
    torch.manual_seed(0)
    model = unn.TransformerDecoder(64, 64, 2, 2, intermediate_size=128, scale_seq_len=16).cuda().bfloat16()
    ids = torch.randint(64, (4, 16), device="cuda")
    with simulate_fp8(model):
        simulated = model.loss(ids)
    with fp8(model) as report:
        real = model.loss(ids)
        real.backward()
    assert report.backend == "scaled_mm"
    torch.testing.assert_close(real, simulated, rtol=1e-2, atol=1e-2)


def test_what_cannot_run_is_listed():
    model = nn.Sequential(unn.Linear(16, 20), unn.Linear(16, 32), unn.Conv1d(1, 1, 1), nn.Linear(16, 16))
    with fp8(model, backend="scaled_mm") as report:
        pass
    assert (report.fp8, report.unsupported) == (["1"], ["0", "2", "3"])
    with simulate_fp8(model, plain=True) as report:
        x = torch.randn(3, 16)
        torch.testing.assert_close(model[3](x), cast_fp8(x) @ cast_fp8(model[3].weight).t() + model[3].bias)
    assert "3" in report.fp8
    torch.testing.assert_close(model[3](x), nn.functional.linear(x, model[3].weight, model[3].bias))


def test_auto_simulates_where_there_is_no_hardware():
    assert not fp8_available("cpu")
    with fp8(decoder()) as report:
        assert report.backend == "simulate"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "magic"}, "backend"),
        ({"critical": "low"}, "critical"),
        ({"rounding": "up"}, "rounding"),
        ({"backend": "scaled_mm", "fnuz": True}, "OCP"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message), fp8(decoder(), **options):
        pass
    with pytest.raises(ValueError, match="e3m4"):
        cast_fp8(torch.zeros(1), "e3m4")
    with pytest.raises(ValueError, match="rounding"):
        cast_fp8(torch.zeros(1), rounding="up")
