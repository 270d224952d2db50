"""`python -m ac_router.bench`: what Adaptive Clustering adds to a mixture-of-experts block's training step, in time and peak memory.

The time is that of the router's forward and backward with a previous assignment minus without, pass by pass in turns, against the whole
plain step: the difference of two steps of seconds would drown in noise. CPU time of one thread.
"""

import resource
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from ac_router import ACMoE, ACRouter, feature_weights, scale_tokens
from chapbook_shared.bench import Comparison, main


def milliseconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory() -> Iterator[Comparison]:
    """From the process's peak, which only grows: what needs least comes first."""
    tokens, dim, experts = 131072, 512, 16
    hidden = torch.randn(tokens, dim, requires_grad=True)
    prev = torch.randint(0, experts, (tokens, 1))
    router = ACRouter(dim, experts, 2)

    def route(previous: torch.Tensor | None) -> None:
        router(hidden, previous).logits.square().sum().backward()
        hidden.grad = router.weight.grad = None

    def scale_then_route() -> None:
        # No name for the scaled tokens: as in a model, only the router's product keeps them.
        router(scale_tokens(hidden, feature_weights(hidden, prev, experts), prev)).logits.square().sum().backward()
        hidden.grad = router.weight.grad = None

    few = torch.randn(64, dim)
    router(few, router(few))  # The library's code counts as memory once it is loaded.
    for _ in range(3):  # The first passes also pay for buffers that stay.
        route(None)
    for name, call in (
        ("ACRouter", lambda: route(prev)),
        ("scaled tokens handed to another router, as patch_model does", scale_then_route),
    ):
        before = peak_bytes()
        call()
        copies = (peak_bytes() - before) / hidden.nbytes
        yield Comparison(
            f"extra peak memory over a plain router, {name}, {tokens} tokens, d={dim}",
            round(copies, 3),
            goal=1.0,
            unit="copies of the tokens",
        )


def share_of_step(tokens: int, dim: int, ffn: int, experts: int) -> Comparison:
    block = ACMoE(dim, ffn, experts, 2)
    hidden = torch.randn(tokens, dim, requires_grad=True)
    prev = torch.randint(0, experts, (tokens, 2))
    gradient = torch.randn(tokens, experts)

    def step() -> None:
        output, routing = block(hidden)
        (output.square().mean() + 0.01 * routing.aux_loss).backward()
        block.zero_grad()

    def plain() -> None:
        block.router(hidden).logits.backward(gradient)

    def adaptive() -> None:
        block.router(hidden, prev).logits.backward(gradient)

    step()
    whole = statistics.median(milliseconds(step) for _ in range(3))
    extra = statistics.median(milliseconds(adaptive) - milliseconds(plain) for _ in range(60))
    return Comparison(
        f"AC's share of a block's training step ({whole:.0f} ms), {tokens} tokens, d={dim}, ffn {ffn}, {experts} experts, top 2",
        100 * extra / whole,
        goal=3.0 if dim >= 512 else None,
        unit="%",
    )


def run() -> Iterator[Comparison]:
    torch.set_num_threads(1)  # Compares work, not how a busy machine schedules threads.
    torch.manual_seed(0)
    yield from memory()
    for tokens, dim, ffn in ((4096, 256, 1024), (2048, 512, 2048), (1024, 1024, 4096), (1024, 2048, 4096)):
        yield share_of_step(tokens, dim, ffn, experts=16)


if __name__ == "__main__":
    main(run)
