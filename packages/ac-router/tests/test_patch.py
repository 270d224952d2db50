"""The patch, on tiny random models of the real transformers classes."""

import copy
import io
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ac_router import (
    ACRouter,
    collect_statistics,
    diagnostics,
    feature_weights,
    load_statistics,
    patch_model,
    register_router,
    statistics_state,
    token_weights,
    unpatch_model,
)

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 4}),
    "qwen2": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    ),
    "qwen3": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}),
}
each_family = pytest.mark.parametrize("family", list(FAMILIES))


def make(family="mixtral", seed=0, **overrides):
    config_name, model_name, extra = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**COMMON, **extra, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):  # Far from ties.
            nn.init.normal_(parameter, std=0.5)
    return model.eval()


def gates(model):
    return [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]


def batch(seed=1, size=(3, 10)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 64, size, generator=generator)


def watch(seen, key, what):
    """A hook that notes something on its first call and changes nothing."""

    def hook(module, args, output=None):
        seen.setdefault(key, what(args, output))

    return hook


def gradients(model, *losses):
    sum(losses).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@each_family
def test_with_all_weights_one_the_patched_model_is_the_model_exactly(family):
    model = make(family)
    ids = batch()
    plain = model(ids, labels=ids, output_router_logits=True)
    patch_model(model)  # In eval without an average all weights are 1.
    patched = model(ids, labels=ids, output_router_logits=True)
    assert torch.equal(patched.logits, plain.logits)
    assert torch.equal(patched.aux_loss, plain.aux_loss)
    assert torch.equal(patched.loss, plain.loss)
    assert len(patched.router_logits) == len(plain.router_logits) == 3
    for a, b in zip(patched.router_logits, plain.router_logits, strict=True):
        assert torch.equal(a, b)


@each_family
def test_unpatching_leaves_no_trace(family):
    model = make(family)
    ids = batch()
    before, keys, classes = model(ids).logits, set(model.state_dict()), [type(g) for g in gates(model)]
    patch_model(model, stats="batch")
    assert not torch.equal(model(ids).logits, before)
    assert [type(g) for g in gates(model)] == classes
    assert {key.rpartition(".")[2] for key in set(model.state_dict()) - keys} == {"ema_count", "ema_dispersion"}
    unpatch_model(model)
    assert torch.equal(model(ids).logits, before)
    assert set(model.state_dict()) == keys
    assert not hasattr(model.model, "ac_patch")
    unpatch_model(model)


@each_family
def test_the_first_layer_is_plain_and_the_next_are_routed_by_the_definition(family):
    model = patch_model(make(family), stats="batch")
    seen = {}
    for at, gate in enumerate(gates(model)):
        # Registered after the patch's own hooks: this sees scaled tokens and the choice.
        gate.register_forward_hook(watch(seen, at, lambda args, out: (args[0], out)))
    raw = {}
    for at, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(watch(raw, at, lambda args, _: args[0]))
    model(batch())
    assert torch.equal(seen[0][0].reshape(-1, 32), raw[0].reshape(-1, 32))
    for at in (1, 2):
        hidden, prev = raw[at].reshape(-1, 32), seen[at - 1][1][2]
        w = token_weights(feature_weights(hidden, prev, 4), prev)
        torch.testing.assert_close(seen[at][0], hidden * w)
        logits, _, indices = seen[at][1]
        torch.testing.assert_close(logits, (hidden * w) @ gates(model)[at].weight.T)
        assert torch.equal(indices, logits.softmax(-1).topk(2).indices)


@each_family
def test_training_reaches_every_parameter_and_the_running_average(family):
    model = patch_model(make(family).train())
    ids = batch(size=(4, 16))
    grads = gradients(model, model(ids, labels=ids, output_router_logits=True).loss)
    assert all(f"model.layers.{i}.mlp.gate.weight" in grads for i in range(3))
    for i, gate in enumerate(gates(model)):
        assert hasattr(gate, "ac_weights") == (i > 0)
    assert all(m.ema_count.sum() > 0 for m in model.modules() if hasattr(m, "ema_count"))
    model.eval()
    trained = model(ids).logits
    unpatch_model(model)
    assert not torch.equal(model(ids).logits, trained)


