"""The router. Golden values: the official language-model gate, run on a CPU in float32."""

import copy
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from torch.utils.checkpoint import checkpoint

from ac_router import (
    ACRouter,
    RoutingState,
    collect_statistics,
    diagnostics,
    feature_weights,
    load_balance_loss,
    load_statistics,
    scale_tokens,
    statistics_state,
)

GOLDEN = np.load(Path(__file__).parent / "data" / "router.npz")


def golden(name):
    return torch.from_numpy(np.asarray(GOLDEN[name]))


def assigned(tokens=48, dim=6, experts=4, k=2, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, dim, generator=generator, dtype=dtype)
    prev = torch.rand(tokens, experts, generator=generator).topk(k).indices
    return hidden, prev


@pytest.mark.parametrize("case", ["a", "b"])
@pytest.mark.parametrize(("scorer", "name"), [("linear", "linear"), ("normalized", "unitnorm")])
def test_logits_equal_the_official_gate(case, scorer, name):
    e = golden(f"{case}.e")
    router = ACRouter(e.shape[1], len(e), 2, router=scorer)
    router.weight.data = e
    out = router(golden(f"{case}.x"), golden(f"{case}.prev_idx"))
    torch.testing.assert_close(out.logits, golden(f"{case}.official_lm_logits_{name}"), rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("case", ["a", "b"])
def test_choice_gate_weights_and_balance_loss_equal_the_official_gate(case):
    e = golden(f"{case}.e")
    router = ACRouter(e.shape[1], len(e), 2, router="normalized")
    router.weight.data = e
    out = router(golden(f"{case}.x"), golden(f"{case}.prev_idx"))
    expected = golden(f"{case}.official_lm_topk_idx")
    assert torch.equal(out.indices.sort(1).values, expected.sort(1).values)
    official = torch.zeros_like(out.logits).scatter(1, expected, golden(f"{case}.official_lm_topk_weight"))
    torch.testing.assert_close(
        torch.zeros_like(out.logits).scatter(1, out.indices, out.weights), official, atol=5e-6, rtol=5e-6
    )
    balance = load_balance_loss(out.logits, out.indices, temperature=0.3, per="assignment")
    assert balance.item() == pytest.approx(float(golden(f"{case}.official_lm_balance_T0.3")), rel=2e-6)


@pytest.mark.parametrize("case", ["a", "b"])
def test_float64_logits_and_choice_equal_an_independent_loop(case):
    e = golden(f"{case}.e").double()
    router = ACRouter(e.shape[1], len(e), 2).double()
    router.weight.data = e
    out = router(golden(f"{case}.x").double(), golden(f"{case}.prev_idx"))
    torch.testing.assert_close(out.logits, golden(f"{case}.brute.logits_linear"), rtol=1e-9, atol=1e-9)
    assert torch.equal(out.indices.sort(1).values, golden(f"{case}.brute.topk").sort(1).values)


def test_without_a_previous_assignment_it_is_the_plain_router_exactly():
    hidden, _ = assigned()
    router = ACRouter(6, 4, 2)
    out = router(hidden)
    assert torch.equal(out.logits, hidden @ router.weight.T)
    assert out.feature_weights is None
    with diagnostics(router) as seen:
        router(hidden)
    (layer,) = seen.layers().values()
    assert (layer.calls, layer.plain_calls) == (1, 1)


def test_gradient_reaches_tokens_scaled_and_expert_rows():
    hidden, prev = assigned(dtype=torch.float64)
    hidden.requires_grad_()
    router = ACRouter(6, 4, 2).double()
    weights = feature_weights(hidden, prev, 4)
    out = router(hidden, prev)
    out.logits.sum().backward()
    torch.testing.assert_close(hidden.grad, weights[prev[:, 0]] * router.weight.sum(0))
    torch.testing.assert_close(router.weight.grad, (weights[prev[:, 0]] * hidden).sum(0).detach().expand(4, 6))
    assert all(p.grad is not None for p in router.parameters())


@pytest.mark.parametrize("scorer", ["linear", "normalized", "cosine"])
def test_gradcheck_through_logits_and_gates(scorer):
    hidden, prev = assigned(tokens=12, dtype=torch.float64)
    router = ACRouter(6, 4, 2, router=scorer, bias=True, stats="frozen").double()
    router.adaptive.update(router.adaptive.statistics(hidden, prev[:, 0]))
    names = dict(router.named_parameters())

    def outputs(h, weight, bias):
        out = torch.func.functional_call(router, {"weight": weight, "bias": bias}, (h, prev))
        return out.logits, out.weights, out.aux_loss

    inputs = (hidden.requires_grad_(), *names.values())
    assert torch.autograd.gradcheck(outputs, inputs)
    assert torch.autograd.gradgradcheck(lambda *values: outputs(*values)[0].sin(), inputs)


def test_cosine_logits_are_bounded_by_the_inverse_temperature():
    hidden, prev = assigned()
    out = ACRouter(6, 4, 2, router="cosine", cosine_temperature=0.5)(hidden * 100, prev)
    assert out.logits.abs().max() <= 2.0001


@pytest.mark.parametrize("norm_topk", [True, False])
def test_gate_weights(norm_topk):
    hidden, prev = assigned()
    out = ACRouter(6, 4, 2, norm_topk=norm_topk)(hidden, prev)
    expected = out.logits.softmax(-1).gather(1, out.indices)
    if norm_topk:
        expected = expected / expected.sum(1, keepdim=True)
    torch.testing.assert_close(out.weights, expected)
    assert (out.logits.gather(1, out.indices).diff(dim=1) <= 0).all()


def test_a_previous_layer_with_another_number_of_experts():
    hidden, prev = assigned(experts=7)
    router = ACRouter(6, 4, 2, num_experts_prev=7)
    assert router(hidden, prev).feature_weights.shape == (7, 6)
    with pytest.raises(ValueError, match=r"must lie in \[0, 4\)"):
        ACRouter(6, 4, 2)(hidden, torch.full_like(prev, 6))


def test_mixed_weights_use_the_previous_gate_weights():
    hidden, prev = assigned(k=3)
    gates = torch.rand(48, 3)
    router = ACRouter(6, 4, 2, mix_weights=True)
    out = router(hidden, prev, prev_weights=gates)
    w = feature_weights(hidden, prev, 4)
    expected = (gates[..., None] * w[prev]).sum(1) * hidden @ router.weight.T
    torch.testing.assert_close(out.logits, expected)
    with pytest.raises(ValueError, match="needs the previous layer's gate weights"):
        router(hidden, prev)


def test_the_previous_output_can_be_handed_on_whole():
    hidden, prev = assigned()
    first, second = ACRouter(6, 4, 2), ACRouter(6, 4, 2, mix_weights=True)
    out = first(hidden, prev)
    torch.testing.assert_close(second(hidden, out).logits, second(hidden, out.indices, prev_weights=out.weights).logits)


def test_statistics_of_the_previous_layers_tokens():
    hidden, prev = assigned()
    before = torch.randn(48, 6)
    out = ACRouter(6, 4, 2, stat_source="previous")(hidden, prev, prev_hidden=before)
    assert torch.equal(out.feature_weights, feature_weights(before, prev, 4))
    with pytest.raises(ValueError, match="pass prev_hidden"):
        ACRouter(6, 4, 2, stat_source="previous")(hidden, prev)


def test_tokens_and_masks_in_batches_of_sequences():
    hidden, prev = assigned()
    mask = torch.rand(8, 6) > 0.3
    router = ACRouter(6, 4, 2)
    batched = router(hidden.reshape(8, 6, 6), prev.reshape(8, 6, 2), mask=mask)
    flat = router(hidden, prev, mask=mask.reshape(-1))
    for a, b in zip(batched, flat, strict=True):
        assert torch.equal(a, b)


def test_padding_changes_nothing_for_the_tokens_that_count():
    hidden, prev = assigned()
    padded = torch.cat([hidden, torch.full((9, 6), 50.0)])
    padded_prev = torch.cat([prev, torch.zeros(9, 2, dtype=torch.long)])
    mask = torch.arange(57) < 48
    plain, with_padding = ACRouter(6, 4, 2), ACRouter(6, 4, 2)
    with_padding.load_state_dict(plain.state_dict())
    a, b = plain(hidden, prev), with_padding(padded, padded_prev, mask=mask)
    torch.testing.assert_close(b.logits[:48], a.logits)
    torch.testing.assert_close(b.aux_loss, a.aux_loss)
    torch.testing.assert_close(with_padding.adaptive.ema_dispersion, plain.adaptive.ema_dispersion)


def test_a_broken_token_spoils_only_its_own_logits():
    hidden, prev = assigned()
    router = ACRouter(6, 4, 2)
    broken = hidden.clone()
    broken[5, 2] = float("nan")
    with pytest.warns(UserWarning, match="left out"):
        out = router(broken, prev)
    good = torch.arange(48) != 5
    assert torch.isfinite(out.logits[good]).all()
    assert out.logits[5].isnan().all()


def test_balance_loss_counted_by_hand():
    # Four tokens, two experts, top-1; three choose expert 0. Equal logits: P = (1/2, 1/2).
    loss = load_balance_loss(torch.zeros(4, 2), torch.tensor([[0], [0], [0], [1]]))
    assert float(loss) == pytest.approx(2 * (0.75 * 0.5 + 0.25 * 0.5))
    masked = load_balance_loss(torch.zeros(4, 2), torch.tensor([[0], [0], [0], [1]]), mask=torch.tensor([1, 0, 0, 1]))
    assert float(masked) == pytest.approx(1.0)
    assert torch.isfinite(load_balance_loss(torch.zeros(0, 2), torch.zeros(0, 1, dtype=torch.long)))


def test_running_average_of_one_batch_is_that_batch():
    hidden, prev = assigned(dtype=torch.float64)
    router = ACRouter(6, 4, 2, stats="ema").double()
    in_training = router(hidden, prev)
    router.eval()
    torch.testing.assert_close(router(hidden[:1], prev[:1]).feature_weights, in_training.feature_weights)


def test_running_average_weighs_batches_by_their_tokens_in_each_cluster():
    first, second = torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [8.0], [0.0], [8.0]])
    router = ACRouter(1, 1, 1, stats="ema", momentum=0.75)
    router(first, torch.zeros(2, dtype=torch.long))
    router(second, torch.zeros(4, dtype=torch.long))
    # Shares: 2 x 0.25 x 0.75 = 3/8 of deviation 1, and 4 x 0.25 = 1 of deviation 4.
    assert float(router.adaptive.ema_dispersion) == pytest.approx((3 / 8 * 1 + 1 * 4) / (3 / 8 + 1))


