"""Adaptive Clustering router: weighs a token's features by how tight its cluster is, without new parameters."""

from ac_router.clusters import causal_token_weights, feature_weights, scale_tokens, token_weights

__all__ = ["causal_token_weights", "feature_weights", "scale_tokens", "token_weights"]
