"""Adaptive Clustering router: weighs a token's features by how tight its cluster is, without new parameters."""

from ac_router.adaptive import AdaptiveWeights, RoutingState, collect_statistics
from ac_router.clusters import causal_token_weights, feature_weights, scale_tokens, token_weights
from ac_router.diagnostics import diagnostics
from ac_router.moe import ACMoE, ACSoftMoE
from ac_router.patch import load_statistics, patch_model, register_router, statistics_state, unpatch_model
from ac_router.router import ACRouter, RouterOutput, load_balance_loss

__all__ = [
    "feature_weights",
    "token_weights",
    "scale_tokens",
    "causal_token_weights",
    "ACRouter",
    "RouterOutput",
    "RoutingState",
    "AdaptiveWeights",
    "collect_statistics",
    "load_balance_loss",
    "ACMoE",
    "ACSoftMoE",
    "patch_model",
    "unpatch_model",
    "register_router",
    "statistics_state",
    "load_statistics",
    "diagnostics",
]
