"""Learning rates per parameter, in as few parameter groups as there are distinct values.

Symbols   paper                    here
          eta                      lr
          C (of the abc table)     lr_scale
          lambda                   weight_decay (independent: the step's decay is lambda times the schedule, whatever eta)

With Adam the factors of the paper's table 2 are: input fan_out^-1/2 (u-muP's changed embedding rule), hidden fan_in^-1/2,
output, bias and norm 1; all times depth^-1/2 inside a depth stack.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from umup.roles import KINDS, Role, UmupParameterError, parameter_roles

__all__ = ["SGD", "Adam", "AdamW", "check_optimizer", "clip_grad_norm_", "get_param_groups", "lr_scale"]


def lr_scale(
    role: Role, depth: int | None = None, *, optimizer: str = "adamw", readout_constraint: str | None = None
) -> float:
    """The factor C on the global learning rate for a parameter of this role, `depth` layers deep in its stack.

    SGD has the factors of Adam when the readout is unconstrained (the default), since gradients then have unit scale too;
    with the constraint "to_output_scale" they shrink with width and the factors make up for it.
    """
    if optimizer not in ("adamw", "adam", "sgd"):
        raise ValueError(f"optimizer must be 'adamw', 'adam' or 'sgd', got {optimizer!r}")
    if depth is not None and depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}: the stack is empty")
    factor = 1.0 if depth is None else depth**-0.5
    if optimizer == "sgd" and readout_constraint is not None:
        if readout_constraint != "to_output_scale":
            raise ValueError(
                f"SGD's factors are known for a readout without constraint or with 'to_output_scale', not"
                f" {readout_constraint!r}"
            )
        return (
            factor
            * {
                "input": role.fan_out**0.5,
                "hidden": role.fan_in**0.5,
                "output": 1.0,
                "bias": float(role.fan_out),
                "norm": float(role.fan_out),
            }[role.kind]
        )
    if role.kind == "input":
        return factor * role.fan_out**-0.5
    if role.kind == "hidden":
        return factor * role.fan_in**-0.5
    return factor


def _readout_constraint(model: nn.Module) -> str | None:
    found = set()
    for module in model.modules():
        roles: dict[str, Role] = getattr(module, "umup_roles", {})
        if any(role.kind == "output" for role in roles.values()):
            found.add(getattr(module, "constraint", None))
    if len(found) > 1:
        raise ValueError(f"the model's readouts have different constraints {sorted(map(str, found))}: SGD needs one")
    return found.pop() if found else None


def _check_number(name: str, value: Any, *, zero: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        hint = ": scale the groups' lr in place afterwards if you need one" if isinstance(value, Tensor) else ""
        raise TypeError(f"{name} must be a number, got {type(value).__name__}{hint}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be a finite number {'>= 0' if zero else '> 0'}, got {value}")
    return float(value)


def get_param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    *,
    optimizer: str = "adamw",
    weight_decay_mode: str = "independent",
    depth_unit: str = "layer",
    foreign: str = "error",
    decay_kinds: Iterable[str] = KINDS,
) -> list[dict[str, Any]]:
    """Parameter groups for any torch-style optimiser: `torch.optim.AdamW(get_param_groups(model, lr=1.0), fused=True)`.

    Parameters with the same learning rate and decay share a group, so a model has a handful. Each group also holds
    `umup_scale` (its factor on `lr`) and `umup_names`. Schedulers that multiply each group's own lr (all of torch's LambdaLR
    kind, and transformers') keep the ratios; `check_optimizer` notices one that does not.

    `lr`: the global learning rate, typically 2^-2 to 2^3. `optimizer`: "adamw" (also for Lion, Adafactor and others with
    updates of a size that does not depend on the gradient's), "adam" or "sgd". `weight_decay_mode`: "independent" sets each
    group's decay to weight_decay / its lr, so that a step decays by weight_decay times the schedule whatever lr is (meant for
    decoupled decay: with "adam", whose decay is an L2 term, it warns); "coupled" passes it on. `depth_unit`: what the depth
    of a stack counts, "layer" (as unit-scaling) or "branch" (as the authors' other code; lr differs by sqrt 2). `foreign`:
    "error" or "base", to give parameters without a role lr itself. `decay_kinds`: roles that decay; all by default.

    Raises `UmupParameterError` for parameters without a role, tied across roles, or quantised; ValueError for bad numbers.
    """
    lr = _check_number("lr", lr, zero=False)
    weight_decay = _check_number("weight_decay", weight_decay, zero=True)
    if weight_decay_mode not in ("independent", "coupled"):
        raise ValueError(f"weight_decay_mode must be 'independent' or 'coupled', got {weight_decay_mode!r}")
    if optimizer == "adam" and weight_decay > 0 and weight_decay_mode == "independent":
        warnings.warn(
            "Adam's weight decay is an L2 term that Adam rescales, so dividing it by lr does not make it independent:"
            " use AdamW, or weight_decay_mode='coupled'",
            stacklevel=2,
        )
    decays = set(decay_kinds)
    if not decays <= set(KINDS):
        raise ValueError(f"decay_kinds must be among {KINDS}, got {sorted(decays - set(KINDS))}")
    roled, strangers = parameter_roles(model, depth_unit=depth_unit, foreign=foreign)
    if not roled and not strangers:
        raise UmupParameterError("the model has no trainable parameters")
    readout_constraint = _readout_constraint(model) if optimizer == "sgd" else None
    entries = [
        (
            p.name,
            p.parameter,
            lr_scale(p.role, p.depth, optimizer=optimizer, readout_constraint=readout_constraint),
            weight_decay if p.role.kind in decays else 0.0,
        )
        for p in roled
    ] + [(name, parameter, 1.0, weight_decay) for name, parameter in strangers]
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter, factor, decay in entries:
        group_lr = lr * factor
        group_decay = decay / group_lr if weight_decay_mode == "independent" else decay
        group = groups.setdefault(
            (group_lr, group_decay),
            {"params": [], "lr": group_lr, "weight_decay": group_decay, "umup_scale": factor, "umup_names": []},
        )
        group["params"].append(parameter)
        group["umup_names"].append(name)
    return list(groups.values())


class _OverGroups:
    """Makes a torch optimiser take a model, whose `get_param_groups` it steps."""

    kind = "adamw"
    decay_mode = "independent"

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1.0,
        weight_decay: float = 0.0,
        *,
        weight_decay_mode: str | None = None,
        depth_unit: str = "layer",
        foreign: str = "error",
        **kwargs: Any,
    ) -> None:
        groups = get_param_groups(
            model,
            lr,
            weight_decay,
            optimizer=self.kind,
            weight_decay_mode=weight_decay_mode or self.decay_mode,
            depth_unit=depth_unit,
            foreign=foreign,
        )
        super().__init__(groups, lr=lr, **kwargs)  # type: ignore[call-arg]


class AdamW(_OverGroups, torch.optim.AdamW):
    """`torch.optim.AdamW` over `get_param_groups(model, lr, weight_decay, ...)`; other arguments are torch's."""


class Adam(_OverGroups, torch.optim.Adam):
    """`torch.optim.Adam` over `get_param_groups`; its weight decay is an L2 term, so coupled."""

    kind = "adam"
    decay_mode = "coupled"


class SGD(_OverGroups, torch.optim.SGD):
    """`torch.optim.SGD` over `get_param_groups(model, lr, weight_decay, optimizer="sgd")`."""

    kind = "sgd"


def check_optimizer(optimizer: Any, *, tolerance: float = 1e-6) -> float:
    """The global learning rate that all groups agree on now; ValueError if they have lost their ratios.

    Something that sets every group's lr to one number (`for g in optimizer.param_groups: g["lr"] = x`, or a scheduler that
    does) silently turns u-muP off: call this after the first scheduled step. Groups at lr 0 (a warmup's start) agree.
    """
    groups = optimizer.param_groups
    missing = [i for i, group in enumerate(groups) if "umup_scale" not in group]
    if missing:
        raise ValueError(
            f"parameter groups {missing} were not made by umup.get_param_groups: they have no 'umup_scale'"
        )
    rates = [float(group["lr"]) / group["umup_scale"] for group in groups]
    low, high = min(rates), max(rates)
    if high - low > tolerance * high:
        found = {float(group["lr"]) for group in groups}
        why = " (all groups have one lr: something overwrote them with a single number)" if len(found) == 1 else ""
        raise ValueError(
            f"group learning rates lost their ratios{why}: lr / umup_scale ranges from {low:.6g} to {high:.6g}; multiply each"
            " group's lr by the schedule instead"
        )
    return high


def clip_grad_norm_(
    parameters: nn.Module | Iterable[Tensor], max_rms: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the root mean square of all gradients together to `max_rms`; returns what it was, as a 0-d tensor.

    Unit-scale gradients have a norm near sqrt(number of parameters), so a clip at norm 1 would always bite. This one is
    `torch.nn.utils.clip_grad_norm_` at max_rms * sqrt(number of elements with a gradient), DTensor shards counted whole.
    """
    _check_number("max_rms", max_rms, zero=False)
    tensors = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    with_grad = [p for p in tensors if p.grad is not None]
    root = math.sqrt(max(sum(p.numel() for p in with_grad), 1))
    norm = torch.nn.utils.clip_grad_norm_(with_grad, max_rms * root, error_if_nonfinite=error_if_nonfinite)
    return norm / root
