"""Forget losses and regularisers by name, as sums over the parts of a batch, and how a method name is read.

An objective returns a *sum* (over tokens, positions or sequences) and says what it is per; whoever trains divides by the count over the
whole optimiser step: all micro-batches, all processes. That is what makes gradient accumulation and data parallelism exact.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from . import losses

PartName = Literal["forget", "forget_idk", "retain", "retain_idk"]
PART_NAMES: tuple[PartName, ...] = ("forget", "forget_idk", "retain", "retain_idk")

Positions = Literal["answer", "nonpad", "tokens", "padded", "all"]
"""Which positions t of a sequence an objective reads: those that predict a supervised token ("answer"), any real token ("nonpad"), every
real token's own position, the last included ("tokens"), every position but the last of the padded batch ("padded"), or of it all ("all")."""

Per = Literal["token", "position", "sequence"]
Reference = Literal["nll", "logits", "hidden"]


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers that objectives take. `beta` is that of NPO, DPO and AP."""

    beta: float = 0.1
    me_direction: losses.Direction = "uniform_to_model"
    me_positions: Positions = "nonpad"
    kl_positions: Positions = "tokens"
    simnpo_beta: float = 2.5
    simnpo_gamma: float = 0.0
    wga_alpha: float = 1.0
    rmu_steering: float = 20.0
    seed: int = 0


@dataclass(frozen=True)
class Part:
    """The rows that one part of the batch gave: `logits[i]` predicts `targets[i]` in sequence `sequence[i]` (0 .. n_sequences - 1).

    `answer[i]` says whether that token is supervised. `ref_nll` is one sum a sequence.
    """

    logits: Tensor
    targets: Tensor
    answer: Tensor
    sequence: Tensor
    n_sequences: int
    ref_logits: Tensor | None = None
    ref_nll: Tensor | None = None
    hidden: Tensor | None = None
    ref_hidden: Tensor | None = None

    @cached_property
    def token_nll(self) -> Tensor:
        """NLL of each supervised token."""
        if bool(self.answer.all()):
            return losses.nll_rows(self.logits, self.targets)
        return losses.nll_rows(self.logits[self.answer], self.targets[self.answer])

    @cached_property
    def nll(self) -> Tensor:
        """NLL of each sequence, summed over its supervised tokens."""
        token_nll = self.token_nll
        zeros = torch.zeros(self.n_sequences, dtype=token_nll.dtype, device=token_nll.device)
        return zeros.index_add(0, self.sequence[self.answer], token_nll)

    @cached_property
    def lengths(self) -> Tensor:
        """Supervised tokens of each sequence."""
        return torch.bincount(self.sequence[self.answer], minlength=self.n_sequences)

    def reference(self) -> Part:
        """The same rows as the reference model sees them."""
        if self.ref_logits is None:
            raise ValueError("this objective reads the reference's logits: register it with reference='logits'")
        return Part(self.ref_logits, self.targets, self.answer, self.sequence, self.n_sequences)

    def reference_nll(self) -> Tensor:
        """`nll` of the reference model."""
        if self.ref_nll is None:
            raise ValueError("this objective reads the reference's likelihoods: register it with reference='nll'")
        return self.ref_nll


Compute = Callable[[Mapping[PartName, Part], Hyperparameters], Tensor]


@dataclass(frozen=True)
class Objective:
    """A forget loss or a regulariser: `compute` gives its sum; `per` says what the mean of it is over, counted in `parts[0]`."""

    name: str
    compute: Compute
    parts: tuple[PartName, ...]
    per: Per = "token"
    positions: Positions | Callable[[Hyperparameters], Positions] = "answer"
    reference: Reference | None = None

    def positions_for(self, hyper: Hyperparameters) -> Positions:
        return self.positions(hyper) if callable(self.positions) else self.positions


@dataclass(frozen=True)
class Method:
    """A forget loss and a regulariser (or none)."""

    forget: Objective
    regularizer: Objective | None

    @property
    def name(self) -> str:
        return self.forget.name if self.regularizer is None else f"{self.forget.name}+{self.regularizer.name}"

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return (self.forget,) if self.regularizer is None else (self.forget, self.regularizer)

    @property
    def parts(self) -> tuple[PartName, ...]:
        """The parts of the batch that this method needs, and no others."""
        needed = {part for objective in self.objectives for part in objective.parts}
        return tuple(part for part in PART_NAMES if part in needed)

    @property
    def needs_refusals(self) -> bool:
        return any(part.endswith("_idk") for part in self.parts)

    @property
    def needs_retain(self) -> bool:
        return any(part.startswith("retain") for part in self.parts)

    @property
    def references(self) -> frozenset[Reference]:
        """What of the reference model this method reads; empty for a reference-free method."""
        return frozenset(o.reference for o in self.objectives if o.reference is not None)


_FORGET: dict[str, Objective] = {}
_REGULARIZERS: dict[str, Objective] = {}


def register_forget_loss(
    name: str,
    *,
    parts: tuple[PartName, ...] = ("forget",),
    per: Per = "token",
    positions: Positions | Callable[[Hyperparameters], Positions] = "answer",
    reference: Reference | None = None,
) -> Callable[[Compute], Compute]:
    """Make a function of (parts, hyperparameters) usable as the first half of a method name. It returns a sum, `per` names its divisor."""
    return _registering(_FORGET, name, parts, per, positions, reference)


def register_regularizer(
    name: str,
    *,
    parts: tuple[PartName, ...] = ("retain",),
    per: Per = "token",
    positions: Positions | Callable[[Hyperparameters], Positions] = "answer",
    reference: Reference | None = None,
) -> Callable[[Compute], Compute]:
    """Make a function of (parts, hyperparameters) usable as the second half of a method name."""
    return _registering(_REGULARIZERS, name, parts, per, positions, reference)


def forget_losses() -> tuple[str, ...]:
    """The names that may stand before the +."""
    return tuple(_FORGET)


def regularizers() -> tuple[str, ...]:
    """The names that may stand after the +."""
    return tuple(_REGULARIZERS)


def parse_method(name: str) -> Method:
    """Read `"IDK+AP"`, `"ME+GD"`, `"GA"` (or `"GA+none"`): any forget loss with any regulariser. Case does not matter.

    Raises ValueError with the known names and the nearest one.
    """
    if not isinstance(name, str) or name.count("+") > 1 or not name.strip():
        raise ValueError(f"method must be 'FORGET' or 'FORGET+REGULARIZER', such as 'ME+GD', got {name!r}")
    forget, _, regularizer = (half.strip() for half in name.partition("+"))
    if "+" in name and not regularizer:
        raise ValueError(
            f"method {name!r} has nothing after the +: write {forget!r}, or one of {_listed(_REGULARIZERS)}"
        )
    chosen = _find(forget, _FORGET, "forget loss", name)
    if regularizer.lower() in ("", "none"):
        return Method(chosen, None)
    return Method(chosen, _find(regularizer, _REGULARIZERS, "regularizer", name))


def _find(wanted: str, known: Mapping[str, Objective], kind: str, method: str) -> Objective:
    by_folded = {name.lower(): objective for name, objective in known.items()}
    if wanted.lower() in by_folded:
        return by_folded[wanted.lower()]
    near = difflib.get_close_matches(wanted.lower(), by_folded, n=1, cutoff=0.3)
    hint = f" Did you mean {by_folded[near[0]].name!r}?" if near else ""
    raise ValueError(f"unknown {kind} {wanted!r} in method {method!r}.{hint} Known: {_listed(known)}")


def _listed(known: Mapping[str, Objective]) -> str:
    return ", ".join(known)


def _registering(
    registry: dict[str, Objective],
    name: str,
    parts: tuple[PartName, ...],
    per: Per,
    positions: Positions | Callable[[Hyperparameters], Positions],
    reference: Reference | None,
) -> Callable[[Compute], Compute]:
    if not name or "+" in name or name != name.strip() or name.lower() == "none":
        raise ValueError(f"name must not be empty or 'none', nor have a + or outer spaces, got {name!r}")
    if name.lower() in (known.lower() for known in registry):
        raise ValueError(f"{name!r} is registered already")
    unknown = [part for part in parts if part not in PART_NAMES]
    if not parts or unknown:
        raise ValueError(f"parts must be some of {PART_NAMES}, got {parts!r}")

    def register(compute: Compute) -> Compute:
        registry[name] = Objective(name, compute, parts, per, positions, reference)
        return compute

    return register


@register_forget_loss("GA")
def _ga(parts: Mapping[PartName, Part], hyper: Hyperparameters) -> Tensor:
    return -parts["forget"].token_nll.sum()


@register_forget_loss("NPO", per="sequence", reference="nll")
def _npo(parts: Mapping[PartName, Part], hyper: Hyperparameters) -> Tensor:
    forget = parts["forget"]
    return losses.npo(forget.nll, forget.reference_nll(), beta=hyper.beta, reduction="sum")


@register_forget_loss("ME", per="position", positions=lambda hyper: hyper.me_positions)
def _me(parts: Mapping[PartName, Part], hyper: Hyperparameters) -> Tensor:
    return losses.uniform_divergence_rows(parts["forget"].logits, direction=hyper.me_direction).sum()


@register_forget_loss("IDK", parts=("forget_idk",))
def _idk(parts: Mapping[PartName, Part], hyper: Hyperparameters) -> Tensor:
    return parts["forget_idk"].token_nll.sum()


@register_forget_loss("DPO", parts=("forget", "forget_idk"), per="sequence", reference="nll")
def _dpo(parts: Mapping[PartName, Part], hyper: Hyperparameters) -> Tensor:
    answer, refusal = parts["forget"], parts["forget_idk"]
    return losses.dpo(
        answer.nll,
        refusal.nll,
        answer.reference_nll(),
        refusal.reference_nll(),
        beta=hyper.beta,
        reduction="sum",
    )


@register_forget_loss("SimNPO", per="sequence")
def _simnpo(parts: Mapping[PartName, Part], hyper: Hyperparameters) -> Tensor:
    forget = parts["forget"]
    return losses.simnpo(forget.nll, forget.lengths, beta=hyper.simnpo_beta, gamma=hyper.simnpo_gamma, reduction="sum")


@register_forget_loss("WGA")
def _wga(parts: Mapping[PartName, Part], hyper: Hyperparameters) -> Tensor:
    return losses.wga_sum(parts["forget"].token_nll, alpha=hyper.wga_alpha)


@register_forget_loss("RMU", per="position", positions="tokens", reference="hidden")
def _rmu_forget(parts: Mapping[PartName, Part], hyper: Hyperparameters) -> Tensor:
    hidden = parts["forget"].hidden
    assert hidden is not None
    generator = torch.Generator().manual_seed(hyper.seed)
    control = torch.rand(hidden.shape[-1], generator=generator).to(hidden)
    return losses.rmu_forget(hidden, control / control.norm() * hyper.rmu_steering, reduction="sum")


@register_regularizer("GD")
def _gd(parts: Mapping[PartName, Part], hyper: Hyperparameters) -> Tensor:
    return parts["retain"].token_nll.sum()


@register_regularizer("KL", per="position", positions=lambda hyper: hyper.kl_positions, reference="logits")
def _kl(parts: Mapping[PartName, Part], hyper: Hyperparameters) -> Tensor:
    retain = parts["retain"]
    return losses.kl_rows(retain.logits, retain.reference().logits).sum()


@register_regularizer("AP", parts=("retain", "retain_idk"), per="sequence")
def _ap(parts: Mapping[PartName, Part], hyper: Hyperparameters) -> Tensor:
    return losses.ap(parts["retain"].nll, parts["retain_idk"].nll, beta=hyper.beta, reduction="sum")


@register_regularizer("RMU", per="position", positions="tokens", reference="hidden")
def _rmu_retain(parts: Mapping[PartName, Part], hyper: Hyperparameters) -> Tensor:
    retain = parts["retain"]
    assert retain.hidden is not None
    assert retain.ref_hidden is not None
    return losses.rmu_retain(retain.hidden, retain.ref_hidden, reduction="sum")


def with_reference(part: Part, reference: Part) -> Part:
    """`part` with what the reference model says of the same rows."""
    return replace(part, ref_logits=reference.logits, ref_nll=reference.ref_nll, ref_hidden=reference.hidden)
