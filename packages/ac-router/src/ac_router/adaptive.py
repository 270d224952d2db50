"""`AdaptiveWeights`: which statistics a layer's feature weights come from (this batch, a running average), and the running average.

The running average has no counterpart in the paper, whose weights always come from the batch at hand. It gives an answer where
there is no batch: generation token by token, or evaluation that must not depend on what else is in the batch.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ac_router.clusters import (
    ClusterStatistics,
    Dispersion,
    Norm,
    ProcessGroup,
    causal_token_weights,
    check_rule,
    cluster_statistics,
    eligible_clusters,
    mixing,
    valid_labels,
    weights_from_dispersion,
    with_unit_row,
)
from chapbook_shared.validate import check_choice, check_fraction, check_int

Stats: TypeAlias = Literal["batch", "ema", "frozen", "causal"]


class WeightOptions(TypedDict, total=False):
    """Keyword arguments that routers and `patch_model` hand on to `AdaptiveWeights`, where their defaults and meaning are."""

    momentum: float
    dispersion: Dispersion
    norm: Norm | None
    eps: float
    clip: float | None
    min_count: int
    official_compat: bool
    process_group: ProcessGroup | None
    persistent: bool


class Scaling(NamedTuple):
    """What each token is scaled by: its row, or its shares of the rows, of a table of weights; see `scale_by_table`."""

    table: Tensor
    rows: Tensor
    per_token: bool = False

    @property
    def weights(self) -> Tensor | None:
        """The clusters' weights [clusters, dim]; None where each token has its own."""
        return None if self.per_token else self.table[:-1]


_collecting: ContextVar[bool] = ContextVar("ac_router_collecting", default=False)


@contextlib.contextmanager
def collect_statistics() -> Iterator[None]:
    """Within the block, forward passes update running averages in `eval()` and without gradient too.

    For a model that was trained plain: run a few hundred batches of typical data through it once, and `stats="ema"` or `"frozen"`
    has something to say.
    """
    token = _collecting.set(True)
    try:
        yield
    finally:
        _collecting.reset(token)


def is_collecting() -> bool:
    # The compiler cannot trace a context variable.
    return not torch.compiler.is_compiling() and _collecting.get()


@dataclass
class LayerRecord:
    """What one layer decided in one forward pass. Recomputation under gradient checkpointing finds it, and repeats it."""

    indices: Tensor | None = None
    gates: Tensor | None = None
    table: Tensor | None = None
    statistics: ClusterStatistics | None = None
    learned: bool = False
    # Of this layer's tokens under its own choice, for a next layer with stat_source="previous".
    next_statistics: ClusterStatistics | None = None
    # The unscaled tokens and the weights, while the router runs, for what happens after it.
    pending: tuple[Tensor, Tensor | None] | None = None


@dataclass
class RoutingState:
    """One forward pass through a stack of layers: each layer leaves its assignment here, the next one finds it.

    Make a new one for every forward pass and hand it to all layers. It belongs to the pass, not to the model, so two passes before one
    backward, threads, and recomputation under `torch.utils.checkpoint` each see their own assignments, and a recomputed
    layer neither changes its mind nor updates its running average twice. `mask`: True for the tokens that count, flattened.
    """

    mask: Tensor | None = None
    records: dict[int, LayerRecord] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None  # Of the tokens: (batch, length).

    def record(self, layer: int) -> LayerRecord:
        """The record of this layer, made if it is not there."""
        if layer not in self.records:
            self.records[layer] = LayerRecord()
        return self.records[layer]

    def previous(self, layer: int) -> LayerRecord | None:
        """The record of the nearest layer before this one that has routed."""
        before = [index for index, record in self.records.items() if index < layer and record.indices is not None]
        return self.records[max(before)] if before else None


