"""`ACMoE`: a ready mixture-of-experts layer around an `ACRouter`: tokens sorted by expert, one grouped product a weight.

`ACSoftMoE`: Adaptive Clustering for SoftMoE (Puigcerver et al. 2024), where a token goes to every slot a little.
"""

from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ac_router.adaptive import AdaptiveWeights, RoutingState, Stats, WeightOptions
from ac_router.clusters import check_assignment, flatten_assignment, full_precision, scale_by_table
from ac_router.diagnostics import observe
from ac_router.router import ACRouter, RouterOutput, load_balance_loss
from chapbook_shared.validate import check_choice, check_int


class Experts(nn.Module):
    """`num_experts` feed-forward networks: `"swiglu"`, W_down(silu(W_gate x) * W_up x), or `"mlp"`, W_down gelu(W_up x)."""

    def __init__(self, dim: int, ffn_dim: int, num_experts: int, expert: Literal["swiglu", "mlp"] = "swiglu"):
        super().__init__()
        check_int("ffn_dim", ffn_dim, minimum=1)
        check_choice("expert", expert, ("swiglu", "mlp"))
        self.dim, self.ffn_dim, self.num_experts, self.expert = dim, ffn_dim, num_experts, expert
        self.up = nn.Parameter(torch.empty(num_experts, 2 * ffn_dim if expert == "swiglu" else ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, ffn_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.up, -(self.dim**-0.5), self.dim**-0.5)
        nn.init.uniform_(self.down, -(self.ffn_dim**-0.5), self.ffn_dim**-0.5)

    def forward(self, rows: Float[Tensor, "rows dim"], sizes: Int[Tensor, "experts"]) -> Float[Tensor, "rows dim"]:
        """Rows sorted by expert, `sizes` of them for each."""
        return grouped_linear(self.activate(grouped_linear(rows, self.up, sizes)), self.down, sizes)

    def batched(self, slots: Float[Tensor, "batch experts slots dim"]) -> Float[Tensor, "batch experts slots dim"]:
        """The same number of rows for every expert."""
        inner = self.activate(torch.einsum("bend,efd->benf", slots, self.up))
        return torch.einsum("benf,edf->bend", inner, self.down)

    def activate(self, inner: Tensor) -> Tensor:
        if self.expert == "mlp":
            return F.gelu(inner)
        gate, up = inner.chunk(2, dim=-1)
        return F.silu(gate) * up


def grouped_linear(
    rows: Float[Tensor, "rows inner"], weight: Float[Tensor, "experts outer inner"], sizes: Int[Tensor, "experts"]
) -> Float[Tensor, "rows outer"]:
    """Row r times the transposed weight of the expert whose group it lies in.

    One grouped kernel on an accelerator and in compiled code, where torch has one that takes these sizes (16-byte rows); else one product an expert.
    """
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows, weight = rows.to(dtype), weight.to(dtype)
    aligned = all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
    takes = aligned and rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
    suits = torch.compiler.is_compiling() or (kind != "cpu" and rows.dtype == torch.bfloat16)
    if hasattr(F, "grouped_mm") and takes and suits:
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=sizes.cumsum(0).to(torch.int32))
    groups = rows.split(sizes.tolist())
    return torch.cat([F.linear(group, w) for group, w in zip(groups, weight.unbind(0), strict=True)])


class ACMoE(nn.Module):
    """Mixture of `num_experts` feed-forward experts, `top_k` a token, routed by Adaptive Clustering.

    `router`: an `ACRouter` of your own (of this width and number of experts), or None for one made from `router_options`.
    """

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        expert: Literal["swiglu", "mlp"] = "swiglu",
        router: ACRouter | None = None,
        **router_options: Any,
    ):
        super().__init__()
        if router is None:
            router = ACRouter(dim, num_experts, top_k, **router_options)
        elif router_options:
            raise ValueError(f"give router, or options for one, not both: got {', '.join(sorted(router_options))}")
        if (router.dim, router.num_experts) != (dim, num_experts):
            raise ValueError(
                f"the router is for {router.num_experts} experts and width {router.dim}, the layer for {num_experts} and {dim}"
            )
        self.router = router
        self.experts = Experts(dim, ffn_dim, num_experts, expert)

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
    ) -> tuple[Float[Tensor, "*tokens dim"], RouterOutput]:
        """The layer's output, in the shape of `hidden`, and the routing, to be handed to the next layer as `prev`."""
        routing = self.router(
            hidden,
            prev,
            mask=mask,
            prev_weights=prev_weights,
            prev_hidden=prev_hidden,
            state=state,
            layer=layer,
        )
        tokens, k = routing.indices.shape
        chosen = routing.indices.reshape(-1)
        order = chosen.argsort(stable=True)
        sizes = torch.zeros(self.experts.num_experts, dtype=torch.int64, device=chosen.device)
        sizes = sizes.index_add_(0, chosen, torch.ones_like(chosen))
        rows = hidden.reshape(tokens, hidden.shape[-1]).index_select(0, order // k)
        outputs = self.experts(rows, sizes)
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(tokens * k, device=order.device))
        outputs = outputs.index_select(0, back).reshape(tokens, k, hidden.shape[-1])
        mixed = (outputs * routing.weights[..., None].to(outputs.dtype)).sum(1)
        return mixed.to(hidden.dtype).reshape(hidden.shape), routing


