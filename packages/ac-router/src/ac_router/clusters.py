"""Adaptive Clustering: feature weights from how tightly each expert's tokens cluster along each feature.

Nielsen, Teo, Abdullaev, Nguyen: Tight Clusters Make Specialized Experts, ICLR 2025 (arXiv 2502.15315).

Symbols   paper    here
          h_i      hidden[i]         input of the router, one token
          k*(i)    prev[i, 0]        the token's top-1 expert in the previous mixture-of-experts layer: its cluster
          C_k, N_k labels == k, statistics.count[k]
          s_qk     statistics.dispersion[k, q]
          M_k      diag(weights[k])
          e_j      the router's weight row of expert j

Unlike a plain router, what a token is routed by depends on the other tokens: the statistics are over the tokens of the call.
All of it is fixed-shape (`num_experts` rows, whatever occurs), without gradient, and in float32 whatever the tokens' dtype (float64
for float64 tokens).
"""

import contextlib
import math
import numbers
import warnings
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from chapbook_shared.validate import check_choice, check_int, check_positive

Dispersion: TypeAlias = Literal["mad", "variance", "pairwise"]
Norm: TypeAlias = Literal["feature", "global", "global_clipped", "cluster"]
# A torch.distributed process group, or "world" for the default one (which survives pickling and copying).
ProcessGroup: TypeAlias = Any

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)

# Tokens are worked through in blocks of a megabyte: the temporaries stay in cache and small next to the tokens.
BLOCK_ELEMENTS = 2**18


class ClusterStatistics(NamedTuple):
    """Valid tokens in each cluster, and their within-cluster dispersion along each feature (0 for an empty cluster)."""

    count: Float[Tensor, "experts"]  # type: ignore[assignment]  # hides tuple.count, which nobody wants here
    dispersion: Float[Tensor, "experts dim"]


def check_rule(
    *, dispersion: Dispersion, norm: Norm | None, eps: float, clip: float | None, min_count: int, process_group: Any
) -> None:
    """Raise ValueError or TypeError for options that `feature_weights` cannot take."""
    check_choice("dispersion", dispersion, ("mad", "variance", "pairwise"))
    check_choice("norm", norm, ("feature", "global", "global_clipped", "cluster", None))
    check_positive("eps", eps)
    if clip is not None and not (isinstance(clip, numbers.Real) and clip >= 1):
        raise ValueError(
            f"clip is a multiple of the mean weight and must be >= 1, or None for no clipping, got {clip!r}"
        )
    check_int("min_count", min_count, minimum=1)
    if dispersion == "pairwise" and process_group is not None:
        raise ValueError("dispersion='pairwise' does not add up over processes: use 'mad', or process_group=None")


def flatten_assignment(prev: Int[Tensor, "..."], token_shape: tuple[int, ...]) -> Int[Tensor, "tokens k"]:
    """Assignments of shape `token_shape` or `token_shape + (k,)`, flattened or not, as [tokens, k].

    Raises ValueError, with both counts, when there is not one assignment a token; TypeError unless `prev` is a tensor of integers.
    """
    if not isinstance(prev, Tensor) or prev.dtype not in INTEGERS:
        found = f"a tensor of {prev.dtype}" if isinstance(prev, Tensor) else type(prev).__name__
        raise TypeError(f"prev must be a tensor of integers, the previous layer's expert indices, got {found}")
    tokens = 1
    for size in token_shape:
        tokens *= size
    own_column = tuple(prev.shape) == token_shape or prev.ndim < 2
    choices = 1 if own_column else prev.shape[-1]
    if choices == 0:
        raise ValueError(
            f"prev has no choice for any token (shape {tuple(prev.shape)}): pass prev=None to route plainly"
        )
    flat = prev if prev.ndim == 2 and not own_column else prev.reshape(-1, choices)
    flat = flat if flat.dtype == torch.int64 else flat.long()
    if flat.shape[0] != tokens:
        raise ValueError(
            f"hidden has {tokens} tokens but prev has assignments for {flat.shape[0]} (shapes {token_shape} + (dim,) and "
            f"{tuple(prev.shape)}): assignments do not carry over where tokens are pruned or merged; pass prev=None there"
        )
    return flat