@pytest.mark.parametrize("reentrant", [False, True])
@each_family
def test_gradient_checkpointing_changes_neither_gradients_nor_the_running_average(family, reentrant):
    first, second = batch(size=(2, 12)), batch(seed=2, size=(3, 9))
    results = []
    for checkpointing in (False, True):
        model = patch_model(make(family).train())
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        # Two passes before one backward, of different sizes.
        # (Reentrant checkpointing gives transformers' auxiliary loss no gradient, patched or not.)
        aux = not reentrant
        losses = [model(ids, labels=ids, output_router_logits=aux).loss for ids in (first, second)]
        results.append((gradients(model, *losses), statistics_state(model)))
    (plain, plain_average), (again, again_average) = results
    assert plain.keys() == again.keys()
    for name in plain:
        torch.testing.assert_close(again[name], plain[name], rtol=1e-4, atol=1e-6)
    for name, value in plain_average.items():
        # Reentrant recomputation averages in the order of the backward pass: second pass first.
        torch.testing.assert_close(again_average[name], value, rtol=2e-2 if reentrant else 1e-6, atol=1e-6)


def test_recomputation_in_another_thread_finds_its_pass():
    model = patch_model(make().train())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = batch()
    expected = gradients(model, model(ids, labels=ids).loss)
    loss = model(ids, labels=ids).loss
    model(batch(seed=5))  # Another pass in between, in this thread.
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_threads_do_not_see_each_others_assignments():
    model = patch_model(make(), stats="batch")
    inputs = [batch(seed=s, size=(2, 8 + s)) for s in range(6)]
    expected = [model(ids).logits for ids in inputs]
    results: dict[int, torch.Tensor] = {}

    def work(i):
        for _ in range(5):
            results[i] = model(inputs[i]).logits

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(6):
        torch.testing.assert_close(results[i], expected[i])


@each_family
def test_cached_generation_equals_generation_without_a_cache(family):
    model = patch_model(make(family).train())
    model(batch(size=(4, 16)))
    model.eval()
    ids = batch(seed=9, size=(2, 6))
    for stats in ("ema", "frozen"):
        for module in model.modules():
            if hasattr(module, "ema_count"):
                module.stats = stats
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        cached = model.generate(ids, use_cache=True, **options)
        assert torch.equal(cached, model.generate(ids, use_cache=False, **options))
        # And the last step's logits are those of the whole sequence at once.
        whole = model(cached[:, :-1]).logits[:, -1].argmax(-1)
        assert torch.equal(whole, cached[:, -1])


def test_a_sequence_does_not_depend_on_its_batch_in_eval():
    model = patch_model(make().train())
    model(batch(size=(4, 16)))
    model.eval()
    ids = batch()
    torch.testing.assert_close(model(ids[:1]).logits, model(ids).logits[:1], rtol=1e-4, atol=1e-5)