def test_a_cluster_absent_from_a_batch_keeps_its_average():
    hidden, prev = assigned()
    router = ACRouter(6, 4, 2, stats="ema")
    router(hidden, prev)
    before = router.adaptive.ema_dispersion.clone()
    router(hidden[:10] * 9, torch.zeros(10, dtype=torch.long))
    assert torch.equal(router.adaptive.ema_dispersion[1:], before[1:])
    assert (router.adaptive.ema_dispersion[0] > before[0]).all()


def test_running_average_rests_in_eval_and_without_gradient_unless_asked():
    hidden, prev = assigned()
    router = ACRouter(6, 4, 2, stats="ema")
    with torch.no_grad():
        router(hidden, prev)
    router.eval()
    router(hidden, prev)
    assert router.adaptive.ema_count.sum() == 0
    with torch.no_grad(), collect_statistics():
        out = router(hidden, prev)
    assert router.adaptive.ema_count.sum() > 0
    torch.testing.assert_close(router(hidden, prev).feature_weights, out.feature_weights)


def test_eval_without_an_average_is_plain_and_one_token_falls_back_to_the_average():
    hidden, prev = assigned()
    for stats in ("ema", "frozen"):
        router = ACRouter(6, 4, 2, stats=stats).eval()
        assert torch.equal(router(hidden, prev).logits, router(hidden).logits)
    router = ACRouter(6, 4, 2, stats="batch")
    trained = router(hidden, prev).feature_weights
    router.eval()
    assert torch.equal(router(hidden, prev).feature_weights, trained)
    torch.testing.assert_close(router(hidden[:1], prev[:1]).feature_weights, trained)
    mask = torch.arange(48) < 1
    torch.testing.assert_close(router(hidden, prev, mask=mask).feature_weights, trained)