def check_assignment(prev: Int[Tensor, "*any"], num_experts: int, *, check: bool | None = None) -> bool:
    """Raise ValueError for an expert index outside [0, num_experts) that is not -1 (no expert); whether there is known to be no -1.

    `check=None` looks at the values only where that costs no synchronisation: on the CPU and not under `torch.compile`.
    """
    if check is None:
        check = prev.device.type == "cpu" and not torch.compiler.is_compiling()
    if check and prev.numel():
        low, high = (int(bound) for bound in torch.aminmax(prev))
        if low < -1 or high >= num_experts:
            raise ValueError(
                f"prev holds expert indices from {low} to {high}, but must lie in [0, {num_experts}), or be -1 for a token that no "
                "expert took (pass the previous layer's number of experts if it differs)"
            )
        return low >= 0
    return False


@torch.no_grad()
def cluster_statistics(
    hidden: Float[Tensor, "tokens dim"],
    labels: Int[Tensor, "tokens"],
    num_experts: int,
    *,
    dispersion: Dispersion = "mad",
    process_group: ProcessGroup | None = None,
) -> ClusterStatistics:
    """N_k and s_qk over the tokens with a label in [0, num_experts); all others do not count.

    `"mad"`: 1/N_k sum |h_iq - mu_qk| (section 2.2); `"variance"`: the same with squares, two-pass; `"pairwise"`: the mean of
    |h_iq - h_jq| over pairs of different members, of which MAD is the cheap stand-in, by sorting: O(N log N), not O(N^2).
    Tokens with a NaN or an infinity do not count either (with a warning where that is seen for free).
    With a process group, sums go over all its processes, whatever their numbers of tokens.
    """
    hidden = hidden.detach()
    accumulate = torch.promote_types(hidden.dtype, torch.float32)
    # Row `num_experts` of all sums takes the tokens that do not count, and is dropped at the end.
    labels = torch.where((labels >= 0) & (labels < num_experts), labels, num_experts)
    reactive = hidden.device.type == "cpu" and not torch.compiler.is_compiling()
    if not reactive:  # Looking first would synchronise the device, or break the graph.
        labels = torch.where(_finite_rows(hidden), labels, num_experts)
    sums = _sums(hidden, labels, num_experts, accumulate)
    if reactive and not _all_finite(sums[:-1]):
        finite = _finite_rows(hidden)
        if not bool(finite[labels < num_experts].all()):
            warnings.warn("tokens with NaN or infinite features are left out of the cluster statistics", stacklevel=2)
            labels = torch.where(finite, labels, num_experts)
        else:
            accumulate = torch.float64  # Finite tokens whose sum overflowed.
        sums = _sums(hidden, labels, num_experts, accumulate)

    count = torch.zeros(num_experts + 1, dtype=torch.int64, device=hidden.device)
    count = count.index_add_(0, labels, torch.ones_like(labels)).to(accumulate)
    if process_group is not None:
        both = _all_reduce(torch.cat([sums, count[:, None]], dim=1), process_group)
        sums, count = both[:, :-1], both[:, -1]
    members = count.clamp(min=1)[:, None]
    mean = sums / members
    if dispersion == "pairwise":
        spread = _pairwise_sums(hidden, labels, mean, count) / (members * (members - 1) / 2).clamp(min=1)
    else:
        deviations = _deviation_sums(hidden, labels, mean, squared=dispersion == "variance")
        if reactive and not _all_finite(deviations[:-1]):  # Overflowed.
            deviations = _deviation_sums(hidden, labels, mean.double(), squared=dispersion == "variance")
        if process_group is not None:
            deviations = _all_reduce(deviations, process_group)
        spread = deviations / members
    result = torch.promote_types(hidden.dtype, torch.float32)
    # Finite, so that 1 / dispersion is not 0.
    return ClusterStatistics(count[:-1].to(result), spread[:-1].clamp(max=torch.finfo(result).max).to(result))


