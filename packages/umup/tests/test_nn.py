"""Modules. tests/data/decoder.npz and stds.json: computed by unit-scaling 0.3.5."""

import copy
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import umup.functional as U
import umup.nn as unn
from umup.compat import from_unit_scaling
from umup.optim import AdamW
from umup.roles import parameter_roles

DATA = Path(__file__).parent / "data"


def golden_decoder():
    arrays = dict(np.load(DATA / "decoder.npz"))
    state = from_unit_scaling({k[2:]: torch.tensor(v) for k, v in arrays.items() if k.startswith("w.")})
    model = unn.TransformerDecoder(20, 16, 2, 2, rope_theta=None).double()
    model.load_state_dict(state)
    return model, arrays


def test_decoder_equals_the_reference_librarys():
    model, arrays = golden_decoder()
    ids = torch.tensor(arrays["ids"])
    np.testing.assert_allclose(model(ids).detach(), arrays["logits"], rtol=1e-5, atol=1e-6)
    logits = model(ids)
    loss = U.cross_entropy(logits[:, :-1], ids[:, 1:])
    assert loss.item() == pytest.approx(arrays["loss0"].item(), rel=1e-5)
    loss.backward()
    wanted = from_unit_scaling({k[2:]: torch.tensor(v) for k, v in arrays.items() if k.startswith("g.")})
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5)


