"""Everything that must compile without a graph break, compared with eager. Not a test by itself: it runs without the shape checks that
the tests install around every function, which the compiler cannot trace.

usage: run_compiled.py BACKEND all|few
"""

import sys

import torch

from ac_router import ACMoE, ACRouter, ACSoftMoE, RoutingState, feature_weights, patch_model

torch.set_num_threads(1)
backend, everything = sys.argv[1], sys.argv[2] == "all"


def compiled(function, **options):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


hidden = torch.randn(64, 16)
prev = torch.rand(64, 4).topk(2).indices
mask = torch.rand(64) > 0.2
variants = [{"mask": mask}, {"dispersion": "variance", "norm": "global"}, {"dispersion": "pairwise"}, {}]
for options in variants if everything else variants[:1]:
    ours = compiled(lambda h, p, options=options: feature_weights(h, p, 4, **options))(hidden, prev)
    torch.testing.assert_close(ours, feature_weights(hidden, prev, 4, **options), rtol=1e-4, atol=1e-5)
broken = hidden.clone()
broken[3, 3] = float("nan")
assert torch.isfinite(compiled(lambda h, p: feature_weights(h, p, 4))(broken, prev)).all()
wrong = prev.clone()
wrong[5] = 77  # Not looked at in compiled code: a token that does not count.
assert torch.isfinite(compiled(lambda h, p: feature_weights(h, p, 4))(hidden, wrong)).all()
print("feature_weights")

for stats in ("ema", "batch", "frozen") if everything else ("ema",):
    router = ACRouter(16, 4, 2, stats=stats, mix_weights=stats == "ema")
    gates = torch.rand(64, 2)
    for training in (True, False):
        router.train(training)
        expected = router(hidden, prev, prev_weights=gates)
        average = router.adaptive.ema_dispersion.clone()
        router.adaptive.ema_count.zero_()
        router.adaptive.ema_dispersion.zero_()
        if not training:
            router.adaptive.update(router.adaptive.statistics(hidden, prev[:, 0]))
            expected = router(hidden, prev, prev_weights=gates)
        out = compiled(router)(hidden, prev, prev_weights=gates)
        torch.testing.assert_close(out.logits, expected.logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(out.indices, expected.indices)
        if training and stats != "frozen":
            torch.testing.assert_close(router.adaptive.ema_dispersion, average, rtol=1e-4, atol=1e-5)
            assert router.adaptive.ema_count.sum() > 0
print("ACRouter")


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(ACMoE(16, 32, 4, 2) for _ in range(3))

    def forward(self, hidden):
        state, aux = RoutingState(), 0.0
        for i, layer in enumerate(self.layers):
            update, routing = layer(hidden, state=state, layer=i)
            hidden, aux = hidden + update, aux + routing.aux_loss
        return hidden, aux


stack = Stack()
plain = hidden.clone().requires_grad_()
expected, aux = stack(plain)
(expected.square().sum() + aux).backward()
grads = [plain.grad, *(p.grad for p in stack.parameters())]
stack.zero_grad(set_to_none=True)
again = hidden.clone().requires_grad_()
output, aux = compiled(stack)(again)
torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
(output.square().sum() + aux).backward()
for ours, eager in zip([again.grad, *(p.grad for p in stack.parameters())], grads, strict=True):
    torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)
print("ACMoE")

soft = ACSoftMoE(16, 32, 4, 2)
sequences = hidden.reshape(2, 32, 16)
_, before = ACSoftMoE(16, 32, 4)(sequences)
torch.testing.assert_close(compiled(soft)(sequences, before)[0], soft(sequences, before)[0], rtol=1e-4, atol=1e-5)
print("ACSoftMoE")

import transformers  # noqa: E402 - after the cheap part

common = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
}
qwen = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
families = (
    (transformers.MixtralConfig(**common, num_local_experts=4), transformers.MixtralForCausalLM),
    (transformers.OlmoeConfig(**common, num_experts=4), transformers.OlmoeForCausalLM),
    (transformers.Qwen2MoeConfig(**common, **qwen), transformers.Qwen2MoeForCausalLM),
    (transformers.Qwen3MoeConfig(**common, **qwen, head_dim=8), transformers.Qwen3MoeForCausalLM),
)
for config, model_class in families if everything else families[:1]:
    torch.manual_seed(0)
    model = model_class(config)
    model.set_experts_implementation("grouped_mm")  # The eager loop over experts does not compile, patched or not.
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight, std=0.5)
    ids = torch.randint(0, 64, (3, 12))
    patch_model(model).train()
    eager = model(ids).logits
    eager.logsumexp(-1).sum().backward()
    grad = model.model.layers[1].mlp.gate.weight.grad.clone()
    model.zero_grad()
    adaptive = model.model.layers[2].mlp.gate.ac_weights
    average = adaptive.ema_dispersion.clone()
    for module in model.modules():
        if hasattr(module, "ema_count"):
            module.ema_count.zero_()
            module.ema_dispersion.zero_()
    logits = compiled(model)(ids).logits
    torch.testing.assert_close(logits, eager, rtol=1e-3, atol=1e-3)
    logits.logsumexp(-1).sum().backward()
    torch.testing.assert_close(model.model.layers[1].mlp.gate.weight.grad, grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(adaptive.ema_dispersion, average, rtol=1e-3, atol=1e-4)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)
    print(model_class.__name__)
