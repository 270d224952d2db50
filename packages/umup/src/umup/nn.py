"""Unit-scaled modules: replace `torch.nn` by `umup.nn` and plain residual sums by `Residual`.

What differs from torch.nn: weights start at N(0, 1), biases are off and norms have no gain by default (trainable gains hurt
transfer), and each module that owns parameters says what they are in `umup_roles` (see `umup.roles`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

import umup.functional as U
from umup.residual import residual_add, residual_split, transformer_taus
from umup.roles import Role
from umup.scaling import Constraint

__all__ = [
    "GELU",
    "MLP",
    "Attention",
    "Conv1d",
    "CrossEntropyLoss",
    "DepthModuleList",
    "DepthSequential",
    "Dropout",
    "Embedding",
    "KVCache",
    "LayerNorm",
    "Linear",
    "LinearReadout",
    "MSELoss",
    "RMSNorm",
    "Residual",
    "SiLU",
    "Softmax",
    "SwiGLU",
    "TransformerDecoder",
    "TransformerLayer",
    "effective_tokens",
]


def _roles(kind: str, fan_in: int, fan_out: int, bias: bool) -> dict[str, Role]:
    roles = {"weight": Role(kind, fan_in, fan_out)}
    return roles | {"bias": Role("bias", 1, fan_out)} if bias else roles


def _reset(module: nn.Linear | nn.Conv1d) -> None:
    nn.init.normal_(module.weight)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


class Linear(nn.Linear):
    """Unit-scaled linear map for hidden weights.

    `constraint`: see `umup.scaling`. `multiplier`: a further constant factor on output and input gradient (1 is u-muP;
    `umup.convert(strategy="preserve")` needs others). Float tensor in, same dtype out.
    """

    kind = "hidden"
    function = staticmethod(U.linear)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = "to_output_scale",
        multiplier: float = 1.0,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.constraint = constraint
        self.multiplier = multiplier
        self.grad_scale = 1.0
        self.matmul: Callable[..., Tensor] | None = None
        self.umup_roles = _roles(self.kind, in_features, out_features, bias)

    def reset_parameters(self) -> None:
        _reset(self)

    def forward(self, x: Float[Tensor, "*batch fan_in"]) -> Float[Tensor, "*batch fan_out"]:
        return self.function(
            x,
            self.weight,
            self.bias,
            self.constraint,
            multiplier=self.multiplier,
            grad_scale=self.grad_scale,
            matmul=self.matmul,
        )


class LinearReadout(Linear):
    """Unit-scaled last linear map (role "output"): forward factor 1/fan_in."""

    kind = "output"
    function = staticmethod(U.linear_readout)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = None,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, constraint, multiplier)


class Conv1d(nn.Conv1d):
    """Unit-scaled 1-D convolution, zero-padded by a number of elements."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = "to_output_scale",
    ) -> None:
        if not isinstance(padding, int):
            raise ValueError(f"padding must be a number of elements, got {padding!r}")
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, device=device, dtype=dtype
        )
        self.constraint = constraint
        self.grad_scale = 1.0
        self.umup_roles = _roles("hidden", in_channels // groups * kernel_size, out_channels, bias)

    def reset_parameters(self) -> None:
        _reset(self)

    def forward(self, x: Float[Tensor, "*batch channels length"]) -> Float[Tensor, "*batch out new_length"]:
        return U.conv1d(
            x,
            self.weight,
            self.bias,
            self.stride[0],
            int(self.padding[0]),
            self.dilation[0],
            self.groups,
            self.constraint,
            grad_scale=self.grad_scale,
        )


class Embedding(nn.Embedding):
    """Unit-scaled lookup table (role "input")."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.grad_scale = 1.0
        self.umup_roles = {"weight": Role("input", num_embeddings, embedding_dim)}

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch dim"]:
        return U.embedding(ids, self.weight, self.padding_idx, grad_scale=self.grad_scale)


class LayerNorm(nn.LayerNorm):
    """Layer norm, without gain and bias by default."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self.grad_scale = 1.0
        self.umup_roles = {"weight": Role("norm", 1, math.prod(shape)), "bias": Role("bias", 1, math.prod(shape))}

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return U.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps, grad_scale=self.grad_scale)