class ACSoftMoE(nn.Module):
    """SoftMoE with Adaptive Clustering: the router's tokens are scaled by weights mixed over the previous layer's experts.

    Every slot takes a softmax-weighted mean of a sequence's tokens, every token a softmax-weighted mean of the slots' outputs. A token's
    assignment is its `mix_over` experts of largest combine weight (summed over the expert's slots), the first of them its cluster. The
    defaults are the official code's: eps 0.35, clip 5, global norm after clipping, mixed over 8. `normalize`: route by tokens and slots
    of unit norm, with SoftMoE's own learned `scale`; the statistics are of these tokens. The experts get the tokens as they are.
    A token depends on its whole sequence here, with or without Adaptive Clustering: not for autoregressive models.
    """

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        num_experts: int,
        slots_per_expert: int = 1,
        *,
        mix_over: int = 8,
        normalize: bool = True,
        expert: Literal["swiglu", "mlp"] = "mlp",
        num_experts_prev: int | None = None,
        stats: Stats = "batch",
        **weight_options: Unpack[WeightOptions],
    ):
        super().__init__()
        check_int("num_experts", num_experts, minimum=1)
        check_int("slots_per_expert", slots_per_expert, minimum=1)
        check_int("mix_over", mix_over, minimum=1)
        self.dim, self.num_experts, self.slots_per_expert = dim, num_experts, slots_per_expert
        self.mix_over = min(mix_over, num_experts)
        self.slots = nn.Parameter(torch.randn(num_experts * slots_per_expert, dim) * dim**-0.5)
        self.scale = nn.Parameter(torch.ones(())) if normalize else None
        self.experts = Experts(dim, ffn_dim, num_experts, expert)
        options: WeightOptions = {"eps": 0.35, "clip": 5.0, "norm": "global_clipped", **weight_options}
        if stats == "causal":
            raise ValueError(
                "SoftMoE mixes whole sequences, so stats='causal' would promise too much: use 'batch' or 'ema'"
            )
        clusters = num_experts if num_experts_prev is None else num_experts_prev
        self.adaptive = AdaptiveWeights(dim, clusters, stats=stats, **options)

    def forward(
        self,
        hidden: Float[Tensor, "batch length dim"],
        prev: RouterOutput | None = None,
        *,
        mask: Tensor | None = None,
        state: RoutingState | None = None,
        layer: int = 0,
    ) -> tuple[Float[Tensor, "batch length dim"], RouterOutput]:
        """The layer's output and its routing; `routing.weights` are the combine weights of the `mix_over` chosen experts, made to sum to 1.

        `mask` [batch, length]: tokens where it is False reach no slot.
        """
        if hidden.shape[-1] != self.dim:
            raise ValueError(f"hidden has width {hidden.shape[-1]}, the layer {self.dim}")
        batch, length, dim = hidden.shape
        tokens = hidden.reshape(-1, dim).to(torch.promote_types(hidden.dtype, torch.float32))
        if self.scale is not None:
            tokens = F.normalize(tokens, dim=-1)
        record = state.record(layer) if state is not None else None
        indices = gates = None
        if prev is not None:
            indices, gates = prev.indices, prev.weights
        elif state is not None and (before := state.previous(layer)) is not None:
            indices, gates = before.indices, before.gates
        scaled, weights, flat = tokens, None, None
        if indices is not None:
            flat = flatten_assignment(indices, (batch, length))
            check_assignment(flat, self.adaptive.num_clusters)
            scaling = self.adaptive.weigh(tokens, flat, gates=gates, mask=mask, record=record)
            scaled, weights = scale_by_table(tokens, scaling.table, scaling.rows), scaling.weights

        logits = self._score(scaled).reshape(batch, length, -1)
        dispatch_logits = logits
        if mask is not None:
            keep = mask.reshape(batch, length, 1).to(device=logits.device, dtype=torch.bool)
            # Finite: a sequence that is masked altogether must not become NaN.
            dispatch_logits = logits.masked_fill(~keep, torch.finfo(logits.dtype).min)
        dispatch = dispatch_logits.softmax(dim=1).to(hidden.dtype)
        combine = logits.softmax(dim=2)
        slots = (dispatch.transpose(1, 2) @ hidden).reshape(batch, self.num_experts, self.slots_per_expert, dim)
        outputs = self.experts.batched(slots).reshape(batch, -1, dim)
        mixed = combine.to(outputs.dtype) @ outputs

        share = combine.reshape(batch * length, self.num_experts, self.slots_per_expert).sum(-1)
        gate, chosen = share.topk(self.mix_over, dim=-1, sorted=True)
        gate = (gate / gate.sum(-1, keepdim=True)).to(hidden.dtype)
        if record is not None and record.indices is None:
            record.indices, record.gates = chosen, gate.detach()
        expert_logits = logits.reshape(batch * length, self.num_experts, -1).logsumexp(-1)
        observe(self, expert_logits, chosen, flat, weights, mask, plain=lambda: self._expert_logits(tokens))
        loss = load_balance_loss(expert_logits, chosen[:, :1], mask=mask)
        return mixed.to(hidden.dtype), RouterOutput(expert_logits, gate, chosen, loss, weights)

    def _score(self, tokens: Tensor) -> Tensor:
        with full_precision(tokens.device):
            slots = self.slots.to(tokens.dtype)
            if self.scale is not None:
                slots = self.scale.to(tokens.dtype) * F.normalize(slots, dim=-1)
            return F.linear(tokens, slots)

    def _expert_logits(self, tokens: Tensor) -> Tensor:
        return self._score(tokens).reshape(len(tokens), self.num_experts, -1).logsumexp(-1)