@torch.no_grad()
def weights_from_dispersion(
    dispersion: Float[Tensor, "*batch experts dim"],
    eligible: Bool[Tensor, "*batch experts"],
    *,
    norm: Norm | None = "feature",
    eps: float = 1e-4,
    clip: float | None = 10.0,
) -> Float[Tensor, "*batch experts dim"]:
    """The diagonals of M_k: w = 1/(s + eps), clipped at `clip` times the mean weight, then normalised.

    Clusters that are not eligible have weight exactly 1 and take no part in any mean. `norm`: `"feature"` makes each feature's
    weights average 1 over the clusters, `"cluster"` each cluster's over its features, `"global"` divides by the mean before clipping,
    `"global_clipped"` by the mean after it.
    """
    chosen = eligible[..., None]
    clusters = eligible.sum(-1)[..., None, None].clamp(min=1)
    weights = torch.where(chosen, 1 / (dispersion + eps), 0.0)

    def mean(values: Tensor) -> Tensor:
        """Of each feature, over the eligible clusters."""
        return values.sum(-2, keepdim=True) / clusters

    overall = mean(weights).mean(-1, keepdim=True)
    if clip is not None:
        weights = torch.minimum(weights, clip * overall)
    if norm == "feature":
        weights = weights / mean(weights)
    elif norm == "global":
        weights = weights / overall
    elif norm == "global_clipped":
        weights = weights / mean(weights).mean(-1, keepdim=True)
    elif norm == "cluster":
        weights = weights / weights.mean(-1, keepdim=True)
    return torch.where(chosen, weights, 1.0)


def eligible_clusters(
    count: Float[Tensor, "experts"], *, min_count: int, official_compat: bool
) -> Bool[Tensor, "experts"]:
    """Which clusters take part: those with `min_count` valid tokens.

    The official code takes every row up to the last expert that occurs, empty ones (dispersion 0, weight 1/eps) included.
    """
    if official_compat:
        return count.flip(0).cumsum(0).flip(0) > 0
    return count >= min_count


@torch.no_grad()
def feature_weights(
    hidden: Float[Tensor, "*tokens dim"],
    prev: Int[Tensor, "..."],
    num_experts: int,
    *,
    dispersion: Dispersion = "mad",
    norm: Norm | None = "feature",
    eps: float = 1e-4,
    clip: float | None = 10.0,
    min_count: int = 2,
    mask: Tensor | None = None,
    process_group: ProcessGroup | None = None,
    official_compat: bool = False,
    check: bool | None = None,
) -> Float[Tensor, "{num_experts} dim"]:
    """Feature weights of every cluster: the diagonals of M_k (section 2.3 of the paper's appendix and code), without gradient.

    `hidden`: the inputs of this layer's router. `prev`: the previous layer's expert indices, [N], [N, k], [B, S] or [B, S, k] (the
    first of k counts); -1 for a token that no expert took. `num_experts`: of the previous layer. `mask`: True (or non-zero) for the
    tokens that count. A cluster with fewer than `min_count` valid tokens gets weight 1 and stays out of all means.
    `process_group`: statistics over all its processes (two small all-reduces); `"world"` is the default group.
    `official_compat` counts clusters as the official code does, whose weights collapse when a cluster is empty; `min_count` is then
    ignored. `check`: look for invalid indices (default: only where it costs no device synchronisation).

    Returns float32 (float64 for float64 tokens), finite, [num_experts, dim].
    """
    check_rule(dispersion=dispersion, norm=norm, eps=eps, clip=clip, min_count=min_count, process_group=process_group)
    check_int("num_experts", num_experts, minimum=1)
    flat = flatten_assignment(prev, tuple(hidden.shape[:-1]))
    check_assignment(flat, num_experts, check=check)
    labels = valid_labels(flat, mask)
    tokens = hidden.reshape(-1, hidden.shape[-1])
    count, spread = cluster_statistics(
        tokens, labels.to(tokens.device), num_experts, dispersion=dispersion, process_group=process_group
    )
    eligible = eligible_clusters(count, min_count=min_count, official_compat=official_compat)
    return weights_from_dispersion(spread, eligible, norm=norm, eps=eps, clip=clip)


