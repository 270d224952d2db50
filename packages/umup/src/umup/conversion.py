"""Plain Llama-type transformers models -> `UmupForCausalLM`. Extra: `umup[hf]`.

"reinit" takes the architecture and draws fresh unit-normal weights: the model to pre-train. "preserve" keeps the trained
function. A trained weight is not unit-normal, and u-muP has no place for its size, so each linear map then carries a
constant multiplier and each norm its own epsilon, both in the config:

plain stream x_k, ours s_k = x_k / c_k; c_0 = std of the embedding. A branch with weights (a, b) = (tau, 1)/sqrt(1 + tau^2)
gives s_{k+1} = b s_k + a f, so c_{k+1} = c_k / b and the branch's last map is multiplied by 1 / (a c_{k+1}).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import umup.functional as U
from umup.hf import UmupConfig, UmupForCausalLM
from umup.residual import residual_weights, transformer_taus

__all__ = ["convert"]


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"convert handles Llama-type models (RMS norm, RoPE, SwiGLU, pre-norm); this one {what}")


def _config(plain: Any, **changes: Any) -> dict[str, Any]:
    c = plain.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    first = plain.model.layers[0]
    settings = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": head_dim,
        "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_parameters": c.rope_parameters,
        "attention_bias": first.self_attn.q_proj.bias is not None,
        "mlp_bias": first.mlp.gate_proj.bias is not None,
        "attention_dropout": float(getattr(c, "attention_dropout", 0.0) or 0.0),
        "pad_token_id": c.pad_token_id,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": c.eos_token_id,
    }
    return settings | changes


def _check(plain: nn.Module, tie: str) -> None:
    for name in ("model.embed_tokens", "model.layers", "model.norm", "lm_head"):
        try:
            plain.get_submodule(name)
        except AttributeError:
            _require(False, f"({type(plain).__name__}) has no {name}")
    config: Any = plain.config
    _require(getattr(config, "hidden_act", "silu") == "silu", f"has hidden_act={getattr(config, 'hidden_act', None)!r}")
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) and window and window < config.max_position_embeddings:
        _require(False, f"has sliding_window={window}, less than max_position_embeddings")
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for name, module in plain.get_submodule("model.layers.0").named_modules():
        last = name.rpartition(".")[2]
        if "lora_" in name:
            raise ValueError(f"convert found an adapter ({name}): merge it first (peft: merge_and_unload)")
        if next(module.parameters(recurse=False), None) is None:
            continue
        if not all(p.is_floating_point() for p in module.parameters(recurse=False)):
            raise ValueError(f"{name} holds quantised weights: convert the model before quantising it")
        norm = last in ("input_layernorm", "post_attention_layernorm")
        _require(norm or (last in known and isinstance(module, nn.Linear)), f"has {name} ({type(module).__name__})")
    if plain.lm_head.weight is plain.model.embed_tokens.weight and tie != "untie":  # type: ignore[union-attr]
        raise ValueError(
            "embedding and readout are one tied weight, which cannot meet both u-muP rules: pass tie='untie' to copy it"
        )


def convert(
    plain: Any, *, strategy: str = "reinit", tie: str = "error", seed: int | None = None, **config: Any
) -> UmupForCausalLM:
    """A `UmupForCausalLM` from a Llama-type `transformers` model, which is left as it is.

    `strategy`: "reinit" (fresh N(0, 1) weights from `seed`, all multipliers 1 unless given in `config`) or "preserve" (the
    same logits; norm gains are kept and trainable). `tie`: "error", or "untie" to copy a tied embedding. `config`: changes
    to the `UmupConfig`, e.g. `scale_seq_len`, `alpha_res`.

    ValueError for what is not Llama-type; "preserve" also runs both models on a few tokens and raises if they differ (some
    models have Llama's modules but further constants, as Granite and Gemma do).
    """
    if strategy not in ("reinit", "preserve"):
        raise ValueError(f"strategy must be 'reinit' or 'preserve', got {strategy!r}")
    if tie not in ("error", "untie"):
        raise ValueError(f"tie must be 'error' or 'untie', got {tie!r}")
    _check(plain, tie)
    dtype = plain.lm_head.weight.dtype
    if strategy == "reinit":
        with torch.random.fork_rng(enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            return UmupForCausalLM(UmupConfig(**_config(plain, **config))).to(dtype)
    ours = _preserve(plain, config)
    _check_same(plain, ours)
    return ours.to(dtype)


@torch.no_grad()
def _check_same(plain: Any, ours: UmupForCausalLM) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(plain.config.vocab_size, (1, 16), generator=generator)
    training = plain.training
    wanted = plain.eval()(ids.to(plain.lm_head.weight.device)).logits.double().cpu()
    plain.train(training)
    got = ours.eval()(ids).logits.double()
    ours.train()
    size = wanted.square().mean().sqrt()
    error = ((got - wanted).square().mean().sqrt() / size.clamp(min=1e-30)).item()
    rounding = 1e-3 if plain.lm_head.weight.dtype in (torch.float32, torch.float64) else 0.1
    _require(error <= rounding, f"has other constants: its logits would change by {error:.2g} of their size")


def _std(weight: Tensor) -> float:
    std = weight.detach().double().square().mean().sqrt().item()
    return std if std > 0 else 1.0


@torch.no_grad()
def _preserve(plain: Any, changes: dict[str, Any]) -> UmupForCausalLM:
    settings = _config(plain, norm_gains=True, **changes)
    head_dim = settings["head_dim"]
    # Plain logits are q.k / sqrt(head_dim), ours mult q.k / head_dim.
    settings["alpha_attn_softmax"] = math.sqrt(head_dim)
    layers = settings["num_hidden_layers"]
    taus = transformer_taus(
        layers,
        alpha_res=settings.get("alpha_res", 1.0),
        alpha_res_attn_ratio=settings.get("alpha_res_attn_ratio", 1.0),
    )
    attention_scale = U.sdpa_scale(
        settings.get("scale_seq_len") or settings["max_position_embeddings"],
        head_dim,
        is_causal=True,
        mult=settings["alpha_attn_softmax"],
        dropout_p=settings["attention_dropout"],
    )
    multipliers: dict[str, float] = {}
    epsilons: dict[str, float] = {}
    state: dict[str, Tensor] = {}

    def linear(name: str, module: nn.Linear, alpha: float, factor: float = 1.0) -> None:
        """Ours is multiplier * alpha * (x W^T + b): W of unit size, the rest in the multiplier."""
        std = _std(module.weight)
        multiplier = factor * std / alpha
        multipliers[name] = multiplier
        state[f"{name}.weight"] = module.weight / std
        if module.bias is not None:
            state[f"{name}.bias"] = module.bias / std

    def norm(name: str, module: Any, stream: float) -> None:
        epsilons[name] = settings["rms_norm_eps"] / stream**2
        state[f"{name}.weight"] = module.weight.clone()

    embedding = plain.model.embed_tokens.weight
    stream = _std(embedding)
    state["model.embed_tokens.weight"] = embedding / stream
    for i, layer in enumerate(plain.model.layers):
        prefix = f"model.layers.{i}"
        for branch, tau in zip(("self_attn", "mlp"), taus[2 * i : 2 * i + 2], strict=True):
            a, b = residual_weights(tau)
            norm_name = "input_layernorm" if branch == "self_attn" else "post_attention_layernorm"
            norm(f"{prefix}.{norm_name}", getattr(layer, norm_name), stream)
            stream = stream / b
            block, op_scale = getattr(layer, branch), attention_scale if branch == "self_attn" else U.silu_glu_scale()
            for part, module in block.named_children():
                if isinstance(module, nn.Linear):
                    last = part in ("o_proj", "down_proj")
                    factor = 1 / (op_scale * a * stream) if last else 1.0
                    bias = module.bias
                    # The op's scale divides the map's input; its bias must not be divided with it.
                    linear(f"{prefix}.{branch}.{part}", module, module.in_features**-0.5, factor)
                    if last and bias is not None:
                        state[f"{prefix}.{branch}.{part}.bias"] = bias / _std(module.weight) * op_scale
    norm("model.norm", plain.model.norm, stream)
    linear("lm_head", plain.lm_head, 1 / plain.lm_head.in_features)
    settings["alpha_ffn_act"] = 1.0
    ours = UmupForCausalLM(UmupConfig(multipliers=multipliers, norm_epsilons=epsilons, **settings))
    ours.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=True)
    return ours
