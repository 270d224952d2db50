"""Topograph, forward and backward, against soft clDice, cubical persistence and an obvious scipy implementation; one thread."""

import statistics
import time
from collections.abc import Callable, Iterator

import gudhi
import thickened_reference
import torch
from monai.losses import SoftclDiceLoss
from road_images import roads
from torch import Tensor

from chapbook_shared.bench import Comparison, compare, main
from topograph_loss import TopographLoss, critical_regions


def step(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor) -> Callable[[], None]:
    """One forward and backward pass."""

    def forward_backward() -> None:
        x = logits.clone().requires_grad_()
        loss(x, target).backward()

    return forward_backward


def run() -> Iterator[Comparison]:
    torch.set_num_threads(1)
    ours = TopographLoss(sigmoid=True)
    cldice = SoftclDiceLoss(iter_=3, sigmoid=True)
    for noise in (0.07, 0.22):
        logits, target = roads(512, noise=noise)
        P, G = (logits > 0)[0, 0].numpy(), (target > 0)[0, 0].numpy()
        wrong, critical = (P != G).mean(), len(critical_regions(P, G))
        name = f"512x512, {wrong:.0%} wrong, {critical} critical, fwd+bwd"
        mine = step(ours, logits, target)
        yield compare(name, mine, step(cldice, logits, target), peer_name="MONAI soft clDice, 3 steps", goal=5)

        p = 1 - logits.sigmoid()[0, 0].double().numpy()

        def persistence(p=p) -> None:
            gudhi.CubicalComplex(top_dimensional_cells=p).compute_persistence()

        yield compare(
            name, mine, persistence, peer_name="gudhi persistence of the prediction alone", goal=15, repeats=3
        )

    logits, target = roads(96, noise=0.22)
    P, G = (logits > 0)[0, 0].numpy(), (target > 0)[0, 0].numpy()
    q = torch.where(logits > 0, logits.sigmoid(), 1 - logits.sigmoid())[0, 0].numpy()
    yield compare(
        "96x96, forward",
        lambda: ours(logits, target),
        lambda: thickened_reference.loss(P, G, q),
        peer_name="5x upsampling and scipy labels",
        repeats=3,
    )

    torch.set_num_threads(2)
    logits, target = roads(512, noise=0.07, batch=8)
    threaded = step(TopographLoss(sigmoid=True, workers=2), logits, target)
    cpu, wall = [], []
    for _ in range(8):
        start = time.process_time(), time.perf_counter()
        threaded()
        cpu.append(1e3 * (time.process_time() - start[0]))
        wall.append(1e3 * (time.perf_counter() - start[1]))
    name = "batch of 8, 512x512, fwd+bwd, 2 threads"
    yield Comparison(f"{name}, CPU time", statistics.median(cpu[1:]), goal=150)
    yield Comparison(f"{name}, wall time", statistics.median(wall[1:]))


if __name__ == "__main__":
    main(run)
