"""What Adaptive Clustering adds to the training step of a mixture-of-experts block: time and peak memory.

The time is that of what is added (statistics, weights, scaled tokens, and their backward), against the whole plain step: the difference of two
steps of seconds would drown in noise.
"""

import resource
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from ac_router import ACMoE, feature_weights, scale_tokens
from chapbook_shared.bench import Comparison, main


def median_ms(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run() -> Iterator[Comparison]:
    torch.set_num_threads(1)  # Compares work, not how a busy machine schedules threads.
    torch.manual_seed(0)
    # First, while the process's peak is still low.
    tokens, dim, experts = 131072, 512, 16
    hidden = torch.randn(tokens, dim, requires_grad=True)
    prev = torch.randint(0, experts, (tokens, 1))
    weight = torch.randn(experts, dim, requires_grad=True)

    def tokens_of(adaptive: bool) -> torch.Tensor:
        return scale_tokens(hidden, feature_weights(hidden, prev, experts), prev) if adaptive else hidden

    def route(adaptive: bool) -> None:
        # No name for the scaled tokens: as in a model, only the router's product keeps them.
        (tokens_of(adaptive) @ weight.T).square().sum().backward()
        hidden.grad = weight.grad = None

    small, few = torch.randn(64, dim), prev[:64]
    scale_tokens(
        small, feature_weights(small, few, experts), few
    )  # The library's code counts as memory once it is loaded.
    for _ in range(2):  # The first pass also pays for buffers that stay.
        route(adaptive=False)
    plain = peak_bytes()
    route(adaptive=True)
    copies = round((peak_bytes() - plain) / (tokens * dim * 4), 2)  # Finer than the allocator is.
    yield Comparison(
        f"extra peak memory of a router's forward and backward, {tokens} tokens, d={dim}, in copies of the tokens",
        copies,
        goal=1.0,
        unit="copies",
    )
    del hidden, prev

    for tokens, dim, ffn, experts in (
        (4096, 256, 1024, 16),
        (2048, 512, 2048, 16),
        (1024, 1024, 4096, 16),
        (512, 2048, 4096, 16),
    ):
        block = ACMoE(dim, ffn, experts, 2)
        hidden = torch.randn(tokens, dim, requires_grad=True)
        prev = torch.randint(0, experts, (tokens, 1))
        gradient = torch.randn(tokens, dim)

        def step(block=block, hidden=hidden) -> None:
            output, routing = block(hidden)
            (output.square().mean() + 0.01 * routing.aux_loss).backward()
            block.zero_grad()

        def added(hidden=hidden, prev=prev, experts=experts, gradient=gradient) -> None:
            scale_tokens(hidden, feature_weights(hidden, prev, experts), prev).backward(gradient)

        whole = median_ms(step, 2)
        extra = median_ms(added, 7)
        yield Comparison(
            f"AC's share of a block's training step ({whole:.0f} ms), {tokens} tokens, d={dim}, ffn {ffn}, {experts} experts, top 2",
            100 * extra / whole,
            goal=3.0 if dim >= 512 else None,
            unit="%",
        )


if __name__ == "__main__":
    main(run)