def test_ten_adamw_steps_equal_the_reference_librarys():
    model, arrays = golden_decoder()
    ids = torch.tensor(arrays["ids"])
    optimizer = AdamW(model, lr=0.25, weight_decay=2**-8, betas=(0.9, 0.99))
    assert len(optimizer.param_groups) == 4  # embedding, hidden, down projection, readout
    losses = []
    for _ in range(10):
        loss = model.loss(ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(losses, arrays["adamw_losses"], rtol=1e-4)
    wanted = from_unit_scaling({k[4:]: torch.tensor(v) for k, v in arrays.items() if k.startswith("w10.")})
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach(), wanted[name], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_scales_at_init_are_those_of_the_reference_library(index):
    case = json.loads((DATA / "stds.json").read_text(encoding="utf-8"))[index]
    rename = {
        "embedding": "embed_tokens",
        "projection": "lm_head",
        "final_norm": "norm",
        "mhsa.linear_o": "self_attn.o_proj",
        "mlp.linear_1": "mlp.up_proj",
        "mlp.linear_gate": "mlp.gate_proj",
        "mlp.linear_2": "mlp.down_proj",
    }
    seen: dict[str, list[float]] = {}
    for seed in range(2):
        torch.manual_seed(seed)
        model = unn.TransformerDecoder(case["vocab"], case["hidden"], case["layers"], case["heads"], rope_theta=None)

        def watch(name, model=model):
            def hook(module, inputs, output):
                seen.setdefault(f"fwd.{name}", []).append(output.std().item())
                if output.requires_grad:
                    output.register_hook(lambda g: seen.setdefault(f"bwd.{name}", []).append(g.std().item()))

            return hook

        for name, module in model.named_modules():
            module.register_forward_hook(watch(name))
        model.loss(torch.randint(case["vocab"], (case["batch"], case["seq"]))).backward()
        for name, parameter in model.named_parameters():
            seen.setdefault(f"wgrad.{name}", []).append(parameter.grad.std().item())
    checked = 0
    for key, mean in case["mean"].items():
        ours = key
        for old, new in rename.items():
            ours = ours.replace(old, new)
        if "linear_qkv" in key or ours not in seen:
            continue
        assert np.mean(seen[ours]) == pytest.approx(mean, rel=0.15, abs=4 * case["sd"][key]), key
        checked += 1
    assert checked > 15


def small(**kwargs):
    torch.manual_seed(0)
    return unn.TransformerDecoder(13, 16, 2, 4, kv_heads=2, scale_seq_len=12, **kwargs)


def test_decoding_with_a_cache_equals_the_full_pass():
    model = small().double().eval()
    ids = torch.randint(13, (2, 12))
    full = model(ids)
    cache = unn.KVCache()
    parts = [model(ids[:, :5], None, cache), model(ids[:, 5:8], None, cache)]
    parts += [model(ids[:, i : i + 1], None, cache) for i in range(8, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-9, atol=1e-10)
    assert cache.length() == 12


def test_decoding_a_padded_batch_with_a_cache_equals_the_full_pass():
    model = small().double().eval()
    ids = torch.randint(13, (2, 20))  # longer than scale_seq_len, too
    keep = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    keep[0, ..., :3] = False
    cache = unn.KVCache()
    parts = [model(ids[:, a:b], keep[..., :b], cache) for a, b in [(0, 4), (4, 9), *((i, i + 1) for i in range(9, 20))]]
    got, full = torch.cat(parts, 1), model(ids, keep)
    torch.testing.assert_close(got[0, 3:], full[0, 3:], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(got[1], full[1], rtol=1e-9, atol=1e-10)


def test_a_cache_without_a_fixed_scale_is_refused():
    model = unn.TransformerDecoder(13, 16, 1, 2)
    with pytest.raises(ValueError, match="scale_seq_len"):
        model(torch.zeros(1, 3, dtype=torch.long), None, unn.KVCache())


def test_every_gradient_is_a_multiple_of_the_true_one():
    """Unit scaling changes the length of a parameter's gradient, never its direction: against finite differences."""
    torch.manual_seed(0)
    model = unn.TransformerDecoder(
        5,
        8,
        2,
        2,
        kv_heads=1,
        intermediate_size=6,
        scale_seq_len=4,
        alpha_attn_softmax=2.0,
        alpha_ffn_act=0.5,
        alpha_res=0.5,
        alpha_res_attn_ratio=2.0,
        alpha_loss_softmax=1.5,
    ).double()
    ids = torch.randint(5, (2, 4))
    model.loss(ids).backward()
    for name, parameter in model.named_parameters():
        flat, true = parameter.detach().view(-1), torch.zeros(parameter.numel(), dtype=torch.float64)
        for i in range(len(flat)):
            start = flat[i].item()
            ends = []
            for step in (1e-5, -1e-5):
                flat[i] = start + step
                with torch.no_grad():
                    ends.append(model.loss(ids).item())
            flat[i] = start
            true[i] = (ends[0] - ends[1]) / 2e-5
        cosine = torch.nn.functional.cosine_similarity(true, parameter.grad.view(-1), dim=0).item()
        assert cosine == pytest.approx(1, abs=1e-7), name


def test_a_padding_mask_hides_what_it_masks():
    model = small().double()
    ids = torch.randint(13, (1, 6))
    mask = torch.tensor([True, True, True, True, False, True]).view(1, 1, 1, 6)
    other = ids.clone()
    other[0, 4] = (ids[0, 4] + 1) % 13
    torch.testing.assert_close(model(ids, mask)[:, 5], model(other, mask)[:, 5])
    additive = torch.zeros(1, 1, 1, 6, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(model(ids, additive)[:, 5], model(ids, mask)[:, 5])


def test_roles_survive_copying_pickling_meta_init_and_assignment():
    model = small()
    wanted = [(p.name, p.role, p.depth) for p in parameter_roles(model)[0]]

    def roles(m):
        return [(p.name, p.role, p.depth) for p in parameter_roles(m)[0]]

    assert roles(copy.deepcopy(model)) == wanted
    assert roles(pickle.loads(pickle.dumps(model))) == wanted
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert roles(torch.load(buffer, weights_only=False)) == wanted
    with torch.device("meta"):
        empty = unn.TransformerDecoder(13, 16, 2, 4, kv_heads=2, scale_seq_len=12)
    assert roles(empty) == wanted
    empty.load_state_dict(model.state_dict(), assign=True)
    assert roles(empty) == wanted
    assert len(AdamW(empty, lr=1.0).param_groups) == len(AdamW(model, lr=1.0).param_groups)
    ids = torch.randint(13, (1, 5))
    torch.testing.assert_close(empty(ids), model(ids))
    with torch.device("meta"):
        blank = unn.TransformerDecoder(13, 16, 2, 4, kv_heads=2, scale_seq_len=12)
    blank.to_empty(device="cpu")
    assert roles(blank) == wanted


@pytest.mark.parametrize("parts", [[2, 2], [1, 3]])
def test_accumulated_gradients_equal_those_of_the_whole_batch(parts):
    model = small().double()
    ids = torch.randint(13, (4, 7))
    model.loss(ids).backward()
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for part in ids.split(parts):
        with unn.effective_tokens(model, local=part.shape[0], total=4):
            model.loss(part).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name])
    assert model.lm_head.grad_scale == 1.0


def test_accumulating_a_divided_loss_needs_to_say_so():
    model = small().double()
    ids = torch.randint(13, (4, 7))
    model.loss(ids).backward()
    whole = model.lm_head.weight.grad.clone()
    model.zero_grad()
    for part in ids.split(2):
        with unn.effective_tokens(model, local=2, total=4, averaged_over=2):
            (model.loss(part) / 2).backward()
    torch.testing.assert_close(model.lm_head.weight.grad, whole)


@pytest.mark.parametrize(("local", "total", "ranks"), [(0, 4, 1), (5, 4, 1), (1, 4, 0)])
def test_impossible_token_counts_are_refused(local, total, ranks):
    with (
        pytest.raises(ValueError, match="must be"),
        unn.effective_tokens(small(), local=local, total=total, averaged_over=ranks),
    ):
        pass


def test_autocast_bfloat16_stays_close_and_keeps_float32_gradients():
    model = small()
    ids = torch.randint(13, (2, 12))
    exact = model(ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids)
        loss = model.loss(ids)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - exact).abs().max() < 0.05
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in model.parameters())