def test_padding_is_left_out_of_the_statistics():
    model = patch_model(make(), stats="batch")
    ids = batch(size=(1, 9))
    plain = model(ids).logits
    for side in ("left", "right"):
        padding = torch.zeros(1, 4, dtype=torch.long)
        padded = torch.cat([padding, ids] if side == "left" else [ids, padding], dim=1)
        mask = (padded != 0).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(padded, attention_mask=mask, position_ids=positions).logits[mask.bool()]
        torch.testing.assert_close(logits, plain[0], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(model(padded, position_ids=positions).logits[mask.bool()], plain[0], atol=1e-3)


def test_qwen_passes_over_dense_layers():
    model = make("qwen3", num_hidden_layers=5, mlp_only_layers=[1, 3])
    patch_model(model, stats="batch")
    patched = [
        i for i, layer in enumerate(model.model.layers) if hasattr(getattr(layer.mlp, "gate", None), "ac_weights")
    ]
    assert patched == [2, 4]
    with diagnostics(model) as seen:
        model(batch())
    assert [name for name, layer in seen.layers().items() if layer.plain_calls == 0] == [
        "model.layers.2.mlp.gate",
        "model.layers.4.mlp.gate",
    ]


def test_layers_can_be_named_and_skipped():
    def patched(model):
        return [i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp.gate, "ac_weights")]

    assert patched(patch_model(make(num_hidden_layers=4), skip_first=2)) == [2, 3]
    assert patched(patch_model(make(num_hidden_layers=4), [3])) == [3]
    model = make()
    for layers, message in (
        ([0], "layer 0 is the first"),
        ([7], r"among the mixture-of-experts layers \[1, 2\]"),
        ([], "among the mixture-of-experts layers"),
    ):
        with pytest.raises(ValueError, match=message):
            patch_model(model, layers)
    with pytest.raises(ValueError, match="skip_first=3 leaves none"):
        patch_model(model, skip_first=3)
    with pytest.raises(ValueError, match="skip_first must be >= 1"):
        patch_model(model, skip_first=0)
    with pytest.raises(ValueError, match="clip is a multiple"):
        patch_model(model, clip=0.2)
    assert not hasattr(model.model, "ac_patch")
    patch_model(model)
    with pytest.raises(ValueError, match="already patched"):
        patch_model(model)


def test_a_model_without_known_routers_is_an_error():
    config = transformers.LlamaConfig(**{k: v for k, v in COMMON.items() if k != "num_experts_per_tok"})
    with pytest.raises(ValueError, match="LlamaForCausalLM has no decoder layers with a router of a known class"):
        patch_model(transformers.LlamaForCausalLM(config))


def test_base_model_and_inputs_embeds():
    model = make()
    patch_model(model.model, stats="batch")
    ids = batch()
    expected = model(ids).logits
    torch.testing.assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, expected)


@each_family
def test_save_and_load_both_ways(family, tmp_path):
    model = patch_model(make(family).train())
    ids = batch(size=(4, 16))
    model(ids)
    model.eval()
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(unpatched := plain(ids).logits, unpatch_model(copy.deepcopy(model))(ids).logits)
    again = patch_model(plain)
    assert torch.equal(again(ids).logits, unpatched)
    load_statistics(again, tmp_path)
    assert torch.equal(again(ids).logits, expected)
    # A plain state dict into a patched model, strictly, and averages by name.
    fresh = patch_model(make(family, seed=3))
    fresh.load_state_dict(make(family).state_dict())
    load_statistics(fresh, statistics_state(model))
    assert torch.equal(fresh.eval()(ids).logits, expected)
    with pytest.raises(KeyError, match=r"no ema_count for model\.layers\.1\.mlp\.gate\.ac_weights"):
        load_statistics(fresh, {})
    with pytest.raises(FileNotFoundError, match="no safetensors file"):
        load_statistics(fresh, tmp_path / "nowhere")


def test_averages_can_be_left_out_of_the_state_dict():
    model = make()
    keys = set(model.state_dict())
    assert set(patch_model(model, persistent=False).state_dict()) == keys


def test_deepcopy_and_pickle_keep_the_patch_and_are_independent():
    model = patch_model(make().train())
    ids = batch(size=(4, 16))
    model(ids)
    model.eval()
    expected = model(ids).logits
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(ids).logits, expected)
        unpatch_model(other)
        assert not torch.equal(other(ids).logits, expected)
        assert torch.equal(model(ids).logits, expected)


class LowRank(nn.Module):
    """A low-rank addition to a weight, as adapter libraries parametrise it."""

    def __init__(self, weight, rank=2):
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, weight.shape[1]) * 0.1)
        self.b = nn.Parameter(torch.randn(weight.shape[0], rank))

    def forward(self, weight):
        return weight + self.b @ self.a


