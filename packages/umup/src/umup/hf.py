"""A Llama-style transformers model in u-muP, and a Trainer that gives it its learning rates. Extra: `umup[hf]`.

What differs from Llama: unit-scaled linear maps with weights N(0, 1), norms without gain, attention logits `q.k / head_dim`,
residual branches weighted by tau, a 1/fan_in readout, a loss whose gradient has unit scale. Attention's output scale is
fixed by `config.scale_seq_len`, so a logit does not depend on how long the input is and decoding with a cache is exact.
"""

# ruff: noqa: E402
from __future__ import annotations

import copy
import math
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

import umup.functional as U
import umup.nn as unn
from chapbook_shared.validate import import_extra
from umup.optim import get_param_groups
from umup.residual import residual_add, residual_split, transformer_taus

# Before the imports below, so that a missing extra is named.
import_extra("transformers", "umup[hf]")

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
)
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

__all__ = ["UmupConfig", "UmupForCausalLM", "UmupModel", "UmupTrainer"]

ALPHAS = (
    "alpha_attn_softmax",
    "alpha_ffn_act",
    "alpha_res",
    "alpha_res_attn_ratio",
    "alpha_loss_softmax",
    "alpha_out",
)


class UmupConfig(PreTrainedConfig):
    """Sizes and multipliers of a `UmupForCausalLM`.

    `num_attention_heads` defaults to hidden_size / head_dim, `num_key_value_heads` to that, `intermediate_size` to 2.75
    hidden_size (the paper's), `scale_seq_len` (the length attention's output scale is computed for; the training length) to
    max_position_embeddings. The alphas are the paper's multipliers, all 1. `norm_gains` makes norm gains trainable, which
    hurts transfer. `multipliers` and `norm_epsilons` (module name -> number) are what `umup.convert(strategy="preserve")`
    needs to keep a trained model's function. Embeddings cannot be tied: one weight cannot meet both rules.
    """

    model_type = "umup"
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012 - transformers' own convention

    def __init__(
        self,
        *,
        vocab_size: int = 32000,
        hidden_size: int = 256,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 4,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int = 64,
        max_position_embeddings: int = 2048,
        scale_seq_len: int | None = None,
        rms_norm_eps: float = 1e-5,
        rope_parameters: dict | None = None,
        norm_gains: bool = False,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        attention_dropout: float = 0.0,
        alpha_attn_softmax: float = 1.0,
        alpha_ffn_act: float = 1.0,
        alpha_res: float = 1.0,
        alpha_res_attn_ratio: float = 1.0,
        alpha_loss_softmax: float = 1.0,
        alpha_out: float = 1.0,
        multipliers: dict | None = None,
        norm_epsilons: dict | None = None,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.scale_seq_len = scale_seq_len
        self.rms_norm_eps = rms_norm_eps
        self.norm_gains = norm_gains
        self.attention_bias = attention_bias
        self.mlp_bias = mlp_bias
        self.attention_dropout = attention_dropout
        self.alpha_attn_softmax = alpha_attn_softmax
        self.alpha_ffn_act = alpha_ffn_act
        self.alpha_res = alpha_res
        self.alpha_res_attn_ratio = alpha_res_attn_ratio
        self.alpha_loss_softmax = alpha_loss_softmax
        self.alpha_out = alpha_out
        self.multipliers = multipliers
        self.norm_epsilons = norm_epsilons
        self.use_cache = use_cache
        if self.num_attention_heads is None:
            if self.hidden_size % self.head_dim:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of head_dim {self.head_dim}: set head_dim, or"
                    " num_attention_heads too"
                )
            self.num_attention_heads = self.hidden_size // self.head_dim
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads"
                f" {self.num_key_value_heads}"
            )
        if self.intermediate_size is None:
            self.intermediate_size = round(2.75 * self.hidden_size)
        if self.scale_seq_len is None:
            self.scale_seq_len = self.max_position_embeddings
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "scale_seq_len"):
            if getattr(self, name) < (2 if name == "vocab_size" else 1):
                raise ValueError(f"{name} is too small: {getattr(self, name)}")
        for name in ALPHAS:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive finite number, got {value}")
        if tie_word_embeddings:
            raise ValueError(
                "tie_word_embeddings=True: a tied weight cannot meet both the input and the output rule of u-muP; set it to"
                " False (umup.convert takes tie='untie' to copy it)"
            )
        shared: dict[str, Any] = {
            "pad_token_id": pad_token_id,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "tie_word_embeddings": False,
            "rope_parameters": rope_parameters or {"rope_type": "default", "rope_theta": 10000.0},
        }
        super().__init__(**shared, **kwargs)