def valid_labels(prev: Int[Tensor, "tokens k"], mask: Tensor | None) -> Int[Tensor, "tokens"]:
    """The top-1 column, with -1 where the mask is False."""
    labels = prev[:, 0]
    if mask is None:
        return labels
    keep = mask.reshape(-1).to(device=labels.device, dtype=torch.bool)
    if keep.shape != labels.shape:
        raise ValueError(
            f"mask has {keep.numel()} entries (shape {tuple(mask.shape)}) but there are {labels.numel()} tokens"
        )
    return torch.where(keep, labels, -1)


def _all_finite(values: Tensor) -> bool:
    """Whether the sum is finite: cheaper than looking at each, and a false alarm costs a second look only."""
    return math.isfinite(float(values.sum()))


def _finite_rows(hidden: Float[Tensor, "tokens dim"]) -> Bool[Tensor, "tokens"]:
    return torch.isfinite(torch.linalg.vector_norm(hidden, ord=float("inf"), dim=1))


def _blocks(hidden: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    # The compiler fuses the block's steps itself, and unrolls this loop if there is one.
    rows = max(1, hidden.shape[0] if torch.compiler.is_compiling() else BLOCK_ELEMENTS // max(1, hidden.shape[1]))
    return list(zip(*(tensor.split(rows) for tensor in (hidden, *others)), strict=True))


def _sums(hidden: Tensor, labels: Tensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    sums = torch.zeros(num_experts + 1, hidden.shape[1], dtype=dtype, device=hidden.device)
    for block, label in _blocks(hidden, labels):
        sums.index_add_(0, label, block.to(dtype))
    return sums


def _deviation_sums(hidden: Tensor, labels: Tensor, mean: Tensor, *, squared: bool) -> Tensor:
    sums = torch.zeros_like(mean)
    for block, label in _blocks(hidden, labels):
        deviation = mean.index_select(0, label).sub_(block)  # In place, and its sign does not matter.
        sums.index_add_(0, label, deviation.square_() if squared else deviation.abs_())
    return sums


def _pairwise_sums(hidden: Tensor, labels: Tensor, mean: Tensor, count: Tensor) -> Tensor:
    """Sum of |h_i - h_j| over the pairs of members: in sorted order, member r (from 0) of n enters 2r - n + 1 times."""
    tokens = hidden.shape[0]
    # float64: the coefficients reach the number of tokens, and the terms nearly cancel.
    values, by_value = (hidden - mean.index_select(0, labels)).double().sort(dim=0)
    sorted_labels, by_cluster = labels[by_value].sort(dim=0, stable=True)
    values = values.gather(0, by_cluster)
    sizes = count.double()
    starts = sizes.cumsum(0) - sizes
    position = torch.arange(tokens, device=hidden.device, dtype=torch.float64)[:, None]
    entering = 2 * (position - starts[sorted_labels]) - sizes[sorted_labels] + 1
    sums = torch.zeros_like(mean, dtype=torch.float64)
    return sums.scatter_add_(0, sorted_labels, entering * values)


def _all_reduce(values: Tensor, process_group: ProcessGroup) -> Tensor:
    import torch.distributed as dist

    values = values.double().contiguous()  # The same dtype in every process, whatever each had to accumulate in.
    dist.all_reduce(values, group=None if process_group == "world" else process_group)
    return values


@torch.no_grad()
def causal_token_weights(
    hidden: Float[Tensor, "batch length dim"],
    prev: Int[Tensor, "..."],
    num_experts: int,
    *,
    norm: Norm | None = "feature",
    dispersion: Dispersion = "mad",
    eps: float = 1e-4,
    clip: float | None = 10.0,
    min_count: int = 2,
    mask: Tensor | None = None,
) -> Float[Tensor, "batch length dim"]:
    """Each token's weights from its own sequence up to and with itself: no other sequence, nothing later.

    Token t's row is `feature_weights(hidden[b, : t + 1], prev[b, : t + 1], ...)[prev[b, t]]`, exactly. O(length^2) work.
    """
    check_rule(dispersion=dispersion, norm=norm, eps=eps, clip=clip, min_count=min_count, process_group=None)
    if dispersion == "pairwise":
        raise ValueError("dispersion='pairwise' has no causal form here: use 'mad' or 'variance'")
    batch, length, dim = hidden.shape
    flat = flatten_assignment(prev, (batch, length))
    check_assignment(flat, num_experts)
    tokens = hidden.detach().to(torch.promote_types(hidden.dtype, torch.float32))
    finite = _finite_rows(tokens.reshape(-1, dim))
    labels = torch.where(finite, valid_labels(flat, mask).to(hidden.device), -1).reshape(batch, length)
    tokens = torch.where(finite.reshape(batch, length, 1), tokens, tokens.new_zeros(()))
    labels = torch.where((labels >= 0) & (labels < num_experts), labels, -1)
    count = tokens.new_zeros(batch, num_experts)
    spread = tokens.new_zeros(batch, num_experts, dim)
    rows = torch.arange(batch, device=hidden.device)
    result = torch.ones_like(tokens)
    for t in range(length):  # Only the cluster that token t joins changes.
        here = labels[:, t]
        known = here >= 0
        own = here.clamp(min=0)
        past = tokens[:, : t + 1]
        same = ((labels[:, : t + 1] == here[:, None]) & known[:, None]).to(tokens.dtype)
        members = same.sum(1).clamp(min=1)[:, None]
        deviation = past - ((same[:, :, None] * past).sum(1) / members)[:, None]
        deviation = deviation.square_() if dispersion == "variance" else deviation.abs_()
        updated = (same[:, :, None] * deviation).sum(1) / members
        spread[rows, own] = torch.where(known[:, None], updated, spread[rows, own])
        count[rows, own] += known.to(count.dtype)
        weights = weights_from_dispersion(spread, count >= min_count, norm=norm, eps=eps, clip=clip)
        result[:, t] = torch.where(known[:, None], weights[rows, own], result[:, t])
    return result


def token_weights(
    weights: Float[Tensor, "experts dim"],
    prev: Int[Tensor, "tokens k"],
    gates: Float[Tensor, "tokens k"] | None = None,
) -> Float[Tensor, "tokens dim"]:
    """Every token's row of weights: its cluster's, or, with the previous layer's `gates`, sum_r g_ir W[k_r(i)] over its k experts.

    A token with index -1 has weight 1 (for that share).
    """
    table = with_unit_row(weights)
    return _rows(table, mixing(prev, weights.shape[0], gates, table))


def scale_tokens(
    hidden: Float[Tensor, "tokens dim"],
    weights: Float[Tensor, "experts dim"],
    prev: Int[Tensor, "tokens k"],
    gates: Float[Tensor, "tokens k"] | None = None,
) -> Float[Tensor, "tokens dim"]:
    """h_i M_k*(i), in the dtype of `hidden`. Gradient goes to `hidden` alone, itself scaled; one copy of the tokens is made."""
    table = with_unit_row(weights)
    return scale_by_table(hidden, table, mixing(prev, weights.shape[0], gates, table))


def with_unit_row(weights: Float[Tensor, "experts dim"]) -> Float[Tensor, "experts_and_one dim"]:
    """The weights with a last row of ones, which index -1 refers to."""
    return torch.cat([weights, weights.new_ones(1, weights.shape[1])])


def mixing(prev: Tensor, num_experts: int, gates: Tensor | None, table: Tensor, *, complete: bool = False) -> Tensor:
    """Which row of the table each token takes: [tokens] indices, or with gates the [tokens, experts + 1] shares of the rows.

    `complete`: all indices are known to be of experts. Few operations then, as every generated token pays for them in every layer.
    """
    if gates is None:
        prev = prev.select(1, 0)
    index = prev if complete else torch.where((prev >= 0) & (prev < num_experts), prev, num_experts)
    if gates is None:
        return index
    if gates.shape != prev.shape:
        raise ValueError(
            f"the previous layer's gate weights have shape {tuple(gates.shape)}, its indices {tuple(prev.shape)}: they must agree"
        )
    share = table.new_zeros(prev.shape[0], num_experts + 1)
    return share.scatter_add_(1, index, gates.detach().to(share.dtype))


def scale_by_table(hidden: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """`hidden` times each token's row of `table`, see `mixing`."""
    if torch.compiler.is_compiling():
        return (hidden * _rows(table, rows)).to(hidden.dtype)
    if torch.is_grad_enabled() and hidden.requires_grad:
        scaled: Tensor = _Scale.apply(hidden, table, rows)
        return scaled
    return _scale(hidden, table, rows)


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """No autocast: routing is decided in float32."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device_type=device.type, enabled=False)
    return contextlib.nullcontext()


def _rows(table: Tensor, rows: Tensor) -> Tensor:
    if rows.ndim == 1:
        return table.index_select(0, rows)
    with full_precision(table.device):
        return rows @ table


def _scale(hidden: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    if hidden.numel() <= BLOCK_ELEMENTS:
        scaled = hidden * _rows(table, rows)
        return scaled if scaled.dtype == hidden.dtype else scaled.to(hidden.dtype)
    scaled = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    for block, row, out in _blocks(hidden, rows, scaled):
        torch.mul(block, _rows(table, row), out=out)
    return scaled


class _Scale(torch.autograd.Function):
    """Keeps for backward the small table and the indices, not one more copy of the tokens."""

    @staticmethod
    def forward(hidden: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        return _scale(hidden, table, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        table, rows = ctx.saved_tensors
        # Through the public function: differentiable again.
        return scale_by_table(grad, table, rows), None, None


def scaled_linear(
    hidden: Float[Tensor, "tokens dim"],
    table: Float[Tensor, "any dim"],
    rows: Tensor,
    weight: Float[Tensor, "experts dim"],
) -> Float[Tensor, "tokens experts"]:
    """`scale_by_table(hidden, table, rows) @ weight.T` in the dtype of `weight`, without ever holding all the scaled tokens."""
    if torch.compiler.is_compiling():
        return F.linear((hidden * _rows(table, rows)).to(weight.dtype), weight)
    logits: Tensor = _ScaledLinear.apply(hidden, table, rows, weight)
    return logits


class _ScaledLinear(torch.autograd.Function):
    """Scales blocks of tokens again in backward, rather than keep a copy of them all."""

    @staticmethod
    def forward(hidden: Tensor, table: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        logits = weight.new_empty(hidden.shape[0], weight.shape[0])
        for block, row, out in _blocks(hidden, rows, logits):
            torch.mm((block * _rows(table, row)).to(weight.dtype), weight.T, out=out)
        return logits

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        hidden, table, rows, weight = ctx.saved_tensors
        for_hidden, for_weight = None, None
        with full_precision(hidden.device):
            if torch.is_grad_enabled():  # Someone wants to differentiate again.
                each = _rows(table, rows)
                for_hidden = ((grad @ weight) * each).to(hidden.dtype)
                for_weight = grad.T @ (hidden * each).to(weight.dtype)
                return for_hidden, None, None, for_weight
            if ctx.needs_input_grad[0]:
                for_hidden = torch.empty_like(hidden)
                for out, row, block in _blocks(for_hidden, rows, grad):
                    torch.mul(block @ weight, _rows(table, row), out=out)
            if ctx.needs_input_grad[3]:
                for_weight = torch.zeros_like(weight)
                for block, row, block_grad in _blocks(hidden, rows, grad):
                    for_weight.addmm_(block_grad.T, (block * _rows(table, row)).to(weight.dtype))
        return for_hidden, None, None, for_weight