def test_frozen_statistics_never_move():
    hidden, prev = assigned()
    router = ACRouter(6, 4, 2, stats="frozen")
    router.adaptive.update(router.adaptive.statistics(hidden, prev[:, 0]))
    before = router.adaptive.ema_dispersion.clone()
    router(hidden * 3, prev)
    assert torch.equal(router.adaptive.ema_dispersion, before)


def test_evaluated_tokens_do_not_depend_on_their_batch_with_ema():
    hidden, prev = assigned()
    router = ACRouter(6, 4, 2, stats="ema")
    router(hidden, prev)
    router.eval()
    whole = router(hidden, prev).logits
    torch.testing.assert_close(
        torch.cat([router(h[None], p[None]).logits for h, p in zip(hidden, prev, strict=True)]), whole
    )


def test_causal_logits_do_not_see_the_future():
    hidden, prev = assigned()
    router = ACRouter(6, 4, 2, stats="causal")
    out = router(hidden.reshape(4, 12, 6), prev.reshape(4, 12, 2))
    changed = hidden.reshape(4, 12, 6).clone()
    changed[:, 8:] += 5
    again = router(changed, prev.reshape(4, 12, 2))
    keep = (torch.arange(48) % 12) < 8
    assert torch.equal(again.logits[keep], out.logits[keep])
    assert not torch.equal(again.logits[~keep], out.logits[~keep])
    assert out.feature_weights is None
    with pytest.raises(ValueError, match="where sequences begin"):
        router(hidden, prev)