def test_norm_gains_conv_and_biases_train_under_their_roles():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        unn.Conv1d(3, 8, 3, padding=1, bias=True),
        unn.LayerNorm(10, elementwise_affine=True),
        unn.GELU(),
        unn.SiLU(),
        unn.Softmax(),
        unn.Dropout(0.1),
        unn.RMSNorm(10, elementwise_affine=True),
        unn.Linear(10, 4, bias=True),
    )
    kinds = {p.name: p.role.kind for p in parameter_roles(model)[0]}
    assert kinds == {
        "0.weight": "hidden",
        "0.bias": "bias",
        "1.weight": "norm",
        "1.bias": "bias",
        "6.weight": "norm",
        "7.weight": "hidden",
        "7.bias": "bias",
    }
    unn.MSELoss()(model(torch.randn(2, 3, 10)), torch.randn(2, 8, 4)).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    conv = unn.Conv1d(3, 8, 3, constraint="to_grad_input_scale")
    x = torch.randn(1, 3, 9)
    ratio = conv(x) / U.conv1d(x, conv.weight)  # the module passes its constraint on
    torch.testing.assert_close(ratio, torch.full_like(ratio, (1 / (8 * 3)) ** 0.5 / (1 / 9) ** 0.5))


def test_residual_module_pairs_split_and_add():
    block = unn.Residual(torch.nn.Tanh(), tau=0.5)
    x = torch.randn(3, 4)
    torch.testing.assert_close(block(x), U.residual_apply(torch.tanh, x, 0.5))


def test_cross_entropy_module_and_padding_index():
    loss = unn.CrossEntropyLoss(mult=2.0, ignore_index=0)
    logits, target = torch.randn(4, 5), torch.tensor([1, 0, 2, 3])
    torch.testing.assert_close(loss(logits, target), U.cross_entropy(logits, target, mult=2.0, ignore_index=0))
    table = unn.Embedding(5, 3, padding_idx=0)
    assert (table.weight[0] == 0).all()
    assert table.weight[1:].std() > 0.3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: unn.TransformerDecoder(1, 8, 1, 2), "vocab_size"),
        (lambda: unn.TransformerDecoder(8, 9, 1, 2), "hidden_size 9"),
        (lambda: unn.TransformerDecoder(8, 8, 1, 4, kv_heads=3), "kv_heads"),
        (lambda: unn.TransformerDecoder(8, 8, 1, 2, alpha_ffn_act=0.0), "mult"),
        (lambda: unn.TransformerDecoder(8, 8, 1, 2, alpha_attn_softmax=-1.0), "mult"),
        (lambda: unn.TransformerDecoder(8, 8, 1, 2, alpha_res=0.0), "alpha_res"),
        (lambda: unn.TransformerDecoder(8, 8, 1, 2, dropout_p=1.0), r"\[0, 1\)"),
        (lambda: unn.Dropout(1.0), r"\[0, 1\)"),
        (lambda: unn.Conv1d(1, 1, 3, padding="same"), "padding"),
        (lambda: unn.DepthModuleList([], depth=0), "depth"),
    ],
)
def test_bad_sizes_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_unknown_names_of_the_reference_library_are_refused():
    with pytest.raises(ValueError, match="what"):
        from_unit_scaling({"what.weight": torch.zeros(1)})