class AdaptiveWeights(nn.Module):
    """Feature weights of `num_clusters` clusters (the experts of the previous layer), without parameters.

    `stats`: `"batch"`, the statistics of the tokens at hand (the paper), but in `eval()` the running average where there are fewer than
    `min_count` tokens; `"ema"`, of the batch in training and the running average in `eval()`, as a batch norm does; `"frozen"`, the
    running average always, never updated; `"causal"`, of each token's own sequence up to it.
    The running average is over per-cluster counts and deviation sums, so it needs no correction for its start; a cluster absent from a
    batch (fewer than `min_count` tokens) keeps its average. While it has none, its weight is 1. It is updated in training with gradient on, and
    within `collect_statistics()`. Buffers `ema_count` and `ema_dispersion`; `persistent=False` leaves them out of the state dict.
    """

    ema_count: Tensor
    ema_dispersion: Tensor

    def __init__(
        self,
        dim: int,
        num_clusters: int,
        *,
        stats: Stats = "batch",
        momentum: float = 0.99,
        dispersion: Dispersion = "mad",
        norm: Norm | None = "feature",
        eps: float = 1e-4,
        clip: float | None = 10.0,
        min_count: int = 2,
        official_compat: bool = False,
        process_group: ProcessGroup | None = None,
        persistent: bool = True,
        device: torch.device | None = None,
    ):
        super().__init__()
        check_int("dim", dim, minimum=1)
        check_int("num_clusters", num_clusters, minimum=1)
        check_choice("stats", stats, ("batch", "ema", "frozen", "causal"))
        check_fraction("momentum", momentum)
        check_rule(
            dispersion=dispersion, norm=norm, eps=eps, clip=clip, min_count=min_count, process_group=process_group
        )
        if stats == "causal" and (dispersion == "pairwise" or process_group is not None or official_compat):
            raise ValueError(
                "stats='causal' looks at one sequence at a time and takes neither dispersion='pairwise', nor process_group, nor "
                "official_compat=True: use stats='batch' with these"
            )
        self.dim, self.num_clusters, self.stats, self.momentum = dim, num_clusters, stats, momentum
        self.dispersion: Dispersion = dispersion
        self.norm: Norm | None = norm
        self.eps, self.clip, self.min_count, self.official_compat = eps, clip, min_count, official_compat
        self.process_group = process_group
        size = (num_clusters, dim)
        self.register_buffer("ema_count", torch.zeros(num_clusters, device=device), persistent=persistent)
        self.register_buffer("ema_dispersion", torch.zeros(size, device=device), persistent=persistent)
        self._running_table: Tensor | None = None
        self._running_table_of: tuple[Any, ...] | None = None
        if persistent:
            self.register_load_state_dict_pre_hook(_keep_missing_averages)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, num_clusters={self.num_clusters}, stats={self.stats!r}, dispersion={self.dispersion!r}, "
            f"norm={self.norm!r}, eps={self.eps}, clip={self.clip}, min_count={self.min_count}"
        )

    @property
    def learning(self) -> bool:
        """Whether a forward pass now updates the running average."""
        if self.stats in ("frozen", "causal"):
            return False
        return is_collecting() or (self.training and torch.is_grad_enabled())

    def from_statistics(self, statistics: ClusterStatistics) -> Float[Tensor, "clusters dim"]:
        """The weights that these statistics mean under this layer's rule."""
        eligible = eligible_clusters(statistics[0], min_count=self.min_count, official_compat=self.official_compat)
        return weights_from_dispersion(statistics.dispersion, eligible, norm=self.norm, eps=self.eps, clip=self.clip)

    def running(self) -> Float[Tensor, "clusters dim"]:
        """The weights that the running average means; 1 for a cluster that has none yet."""
        return self._table()[:-1]

    def resting(self, device: torch.device) -> Tensor | None:
        """The running table (the weights and a row of ones), where the batch at hand has no say now; else None."""
        if self.stats == "frozen" or (self.stats == "ema" and not self.training and not is_collecting()):
            table = self._table()
            return table if table.device == device else table.to(device)
        return None

    @torch.no_grad()
    def update(self, statistics: ClusterStatistics) -> None:
        """Move the running average towards these statistics."""
        if self.ema_count.dtype in (torch.float16, torch.bfloat16):  # `model.to(bfloat16)` converts buffers too.
            self.ema_count, self.ema_dispersion = self.ema_count.float(), self.ema_dispersion.float()
        count, dispersion = (values.to(self.ema_count) for values in statistics)
        # A single token has no dispersion to report.
        seen = count >= max(2, self.min_count)
        new_count = self.momentum * self.ema_count + (1 - self.momentum) * count
        share = (1 - self.momentum) * count / new_count.clamp(min=torch.finfo(count.dtype).tiny)
        moved = torch.lerp(self.ema_dispersion, dispersion, share[:, None])
        self.ema_dispersion.copy_(torch.where(seen[:, None], moved, self.ema_dispersion))
        self.ema_count.copy_(torch.where(seen, new_count, self.ema_count))

    def statistics(self, hidden: Float[Tensor, "tokens dim"], labels: Int[Tensor, "tokens"]) -> ClusterStatistics:
        """The statistics of a batch; see `cluster_statistics`."""
        return cluster_statistics(
            hidden, labels, self.num_clusters, dispersion=self.dispersion, process_group=self.process_group
        )

    def weigh(
        self,
        hidden: Float[Tensor, "tokens dim"],
        prev: Int[Tensor, "tokens k"],
        *,
        gates: Tensor | None = None,
        mask: Tensor | None = None,
        shape: tuple[int, ...] | None = None,
        record: LayerRecord | None = None,
        statistics: ClusterStatistics | None = None,
        complete: bool = False,
    ) -> Scaling:
        """What to scale the tokens by.

        `gates`: mix the weights of the k previous experts by these. `shape`: (batch, length), for causal statistics. `record`: this
        layer's in this forward pass. `statistics`: in place of this batch's own. `complete`: no token is without an expert.
        """
        if prev.device != hidden.device:
            prev = prev.to(hidden.device)
        if self.stats == "causal":
            return self._weigh_causally(hidden, prev, mask, shape)
        self._check_averages(hidden)
        if record is not None and record.table is not None:
            table, statistics = record.table.to(hidden.device), record.statistics
        else:
            table, statistics = self._choose(hidden, prev, mask, statistics)
        if statistics is not None and self.learning and not (record is not None and record.learned):
            self.update(statistics)
            if record is not None:
                record.learned = True
        if record is not None:
            record.table, record.statistics = table, statistics
        return Scaling(table, mixing(prev, self.num_clusters, gates, table, complete=complete))

    def _choose(
        self, hidden: Tensor, prev: Tensor, mask: Tensor | None, statistics: ClusterStatistics | None
    ) -> tuple[Tensor, ClusterStatistics | None]:
        resting = self.resting(hidden.device)
        if resting is not None:
            return resting, None
        if statistics is None:
            statistics = self.statistics(hidden, valid_labels(prev, mask).to(hidden.device))
        else:
            statistics = ClusterStatistics(*(values.to(hidden.device) for values in statistics))
        table = with_unit_row(self.from_statistics(statistics))
        if not (self.training or is_collecting()):
            enough = statistics[0].sum() >= self.min_count
            table = torch.where(enough, table, self._table().to(table))
        return table, statistics

    def _weigh_causally(
        self, hidden: Tensor, prev: Tensor, mask: Tensor | None, shape: tuple[int, ...] | None
    ) -> Scaling:
        if shape is None or len(shape) != 2:
            raise ValueError(
                f"stats='causal' needs to know where sequences begin: give tokens of shape [batch, length, dim] (got "
                f"{'flattened tokens' if shape is None else shape})"
            )
        weights = causal_token_weights(
            hidden.reshape(*shape, self.dim),
            prev[:, 0].reshape(shape),
            self.num_clusters,
            norm=self.norm,
            dispersion=self.dispersion,
            eps=self.eps,
            clip=self.clip,
            min_count=self.min_count,
            mask=mask,
        )
        return Scaling(
            weights.reshape(-1, self.dim), torch.arange(hidden.shape[0], device=hidden.device), per_token=True
        )

    def _table(self) -> Tensor:
        """The running weights with the unit row, kept until the average moves: generation asks for it at every token."""
        if torch.compiler.is_compiling():
            return self._make_table()
        # Not by way of `nn.Module.__getattr__`, which takes its time.
        count, dispersion = self._buffers["ema_count"], self._buffers["ema_dispersion"]
        assert count is not None
        assert dispersion is not None
        if count.is_inference() or dispersion.is_inference():  # Changes to these leave no mark.
            return self._make_table()
        state = (count.data_ptr(), count._version, dispersion.data_ptr(), dispersion._version)
        if self._running_table is None or self._running_table_of != state:
            # Outside of inference mode: the table must serve a later pass with gradient too.
            with torch.inference_mode(False):
                self._running_table, self._running_table_of = self._make_table(), state
        return self._running_table

    def _check_averages(self, hidden: Tensor) -> None:
        if self._buffers["ema_count"].is_meta and not hidden.is_meta:  # type: ignore[union-attr]  # registered
            raise RuntimeError(
                "the running averages are on the meta device (offloaded by accelerate with offload_buffers=True, perhaps): patch a "
                "model after it is dispatched, or leave buffers where they are"
            )

    @torch.no_grad()
    def _make_table(self) -> Tensor:
        count = self.ema_count.clone()
        dispersion = self.ema_dispersion.to(torch.promote_types(self.ema_dispersion.dtype, torch.float32))
        weights = weights_from_dispersion(dispersion, count > 0, norm=self.norm, eps=self.eps, clip=self.clip)
        return with_unit_row(weights)


def _keep_missing_averages(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A checkpoint of the plain model has no averages: keep ours, so that strict loading works both ways."""
    for name in ("ema_count", "ema_dispersion"):
        state_dict.setdefault(prefix + name, getattr(module, name))
