"""`diagnostics`: what the routers of a model do, while it runs in the block."""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class LayerDiagnostics:
    """One router, over all its calls in the block. Masked tokens do not count.

    `load`: share of the top-k choices each expert got (sums to 1). `load_entropy`: of the load, 1 = balanced. `routing_entropy`: mean entropy of
    the routing distribution, in nats. `changed`: share of tokens whose first expert is another than the plain router would
    choose. `min_weight`, `max_weight`: over the clusters that have tokens. `empty_clusters`: clusters without a token, mean over calls.
    `stability`: mutual information of previous and present first expert, over the smaller entropy (0: unrelated, 1: one decides the other).
    `plain_calls`: calls without a previous assignment, routed plainly.
    """

    calls: int = 0
    plain_calls: int = 0
    tokens: int = 0
    load: list[float] = field(default_factory=list)
    load_entropy: float = math.nan
    routing_entropy: float = math.nan
    changed: float = math.nan
    min_weight: float = math.nan
    max_weight: float = math.nan
    empty_clusters: float = math.nan
    stability: float = math.nan


class Diagnostics:
    """Collects; ask `layers()` for the numbers or print it for a table."""

    def __init__(self, model: nn.Module):
        self._names = {id(module): name for name, module in model.named_modules()}
        self._tallies: dict[str, _Tally] = {}

    def layers(self) -> dict[str, LayerDiagnostics]:
        """By the module's name in the model, in the order of the first call."""
        return {name: tally.summary() for name, tally in self._tallies.items()}

    def __str__(self) -> str:
        columns = ("calls", "plain_calls", "tokens", "load_entropy", "changed", "min_weight", "max_weight", "stability")
        lines = [f"{'layer':<32}" + "".join(f"{column:>14}" for column in columns)]
        for name, layer in self.layers().items():
            cells = [getattr(layer, column) for column in columns]
            lines.append(f"{name:<32}" + "".join(f"{cell:>14.4g}" for cell in cells))
        return "\n".join(lines)

    def add(self, module: nn.Module) -> "_Tally | None":
        name = self._names.get(id(module))
        return None if name is None else self._tallies.setdefault(name or type(module).__name__, _Tally())


_active: ContextVar[Diagnostics | None] = ContextVar("ac_router_diagnostics", default=None)


@contextlib.contextmanager
def diagnostics(model: nn.Module) -> Iterator[Diagnostics]:
    """Watch every `ACRouter`, and every patched router of a transformers model, inside `model`.

    Costs one more router product a layer, and a synchronisation, while the block lasts; nothing is watched inside compiled code.
    """
    watched = Diagnostics(model)
    token = _active.set(watched)
    try:
        yield watched
    finally:
        _active.reset(token)


def is_watching() -> bool:
    return not torch.compiler.is_compiling() and _active.get() is not None


@torch.no_grad()
def observe(
    module: nn.Module,
    logits: Tensor,
    indices: Tensor,
    prev: Tensor | None,
    weights: Tensor | None,
    mask: Tensor | None,
    *,
    plain: Callable[[], Tensor],
) -> None:
    """A router reports one call; `plain` gives the logits it would have without Adaptive Clustering."""
    if not is_watching():
        return
    active = _active.get()
    tally = None if active is None else active.add(module)
    if tally is None:
        return
    keep = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    if mask is not None:
        keep = mask.reshape(-1).to(device=logits.device, dtype=torch.bool)
    changed = torch.zeros(0, device=logits.device)
    if prev is not None:
        changed = (plain().argmax(-1) != indices[:, 0])[keep]
    tally.add(logits[keep], indices[keep], None if prev is None else prev.to(keep.device)[keep], weights, changed)


class _Tally:
    def __init__(self) -> None:
        self.calls = self.plain_calls = self.tokens = self.adapted_tokens = 0
        self.choices: Tensor | None = None
        self.pairs: Tensor | None = None
        self.entropy = self.changed = self.empty = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(
        self, logits: Tensor, indices: Tensor, prev: Tensor | None, weights: Tensor | None, changed: Tensor
    ) -> None:
        experts = logits.shape[1]
        self.calls += 1
        self.tokens += len(logits)
        choices = torch.bincount(indices.reshape(-1), minlength=experts).double().cpu()
        self.choices = choices if self.choices is None else self.choices + choices
        log_probability = torch.log_softmax(logits.double(), dim=-1)
        self.entropy += float(-(log_probability.exp() * log_probability).sum())
        if prev is None:
            self.plain_calls += 1
            return
        self.adapted_tokens += len(logits)
        self.changed += float(changed.sum())
        label = prev[:, 0]
        known = label >= 0
        clusters = len(weights) if weights is not None else int(label.max()) + 1 if len(label) else 1
        pair = label[known] * experts + indices[known, 0]
        pairs = torch.bincount(pair, minlength=clusters * experts).double().reshape(-1, experts).cpu()
        if self.pairs is None or self.pairs.shape == pairs.shape:
            self.pairs = pairs if self.pairs is None else self.pairs + pairs
        occupied = torch.bincount(label[known], minlength=clusters) > 0
        self.empty += clusters - int(occupied.sum())
        if weights is not None and bool(occupied.any()):
            shown = weights[occupied[: len(weights)]]
            self.low, self.high = min(self.low, float(shown.min())), max(self.high, float(shown.max()))

    def summary(self) -> LayerDiagnostics:
        nan = math.nan
        adapted = self.calls - self.plain_calls
        load = [] if self.choices is None else (self.choices / self.choices.sum().clamp(min=1)).tolist()
        return LayerDiagnostics(
            calls=self.calls,
            plain_calls=self.plain_calls,
            tokens=self.tokens,
            load=load,
            load_entropy=_entropy(torch.tensor(load)) / math.log(len(load)) if len(load) > 1 else nan,
            routing_entropy=self.entropy / self.tokens if self.tokens else nan,
            changed=self.changed / self.adapted_tokens if self.adapted_tokens else nan,
            min_weight=self.low if self.low < math.inf else nan,
            max_weight=self.high if self.high > -math.inf else nan,
            empty_clusters=self.empty / adapted if adapted else nan,
            stability=_stability(self.pairs) if self.pairs is not None else nan,
        )


def _entropy(probability: Tensor) -> float:
    positive = probability[probability > 0].double()
    return float(-(positive * positive.log()).sum())


def _stability(pairs: Tensor) -> float:
    total = pairs.sum()
    if total == 0:
        return math.nan
    joint = pairs / total
    before, after = _entropy(joint.sum(1)), _entropy(joint.sum(0))
    smaller = min(before, after)
    return (before + after - _entropy(joint)) / smaller if smaller > 1e-12 else math.nan