class RMSNorm(nn.RMSNorm):
    """RMS norm, without gain by default."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        self.grad_scale = 1.0
        self.umup_roles = {"weight": Role("norm", 1, math.prod(shape))}

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return U.rms_norm(x, self.normalized_shape, self.weight, float(self.eps or 0.0), grad_scale=self.grad_scale)


class GELU(nn.Module):
    """Unit-scaled GELU."""

    def __init__(
        self, mult: float = 1.0, constraint: Constraint = "to_output_scale", approximate: str = "none"
    ) -> None:
        super().__init__()
        self.mult, self.constraint, self.approximate = mult, constraint, approximate

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return U.gelu(x, self.mult, self.constraint, self.approximate)


class SiLU(nn.Module):
    """Unit-scaled SiLU."""

    def __init__(self, mult: float = 1.0, constraint: Constraint = "to_output_scale") -> None:
        super().__init__()
        self.mult, self.constraint = mult, constraint

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return U.silu(x, self.mult, self.constraint)


class Softmax(nn.Module):
    """Unit-scaled softmax."""

    def __init__(self, dim: int = -1, mult: float = 1.0, constraint: Constraint = "to_output_scale") -> None:
        super().__init__()
        self.dim, self.mult, self.constraint = dim, mult, constraint

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return U.softmax(x, self.dim, self.constraint, self.mult)


class Dropout(nn.Dropout):
    """Unit-scaled dropout."""

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p < 1:
            raise ValueError(f"dropout probability must be in [0, 1), got {p}")
        super().__init__(p)

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return U.dropout(x, self.p, self.training)


class CrossEntropyLoss(nn.Module):
    """Unit-scaled cross-entropy; see `umup.functional.cross_entropy`."""

    def __init__(self, mult: float = 1.0, ignore_index: int = -100, reduction: str = "mean") -> None:
        super().__init__()
        self.mult, self.ignore_index, self.reduction = mult, ignore_index, reduction

    def forward(self, logits: Float[Tensor, "*batch vocab"], target: Int[Tensor, "*batch"]) -> Float[Tensor, "..."]:
        return U.cross_entropy(logits, target, mult=self.mult, ignore_index=self.ignore_index, reduction=self.reduction)


class MSELoss(nn.Module):
    """Unit-scaled mean squared error."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, x: Float[Tensor, "*shape"], target: Float[Tensor, "..."]) -> Float[Tensor, ""]:
        return U.mse_loss(x, target, self.reduction)


class Residual(nn.Module):
    """`branch` with a skip around it, of relative weight `tau`; split and add cannot come apart."""

    def __init__(self, branch: nn.Module, tau: float = 1.0) -> None:
        super().__init__()
        self.branch, self.tau = branch, tau

    def forward(self, x: Float[Tensor, "*shape"], *args: Any, **kwargs: Any) -> Float[Tensor, "*shape"]:
        branch, skip = residual_split(x, self.tau)
        return residual_add(self.branch(branch, *args, **kwargs), skip, self.tau)


def _check_branches(branches_per_layer: int, depth: int | None) -> None:
    if branches_per_layer < 1 or (depth is not None and depth < 1):
        raise ValueError(f"branches_per_layer and depth must be at least 1, got {branches_per_layer} and {depth}")


class DepthModuleList(nn.ModuleList):
    """The layers of a deep stack: learning rates inside are divided by the square root of the depth.

    The depth is the list's length when the optimiser's groups are made, so layers may be added or dropped before; `depth`
    fixes it, for a pipeline stage that holds a part of the layers. `branches_per_layer` counts for `depth_unit="branch"`.
    """

    def __init__(
        self, modules: Iterable[nn.Module] = (), *, branches_per_layer: int = 2, depth: int | None = None
    ) -> None:
        super().__init__(modules)
        _check_branches(branches_per_layer, depth)
        self.umup_branches_per_layer, self.umup_depth = branches_per_layer, depth


class DepthSequential(nn.Sequential):
    """`DepthModuleList` that runs its layers in order."""

    def __init__(self, *layers: nn.Module, branches_per_layer: int = 2, depth: int | None = None) -> None:
        super().__init__(*layers)
        _check_branches(branches_per_layer, depth)
        self.umup_branches_per_layer, self.umup_depth = branches_per_layer, depth


