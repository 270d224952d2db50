"""The layers built around the router."""

import copy

import pytest
import torch
import torch.nn.functional as F

from ac_router import ACMoE, ACRouter, ACSoftMoE, RouterOutput, RoutingState, feature_weights, token_weights
from ac_router.moe import grouped_linear


def slow_moe(layer: ACMoE, hidden: torch.Tensor, routing: RouterOutput) -> torch.Tensor:
    """One token and one expert at a time."""
    out = torch.zeros_like(hidden)
    for i, token in enumerate(hidden):
        for gate, expert in zip(routing.weights[i], routing.indices[i], strict=True):
            inner = layer.experts.up[expert] @ token
            if layer.experts.expert == "mlp":
                inner = F.gelu(inner)
            else:
                half = len(inner) // 2
                inner = F.silu(inner[:half]) * inner[half:]
            out[i] = out[i] + gate * (layer.experts.down[expert] @ inner)
    return out


@pytest.mark.parametrize("expert", ["swiglu", "mlp"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_output_equals_one_token_at_a_time(expert, top_k):
    torch.manual_seed(0)
    layer = ACMoE(8, 12, 4, top_k, expert=expert)
    hidden, prev = torch.randn(3, 7, 8), torch.randint(0, 4, (3, 7))
    out, routing = layer(hidden, prev)
    assert out.shape == hidden.shape
    torch.testing.assert_close(out.reshape(21, 8), slow_moe(layer, hidden.reshape(21, 8), routing))


def test_experts_get_unscaled_tokens():
    layer = ACMoE(8, 12, 4, 4, norm=None)  # All experts: the routing changes only the gates.
    hidden, prev = torch.randn(20, 8), torch.arange(20) % 4
    _, plain = layer(hidden)
    out, routing = layer(hidden, prev)
    assert not torch.equal(routing.logits, plain.logits)
    torch.testing.assert_close(out, slow_moe(layer, hidden, routing))


def test_gradients_equal_one_token_at_a_time():
    layer = ACMoE(4, 6, 3, 2, stats="frozen").double()
    hidden = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    out, routing = layer(hidden)
    ours = torch.autograd.grad(out.square().sum(), [hidden, *layer.parameters()], retain_graph=True)
    slow = torch.autograd.grad(slow_moe(layer, hidden, routing).square().sum(), [hidden, *layer.parameters()])
    for a, b in zip(ours, slow, strict=True):
        torch.testing.assert_close(a, b)


def test_grouped_product_equals_one_product_a_group():
    rows, weight, sizes = torch.randn(12, 8), torch.randn(4, 16, 8), torch.tensor([5, 0, 6, 1])
    expected = torch.cat([rows[:5] @ weight[0].T, rows[5:11] @ weight[2].T, rows[11:] @ weight[3].T])
    torch.testing.assert_close(grouped_linear(rows, weight, sizes), expected)
    if hasattr(F, "grouped_mm"):
        kernel = F.grouped_mm(rows, weight.transpose(1, 2), offs=sizes.cumsum(0).to(torch.int32))
        torch.testing.assert_close(kernel, expected)


def test_no_tokens_and_one_token():
    layer = ACMoE(8, 12, 4, 2)
    out, routing = layer(torch.randn(0, 8), torch.zeros(0, dtype=torch.long))
    assert out.shape == (0, 8)
    assert torch.isfinite(routing.aux_loss)
    out, _ = layer(torch.randn(1, 8), torch.zeros(1, dtype=torch.long))
    assert torch.isfinite(out).all()


def test_bfloat16_and_autocast():
    layer = ACMoE(8, 16, 4, 2)
    hidden, prev = torch.randn(20, 8), torch.arange(20) % 4
    plain, routing = layer(hidden, prev)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low, low_routing = layer(hidden, prev)
    assert torch.equal(low_routing.logits, routing.logits)
    torch.testing.assert_close(low.float(), plain, rtol=5e-2, atol=5e-2)
    half, half_routing = copy.deepcopy(layer).to(torch.bfloat16)(hidden.bfloat16(), prev)
    assert half.dtype == torch.bfloat16
    assert half_routing.logits.dtype == torch.float32


def test_a_stack_trains_and_balances():
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(ACMoE(8, 16, 4, 2, stats="ema") for _ in range(3))
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
    data, target = torch.randn(64, 8), torch.randn(64, 8)
    losses = []
    for _ in range(40):
        hidden, state, aux = data, RoutingState(), 0.0
        for i, layer in enumerate(layers):
            out, routing = layer(hidden, state=state, layer=i)
            hidden, aux = hidden + out, aux + routing.aux_loss
        loss = F.mse_loss(hidden, target) + 0.01 * aux
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in layers.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_a_router_of_your_own():
    router = ACRouter(8, 4, 1, router="cosine")
    layer = ACMoE(8, 12, 4, router=router)
    assert layer(torch.randn(5, 8))[1].indices.shape == (5, 1)
    with pytest.raises(ValueError, match="4 experts and width 8, the layer for 5 and 8"):
        ACMoE(8, 12, 5, router=router)
    with pytest.raises(ValueError, match="not both: got clip"):
        ACMoE(8, 12, 4, router=router, clip=2.0)


def slow_softmoe(layer: ACSoftMoE, hidden, scale=None):
    """SoftMoE, algorithm 1, with the router's tokens multiplied by `scale`."""
    out = torch.zeros_like(hidden)
    for b, sequence in enumerate(hidden):
        routed = F.normalize(sequence, dim=-1) if layer.scale is not None else sequence
        if scale is not None:
            routed = routed * scale.reshape(hidden.shape)[b]
        slots = F.normalize(layer.slots, dim=-1) * layer.scale if layer.scale is not None else layer.slots
        logits = routed @ slots.T
        inputs = logits.softmax(0).T @ sequence
        outputs = []
        for s, x in enumerate(inputs):
            expert = s // layer.slots_per_expert
            outputs.append(layer.experts.down[expert] @ F.gelu(layer.experts.up[expert] @ x))
        out[b] = logits.softmax(1) @ torch.stack(outputs)
    return out


@pytest.mark.parametrize("normalize", [True, False])
def test_softmoe_without_a_previous_layer_is_plain_softmoe(normalize):
    layer = ACSoftMoE(6, 10, 4, 2, normalize=normalize)
    hidden = torch.randn(2, 9, 6)
    out, routing = layer(hidden)
    torch.testing.assert_close(out, slow_softmoe(layer, hidden))
    assert routing.indices.shape == (18, 4)
    torch.testing.assert_close(routing.weights.sum(1), torch.ones(18))


def test_softmoe_scales_the_routers_tokens_by_mixed_weights():
    first, second = ACSoftMoE(6, 10, 4, 2), ACSoftMoE(6, 10, 4, 2, mix_over=3)
    hidden = torch.randn(2, 9, 6)
    _, prev = first(hidden)
    out, routing = second(hidden, prev)
    tokens = F.normalize(hidden.reshape(18, 6), dim=-1)
    weights = feature_weights(tokens, prev.indices, 4, eps=0.35, clip=5.0, norm="global_clipped")
    assert torch.equal(routing.feature_weights, weights)
    torch.testing.assert_close(out, slow_softmoe(second, hidden, token_weights(weights, prev.indices, prev.weights)))
    state = RoutingState()
    first(hidden, state=state, layer=0)
    torch.testing.assert_close(second(hidden, state=state, layer=1)[0], out)


def test_masked_tokens_reach_no_slot():
    layer = ACSoftMoE(6, 10, 4)
    hidden = torch.randn(2, 9, 6)
    padded = torch.cat([hidden, torch.full((2, 3, 6), 7.0)], dim=1)
    mask = torch.arange(12).expand(2, 12) < 9
    torch.testing.assert_close(layer(padded, mask=mask)[0][:, :9], layer(hidden)[0])
    assert torch.isfinite(layer(padded, mask=torch.zeros(2, 12, dtype=torch.bool))[0]).all()


def test_softmoe_refuses_to_promise_causality():
    with pytest.raises(ValueError, match="would promise too much"):
        ACSoftMoE(6, 10, 4, stats="causal")
