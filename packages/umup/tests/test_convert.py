"""Conversion of real transformers models."""

import pytest
import torch

pytest.importorskip("transformers")
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from umup.conversion import convert
from umup.hf import UmupForCausalLM
from umup.optim import get_param_groups
from umup.roles import parameter_roles


def llama(**kwargs):
    torch.manual_seed(0)
    config = {
        "vocab_size": 29,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "initializer_range": 0.2,
    }
    model = LlamaForCausalLM(LlamaConfig(**(config | kwargs))).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "bias" in name:
                p.copy_(1 + 0.3 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("bias", [False, True])
def test_preserving_keeps_the_trained_function_and_unit_weights(bias, tmp_path):
    plain = llama(attention_bias=bias, mlp_bias=bias)
    ours = convert(plain, strategy="preserve").eval()
    ids = torch.randint(29, (2, 11))
    torch.testing.assert_close(ours(ids).logits, plain(ids).logits, rtol=2e-4, atol=2e-4)
    assert ours.lm_head.weight.std().item() == pytest.approx(1, rel=0.05)
    ours.save_pretrained(tmp_path)
    torch.testing.assert_close(UmupForCausalLM.from_pretrained(tmp_path)(ids).logits, ours(ids).logits)
    assert {p.role.kind for p in parameter_roles(ours)[0]} >= {"norm", "hidden"}


def test_preserving_with_other_residual_weights_is_the_same_function():
    plain = llama()
    ids = torch.randint(29, (2, 11))
    ours = convert(plain, strategy="preserve", alpha_res=0.25, alpha_res_attn_ratio=2.0, scale_seq_len=8).eval()
    torch.testing.assert_close(ours(ids).logits, plain(ids).logits, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("Granite", {"residual_multiplier": 0.2, "logits_scaling": 4.0}, "constants"),
        ("Gemma", {"hidden_act": "silu", "head_dim": 6}, "constants"),
        ("Mistral", {"sliding_window": 3}, "sliding_window=3"),
    ],
)
def test_llamas_relatives_are_refused_rather_than_changed(name, kwargs, message):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **(llama().config.to_dict() | kwargs | {"tie_word_embeddings": False})
    )
    plain = getattr(transformers, f"{name}ForCausalLM")(config).train()
    with pytest.raises(ValueError, match=message):
        convert(plain, strategy="preserve")
    assert plain.training


def test_a_preserved_model_trains():
    ours = convert(llama(), strategy="preserve")
    optimizer = torch.optim.AdamW(get_param_groups(ours, 0.05))
    ids = torch.randint(29, (4, 11))
    losses = []
    for _ in range(6):
        loss = ours(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_reinit_takes_the_architecture_and_fresh_unit_weights():
    plain = llama()
    ours = convert(plain, seed=1, alpha_res=0.5, scale_seq_len=16)
    again = convert(plain, seed=1, alpha_res=0.5, scale_seq_len=16)
    assert torch.equal(ours.lm_head.weight, again.lm_head.weight)
    assert (ours.config.alpha_res, ours.config.scale_seq_len, ours.config.num_key_value_heads) == (0.5, 16, 2)
    assert {n: p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in plain.named_parameters() if "norm" not in n
    }
    assert all(abs(p.std().item() - 1) < 0.15 for p in ours.parameters())


def test_tied_embeddings_are_refused_or_copied():
    plain = llama(tie_word_embeddings=True)
    with pytest.raises(ValueError, match="tie='untie'"):
        convert(plain, strategy="preserve")
    ours = convert(plain, strategy="preserve", tie="untie").eval()
    ids = torch.randint(29, (1, 7))
    torch.testing.assert_close(ours(ids).logits, plain(ids).logits, rtol=2e-4, atol=2e-4)


def test_what_cannot_be_converted_is_refused():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    with pytest.raises(ValueError, match=r"model\.embed_tokens"):
        convert(gpt2)
    with pytest.raises(ValueError, match="hidden_act"):
        convert(llama(hidden_act="gelu"))
    with pytest.raises(ValueError, match="strategy"):
        convert(llama(), strategy="keep")
    with pytest.raises(ValueError, match="tie must be"):
        convert(llama(), tie="yes")
    adapted = llama()
    adapted.model.layers[0].self_attn.q_proj.lora_A = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="merge"):
        convert(adapted)
    quantised = llama()
    quantised.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.int8), False)
    with pytest.raises(ValueError, match="quantis"):
        convert(quantised)