class UmupAttention(nn.Module):
    """Attention through transformers' attention backends (eager, SDPA, flash, flex), with u-muP's scales."""

    def __init__(self, config: UmupConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        heads, kv_heads = int(config.num_attention_heads or 0), int(config.num_key_value_heads or 0)
        self.num_key_value_groups = heads // kv_heads
        self.scaling = config.alpha_attn_softmax / config.head_dim
        self.attention_dropout, self.is_causal = config.attention_dropout, True
        self.out_scale = U.sdpa_scale(
            int(config.scale_seq_len or 1),
            config.head_dim,
            is_causal=True,
            mult=config.alpha_attn_softmax,
            dropout_p=config.attention_dropout,
        )
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = unn.Linear(hidden, heads * self.head_dim, bias)
        self.k_proj = unn.Linear(hidden, kv_heads * self.head_dim, bias)
        self.v_proj = unn.Linear(hidden, kv_heads * self.head_dim, bias)
        self.o_proj = unn.Linear(heads * self.head_dim, hidden, bias)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch length hidden"],
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "batch length hidden"], Any]:
        shape = hidden_states.shape[:-1]
        q, k, v = (
            projection(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(out.reshape(*shape, -1) * self.out_scale), weights


class UmupDecoderLayer(GradientCheckpointingLayer):
    """Attention and SwiGLU branches, each with its tau."""

    def __init__(self, config: UmupConfig, layer_idx: int, taus: list[float]):
        super().__init__()
        self.attn_tau, self.mlp_tau = taus
        self.input_layernorm = unn.RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_gains)
        self.self_attn = UmupAttention(config, layer_idx)
        self.post_attention_layernorm = unn.RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_gains)
        self.mlp = unn.SwiGLU(
            config.hidden_size, config.intermediate_size, mult=config.alpha_ffn_act, bias=config.mlp_bias
        )

    def forward(
        self, hidden_states: Float[Tensor, "batch length hidden"], **kwargs: Any
    ) -> Float[Tensor, "batch length hidden"]:
        branch, skip = residual_split(hidden_states, self.attn_tau)
        branch, _ = self.self_attn(self.input_layernorm(branch), **kwargs)
        hidden_states = residual_add(branch, skip, self.attn_tau)
        branch, skip = residual_split(hidden_states, self.mlp_tau)
        return residual_add(self.mlp(self.post_attention_layernorm(branch)), skip, self.mlp_tau)