def test_checkpoints_load_both_ways():
    with_average, without = ACRouter(6, 4, 2), ACRouter(6, 4, 2, persistent=False)
    hidden, prev = assigned()
    with_average(hidden, prev)
    assert set(with_average.state_dict()) == {"weight", "adaptive.ema_count", "adaptive.ema_dispersion"}
    assert set(without.state_dict()) == {"weight"}
    with_average.eval()
    kept = with_average.adaptive.running().clone()
    with_average.load_state_dict(without.state_dict())
    assert torch.equal(with_average.adaptive.running(), kept)
    fresh = ACRouter(6, 4, 2).eval()
    assert torch.equal(fresh.adaptive.running(), torch.ones(4, 6))
    fresh.load_state_dict(with_average.state_dict())
    assert torch.equal(fresh.adaptive.running(), kept)


def test_deepcopy_and_pickle_keep_the_function():
    hidden, prev = assigned()
    router = ACRouter(6, 4, 2, stats="ema")
    router(hidden, prev)
    router.eval()
    expected = router(hidden, prev).logits
    assert torch.equal(copy.deepcopy(router)(hidden, prev).logits, expected)
    buffer = io.BytesIO()
    torch.save(router, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(hidden, prev).logits, expected)


def test_inference_mode_first_then_training():
    hidden, prev = assigned()
    router = ACRouter(6, 4, 2, stats="frozen").eval()
    with torch.inference_mode():
        router(hidden, prev)
    hidden.requires_grad_()
    router(hidden, prev).logits.sum().backward()
    assert hidden.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tokens_are_routed_in_float32(dtype):
    hidden, prev = assigned()
    router = ACRouter(6, 4, 2)
    low = hidden.to(dtype)
    out = router(low, prev)
    assert (out.logits.dtype, out.weights.dtype) == (torch.float32, dtype)
    scaled = scale_tokens(low.float(), out.feature_weights, prev)
    torch.testing.assert_close(out.logits, scaled @ router.weight.T, rtol=1e-2, atol=5e-2)
    # Tokens near the end of float16, with weights above 1.
    torch.manual_seed(0)
    big = (6e4 * (0.5 + 0.5 * torch.rand(48, 6))).to(dtype)
    out = router(big, prev)
    scaled = scale_tokens(big.double(), out.feature_weights.double(), prev)
    assert scaled.max() > torch.finfo(torch.float16).max
    torch.testing.assert_close(out.logits.double(), scaled @ router.weight.double().T, rtol=1e-5, atol=1.0)


