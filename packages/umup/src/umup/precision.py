"""FP8 without scale factors: unit-scale tensors are cast as they are, saturating, and multiplied.

Symbols   paper                      here
          E4M3                       forward inputs and weights
          E5M2                       gradients of outputs (never multiplied with one another)
          critical matmuls           attention output, feed-forward down projection, readout: kept in high precision, or
                                     with E5M2 inputs, because their inputs or weights grow during training

On hardware that multiplies FP8 (`backend="scaled_mm"`) the tensors are really cast, and the op's constant goes where others
put a tensor's scale. Elsewhere (`"simulate"`) values are rounded to the format and multiplied in their own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import umup.nn as unn

__all__ = ["FORMATS", "Fp8Format", "Fp8Report", "cast_fp8", "fp8", "fp8_available", "simulate_fp8"]


@dataclass(frozen=True)
class Fp8Format:
    """A format: stored mantissa bits, exponent of the smallest normal number, largest number, torch dtype."""

    mantissa_bits: int
    min_exponent: int
    max_value: float
    dtype: torch.dtype


FORMATS = {
    "e4m3fn": Fp8Format(3, -6, 448.0, torch.float8_e4m3fn),
    "e5m2": Fp8Format(2, -14, 57344.0, torch.float8_e5m2),
    "e4m3fnuz": Fp8Format(3, -7, 240.0, torch.float8_e4m3fnuz),
    "e5m2fnuz": Fp8Format(2, -15, 57344.0, torch.float8_e5m2fnuz),
}


def _format(name: str) -> Fp8Format:
    if name not in FORMATS:
        raise ValueError(f"FP8 format {name!r} is unknown: use one of {sorted(FORMATS)}")
    return FORMATS[name]


def cast_fp8(
    x: Float[Tensor, "*shape"],
    format: str = "e4m3fn",
    *,
    rounding: str = "nearest",
    generator: torch.Generator | None = None,
) -> Float[Tensor, "*shape"]:
    """x rounded to what an FP8 `format` can hold, in x's own dtype. No gradient passes.

    Saturates at the format's largest number, infinities too; NaN stays NaN. `rounding`: "nearest" (ties to even) or
    "stochastic" (up with the probability that leaves the mean unchanged; drawn from `generator`).
    """
    fmt = _format(format)
    values = x.detach().to(torch.float32).clamp(-fmt.max_value, fmt.max_value)
    if rounding == "nearest":
        return values.to(fmt.dtype).to(x.dtype)
    if rounding != "stochastic":
        raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    exponent = torch.frexp(values).exponent - 1
    step = torch.exp2((exponent.clamp(min=fmt.min_exponent) - fmt.mantissa_bits).to(torch.float32))
    noise = torch.rand(values.shape, generator=generator, device=values.device)
    rounded = torch.floor(values / step + noise) * step
    return rounded.clamp(-fmt.max_value, fmt.max_value).to(x.dtype)


def fp8_available(device: torch.device | str) -> bool:
    """Whether this device multiplies FP8 in hardware and this torch has the public call for it."""
    device = torch.device(device)
    if not hasattr(F, "scaled_mm") or device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _scaled_mm(a: Tensor, b_t: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """`factor * a @ b_t.T` of FP8 matrices, both row-major as the hardware wants the left and the transposed right one."""
    inner = -a.shape[1] % 16
    if (
        inner
    ):  # the hardware takes multiples of 16, and the tokens that gradients sum over are any number; zeros add nothing
        a, b_t = F.pad(a, (0, inner)), F.pad(b_t, (0, inner))
    one = torch.ones((), device=a.device)
    tensorwise = F.ScalingType.TensorWise
    return F.scaled_mm(a, b_t.t(), one * factor, tensorwise, one, tensorwise, output_dtype=dtype)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, factors: Any, how: Any) -> Any:
        alpha, ctx.beta, ctx.gamma = factors
        ctx.how, ctx.has_bias, ctx.x_shape, ctx.dtype = how, bias is not None, x.shape, x.dtype
        rows = x.reshape(-1, x.shape[-1])
        x8, w8 = how.cast(rows, "x", how.input_format), how.cast(weight, "weight", how.weight_format)
        # E5M2 gradients must not meet E5M2 inputs: what was forwarded in E5M2 is saved in E4M3.
        saved = x8 if how.input_format == how.weight_format else how.cast(rows, "x", how.weight_format)
        ctx.save_for_backward(saved, w8)
        y = how.multiply(x8, w8, alpha, x.dtype)
        if bias is not None:
            y = y + bias * alpha
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x8, w8 = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        g8 = ctx.how.cast(rows, "grad", ctx.how.grad_format)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.how.multiply(g8, w8.t().contiguous(), ctx.beta, ctx.dtype).reshape(ctx.x_shape)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.how.multiply(g8.t().contiguous(), x8.t().contiguous(), ctx.gamma, ctx.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0) * ctx.gamma
        return grad_x, grad_weight, grad_bias, None, None


class Fp8Matmul:
    """What a linear map does with its three products; one per module, so that it can count what it lost."""

    def __init__(
        self, name: str, formats: tuple[str, str, str], rounding: str, backend: str, counts: dict | None
    ) -> None:
        self.name, self.rounding, self.backend, self.counts = name, rounding, backend, counts
        self.input_format, self.weight_format, self.grad_format = formats

    def cast(self, x: Tensor, operand: str, format: str) -> Tensor:
        if self.counts is not None:
            self._count(x, operand, format)
        if self.backend == "scaled_mm":
            fmt = FORMATS[format]
            return x.clamp(-fmt.max_value, fmt.max_value).to(fmt.dtype).contiguous()
        return cast_fp8(x, format, rounding=self.rounding)

    def multiply(self, a: Tensor, b_t: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
        if self.backend == "scaled_mm":
            return _scaled_mm(a, b_t, factor, dtype)
        return (a @ b_t.t()) * factor

    def _count(self, x: Tensor, operand: str, format: str) -> None:
        fmt = FORMATS[format]
        magnitude = x.detach().abs()
        smallest = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
        # Half the smallest number and less is rounded to zero.
        lost = ((magnitude > 0) & (magnitude <= smallest / 2)).sum().item()
        saturated = (magnitude > fmt.max_value).sum().item()
        entry = self.counts.setdefault(f"{self.name}.{operand}", [0, 0, 0])  # type: ignore[union-attr]
        for i, count in enumerate((lost, saturated, x.numel())):
            entry[i] += count

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, alpha: float, beta: float, gamma: float
    ) -> Tensor:
        return _Fp8Linear.apply(x, weight, bias, (alpha, beta, gamma), self)


@dataclass
class Fp8Report:
    """What runs in FP8 and what does not. `counts`: operand -> [underflowed, saturated, all], if they were asked for."""

    backend: str
    fp8: list[str] = field(default_factory=list)
    critical: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    share_of_weights: float = 0.0
    counts: dict[str, list[int]] = field(default_factory=dict)

    def share(self, operand: str, *, saturated: bool = False) -> float:
        """The share of all values of an operand kind ("x", "weight", "grad") that underflowed (or saturated)."""
        entries = [c for key, c in self.counts.items() if key.endswith(f".{operand}")]
        return sum(c[saturated] for c in entries) / max(sum(c[2] for c in entries), 1)


_CRITICAL = ("o_proj", "down_proj", "lm_head")


@contextmanager
def fp8(
    model: nn.Module,
    *,
    backend: str = "auto",
    critical: str = "high",
    critical_names: Sequence[str] = _CRITICAL,
    fnuz: bool = False,
    rounding: str = "nearest",
    plain: bool = False,
    count: bool = False,
) -> Iterator[Fp8Report]:
    """Inside: the model's linear maps multiply FP8, by the paper's recipe; yields a report of which do.

    `backend`: "scaled_mm" (really cast, `torch.nn.functional.scaled_mm`), "simulate", or "auto" (the first where the
    hardware has it). `critical`: "high" keeps critical matmuls as they are, "e5m2" gives them E5M2 inputs, "fp8" treats
    them as all others. `critical_names`: the last parts of their names (readouts always are). `fnuz`: the FNUZ variants of
    the formats; `rounding`: "nearest" or "stochastic" (both simulated only). `plain`: also plain `nn.Linear` modules, for
    comparison. `count`: count underflow and saturation (slow). Maps that cannot run (sizes not multiples of 16 under
    scaled_mm, convolutions, plain modules) are listed as unsupported and stay as they are.
    """
    if backend not in ("auto", "simulate", "scaled_mm"):
        raise ValueError(f"backend must be 'auto', 'simulate' or 'scaled_mm', got {backend!r}")
    if critical not in ("high", "e5m2", "fp8"):
        raise ValueError(f"critical must be 'high', 'e5m2' or 'fp8', got {critical!r}")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    first = next(model.parameters(), None)
    if backend == "auto":
        usable = first is not None and fp8_available(first.device) and rounding == "nearest" and not fnuz
        backend = "scaled_mm" if usable else "simulate"
    if backend == "scaled_mm":
        if not hasattr(F, "scaled_mm"):
            raise RuntimeError("backend='scaled_mm' needs a torch with torch.nn.functional.scaled_mm: use 'simulate'")
        if rounding != "nearest" or fnuz:
            raise ValueError("backend='scaled_mm' rounds to nearest in the OCP formats: use backend='simulate'")
    e4m3, e5m2 = ("e4m3fnuz", "e5m2fnuz") if fnuz else ("e4m3fn", "e5m2")
    report = Fp8Report(backend)
    before: list[tuple[nn.Module, str, Any]] = []
    weights = fp8_weights = 0
    try:
        for name, module in model.named_modules():
            if isinstance(module, unn.Conv1d):
                report.unsupported.append(name)
            if not isinstance(module, nn.Linear):
                continue
            weights += module.weight.numel()
            ours = isinstance(module, unn.Linear)
            is_critical = isinstance(module, unn.LinearReadout) or name.rpartition(".")[2] in critical_names
            odd = backend == "scaled_mm" and (module.in_features % 16 or module.out_features % 16)
            if is_critical and critical == "high":
                report.critical.append(name)
                continue
            if odd or not (ours or plain):
                report.unsupported.append(name)
                continue
            formats = (e5m2 if is_critical and critical == "e5m2" else e4m3, e4m3, e5m2)
            matmul = Fp8Matmul(name, formats, rounding, backend, report.counts if count else None)
            attribute, value = ("matmul", matmul) if ours else ("forward", _plain_forward(module, matmul))
            before.append((module, attribute, vars(module).get(attribute)))
            setattr(module, attribute, value)
            report.fp8.append(name)
            fp8_weights += module.weight.numel()
        report.share_of_weights = fp8_weights / max(weights, 1)
        yield report
    finally:
        for module, attribute, value in before:
            if attribute == "forward" and value is None:
                del module.forward
            else:
                setattr(module, attribute, value)


def _plain_forward(module: nn.Linear, matmul: Fp8Matmul) -> Any:
    def forward(x: Tensor) -> Tensor:
        return matmul(x, module.weight, module.bias, 1.0, 1.0, 1.0)

    return forward


def simulate_fp8(model: nn.Module, **options: Any) -> Any:
    """`fp8(model, backend="simulate", ...)`."""
    return fp8(model, backend="simulate", **options)
