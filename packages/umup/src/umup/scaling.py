"""Unit scaling's two primitives and the constraints that tie an op's scales together.

An op with ideal output scale alpha and ideal input-gradient scales beta computes
`scale_fwd(f(scale_bwd(x, beta)), alpha)`. Where a path leads around the op (a residual branch), alpha and every beta must
be one number, or the gradients that meet at the fork no longer belong to one loss: a *constraint* picks that number.

Symbols   paper   here
          alpha   output_scale
          beta    grad_input_scale
          gamma   scale of parameter gradients: parameters are leaves, so it is free
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

Constraint = str | Callable[..., float] | None


def to_output_scale(output_scale: float, *grad_input_scales: float) -> float:
    """Use the output's ideal scale for all."""
    return output_scale


def to_grad_input_scale(output_scale: float, grad_input_scale: float) -> float:
    """Use the input gradient's ideal scale for both (ops with one input)."""
    return grad_input_scale


def to_left_grad_scale(output_scale: float, left_grad_scale: float, right_grad_scale: float) -> float:
    """Use the left operand's ideal gradient scale for all (ops with two inputs)."""
    return left_grad_scale


def to_right_grad_scale(output_scale: float, left_grad_scale: float, right_grad_scale: float) -> float:
    """Use the right operand's ideal gradient scale for all (ops with two inputs)."""
    return right_grad_scale


def gmean(*scales: float) -> float:
    """Geometric mean."""
    return math.prod(scales) ** (1 / len(scales))


def hmean(*scales: float) -> float:
    """Harmonic mean (what Glorot initialisation amounts to)."""
    return len(scales) / sum(1 / s for s in scales)


def amean(*scales: float) -> float:
    """Arithmetic mean."""
    return sum(scales) / len(scales)


CONSTRAINTS: dict[str, Callable[..., float]] = {
    "to_output_scale": to_output_scale,
    "to_grad_input_scale": to_grad_input_scale,
    "to_left_grad_scale": to_left_grad_scale,
    "to_right_grad_scale": to_right_grad_scale,
    "gmean": gmean,
    "hmean": hmean,
    "amean": amean,
}


def apply_constraint(constraint: Constraint, *scales: float) -> tuple[float, ...]:
    """The scales to use, given the ideal ones `(output, *grad_inputs)`; all equal unless `constraint` is None.

    `constraint` is a name in `CONSTRAINTS`, a callable taking the scales, or None (legal only where no path leads around
    the op). Raises ValueError for an unknown name, or a name that does not fit the number of inputs.
    """
    if constraint is None:
        return scales
    if callable(constraint):
        merge = constraint
    elif constraint in CONSTRAINTS:
        merge = CONSTRAINTS[constraint]
    else:
        raise ValueError(f"constraint {constraint!r} is unknown: use None, a callable, or one of {sorted(CONSTRAINTS)}")
    wanted = {"to_grad_input_scale": 2, "to_left_grad_scale": 3, "to_right_grad_scale": 3}
    if isinstance(constraint, str) and wanted.get(constraint, len(scales)) != len(scales):
        raise ValueError(
            f"constraint {constraint!r} is for ops with {wanted[constraint] - 1} input(s), this op has {len(scales) - 1}"
        )
    scale = merge(*scales)
    return tuple(scale for _ in scales)


def log_interpolate(weight: float, lower: float, upper: float) -> float:
    """`exp(weight ln(upper) + (1 - weight) ln(lower))`: from lower (weight 0) to upper (weight 1) at a constant ratio."""
    return math.exp(weight * math.log(upper) + (1 - weight) * math.log(lower))


def with_signature(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a function's signature, which `torch.autograd.Function.apply` would otherwise work out anew at every call."""
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward


class _Scale(torch.autograd.Function):
    """Different factors forward and backward. Nothing is saved: the factors are plain numbers."""

    generate_vmap_rule = True

    @staticmethod
    @with_signature
    def forward(x: Any, fwd: Any, bwd: Any) -> Any:
        return x.view_as(x) if not isinstance(fwd, Tensor) and fwd == 1 else x * fwd

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.bwd = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.bwd, None, None


def scale(
    x: Shaped[Tensor, "..."], *, fwd: float | Shaped[Tensor, ""] = 1.0, bwd: float | Shaped[Tensor, ""] = 1.0
) -> Shaped[Tensor, "..."]:
    """Multiply values by `fwd` and gradients by `bwd`. Equal factors are an ordinary product, which autograd fuses."""
    if not isinstance(fwd, Tensor) and not isinstance(bwd, Tensor) and fwd == bwd:
        return x if fwd == 1 else x * fwd
    return _Scale.apply(x, fwd, bwd)


def scale_fwd(x: Shaped[Tensor, "..."], factor: float) -> Shaped[Tensor, "..."]:
    """Multiply values by `factor`; gradients pass untouched (paper, sec. 2.2)."""
    return scale(x, fwd=factor)


def scale_bwd(x: Shaped[Tensor, "..."], factor: float) -> Shaped[Tensor, "..."]:
    """Values pass untouched; multiply gradients by `factor` (paper, sec. 2.2)."""
    return scale(x, bwd=factor)