@pytest.mark.parametrize("scorer", ["linear", "normalized"])
def test_no_copy_of_the_tokens_is_kept_and_blocks_make_no_difference(scorer, monkeypatch):
    hidden, prev = assigned(dtype=torch.float64)
    router = ACRouter(6, 4, 2, router=scorer).double()
    results = []
    for block in (2**17, 5 * 6):
        monkeypatch.setattr("ac_router.clusters.BLOCK_ELEMENTS", block)
        hidden = hidden.detach().requires_grad_()
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            out = router(hidden, prev)
        assert {t.data_ptr() for t in kept if t.shape == hidden.shape} == {hidden.data_ptr()}
        (out.logits.square().sum() + out.weights.square().sum()).backward()
        results.append((out.logits.detach(), hidden.grad, router.weight.grad.clone()))
        router.zero_grad()
    for one, many in zip(*results, strict=True):
        torch.testing.assert_close(many, one, rtol=1e-12, atol=1e-12)
    scaled = scale_tokens(hidden, out.feature_weights, prev)
    rows = router.weight if scorer == "linear" else torch.nn.functional.normalize(router.weight, dim=1, eps=1e-4)
    logits = scaled @ rows.T
    torch.testing.assert_close(results[0][0], logits, rtol=1e-12, atol=1e-12)
    (logits.square().sum() + logits.topk(2).values.softmax(-1).square().sum()).backward()
    torch.testing.assert_close(hidden.grad / 2, results[0][1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(router.weight.grad, results[0][2], rtol=1e-10, atol=1e-12)


def test_gate_weights_of_another_number_of_choices_are_an_error():
    hidden, prev = assigned()
    with pytest.raises(ValueError, match=r"gate weights have shape \(48, 3\), its indices \(48, 2\): they must agree"):
        ACRouter(6, 4, 2, mix_weights=True)(hidden, prev, prev_weights=torch.rand(48, 3))


def test_a_running_average_changed_from_outside_is_seen():
    hidden, prev = assigned()
    router = ACRouter(6, 4, 2, stats="ema")
    router(hidden, prev)
    router.eval()
    before = router(hidden, prev).logits
    router.adaptive.ema_dispersion[0] *= 3  # As DistributedDataParallel does, with the first process's values.
    assert not torch.equal(router(hidden, prev).logits, before)
    with torch.inference_mode():
        router.adaptive.ema_dispersion[0] /= 3
    torch.testing.assert_close(router(hidden, prev).logits, before)


def test_averages_are_loaded_by_name_where_numbers_are_not_unique():
    def two_stacks(seed):
        torch.manual_seed(seed)
        sides = {side: torch.nn.ModuleDict({"layers": torch.nn.ModuleList([ACRouter(6, 4, 2)])}) for side in "ab"}
        return torch.nn.ModuleDict(sides)

    hidden, prev = assigned()
    source, target = two_stacks(0), two_stacks(1)
    for scale, side in enumerate("ab", 1):
        source[side]["layers"][0](scale * hidden, prev)
    load_statistics(target, statistics_state(source))
    for side in "ab":
        ours, theirs = target[side]["layers"][0].adaptive, source[side]["layers"][0].adaptive
        assert torch.equal(ours.ema_dispersion, theirs.ema_dispersion)
    with pytest.raises(KeyError, match="more than one ema_count for a layer of this number"):
        load_statistics(target["a"], statistics_state(source))


def test_autocast_does_not_lower_the_precision():
    hidden, prev = assigned()
    router = ACRouter(6, 4, 2, mix_weights=True)
    gates = torch.rand(48, 2)
    plain = router(hidden, prev, prev_weights=gates)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = router(hidden, prev, prev_weights=gates)
    assert torch.equal(low.logits, plain.logits)


def test_a_model_in_bfloat16_still_averages_in_float32():
    hidden, prev = assigned()
    router = ACRouter(6, 4, 2, stats="ema").to(torch.bfloat16)
    for _ in range(3):
        router(hidden.bfloat16(), prev)
    assert router.adaptive.ema_dispersion.dtype == torch.float32
    reference = ACRouter(6, 4, 2, stats="ema")
    for _ in range(3):
        reference(hidden.bfloat16().float(), prev)
    torch.testing.assert_close(router.adaptive.ema_dispersion, reference.adaptive.ema_dispersion)


class Stack(torch.nn.Module):
    def __init__(self, layers=3, **options):
        super().__init__()
        torch.manual_seed(5)
        self.mix = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(layers))
        self.routers = torch.nn.ModuleList(ACRouter(6, 4, 2, **options) for _ in range(layers))

    def layer(self, i, hidden, state):
        hidden = torch.tanh(self.mix[i](hidden))
        return hidden * self.routers[i](hidden, state=state, layer=i).logits.logsumexp(-1, keepdim=True)

    def forward(self, hidden, *, reentrant=None):
        state = RoutingState()
        for i in range(len(self.mix)):
            if reentrant is None:
                hidden = self.layer(i, hidden, state)
            else:
                hidden = checkpoint(self.layer, i, hidden, state, use_reentrant=reentrant)
        return hidden


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_neither_gradients_nor_the_running_average(reentrant):
    hidden, _ = assigned()
    other, _ = assigned(seed=1)
    plain, checkpointed = Stack(), Stack()
    results = []
    for model, how in ((plain, None), (checkpointed, reentrant)):
        first, second = hidden.clone().requires_grad_(), other.clone().requires_grad_()
        # Two passes before one backward.
        loss = model(first, reentrant=how).square().sum() + model(second, reentrant=how).sum()
        loss.backward()
        results.append([first.grad, second.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)
    if not reentrant:  # Reentrant recomputation averages in the order of the backward pass: second, then first.
        for a, b in zip(plain.buffers(), checkpointed.buffers(), strict=True):
            assert torch.equal(a, b)
    for router in checkpointed.routers[1:]:
        # Two passes over 48 tokens at momentum 0.99: 0.48 x (0.99 + 1) tokens.
        assert float(router.adaptive.ema_count.sum()) == pytest.approx(0.48 * 1.99, rel=1e-3)


def test_diagnostics_count_what_happens():
    hidden, _ = assigned()
    model = Stack()
    with diagnostics(model) as seen:
        model(hidden)
        model(hidden)
    layers = seen.layers()
    assert list(layers) == ["routers.0", "routers.1", "routers.2"]
    assert [layer.plain_calls for layer in layers.values()] == [2, 0, 0]
    last = layers["routers.2"]
    assert (last.calls, last.tokens) == (2, 96)
    assert sum(last.load) == pytest.approx(1)
    assert 0 <= last.load_entropy <= 1
    assert 0 <= last.stability <= 1
    assert 0 <= last.changed <= 1
    assert 0 < last.min_weight <= last.max_weight
    assert "routers.1" in str(seen)
    model(hidden)
    assert seen.layers()["routers.2"].calls == 2


def test_diagnostics_of_a_router_that_copies_the_assignment_are_stable():
    # Cluster k's tokens point along axis k, and expert k along axis k.
    prev = torch.arange(40) % 4
    hidden = torch.nn.functional.one_hot(prev, 4).float() + 0.01 * torch.randn(40, 4)
    router = ACRouter(4, 4, 1)
    router.weight.data = torch.eye(4)
    with diagnostics(router) as seen:
        router(hidden, prev)
    (layer,) = seen.layers().values()
    assert layer.stability == pytest.approx(1)
    assert layer.empty_clusters == 0
    assert layer.load == [0.25] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "top_k must be at most num_experts=4"),
        ({"top_k": 0}, "top_k must be >= 1"),
        ({"dim": 0}, "dim must be >= 1"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"clip": 0.9}, "clip is a multiple"),
        ({"momentum": 1.5}, "momentum must be in"),
        ({"balance_temperature": 0.0}, "balance_temperature must be positive"),
        ({"num_experts_prev": 0}, "num_clusters must be >= 1"),
        ({"stats": "causal", "mix_weights": True}, "stats='causal' takes neither"),
        ({"stats": "causal", "process_group": "world"}, "stats='causal' looks at one sequence"),
    ],
)
def test_bad_options_are_errors_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        ACRouter(**{"dim": 6, "num_experts": 4, "top_k": 2, **options})