class UmupPreTrainedModel(PreTrainedModel):
    """Weight init, loading and what backends the model supports."""

    config_class = UmupConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["UmupDecoderLayer"]  # noqa: RUF012 - transformers' own convention, here and below
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": UmupDecoderLayer, "attentions": UmupAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (unn.Linear, unn.Embedding)):
            nn.init.normal_(module.weight)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        elif isinstance(module, unn.RMSNorm):
            if module.weight is not None:
                nn.init.ones_(module.weight)
        else:
            super()._init_weights(module)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Not offered: transformers would put a plain embedding in place of the unit-scaled one."""
        raise NotImplementedError(
            "resize_token_embeddings would replace the unit-scaled embedding and readout by plain ones: build the model with"
            " the vocab_size you need and copy the rows"
        )


class UmupModel(UmupPreTrainedModel):
    """Embedding, layers and final norm."""

    def __init__(self, config: UmupConfig):
        super().__init__(config)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        taus = transformer_taus(
            config.num_hidden_layers, alpha_res=config.alpha_res, alpha_res_attn_ratio=config.alpha_res_attn_ratio
        )
        self.embed_tokens = unn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = unn.DepthModuleList(
            UmupDecoderLayer(config, i, taus[2 * i : 2 * i + 2]) for i in range(config.num_hidden_layers)
        )
        self.norm = unn.RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_gains)
        rope_config: Any = config  # it reads rope_parameters, head_dim and the position limit only
        self.rotary_emb = LlamaRotaryEmbedding(rope_config)
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Int[Tensor, "batch length"] | None = None,
        attention_mask: Any = None,
        position_ids: Shaped[Tensor, "..."] | None = None,
        cache: Any = None,
        inputs_embeds: Float[Tensor, "batch length hidden"] | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + past).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)


class UmupForCausalLM(UmupPreTrainedModel, GenerationMixin):
    """The language model. `forward(labels=...)` shifts labels itself, as all of transformers does; loss in nats.

    `num_items_in_batch` (a Trainer passes it): valid targets in the whole optimiser step, over accumulation and ranks; loss
    and parameter gradients are then those of the whole step (see `umup.functional.cross_entropy`).
    """

    def __init__(self, config: UmupConfig):
        super().__init__(config)
        self.model = UmupModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = unn.LinearReadout(config.hidden_size, config.vocab_size, multiplier=config.alpha_out)
        for name, multiplier in (config.multipliers or {}).items():
            module = self.get_submodule(name)
            module.multiplier = float(multiplier) * (config.alpha_out if name == "lm_head" else 1.0)  # type: ignore[assignment]
        for name, eps in (config.norm_epsilons or {}).items():
            self.get_submodule(name).eps = float(eps)  # type: ignore[assignment]
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch length"] | None = None,
        attention_mask: Any = None,
        position_ids: Shaped[Tensor, "..."] | None = None,
        cache: Any = None,
        inputs_embeds: Float[Tensor, "batch length hidden"] | None = None,
        labels: Int[Tensor, "batch length"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Shaped[Tensor, "..."] = 0,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep, :])
        loss = None
        if labels is not None:
            targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
            loss = U.cross_entropy(logits, targets, mult=self.config.alpha_loss_softmax, total=num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class UmupTrainer(Trainer):
    """`transformers.Trainer` with u-muP's parameter groups.

    `args.learning_rate` is the global lr (order 1), `args.weight_decay` the independent decay (order 2^-13), and
    `args.max_grad_norm` the clip on the gradients' root mean square (0: none). `umup_options` go to `get_param_groups`.
    A plain Trainer works as well: give it `optimizers=(torch.optim.AdamW(get_param_groups(...)), None)`.
    """

    def __init__(
        self, model: Any = None, args: Any = None, *, umup_options: dict[str, Any] | None = None, **kwargs: Any
    ):
        self.umup_options = dict(umup_options or {})
        super().__init__(model, args, **kwargs)
        if self.args.max_grad_norm:
            self.args = copy.copy(self.args)  # the caller's keep what they said
            trained: Any = self.model
            self.args.max_grad_norm *= math.sqrt(sum(p.numel() for p in trained.parameters() if p.requires_grad))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            opt_model: Any = self.model if model is None else model
            cls, kwargs = self.get_optimizer_cls_and_kwargs(self.args, opt_model)
            groups = get_param_groups(opt_model, self.args.learning_rate, self.args.weight_decay, **self.umup_options)
            self.optimizer = cls(groups, **kwargs)
        return self.optimizer


AutoConfig.register("umup", UmupConfig)
AutoModel.register(UmupConfig, UmupModel)
AutoModelForCausalLM.register(UmupConfig, UmupForCausalLM)
