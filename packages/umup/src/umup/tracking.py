"""Scales of a model's tensors, and whether its updates keep their size as width grows.

`scale_report` shows the root mean square of every module's output, its gradient, and of weights and their gradients in one
step: unit scaling says "near 1". `coord_check` trains a few steps at several widths and fits how far activations move
against width: muP says "slope 0".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["CoordCheck", "ScaleReport", "coord_check", "scale_report", "track_scales"]


def _rms(x: Tensor) -> float:
    x = x.detach()
    return math.sqrt(x.double().square().mean().item()) if x.numel() else 0.0


def _first_tensor(output: Any) -> Tensor | None:
    """The floating-point tensor a module's output is about: itself, or the first in a tuple, list or model output."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return next((t for t in map(_first_tensor, output) if t is not None), None)
    return None


@dataclass
class ScaleReport:
    """Root mean squares, by module (`forward`, `backward`) and by parameter (`weight`, `weight_grad`), in model order."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    weight: dict[str, float] = field(default_factory=dict)
    weight_grad: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """All four, as one JSON object."""
        return json.dumps(asdict(self))

    def rows(self) -> list[tuple[str, float | None, float | None]]:
        """(name, value, gradient) of activations, then of parameters."""
        activations = [(name, value, self.backward.get(name)) for name, value in self.forward.items()]
        return [*activations, *((name, value, self.weight_grad.get(name)) for name, value in self.weight.items())]

    def outside(self, low: float = 0.25, high: float = 4.0) -> list[str]:
        """Names whose value or gradient lies outside [low, high]."""
        return [
            name
            for name, value, grad in self.rows()
            if any(v is not None and not low <= v <= high for v in (value, grad))
        ]

    def __str__(self) -> str:
        rows = self.rows()
        width = max([len(name) for name, _, _ in rows] + [4])
        lines = [f"{'name':<{width}}  {'value':>9}  {'gradient':>9}"]
        for name, *numbers in rows:
            lines.append(f"{name:<{width}}  " + "  ".join("        -" if v is None else f"{v:9.4g}" for v in numbers))
        return "\n".join(lines)


@contextmanager
def track_scales(model: nn.Module) -> Iterator[ScaleReport]:
    """Inside: one forward and backward pass fills the report (the last of several wins). Hooks are removed at the end."""
    report = ScaleReport()
    handles = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is None:
                return
            report.forward[name] = _rms(tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: report.backward.__setitem__(name, _rms(grad)))

        return hook

    try:
        for name, module in model.named_modules():
            if name:
                handles.append(module.register_forward_hook(watch(name)))
        yield report
    finally:
        for handle in handles:
            handle.remove()
    for name, parameter in model.named_parameters():
        report.weight[name] = _rms(parameter)
        if parameter.grad is not None:
            report.weight_grad[name] = _rms(parameter.grad)


def scale_report(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> ScaleReport:
    """Scales of one pass: `loss(model)` gives the scalar to differentiate. Existing gradients are put back afterwards."""
    before = {name: p.grad for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    try:
        with track_scales(model) as report:
            loss(model).backward()
    finally:
        for name, p in model.named_parameters():
            p.grad = before[name]
    return report


@dataclass
class CoordCheck:
    """Change of each module's output since initialisation (`rows`: width, seed, step, module, root mean square)."""

    rows: list[dict[str, Any]]

    def slopes(self, step: int | None = None) -> dict[str, float]:
        """d log RMS(change) / d log width of each module, at a step (the last by default), over seeds. 0: muP holds."""
        step = max(r["step"] for r in self.rows) if step is None else step
        slopes = {}
        for module in dict.fromkeys(r["module"] for r in self.rows):
            points = [
                (math.log(r["width"]), math.log(r["delta_rms"]))
                for r in self.rows
                if r["module"] == module and r["step"] == step and r["delta_rms"] > 0 and math.isfinite(r["delta_rms"])
            ]
            widths = np.array([x for x, _ in points])
            if len(set(widths)) > 1:
                slopes[module] = float(np.polyfit(widths, np.array([y for _, y in points]), 1)[0])
        return slopes

    def failing(self, tolerance: float = 0.25, *, growth_only: bool = False) -> dict[str, float]:
        """Modules whose slope is outside +-tolerance; empty means the check passes. A module that diverged is at inf.

        u-muP's embedding rule (lr / sqrt(width)) means a slope of -1/2 there and in the norm that follows: with
        `growth_only` only slopes above the tolerance fail.
        """
        failing = {m: s for m, s in self.slopes().items() if s > tolerance or (s < -tolerance and not growth_only)}
        return failing | {r["module"]: math.inf for r in self.rows if not math.isfinite(r["delta_rms"])}


def coord_check(
    make: Callable[[int], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    widths: Sequence[int],
    batches: Sequence[Any],
    seeds: Sequence[int] = (0,),
    modules: Callable[[str], bool] = lambda name: True,
) -> CoordCheck:
    """Train `make(width)` one step per batch and record how far outputs on the first batch have moved since initialisation.

    `loss(model, batch)` is the scalar to minimise; `modules` chooses by name. The torch seed is set before each `make`.
    """
    if len(set(widths)) < 2:
        raise ValueError(f"coord_check needs at least two widths, got {list(widths)}")
    if not batches:
        raise ValueError("coord_check needs at least one batch")
    rows = []
    for width in widths:
        for seed in seeds:
            torch.manual_seed(seed)
            model = make(width)
            opt = optimizer(model)
            start = _outputs(model, loss, batches[0], modules)
            for step, batch in enumerate(batches, start=1):
                opt.zero_grad()
                loss(model, batch).backward()
                opt.step()
                for name, tensor in _outputs(model, loss, batches[0], modules).items():
                    rows.append(
                        {
                            "width": width,
                            "seed": seed,
                            "step": step,
                            "module": name,
                            "delta_rms": _rms(tensor - start[name]),
                        }
                    )
    return CoordCheck(rows)


@torch.no_grad()
def _outputs(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, modules: Callable[[str], bool]
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None:
                found[name] = tensor.detach().clone()

        return hook

    handles = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if n and modules(n)]
    try:
        loss(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found
