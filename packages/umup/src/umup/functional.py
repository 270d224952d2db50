"""Unit-scaled versions of `torch.nn.functional`: unit-normal tensors in, unit-scale values and gradients out.

What differs from the textbook is only where the constants sit. Every op is written so that they cost as little as can be:
inside the matrix products (`addmm`'s alpha), on the smaller operand, or on the scalar loss; and as an ordinary product
wherever the forward and backward factors are equal, which the default constraint makes the usual case.

`constraint`: see `umup.scaling`. `mult`: the op's alpha hyperparameter (paper, table 1: alpha_attn-softmax, alpha_ffn-act,
alpha_loss-softmax). `grad_scale`: one more factor on the gradients of the parameters alone (see `umup.effective_tokens`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from umup.residual import residual_add, residual_apply, residual_split
from umup.scaling import Constraint, apply_constraint, log_interpolate, scale, scale_bwd, scale_fwd, with_signature

__all__ = [
    "add",
    "conv1d",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "linear_readout",
    "matmul",
    "mse_loss",
    "residual_add",
    "residual_apply",
    "residual_split",
    "rms_norm",
    "rope",
    "scale_bwd",
    "scale_fwd",
    "scaled_dot_product_attention",
    "sdpa_scale",
    "silu",
    "silu_glu",
    "softmax",
]


def _check_mult(mult: float) -> None:
    if not (mult > 0 and math.isfinite(mult)):
        raise ValueError(f"mult must be a positive finite number, got {mult}")


def _check_dropout(p: float) -> None:
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability must be in [0, 1), got {p}")


def _mm(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """`factor * (a @ b)` of matrices, the factor inside the product in eager mode and left to the compiler's fusion else."""
    if torch.compiler.is_compiling():
        return (a @ b) * factor
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=factor)


class _Linear(torch.autograd.Function):
    """`alpha (x W^T + b)`, grad x = beta g W, grad W = gamma g^T x, grad b = gamma sum(g): three products, no extra pass."""

    generate_vmap_rule = True

    @staticmethod
    @with_signature
    def forward(x: Any, weight: Any, bias: Any, alpha: Any, beta: Any, gamma: Any) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        y = _mm(rows, weight.t(), alpha)
        if bias is not None:
            y = y + bias * alpha
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, _, ctx.beta, ctx.gamma = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _mm(rows, weight, ctx.beta).reshape(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = _mm(rows.t(), x.reshape(-1, x.shape[-1]), ctx.gamma)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0) * ctx.gamma
        return grad_x, grad_weight, grad_bias, None, None, None


def linear_scales(
    fan_out: int, fan_in: int, tokens: int, constraint: Constraint, *, readout: bool = False
) -> tuple[float, float, float]:
    """(alpha, beta, gamma) of a linear map: fan_in^-1/2 (readout: fan_in^-1), fan_out^-1/2, tokens^-1/2."""
    alpha, beta = apply_constraint(constraint, 1 / fan_in if readout else fan_in**-0.5, fan_out**-0.5)
    return alpha, beta, (tokens**-0.5 if tokens > 0 else 1.0)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    constraint: Constraint,
    *,
    readout: bool,
    multiplier: float,
    grad_scale: float,
    matmul: Callable[..., Tensor] | None,
) -> Tensor:
    fan_out, fan_in = weight.shape
    if x.shape[-1] != fan_in:
        raise ValueError(
            f"input has {x.shape[-1]} features but weight has shape {tuple(weight.shape)} (fan_out, fan_in)"
        )
    tokens = x.numel() // fan_in
    alpha, beta, gamma = linear_scales(fan_out, fan_in, tokens, constraint, readout=readout)
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    products = _Linear.apply if matmul is None else matmul
    return products(x, weight, bias, alpha * multiplier, beta * multiplier, gamma * grad_scale)


