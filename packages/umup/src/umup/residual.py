"""Residual branches that keep unit scale, and the rule that says how much each branch of a transformer counts.

A branch of weight tau next to a skip of weight 1 is `(tau * f(x) + x) / sqrt(1 + tau^2)`. In the backward pass the
branch's factor is delayed to the split, so that inside the branch gradients have unit scale as well.

Symbols   paper                    here
          tau_l                    tau
          alpha_res                alpha_res
          alpha_res-attn-ratio     alpha_res_attn_ratio
          L                        layers (each has an attention and a feed-forward branch)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from umup.scaling import with_signature


class ResidualPairError(RuntimeError):
    """A `residual_add` without its `residual_split`, or with another tau."""


def _weighted_sum(branch: Tensor, skip: Tensor, tau: float) -> Tensor:
    """`(tau * branch + skip) / sqrt(1 + tau^2)` in two passes and the memory of one result."""
    return torch.add(skip, branch, alpha=tau).mul_(residual_weights(tau)[1])


class _Split(torch.autograd.Function):
    """Two views of x; backward is one weighted sum in place of two scalings and a sum."""

    generate_vmap_rule = True

    @staticmethod
    @with_signature
    def forward(x: Any, tau: Any) -> Any:
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.tau = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_branch: Any, grad_skip: Any) -> Any:
        branch_weight, skip_weight = residual_weights(ctx.tau)
        if grad_branch is None:
            return None if grad_skip is None else grad_skip * skip_weight, None
        if grad_skip is None:
            return grad_branch * branch_weight, None
        return _weighted_sum(grad_branch, grad_skip, ctx.tau), None


class _Add(torch.autograd.Function):
    """The weighted sum, gradients unscaled."""

    generate_vmap_rule = True

    @staticmethod
    @with_signature
    def forward(branch: Any, skip: Any, tau: Any) -> Any:
        return _weighted_sum(branch, skip, tau)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, grad, None


_checking = [False]


@contextmanager
def check_residual_pairs() -> Iterator[None]:
    """Inside: `residual_add` raises `ResidualPairError` unless its skip came from `residual_split` with the same tau.

    A debugging aid, off by default: it marks tensors with a Python attribute, which the compiler does not see.
    """
    before, _checking[0] = _checking[0], True
    try:
        yield
    finally:
        _checking[0] = before


def residual_weights(tau: float) -> tuple[float, float]:
    """(branch, skip) weights `tau / sqrt(1 + tau^2)` and `1 / sqrt(1 + tau^2)`."""
    if not (tau >= 0 and math.isfinite(tau)):
        raise ValueError(f"tau must be a finite number >= 0, got {tau}")
    norm = math.sqrt(1 + tau * tau)
    return tau / norm, 1 / norm


def residual_split(
    x: Float[Tensor, "*shape"], tau: float = 1.0
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """(branch, skip), both x; the branch's gradient is multiplied by tau/sqrt(1+tau^2), the skip's by 1/sqrt(1+tau^2)."""
    residual_weights(tau)
    branch, skip = _Split.apply(x, tau)
    if _checking[0]:
        skip.umup_tau = tau
    return branch, skip


def residual_add(
    branch: Float[Tensor, "*shape"], skip: Float[Tensor, "*shape"], tau: float = 1.0
) -> Float[Tensor, "*shape"]:
    """`(tau * branch + skip) / sqrt(1 + tau^2)`; gradients pass unscaled. Use with `residual_split` of the same tau."""
    if _checking[0]:
        split_tau = getattr(skip, "umup_tau", None)
        if split_tau is None:
            raise ResidualPairError("residual_add got a skip that no residual_split made: split first, or use Residual")
        if split_tau != tau:
            raise ResidualPairError(f"residual_add got tau={tau}, but its skip was split with tau={split_tau}")
    return _Add.apply(branch, skip, tau)


def residual_apply(
    fn: Callable[[Tensor], Tensor], x: Float[Tensor, "*shape"], tau: float = 1.0
) -> Float[Tensor, "*shape"]:
    """Split, run `fn` on the branch, add."""
    branch, skip = residual_split(x, tau)
    return residual_add(fn(branch), skip, tau)


def transformer_taus(
    layers: int, *, alpha_res: float = 1.0, alpha_res_attn_ratio: float = 1.0, norm: str = "pre"
) -> list[float]:
    """tau of each of the 2 * layers branches (attention, feed-forward, attention, ...), paper app. G.

    All attention branches contribute equally to the final stream and so do all feed-forward ones; `alpha_res` is the ratio
    of the branches' total to the embedding's, `alpha_res_attn_ratio` that of attention to feed-forward.
    `norm="post"`: the variant for post-norm transformers, without the running sum.
    """
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")
    for name, value in (("alpha_res", alpha_res), ("alpha_res_attn_ratio", alpha_res_attn_ratio)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be a positive finite number, got {value}")
    if norm not in ("pre", "post"):
        raise ValueError(f"norm must be 'pre' or 'post', got {norm!r}")
    ffn = alpha_res * math.sqrt(2 / (1 + alpha_res_attn_ratio**2))
    attention = alpha_res_attn_ratio * ffn
    taus = []
    for k in range(2 * layers):
        added = ((k + 1) // 2) * attention**2 + (k // 2) * ffn**2 if norm == "pre" else 0.0
        taus.append((attention if k % 2 == 0 else ffn) / math.sqrt(layers + added))
    return taus