class SwiGLU(nn.Module):
    """Unit-scaled SwiGLU feed-forward layer.

    Its three linear maps are unconstrained: up and gate against down have their fans swapped, so that the products of
    forward and of backward scales agree and the branch as a whole stays consistent.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int | None = None, *, mult: float = 1.0, bias: bool = False
    ) -> None:
        super().__init__()
        inner = 4 * hidden_size if intermediate_size is None else intermediate_size
        U.silu_glu_scale(mult)
        self.mult = mult
        self.gate_proj = Linear(hidden_size, inner, bias, constraint=None)
        self.up_proj = Linear(hidden_size, inner, bias, constraint=None)
        self.down_proj = Linear(inner, hidden_size, bias, constraint=None)

    def forward(self, x: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        return self.down_proj(U.silu_glu(self.up_proj(x), self.gate_proj(x), self.mult))


MLP = SwiGLU


class KVCache:
    """Keys and values of the positions seen so far, by layer. `update` appends and returns all."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key: Float[Tensor, "b h n d"], value: Float[Tensor, "b h n d"], layer: int
    ) -> tuple[Float[Tensor, "b h m d"], Float[Tensor, "b h m d"]]:
        if layer in self.layers:
            past_key, past_value = self.layers[layer]
            key, value = torch.cat((past_key, key), dim=-2), torch.cat((past_value, value), dim=-2)
        self.layers[layer] = key, value
        return key, value

    def length(self, layer: int = 0) -> int:
        """Positions held."""
        return self.layers[layer][0].shape[-2] if layer in self.layers else 0