@pytest.mark.parametrize("options", [{"router": "dense"}, {"stats": "median"}, {"stat_source": "next"}])
def test_unknown_words_are_errors_at_construction(options):
    with pytest.raises((ValueError, TypeCheckError)):
        ACRouter(6, 4, 2, **options)


def test_bad_tokens_are_errors_that_show_the_sizes():
    router = ACRouter(6, 4, 2)
    hidden, prev = assigned()
    with pytest.raises(ValueError, match=r"width 5 .* router 6"):
        router(torch.randn(3, 5))
    with pytest.raises(ValueError, match="48 tokens but prev has assignments for 47"):
        router(hidden, prev[:-1])
    with pytest.raises(ValueError, match="mask has 3 entries"):
        router(hidden, prev, mask=torch.ones(3))


@pytest.mark.parametrize("options", [{}, {"mix_weights": True}, {"stat_source": "previous"}])
def test_assignments_masks_and_statistics_from_another_device_are_moved(options):
    # As when a model's layers lie on several devices; "meta" refuses to mix with the CPU like any other.
    hidden, prev = assigned()
    router = ACRouter(6, 4, 2, **options).to("meta")
    out = router(hidden.to("meta"), prev, mask=torch.ones(48), prev_weights=torch.rand(48, 2), prev_hidden=hidden)
    assert {tensor.device.type for tensor in out} == {"meta"}
    assert out.logits.shape == (48, 4)
