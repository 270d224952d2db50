"""What u-muP needs to know of each parameter: its role, its fans and the depth of the stack it sits in.

The facts live on the *module* that owns the parameter, as plain Python attributes, and are gathered by walking the model
when asked for. So they survive whatever replaces Parameter objects: meta-device init, `load_state_dict(assign=True)`,
`from_pretrained`, `deepcopy`, pickling, FSDP2 (where a parameter becomes a DTensor shard) and `torch.compile`.

Symbols   paper     here
          L         depth, in layers (`depth_unit="layer"`) or in residual branches ("branch")
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

KINDS = ("input", "hidden", "output", "bias", "norm")


class UmupParameterError(ValueError):
    """A parameter that no u-muP rule is known for."""


@dataclass(frozen=True)
class Role:
    """The role of one parameter. Fans are those of the whole weight, whatever part of it this process holds.

    An embedding's `fan_out` is its output dimension; a convolution's `fan_in` is channels per group times kernel size.
    """

    kind: str
    fan_in: int = 1
    fan_out: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"role must be one of {KINDS}, got {self.kind!r}")
        if self.fan_in < 1 or self.fan_out < 1:
            raise ValueError(f"fans must be at least 1, got fan_in={self.fan_in}, fan_out={self.fan_out}")


@dataclass(frozen=True)
class RoledParameter:
    """A parameter found in a model: full name, role, depth (None outside any stack) and the parameter itself."""

    name: str
    role: Role
    depth: int | None
    parameter: nn.Parameter


def set_roles(module: nn.Module, **roles: Role) -> nn.Module:
    """Give the parameters that `module` owns directly their roles, for modules this package does not have.

    `set_roles(my_module, weight=Role("hidden", fan_in=64, fan_out=256))`. The module's forward pass must do the
    corresponding scaling itself. Returns the module.
    """
    owned = {name for name, _ in module.named_parameters(recurse=False)}
    unknown = sorted(set(roles) - owned)
    if unknown:
        raise ValueError(f"{type(module).__name__} owns no parameter named {unknown}: it has {sorted(owned)}")
    module.umup_roles = {**getattr(module, "umup_roles", {}), **roles}  # type: ignore[assignment]
    return module


def depth_of(module: nn.Module, depth_unit: str) -> int | None:
    """The depth of a stack (a module with `umup_branches_per_layer`), or None if the module is no stack."""
    branches = getattr(module, "umup_branches_per_layer", None)
    if branches is None:
        return None
    fixed = getattr(module, "umup_depth", None)
    layers = len(module) if fixed is None else fixed  # type: ignore[arg-type]
    return layers * (branches if depth_unit == "branch" else 1)


def _walk(
    module: nn.Module, prefix: str, depth: int | None, stack: str, depth_unit: str, seen: set[int]
) -> Iterator[tuple[str, nn.Module, str, nn.Parameter, int | None]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    own_depth = depth_of(module, depth_unit)
    if own_depth is not None:
        if depth is not None:
            raise UmupParameterError(
                f"depth stack {prefix.rstrip('.')!r} lies inside depth stack {stack!r}: keep one of them, the depth of a"
                " parameter must be one number"
            )
        depth, stack = own_depth, prefix.rstrip(".")
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield prefix + name, module, name, parameter, depth
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", depth, stack, depth_unit, seen)


def _hint(name: str, module: nn.Module) -> str:
    if "lora_" in name or type(module).__module__.startswith("peft"):
        return "an adapter: train it in an optimiser of its own, or pass foreign='base' to give it the unscaled lr"
    if "parametrizations" in name:
        return "a parametrization owns it: call torch.nn.utils.parametrize.remove_parametrizations, or umup.set_roles"
    return "use umup.nn instead of torch.nn, umup.convert the model, umup.set_roles the module, or pass foreign='base'"


def parameter_roles(
    model: nn.Module, *, depth_unit: str = "layer", foreign: str = "error"
) -> tuple[list[RoledParameter], list[tuple[str, nn.Parameter]]]:
    """Every trainable parameter with its role, and those without one as (name, parameter).

    The second list is empty unless `foreign="base"`; with "error" such parameters raise `UmupParameterError`, which names
    them and the classes that own them. So do weights tied across roles and quantised weights.
    """
    if depth_unit not in ("layer", "branch"):
        raise ValueError(f"depth_unit must be 'layer' or 'branch', got {depth_unit!r}")
    if foreign not in ("error", "base"):
        raise ValueError(f"foreign must be 'error' or 'base', got {foreign!r}")
    known: dict[int, RoledParameter] = {}
    strangers: dict[int, tuple[str, nn.Module, nn.Parameter]] = {}
    for name, module, local, parameter, depth in _walk(model, "", None, "", depth_unit, set()):
        role: Role | None = getattr(module, "umup_roles", {}).get(local)
        if role is not None and not parameter.is_floating_point():
            raise UmupParameterError(
                f"{name} ({type(module).__name__}) has dtype {parameter.dtype}: u-muP's rules are for floating-point weights;"
                " train before quantising, or freeze the model and train adapters with an optimiser of their own"
            )
        if not parameter.requires_grad:
            continue
        if role is None:
            strangers.setdefault(id(parameter), (name, module, parameter))
            continue
        before = known.get(id(parameter))
        if before is None:
            known[id(parameter)] = RoledParameter(name, role, depth, parameter)
        elif before.role != role or before.depth != depth:
            raise UmupParameterError(
                f"{before.name} ({before.role.kind}) and {name} ({role.kind}) are one tied weight, which cannot meet the rules"
                " of both: untie them (UmupConfig has tie_word_embeddings=False; umup.convert takes tie='untie')"
            )
    unroled = {key: value for key, value in strangers.items() if key not in known}
    if unroled and foreign == "error":
        lines = [
            f"  {name} of {type(module).__module__}.{type(module).__name__}, shape {tuple(parameter.shape)}: {_hint(name, module)}"
            for name, module, parameter in list(unroled.values())[:10]
        ]
        more = f"\n  and {len(unroled) - 10} more" if len(unroled) > 10 else ""
        raise UmupParameterError("parameters without a u-muP role:\n" + "\n".join(lines) + more)
    return list(known.values()), [(name, parameter) for name, _, parameter in unroled.values()]
