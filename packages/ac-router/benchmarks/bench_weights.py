"""From tokens and assignments to scaled tokens, against the official formulation written anew: index_reduce for mean and deviation, one row of
weights a token, then the product."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ac_router import ACRouter, feature_weights, scale_tokens
from chapbook_shared.bench import Comparison, compare, main


def official(hidden: Tensor, prev: Tensor) -> Tensor:
    """MAD weights as in the official language models: as many rows as the largest index, no minimum count."""
    clusters = int(prev.max()) + 1
    empty = hidden.new_zeros(clusters, hidden.shape[1])
    mean = empty.index_reduce(0, prev, hidden, "mean", include_self=False)
    deviation = (hidden - mean[prev]).abs()
    spread = empty.index_reduce(0, prev, deviation, "mean", include_self=False)
    weights = 1 / (spread + 1e-4)
    weights = weights.clamp(max=10 * weights.mean())
    return hidden * (weights / weights.mean(0))[prev]


def official_pairwise(hidden: Tensor, prev: Tensor, clusters: int) -> Tensor:
    """The mean distance over all pairs of a cluster, from the tensor of all differences."""
    spread = hidden.new_ones(clusters, hidden.shape[1])
    for k in range(clusters):
        rows = hidden[prev == k]
        if len(rows) > 1:
            spread[k] = (rows[:, None] - rows[None]).abs().sum((0, 1)) / (len(rows) * (len(rows) - 1))
    return hidden * (1 / (spread + 1e-4))[prev]


def ours(hidden: Tensor, prev: Tensor, experts: int, **options) -> Callable[[], Tensor]:
    return lambda: scale_tokens(hidden, feature_weights(hidden, prev, experts, **options), prev[:, None])


def mad(threads: int) -> Iterator[Comparison]:
    torch.set_num_threads(threads)
    for tokens, dim, experts in (
        (256, 256, 8),
        (1024, 64, 8),
        (1024, 256, 16),
        (4096, 256, 16),
        (8192, 512, 16),
        (4096, 1024, 64),
        (8192, 2048, 128),
    ):
        hidden, prev = torch.randn(tokens, dim), torch.randint(0, experts, (tokens,))
        torch.testing.assert_close(ours(hidden, prev, experts)(), official(hidden, prev), rtol=1e-3, atol=1e-3)
        yield compare(
            f"MAD weights and scaling, {tokens} tokens, d={dim}, {experts} experts, {threads} thread{'s'[: threads - 1]}",
            ours=ours(hidden, prev, experts),
            peer=lambda h=hidden, p=prev: official(h, p),
            peer_name="official formulation",
            goal=2.0,
            repeats=int(np.clip(4e7 / hidden.numel(), 15, 300)),
            warmup=5,
        )


def run() -> Iterator[Comparison]:
    torch.manual_seed(0)
    for threads in (2, 1):
        yield from mad(threads)
    pairwise = {"dispersion": "pairwise", "norm": None, "clip": None}
    for tokens, dim in itertools.product((512, 2048), (64,)):
        hidden, prev = torch.randn(tokens, dim), torch.randint(0, 4, (tokens,))
        torch.testing.assert_close(
            ours(hidden, prev, 4, **pairwise)(), official_pairwise(hidden, prev, 4), rtol=1e-3, atol=1e-3
        )
        yield compare(
            f"pairwise weights and scaling, {tokens} tokens, d={dim}, 4 experts, 1 thread",
            ours=ours(hidden, prev, 4, **pairwise),
            peer=lambda h=hidden, p=prev: official_pairwise(h, p, 4),
            peer_name="all pairs",
        )
    for tokens, dim, experts in ((1024, 256, 16), (8192, 512, 16)):
        hidden, prev = torch.randn(tokens, dim), torch.randint(0, experts, (tokens,))
        compiled = torch.compile(
            lambda h, p, e=experts: scale_tokens(h, feature_weights(h, p, e), p[:, None]), fullgraph=True
        )
        yield compare(
            f"compiled weights and scaling, {tokens} tokens, d={dim}, {experts} experts, 1 thread",
            ours=lambda c=compiled, h=hidden, p=prev: c(h, p),
            peer=ours(hidden, prev, experts),
            peer_name="eager",
            repeats=50,
            warmup=5,
        )
    tokens, dim, experts = 4096, 512, 16
    hidden, previous = torch.randn(tokens, dim), torch.rand(tokens, experts).topk(2).indices
    router = ACRouter(dim, experts, 2)
    whole = torch.compile(router, fullgraph=True)

    def step(route: Callable[..., Any]) -> None:
        route(hidden, previous).logits.square().sum().backward()

    yield compare(
        f"compiled router, forward and backward, {tokens} tokens, d={dim}, {experts} experts, 1 thread",
        ours=lambda: step(whole),
        peer=lambda: step(router),
        peer_name="eager",
        repeats=50,
        warmup=5,
    )


if __name__ == "__main__":
    main(run)
