"""`ACRouter`: a top-k router that weighs each token's features by how tight the token's cluster is along them.

z_ij = h_i^T M_k*(i) e_j; the top k over j; gate weights are a softmax over the chosen z (section 2.2). The experts get the unscaled h_i.
Without a previous assignment it is the plain router, exactly.
"""

from typing import Literal, NamedTuple, TypeAlias, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ac_router.adaptive import AdaptiveWeights, RoutingState, Scaling, Stats, WeightOptions
from ac_router.clusters import (
    ProcessGroup,
    check_assignment,
    flatten_assignment,
    full_precision,
    scale_by_table,
    scaled_linear,
    valid_labels,
)
from ac_router.diagnostics import observe
from chapbook_shared.validate import check_choice, check_int, check_positive

Scorer: TypeAlias = Literal["linear", "normalized", "cosine"]


class RouterOutput(NamedTuple):
    """What a router decided for its tokens, flattened to [tokens, ...], as transformers' routers do.

    `logits` [tokens, experts] float32; `weights` [tokens, k] gate weights in the tokens' dtype; `indices` [tokens, k] int64, best first;
    `aux_loss` the load-balancing loss, not yet multiplied by its coefficient; `feature_weights` [previous experts, dim] float32, None
    when the routing was plain or causal. Hand the whole of it to the next layer as `prev`.
    """

    logits: Tensor
    weights: Tensor
    indices: Tensor
    aux_loss: Tensor
    feature_weights: Tensor | None = None


def load_balance_loss(
    logits: Float[Tensor, "tokens experts"],
    indices: Int[Tensor, "tokens k"],
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    per: Literal["token", "assignment"] = "token",
    process_group: ProcessGroup | None = None,
) -> Float[Tensor, ""]:
    """E sum_j f_j P_j (Switch Transformer, eqs. 4-6): f_j the share of tokens that chose j, P_j the mean probability of j.

    P is the softmax of logits / `temperature`. `per="token"` divides the choices by the tokens, as transformers does (perfect balance: k);
    `"assignment"` divides both f and P by tokens times k, as the official code does (perfect balance: 1/k), with temperature 0.3.
    Masked tokens do not count. With a process group, f is global, and the mean of the returned losses over the processes (what
    DDP's averaging of gradients amounts to) is the loss of the whole batch, also when processes hold different numbers of tokens.
    """
    check_positive("temperature", temperature)
    check_choice("per", per, ("token", "assignment"))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    keep = logits.new_ones(logits.shape[0]) if mask is None else mask.reshape(-1).to(logits)
    with torch.no_grad():
        chosen = keep.new_zeros(logits.shape[1]).index_add_(
            0, indices.reshape(-1), keep.repeat_interleave(indices.shape[1])
        )
        totals = torch.cat([chosen, keep.sum()[None]])
        share = 1.0
        if process_group is not None:
            import torch.distributed as dist

            group = None if process_group == "world" else process_group
            dist.all_reduce(totals, group=group)
            share = float(dist.get_world_size(group))
        tokens = totals[-1].clamp(min=1)
    probability = (torch.softmax(logits / temperature, dim=-1) * keep[:, None]).sum(0) * (share / tokens)
    loss = logits.shape[1] * (totals[:-1] / tokens * probability).sum()
    return loss / indices.shape[1] ** 2 if per == "assignment" else loss