class Adapted(nn.Module):
    """An adapter around the whole router, in the layout `gate.base_layer`."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.low_rank = LowRank(base_layer.weight)

    def forward(self, hidden):
        weight = self.low_rank(self.base_layer.weight)
        logits = hidden.reshape(-1, weight.shape[1]) @ weight.T
        gate, indices = logits.softmax(-1).topk(2)
        return logits, gate / gate.sum(-1, keepdim=True), indices


@pytest.mark.parametrize("how", ["parametrised before", "parametrised after", "wrapped before"])
def test_an_adapter_on_the_gate_sees_scaled_tokens_and_gets_gradient(how):
    model = make()
    for p in model.parameters():
        p.requires_grad_(False)
    torch.manual_seed(3)
    if how == "parametrised after":
        patch_model(model, stats="batch")
    for layer in model.model.layers:
        gate = layer.mlp.gate
        if how.startswith("parametrised"):
            nn.utils.parametrize.register_parametrization(gate, "weight", LowRank(gate.weight), unsafe=True)
        else:
            layer.mlp.gate = Adapted(gate)
    if how != "parametrised after":
        patch_model(model, stats="batch")
    seen = []
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    second.register_forward_pre_hook(lambda m, args: seen.append(args[0].reshape(-1, 32)))
    for mlp in (first, second):
        mlp.gate.register_forward_hook(lambda m, args, out: seen.append(out))
    model(batch()).logits.sum().backward()
    (_, _, prev), hidden, (logits, _, _) = seen
    scaled = hidden * token_weights(feature_weights(hidden, prev, 4), prev)
    gate = second.gate
    weight = gate.weight if how.startswith("parametrised") else gate.low_rank(gate.base_layer.weight)
    torch.testing.assert_close(logits, scaled @ weight.T)
    adapter = gate.parametrizations.weight[0] if how.startswith("parametrised") else gate.low_rank
    assert adapter.a.grad.abs().sum() > 0


@pytest.mark.parametrize("first", ["patch", "adapter"])
def test_low_rank_adaptation_of_the_gate_by_peft(first):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"], init_lora_weights=False
    )
    ids = batch()
    torch.manual_seed(4)
    if first == "patch":
        model = peft.get_peft_model(patch_model(make(), stats="batch"), config)
    else:
        model = patch_model(peft.get_peft_model(make(), config), stats="batch")
    model(input_ids=ids, labels=ids, output_router_logits=True).loss.backward()
    grads = [p.grad for name, p in model.named_parameters() if "gate.lora_A" in name]
    assert len(grads) == 3
    assert all(grad.abs().sum() > 0 for grad in grads)
    adapted = model(input_ids=ids).logits
    unpatched = unpatch_model(copy.deepcopy(model))
    assert not torch.allclose(unpatched(input_ids=ids).logits, adapted, atol=1e-4)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, adapted, rtol=1e-4, atol=1e-5)
    assert sum(name.endswith("gate.ac_weights") for name, _ in merged.named_modules()) == 2


@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_weights_offloaded_to_disk(family, tmp_path):
    pytest.importorskip("accelerate")
    plain = make(family)
    plain.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    model = type(plain).from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "off").eval()
    assert gates(model)[1].weight.device.type == "meta"
    patch_model(model)
    patch_model(plain)
    ids = batch(size=(4, 16))
    with torch.no_grad(), collect_statistics():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    for name, average in statistics_state(plain).items():
        torch.testing.assert_close(statistics_state(model)[name], average)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_a_patched_model_can_be_offloaded_without_its_buffers():
    accelerate = pytest.importorskip("accelerate")
    ids = batch()
    expected = patch_model(make(), stats="batch")(ids).logits
    model = accelerate.cpu_offload(patch_model(make(), stats="batch"), execution_device="cpu")
    torch.testing.assert_close(model(ids).logits, expected)
    model = accelerate.cpu_offload(patch_model(make(), stats="batch"), execution_device="cpu", offload_buffers=True)
    with pytest.raises(
        RuntimeError, match=r"running averages are on the meta device .*patch a model after it is dispatched"
    ):
        model(ids)


def test_every_way_to_generate_gives_the_same_text():
    model, draft = patch_model(make().train()), make(seed=4)
    model(batch(size=(4, 16)))
    model.eval()
    ids = batch(seed=9, size=(2, 6))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    greedy = model.generate(ids, **options)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    mask = (padded != 0).long()
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(ids, **static, **options), greedy)
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 3:], greedy)
    assert torch.equal(model.generate(padded, attention_mask=mask, **static, **options)[:, 3:], greedy)
    assert torch.equal(model.generate(ids, prefill_chunk_size=2, **options), greedy)
    assert torch.equal(model.generate(ids[:1], assistant_model=patch_model(draft), **options), greedy[:1])
    beams = [model.generate(ids, num_beams=3, use_cache=cached, **options) for cached in (True, False)]
    assert torch.equal(*beams)


def test_recomputed_dense_layers_leave_nothing_behind():
    model = make("qwen3", num_hidden_layers=4, mlp_only_layers=[0, 3]).train()
    patch_model(model, stats="batch")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = batch()
    model(ids, labels=ids).loss.backward()
    hidden = torch.randn(5, 32)
    gate = model.model.layers[2].mlp.gate
    assert torch.equal(gate(hidden)[0], F.linear(hidden, gate.weight))


def test_a_trainer_trains_and_evaluates(tmp_path):
    pytest.importorskip("accelerate")
    model = patch_model(make(output_router_logits=True))
    data = [{"input_ids": ids, "labels": ids} for ids in batch(size=(8, 12))]
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path,
        per_device_train_batch_size=2,
        max_steps=4,
        gradient_checkpointing=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    # Four steps of 24 tokens, momentum 0.99, each learned once in spite of recomputation; a cluster of one token is not learned.
    most = 24 * (1 - 0.99**4)
    assert all(0.8 * most < m.ema_count.sum() < 1.001 * most for m in model.modules() if hasattr(m, "ema_count"))


def test_bfloat16_model():
    model = patch_model(make().train().to(torch.bfloat16))
    ids = batch(size=(4, 16))
    out = model(ids, labels=ids, output_router_logits=True)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert model.model.layers[1].mlp.gate.ac_weights.ema_dispersion.dtype == torch.float32
    model.eval()
    assert model(ids).logits.dtype == torch.bfloat16
    converted = patch_model(make()).to(torch.bfloat16).train()
    converted(ids).logits.float().sum().backward()
    assert converted.model.layers[1].mlp.gate.ac_weights.ema_dispersion.dtype == torch.float32


def test_autocast_and_inference_mode():
    model = patch_model(make().train())
    ids = batch(size=(4, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(ids, labels=ids).loss.backward()
    model.eval()
    with torch.inference_mode():
        inferred = model(ids).logits
    assert torch.equal(model(ids).logits, inferred)


def test_collecting_gives_a_plain_model_its_averages():
    model = patch_model(make())
    ids = batch(size=(4, 16))
    plain = model(ids).logits
    with torch.no_grad(), collect_statistics():
        collected = model(ids).logits
    assert not torch.equal(collected, plain)
    torch.testing.assert_close(model(ids).logits, collected, rtol=1e-4, atol=1e-5)


def test_causal_statistics_do_not_see_the_future_and_refuse_a_cache():
    model = patch_model(make(), stats="causal")
    ids = batch()
    out = model(ids, use_cache=False).logits
    changed = ids.clone()
    changed[:, 6:] = 1
    torch.testing.assert_close(model(changed, use_cache=False).logits[:, :6], out[:, :6], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(ids[:1, :4], use_cache=False).logits, out[:1, :4], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="stats='causal' needs every sequence whole"):
        model.generate(ids, max_new_tokens=3, do_sample=False)
    model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False)


def test_mixing_and_previous_statistics():
    ids = batch()
    logits = [
        patch_model(make(), stats="batch", **options)(ids).logits
        for options in (
            {},
            {"mix_weights": True},
            {"stat_source": "previous"},
        )
    ]
    assert not torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    model = patch_model(make(), stats="batch", stat_source="previous")
    raw, chosen, scaled = {}, {}, {}
    for at, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(watch(raw, at, lambda args, _: args[0].reshape(-1, 32)))
        layer.mlp.gate.register_forward_hook(watch(chosen, at, lambda _, out: out[2]))
        layer.mlp.gate.register_forward_hook(watch(scaled, at, lambda args, _: args[0]))
    model(ids)
    for at in (1, 2):
        w = feature_weights(raw[at - 1], chosen[at - 1], 4)
        torch.testing.assert_close(scaled[at], raw[at] * token_weights(w, chosen[at - 1]))


def test_diagnostics_of_a_patched_model():
    model = patch_model(make(), stats="batch")
    with diagnostics(model) as seen:
        model(batch())
    layers = seen.layers()
    assert list(layers) == [f"model.layers.{i}.mlp.gate" for i in range(3)]
    assert [layer.plain_calls for layer in layers.values()] == [1, 0, 0]
    assert all(0 <= layers[f"model.layers.{i}.mlp.gate"].changed <= 1 for i in (1, 2))
    assert layers["model.layers.2.mlp.gate"].max_weight > 1


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, hidden):
        logits = hidden @ self.weight.T
        gate, indices = logits.softmax(-1).topk(2)
        return indices, gate, logits


class Block(nn.Module):
    gradient_checkpointing = False

    def __init__(self):
        super().__init__()
        self.route = Router()

    def forward(self, hidden):
        _, gate, _ = self.route(hidden.reshape(-1, 8))
        return torch.tanh(hidden) * gate.sum(-1).reshape((*hidden.shape[:-1], 1))


class Foreign(nn.Module):
    """A model of another make: no keyword arguments passed down."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, inputs_embeds):
        hidden = inputs_embeds
        for block in self.layers:
            if block.gradient_checkpointing:
                hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        return hidden