class Attention(nn.Module):
    """Unit-scaled multi-head self-attention with grouped keys, rotary positions, masks and a cache.

    `kv_heads` < `heads`: grouped-query attention. `rope_theta=None`: no position encoding. `scale_seq_len`: the length the
    output scale is computed for; None takes the run-time length (as unit-scaling does), and then no cache is possible.
    `mult` is alpha_attn-softmax.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        is_causal: bool = True,
        rope_theta: float | None = 10000.0,
        dropout_p: float = 0.0,
        mult: float = 1.0,
        scale_seq_len: int | None = None,
        bias: bool = False,
        layer_index: int = 0,
    ) -> None:
        super().__init__()
        if head_dim is None and hidden_size % heads:
            raise ValueError(f"hidden_size {hidden_size} is not a multiple of heads {heads}: pass head_dim")
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        if heads % self.kv_heads:
            raise ValueError(f"heads {heads} is not a multiple of kv_heads {self.kv_heads}")
        self.head_dim = hidden_size // heads if head_dim is None else head_dim
        U.sdpa_scale(scale_seq_len or 1, self.head_dim, is_causal=is_causal, mult=mult, dropout_p=dropout_p)
        self.is_causal, self.rope_theta, self.dropout_p = is_causal, rope_theta, dropout_p
        self.mult, self.scale_seq_len, self.layer_index = mult, scale_seq_len, layer_index
        self.q_proj = Linear(hidden_size, heads * self.head_dim, bias)
        self.k_proj = Linear(hidden_size, self.kv_heads * self.head_dim, bias)
        self.v_proj = Linear(hidden_size, self.kv_heads * self.head_dim, bias)
        self.o_proj = Linear(heads * self.head_dim, hidden_size, bias)

    def forward(
        self,
        x: Float[Tensor, "batch length hidden"],
        attn_mask: Shaped[Tensor, "..."] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch length hidden"]:
        """`attn_mask`: bool (True: attend) or additive, broadcastable to (batch, heads, queries, keys); on top of causality."""
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None and self.scale_seq_len is None:
            raise ValueError(
                "decoding with a cache needs scale_seq_len (the training length): with None the output scale follows the number"
                " of keys, so a cached pass would differ from the full one"
            )
        past = 0 if cache is None else cache.length(self.layer_index)
        if self.rope_theta is not None:
            positions = torch.arange(past, past + length, device=x.device)
            q, k = U.rope(q, positions, theta=self.rope_theta), U.rope(k, positions, theta=self.rope_theta)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_index)
        causal_flag = self.is_causal and attn_mask is None and past == 0
        if self.is_causal and not causal_flag and length > 1:
            causal = torch.ones(length, past + length, dtype=torch.bool, device=x.device).tril(past)
            if attn_mask is None:
                attn_mask = causal
            elif attn_mask.dtype == torch.bool:
                attn_mask = attn_mask & causal
            else:
                attn_mask = attn_mask.masked_fill(~causal, -math.inf)
        out = U.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attn_mask,
            dropout_p=self.dropout_p,
            training=self.training,
            is_causal=causal_flag,
            mult=self.mult,
            scale_seq_len=self.scale_seq_len,
            causal_scale=self.is_causal,
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, self.heads * self.head_dim))


class TransformerLayer(nn.Module):
    """Pre-norm transformer layer: attention and SwiGLU branches of weights `attn_tau` and `mlp_tau`."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        attn_tau: float,
        mlp_tau: float,
        intermediate_size: int | None = None,
        act_mult: float = 1.0,
        dropout_p: float = 0.0,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.attn_tau, self.mlp_tau, self.dropout_p = attn_tau, mlp_tau, dropout_p
        self.input_layernorm = RMSNorm(hidden_size)
        self.self_attn = Attention(hidden_size, heads, dropout_p=dropout_p, **attention)
        self.post_attention_layernorm = RMSNorm(hidden_size)
        self.mlp = SwiGLU(hidden_size, intermediate_size, mult=act_mult)

    def forward(
        self,
        x: Float[Tensor, "batch length hidden"],
        attn_mask: Shaped[Tensor, "..."] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch length hidden"]:
        branch, skip = residual_split(x, self.attn_tau)
        branch = self.self_attn(self.input_layernorm(branch), attn_mask, cache)
        x = residual_add(U.dropout(branch, self.dropout_p, self.training), skip, self.attn_tau)
        branch, skip = residual_split(x, self.mlp_tau)
        branch = self.mlp(self.post_attention_layernorm(branch))
        return residual_add(U.dropout(branch, self.dropout_p, self.training), skip, self.mlp_tau)


class TransformerDecoder(nn.Module):
    """A decoder-only language model of these parts: embedding, pre-norm layers, final norm, readout.

    `alpha_*` are the paper's multipliers, all 1 by default. Submodules are named as in Llama.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        layers: int,
        heads: int,
        *,
        intermediate_size: int | None = None,
        alpha_attn_softmax: float = 1.0,
        alpha_ffn_act: float = 1.0,
        alpha_res: float = 1.0,
        alpha_res_attn_ratio: float = 1.0,
        alpha_loss_softmax: float = 1.0,
        **layer: Any,
    ) -> None:
        super().__init__()
        if vocab_size < 2:
            raise ValueError(f"vocab_size must be at least 2, got {vocab_size}")
        taus = transformer_taus(layers, alpha_res=alpha_res, alpha_res_attn_ratio=alpha_res_attn_ratio)
        self.alpha_loss_softmax = alpha_loss_softmax
        self.embed_tokens = Embedding(vocab_size, hidden_size)
        self.layers = DepthModuleList(
            TransformerLayer(
                hidden_size,
                heads,
                attn_tau=taus[2 * i],
                mlp_tau=taus[2 * i + 1],
                intermediate_size=intermediate_size,
                act_mult=alpha_ffn_act,
                mult=alpha_attn_softmax,
                layer_index=i,
                **layer,
            )
            for i in range(layers)
        )
        self.norm = RMSNorm(hidden_size)
        self.lm_head = LinearReadout(hidden_size, vocab_size)

    def forward(
        self,
        ids: Int[Tensor, "batch length"],
        attn_mask: Shaped[Tensor, "..."] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "batch length vocab"]:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, attn_mask, cache)
        return self.lm_head(self.norm(x))

    def loss(self, ids: Int[Tensor, "batch length"]) -> Float[Tensor, ""]:
        """Mean next-token cross-entropy, in nats."""
        return U.cross_entropy(self(ids)[:, :-1], ids[:, 1:], mult=self.alpha_loss_softmax)


@contextmanager
def effective_tokens(model: nn.Module, *, local: int, total: int, averaged_over: int = 1) -> Iterator[None]:
    """Scale parameter gradients for the step's `total` tokens when this pass sees `local` of them.

    A parameter's gradient is scaled by tokens^-1/2 so that it has unit scale. When several passes are summed (gradient
    accumulation) or averaged (data parallel: `averaged_over` = number of ranks; also the number by which a loop divides the
    loss), that must be the step's tokens, not the pass's: inside this context each parameter gradient is multiplied by
    `averaged_over * sqrt(local / total)`, and the sum equals the gradient of one pass over everything, also when the parts
    differ in size. Count targets that are not ignored. Activation gradients keep unit scale. Keep the backward pass inside
    the context if layers are checkpointed. A compiled model is compiled once more for a new ratio.
    """
    if not (0 < local <= total):
        raise ValueError(f"local must be in [1, total], got local={local}, total={total}")
    if averaged_over < 1:
        raise ValueError(f"averaged_over must be at least 1, got {averaged_over}")
    factor = averaged_over * math.sqrt(local / total)
    modules: list[Any] = [m for m in model.modules() if hasattr(m, "umup_roles") and hasattr(m, "grad_scale")]
    before = [m.grad_scale for m in modules]
    for module in modules:
        module.grad_scale = module.grad_scale * factor
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.grad_scale = value