class ACRouter(nn.Module):
    """Adaptive Clustering router over `num_experts` experts for tokens of width `dim`.

    `num_experts_prev`: experts of the previous layer, if they differ. `router`: how an expert's row scores a token, `"linear"`,
    `"normalized"` (rows of unit norm, as the official language models) or `"cosine"` (both of unit norm, divided by `cosine_temperature`).
    `norm_topk`: gate weights sum to 1 over the chosen experts. `mix_weights`: weigh by all k previous experts, by their gate weights, not
    only the first. `stat_source`: the statistics are of this layer's tokens, as in the official code, or of the previous layer's, as in
    the paper's notation (`prev_hidden` is then needed). `balance_temperature`: see `load_balance_loss`. All else: see `feature_weights` and
    `AdaptiveWeights`. The mathematics is in float32 whatever the tokens' dtype.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        num_experts_prev: int | None = None,
        router: Scorer = "linear",
        bias: bool = False,
        norm_topk: bool = True,
        mix_weights: bool = False,
        stat_source: Literal["current", "previous"] = "current",
        balance_temperature: float = 1.0,
        cosine_temperature: float = 0.3,
        stats: Stats = "batch",
        **weight_options: Unpack[WeightOptions],
    ):
        super().__init__()
        check_int("dim", dim, minimum=1)
        check_int("num_experts", num_experts, minimum=1)
        check_int("top_k", top_k, minimum=1)
        if top_k > num_experts:
            raise ValueError(f"top_k must be at most num_experts={num_experts}, got {top_k}")
        check_choice("router", router, ("linear", "normalized", "cosine"))
        check_choice("stat_source", stat_source, ("current", "previous"))
        check_positive("balance_temperature", balance_temperature)
        check_positive("cosine_temperature", cosine_temperature)
        if stats == "causal" and (mix_weights or stat_source == "previous"):
            raise ValueError(
                "stats='causal' takes neither mix_weights=True nor stat_source='previous': use stats='batch'"
            )
        self.dim, self.num_experts, self.top_k = dim, num_experts, top_k
        self.router, self.norm_topk, self.mix_weights, self.stat_source = router, norm_topk, mix_weights, stat_source
        self.balance_temperature, self.cosine_temperature = balance_temperature, cosine_temperature
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None
        self.adaptive = AdaptiveWeights(
            dim,
            num_experts if num_experts_prev is None else num_experts_prev,
            stats=stats,
            **weight_options,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.dim**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_experts={self.num_experts}, top_k={self.top_k}, router={self.router!r}"

    def forward(
        self,
        hidden: Float[Tensor, "*tokens dim"],
        prev: Tensor | RouterOutput | None = None,
        *,
        mask: Tensor | None = None,
        prev_weights: Tensor | None = None,
        prev_hidden: Tensor | None = None,
        state: RoutingState | None = None,
        layer: int = 0,
    ) -> RouterOutput:
        """Route tokens of shape [N, dim] or [B, S, dim].

        `prev`: the previous layer's output, or its indices alone ([N], [N, k], [B, S] or [B, S, k]; -1 for a dropped token); None
        routes plainly. `prev_weights`: its gate weights, for `mix_weights`. `mask`: True for the tokens that count in statistics, load
        balance and running average; all are routed. `state`: one `RoutingState` for the whole forward pass, from which `prev` is then
        taken and in which this layer is number `layer`; needed under gradient checkpointing.
        """
        if hidden.shape[-1] != self.dim:
            raise ValueError(
                f"hidden has width {hidden.shape[-1]} (shape {tuple(hidden.shape)}), the router {self.dim}"
            )
        shape = tuple(hidden.shape[:-1])
        tokens = hidden.reshape(-1, self.dim)
        if state is not None:
            if prev is None and (before := state.previous(layer)) is not None:
                prev, prev_weights = before.indices, before.gates
            if mask is None:
                mask = state.mask
        if isinstance(prev, RouterOutput):
            prev_weights = prev.weights if prev_weights is None else prev_weights
            prev = prev.indices
        record = state.record(layer) if state is not None else None

        scaling, flat = None, None
        if prev is not None:
            flat = flatten_assignment(prev, shape)
            complete = check_assignment(flat, self.adaptive.num_clusters)
            gates = None
            if self.mix_weights:
                if prev_weights is None:
                    raise ValueError(
                        "mix_weights=True needs the previous layer's gate weights: pass its RouterOutput, or prev_weights"
                    )
                gates = prev_weights.reshape(-1, prev_weights.shape[-1] if prev_weights.ndim > 1 else 1)
            statistics = None
            if self.stat_source == "previous":
                if prev_hidden is None:
                    raise ValueError(
                        "stat_source='previous' needs the previous layer's router inputs: pass prev_hidden"
                    )
                source = prev_hidden.reshape(-1, self.dim)
                statistics = self.adaptive.statistics(source, valid_labels(flat, mask).to(source.device))
            scaling = self.adaptive.weigh(
                tokens,
                flat,
                gates=gates,
                mask=mask,
                shape=shape if len(shape) == 2 else None,
                record=record,
                statistics=statistics,
                complete=complete,
            )
        logits = self.score(tokens, scaling)
        gate, indices = self.choose(logits)
        gate = gate.to(hidden.dtype)
        if record is not None and record.indices is None:
            record.indices, record.gates = indices, gate.detach()
        process_group = self.adaptive.process_group
        aux_loss = load_balance_loss(
            logits, indices, mask=mask, temperature=self.balance_temperature, process_group=process_group
        )
        weights = None if scaling is None else scaling.weights
        observe(self, logits, indices, flat, weights, mask, plain=lambda: self.score(tokens))
        return RouterOutput(logits, gate, indices, aux_loss, weights)

    def score(
        self, hidden: Float[Tensor, "tokens dim"], scaling: Scaling | None = None
    ) -> Float[Tensor, "tokens experts"]:
        """The logits of tokens as they are, or scaled, in float32 (float64 for float64 tokens)."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        with full_precision(hidden.device):
            weight = self.weight.to(dtype)
            if self.router != "linear":
                weight = F.normalize(weight, dim=-1, eps=1e-4)
            if self.router == "cosine":
                hidden = hidden.to(dtype)
                hidden = hidden if scaling is None else scale_by_table(hidden, scaling.table, scaling.rows)
                logits = F.linear(F.normalize(hidden, dim=-1, eps=1e-4) / self.cosine_temperature, weight)
            elif scaling is None:
                logits = F.linear(hidden.to(dtype), weight)
            else:
                logits = scaled_linear(hidden, scaling.table, scaling.rows, weight)
            return logits if self.bias is None else logits + self.bias.to(dtype)

    def choose(
        self, logits: Float[Tensor, "tokens experts"]
    ) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
        """Gate weights and indices of the k best experts, best first."""
        if self.norm_topk:
            best, indices = torch.topk(logits, self.top_k, dim=-1, sorted=True)
            return torch.softmax(best, dim=-1), indices
        gate, indices = torch.topk(torch.softmax(logits, dim=-1), self.top_k, dim=-1, sorted=True)
        return gate, indices