def test_a_registered_router_of_another_make():
    with pytest.raises(ValueError, match="it has Router: see register_router"):
        patch_model(Foreign())
    register_router(Router, logits=2, gates=1, indices=0)
    model = patch_model(Foreign(), stats="batch")
    hidden = torch.randn(2, 10, 8, requires_grad=True)
    plain = unpatch_model(copy.deepcopy(model))(hidden)
    assert not torch.equal(model(hidden), plain)
    model(hidden).sum().backward()
    model.train()
    for block in model.layers:
        block.gradient_checkpointing = True
    with pytest.raises(RuntimeError, match="gradient checkpointing cannot be used"):
        model(hidden).sum().backward()


def test_an_error_inside_the_model_leaves_nothing_behind():
    model = patch_model(make(), stats="batch")
    ids = batch()
    expected = model(ids).logits
    bomb = model.model.layers[2].self_attn.register_forward_pre_hook(lambda m, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids)
    bomb.remove()
    assert torch.equal(model(ids).logits, expected)
    # A layer called by itself has no previous assignment, and is plain.
    hidden = torch.randn(1, 5, 32)
    gate = model.model.layers[1].mlp.gate
    assert torch.equal(gate(hidden)[0], F.linear(hidden.reshape(-1, 32), gate.weight))


def test_own_router_agrees_with_a_patched_one():
    model = patch_model(make(), stats="batch")
    gate = model.model.layers[1].mlp.gate
    router = ACRouter(32, 4, 2)
    router.weight.data = gate.weight.data
    seen = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda m, a, out: seen.append(out[2]))
    model.model.layers[1].mlp.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    gate.register_forward_hook(lambda m, a, out: seen.append(out))
    model(batch())
    prev, hidden, (logits, scores, indices) = seen
    out = router(hidden, prev)
    torch.testing.assert_close(out.logits, logits)
    torch.testing.assert_close(out.weights, scores)
    assert torch.equal(out.indices, indices)