def linear(
    x: Float[Tensor, "*batch fan_in"],
    weight: Float[Tensor, "fan_out fan_in"],
    bias: Float[Tensor, "fan_out"] | None = None,
    constraint: Constraint = "to_output_scale",
    *,
    multiplier: float = 1.0,
    grad_scale: float = 1.0,
    matmul: Callable[..., Tensor] | None = None,
) -> Float[Tensor, "*batch fan_out"]:
    """Unit-scaled `x W^T + b`: hidden weights (paper, table 2).

    `multiplier`: a further factor on output and input gradient. `matmul`: what computes the map and its gradients, called
    with (x, weight, bias, alpha, beta, gamma), in place of the plain products; `umup.precision` has one for FP8.
    """
    return _linear(
        x, weight, bias, constraint, readout=False, multiplier=multiplier, grad_scale=grad_scale, matmul=matmul
    )


def linear_readout(
    x: Float[Tensor, "*batch fan_in"],
    weight: Float[Tensor, "fan_out fan_in"],
    bias: Float[Tensor, "fan_out"] | None = None,
    constraint: Constraint = None,
    *,
    multiplier: float = 1.0,
    grad_scale: float = 1.0,
    matmul: Callable[..., Tensor] | None = None,
) -> Float[Tensor, "*batch fan_out"]:
    """Unit-scaled last linear map: forward 1/fan_in (muP), input gradient fan_out^-1/2 (nothing lies after it)."""
    return _linear(
        x, weight, bias, constraint, readout=True, multiplier=multiplier, grad_scale=grad_scale, matmul=matmul
    )


def matmul(
    left: Float[Tensor, "*batch_l rows inner"],
    right: Float[Tensor, "*batch_r inner cols"],
    constraint: Constraint = "to_output_scale",
) -> Float[Tensor, "*batch rows cols"]:
    """Unit-scaled product of two activations."""
    if left.shape[-1] != right.shape[-2]:
        raise ValueError(f"matmul: inner sizes differ, left {tuple(left.shape)} and right {tuple(right.shape)}")
    alpha, left_scale, right_scale = apply_constraint(
        constraint, left.shape[-1] ** -0.5, right.shape[-1] ** -0.5, left.shape[-2] ** -0.5
    )
    if alpha == left_scale == right_scale:
        return torch.matmul(left, right) * alpha
    return scale_fwd(torch.matmul(scale_bwd(left, left_scale), scale_bwd(right, right_scale)), alpha)


def conv1d(
    x: Float[Tensor, "*batch channels length"],
    weight: Float[Tensor, "out in_per_group kernel"],
    bias: Float[Tensor, "out"] | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    constraint: Constraint = "to_output_scale",
    *,
    grad_scale: float = 1.0,
) -> Float[Tensor, "*batch out new_length"]:
    """Unit-scaled 1-D convolution. `padding` is a number of elements."""
    out, in_per_group, kernel = weight.shape
    alpha, beta = apply_constraint(
        constraint, (in_per_group * kernel) ** -0.5, (stride * groups / (out * kernel)) ** 0.5
    )
    length = (x.shape[-1] + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    positions = length * math.prod(x.shape[:-2])
    gamma = grad_scale * positions**-0.5 if positions > 0 else 1.0
    # The final product by alpha also reaches the gradients, so what they should not get of it is divided out first.
    y = F.conv1d(
        scale_bwd(x, beta / alpha),
        scale_bwd(weight, gamma / alpha),
        None if bias is None else scale_bwd(bias, gamma / alpha),
        stride,
        padding,
        dilation,
        groups,
    )
    return y * alpha


def embedding(
    ids: Int[Tensor, "*batch"],
    weight: Float[Tensor, "vocab dim"],
    padding_idx: int | None = None,
    *,
    grad_scale: float = 1.0,
) -> Float[Tensor, "*batch dim"]:
    """Unit-scaled lookup; the weight's gradient is scaled by (vocab / number of ids)^1/2."""
    rows = F.embedding(ids, weight, padding_idx)
    if ids.numel() == 0:
        return rows
    # Scaling the looked-up rows' gradient is the same as scaling the table's, and never touches vocab x dim numbers.
    return scale_bwd(rows, grad_scale * (weight.shape[0] / ids.numel()) ** 0.5)


def _gain_scale(x: Tensor, normalized_shape: Sequence[int], grad_scale: float) -> float:
    return grad_scale * (math.prod(normalized_shape) / x.numel()) ** 0.5 if x.numel() else 1.0


def layer_norm(
    x: Float[Tensor, "..."],
    normalized_shape: Sequence[int],
    weight: Float[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    eps: float = 1e-5,
    *,
    grad_scale: float = 1.0,
) -> Float[Tensor, "..."]:
    """Layer norm over the trailing `normalized_shape`; only the gradients of gain and bias need a scale."""
    gamma = _gain_scale(x, normalized_shape, grad_scale)
    weight = None if weight is None else scale_bwd(weight, gamma)
    bias = None if bias is None else scale_bwd(bias, gamma)
    return F.layer_norm(x, list(normalized_shape), weight, bias, eps)


def rms_norm(
    x: Float[Tensor, "..."],
    normalized_shape: Sequence[int],
    weight: Float[Tensor, "..."] | None = None,
    eps: float = 1e-5,
    *,
    grad_scale: float = 1.0,
) -> Float[Tensor, "..."]:
    """`x / sqrt(mean(x^2) + eps)` over the trailing `normalized_shape`, times the gain if there is one.

    float16 and bfloat16 are squared and averaged in float32 (by torch), so large activations do not overflow.
    """
    if weight is not None:
        weight = scale_bwd(weight, _gain_scale(x, normalized_shape, grad_scale))
    return F.rms_norm(x, list(normalized_shape), weight, eps)


def gelu(
    x: Float[Tensor, "*shape"],
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
    approximate: str = "none",
) -> Float[Tensor, "*shape"]:
    """Unit-scaled `gelu(mult x) / mult`."""
    _check_mult(mult)
    weight = 1 / (1 + 0.25 / mult**2)
    alpha, beta = apply_constraint(
        constraint,
        log_interpolate(weight, 2.0, (2 / (1 - 1 / math.pi)) ** 0.5),
        log_interpolate(weight, 2.0, 2**0.5),
    )
    if mult == 1:
        return scale(F.gelu(x, approximate=approximate), fwd=alpha, bwd=beta)
    return scale(F.gelu(x * mult, approximate=approximate), fwd=alpha / mult, bwd=beta / mult)


def _silu(x: Tensor, mult: float) -> Tensor:
    return F.silu(x) if mult == 1 else x * torch.sigmoid(x * mult)


def silu(
    x: Float[Tensor, "*shape"], mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> Float[Tensor, "*shape"]:
    """Unit-scaled `x sigmoid(mult x)`."""
    _check_mult(mult)
    alpha, beta = apply_constraint(
        constraint,
        log_interpolate(1 / (1 + 0.25 / mult**2), 2.0, (2 / (1 - 1 / math.pi)) ** 0.5),
        log_interpolate(1 / (1 + 1 / mult**2), 2.0, 2**0.5),
    )
    return scale(_silu(x, mult), fwd=alpha, bwd=beta)


def silu_glu_scale(mult: float = 1.0) -> float:
    """The one factor of `silu_glu`, forward and backward."""
    _check_mult(mult)
    return log_interpolate(1 / (1 + 1 / mult**2), 2.0, 2**0.5)


def silu_glu(x: Float[Tensor, "*shape"], gate: Float[Tensor, "*shape"], mult: float = 1.0) -> Float[Tensor, "*shape"]:
    """Unit-scaled SwiGLU `x gate sigmoid(mult gate)` (alpha_ffn-act = mult)."""
    if x.shape != gate.shape:
        raise ValueError(f"silu_glu: x and gate must have one shape, got {tuple(x.shape)} and {tuple(gate.shape)}")
    # In place: nobody else holds the activation, and autograd needs only its input.
    return x * _silu(gate, mult).mul_(silu_glu_scale(mult))


def softmax(
    x: Float[Tensor, "*shape"],
    dim: int = -1,
    constraint: Constraint = "to_output_scale",
    mult: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*shape"]:
    """Unit-scaled `softmax(mult x)` over `dim`."""
    _check_mult(mult)
    n = float(x.shape[dim])
    weight = 1 / (1 + 4 / mult**2)
    alpha, beta = apply_constraint(
        constraint, log_interpolate(weight, n, n**0.5), log_interpolate(weight, n / mult, (n / mult) ** 0.5)
    )
    return scale(F.softmax(x if mult == 1 else x * mult, dim=dim, dtype=dtype), fwd=alpha, bwd=beta)


def dropout(x: Float[Tensor, "*shape"], p: float = 0.5, training: bool = True) -> Float[Tensor, "*shape"]:
    """Unit-scaled dropout: times sqrt(1 - p), whether training or not, as the layers around it were tuned with it."""
    _check_dropout(p)
    return x if p == 0 else F.dropout(x, p, training) * (1 - p) ** 0.5


def sdpa_scale(seq_len: int, d_head: int, *, is_causal: bool, mult: float = 1.0, dropout_p: float = 0.0) -> float:
    """The factor on attention's output and on the gradients of q, k and v (paper, app. B).

    Finite for every length: one key gives its own value back, so there the scale is 1 (up to dropout).
    """
    _check_mult(mult)
    _check_dropout(dropout_p)
    if seq_len < 1 or d_head < 1:
        raise ValueError(f"seq_len and d_head must be at least 1, got {seq_len} and {d_head}")
    spread = 1.0 if seq_len == 1 else (math.log(seq_len) if is_causal else 1.0) / seq_len
    return (1 - dropout_p) ** 0.5 / log_interpolate(1 / (1 + 4 * d_head / mult**2), spread**0.5, 1.0)


def scaled_dot_product_attention(
    query: Float[Tensor, "*batch heads queries d_head"],
    key: Float[Tensor, "*batch kv_heads keys d_head"],
    value: Float[Tensor, "*batch kv_heads keys d_value"],
    attn_mask: Shaped[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    mult: float = 1.0,
    *,
    training: bool = True,
    scale_seq_len: int | None = None,
    causal_scale: bool | None = None,
) -> Float[Tensor, "*batch heads queries d_value"]:
    """Unit-scaled attention with logits `mult q.k / d_head` (muP; not 1/sqrt(d_head)).

    Fewer key heads than query heads: grouped-query attention. `scale_seq_len`: the length that the scale is computed for;
    fix it (training length) so that outputs do not depend on how many keys happen to be there, as decoding with a cache
    needs; None takes the run-time length. `causal_scale`: whether the scale is the causal one; by default `is_causal`, so
    set it when a mask tensor is causal. Out of training nothing is dropped, but the scale stays.
    """
    d_head = query.shape[-1]
    s = sdpa_scale(
        key.shape[-2] if scale_seq_len is None else scale_seq_len,
        d_head,
        is_causal=is_causal if causal_scale is None else causal_scale,
        mult=mult,
        dropout_p=dropout_p,
    )
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads: the first must be a multiple")
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p if training else 0.0,
        is_causal=is_causal,
        scale=mult / d_head,
        enable_gqa=heads != kv_heads,
    )
    return out * s


def rope(
    x: Float[Tensor, "*batch heads length d_head"],
    positions: Int[Tensor, "*batch length"] | Int[Tensor, "length"],
    *,
    theta: float = 10000.0,
) -> Float[Tensor, "*batch heads length d_head"]:
    """Rotary position embedding (half-split pairs, as in Llama). A rotation: scale is kept, so no factor is needed."""
    half = x.shape[-1] // 2
    if x.shape[-1] % 2:
        raise ValueError(f"rope needs an even head dimension, got {x.shape[-1]}")
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return rotate(x, cos.unsqueeze(-3), sin.unsqueeze(-3))


def rotate(
    x: Float[Tensor, "*batch heads length d_head"], cos: Float[Tensor, "..."], sin: Float[Tensor, "..."]
) -> Float[Tensor, "*batch heads length d_head"]:
    """Rotate the pairs (x_i, x_{i + d/2}) by the angles of which `cos` and `sin` (d/2 wide) are given."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def add(
    a: Float[Tensor, "..."] | float, b: Float[Tensor, "..."] | float, constraint: Constraint = "to_output_scale"
) -> Float[Tensor, "..."]:
    """Unit-scaled sum. Adding a number or a one-element tensor leaves the scale alone."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return torch.add(a, b)
    shape = torch.broadcast_shapes(a.shape, b.shape)
    numel = math.prod(shape)
    one_element = a.numel() == 1 or b.numel() == 1
    if numel == 0:
        return a + b
    alpha, scale_a, scale_b = apply_constraint(
        constraint,
        1.0 if one_element else 2**-0.5,
        (numel // a.numel()) ** -0.5,
        (numel // b.numel()) ** -0.5,
    )
    if alpha == scale_a == scale_b:
        return scale(a + b, fwd=alpha, bwd=alpha)
    return scale_fwd(scale_bwd(a, scale_a) + scale_bwd(b, scale_b), alpha)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def cross_entropy(
    logits: Float[Tensor, "*batch vocab"],
    target: Int[Tensor, "*batch"],
    *,
    mult: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    weight: Float[Tensor, "vocab"] | None = None,
    label_smoothing: float = 0.0,
    total: Shaped[Tensor, ""] | int | None = None,
) -> Float[Tensor, "..."]:
    """Unit-scaled cross-entropy of `mult * logits`, in nats.

    The value is the usual one (mean over targets that are not `ignore_index`). The gradient is that of the *sum* times
    vocab / sqrt(vocab - 1), which has unit scale at init whatever the batch; `mult` does not reach it. With ignored targets
    it is also divided by the square root of the valid share, so that its root mean square over all rows stays 1 and every
    parameter's gradient is what the valid targets alone would give.

    `total`: valid targets in the whole optimiser step, when this call sees a part of them (gradient accumulation, data
    parallel with gradients summed): the mean is over `total` and gradients are scaled for it. `reduction="mean"` only.
    No valid target: value 0, gradient 0, and a warning (on CPU, where asking costs no synchronisation). Half-precision logits
    are taken in float32, and so is the loss: a sum over a batch of them overflows float16.
    """
    _check_mult(mult)
    vocab = logits.shape[-1]
    if vocab < 2:
        raise ValueError(f"cross_entropy needs a vocabulary of at least 2, got {vocab}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, so target must have shape {tuple(logits.shape[:-1])},"
            f" got {tuple(target.shape)}"
        )
    if total is not None and reduction != "mean":
        raise ValueError(f"total is for reduction='mean', got reduction={reduction!r}")
    rows = target.numel()
    valid = (target != ignore_index).sum()
    if not torch.compiler.is_compiling() and valid.device.type == "cpu" and int(valid) == 0:
        warnings.warn("cross_entropy: every target is ignored, the loss and its gradient are 0", stacklevel=2)
    flat = _at_least_float32(logits.reshape(-1, vocab))
    losses = F.cross_entropy(
        flat if mult == 1 else flat * mult,
        target.reshape(-1),
        weight,
        ignore_index=ignore_index,
        reduction="none" if reduction == "none" else "sum",
        label_smoothing=label_smoothing,
    )
    # Gradients are linear in the loss's own gradient, so the factor goes on the scalar and costs no pass over the logits.
    step_total = (valid if total is None else torch.as_tensor(total, device=valid.device)).clamp(min=1)
    share = (rows / step_total.to(losses.dtype)).sqrt()
    grad = share * (vocab / math.sqrt(vocab - 1) / mult)
    if reduction == "none":
        return scale(losses.reshape(target.shape), bwd=grad)
    return scale(losses, fwd=1 / step_total.to(losses.dtype) if reduction == "mean" else 1.0, bwd=grad)


def mse_loss(x: Float[Tensor, "*shape"], target: Float[Tensor, "..."], reduction: str = "mean") -> Float[Tensor, ""]:
    """Unit-scaled squared error: value as usual (half precision: in float32), gradient 8^-1/2 times that of the sum."""
    if x.shape != target.shape:
        raise ValueError(
            f"mse_loss: input and target must have one shape, got {tuple(x.shape)} and {tuple(target.shape)}"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    loss = F.mse_loss(_at_least_float32(x), _at_least_float32(target), reduction="sum")
    return scale(loss, fwd=1 / max(x.numel(), 1) if reduction == "mean" else 1.0, bwd=8**-0.5)
