"""What a motion adapter costs: alone against the obvious implementation, and as a share of a ViT-B block's step.

CPU time of one thread, medians of turns: a busy machine adds little. In the last rows the peer is the bare block; 0.91 is 10 % more.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chapbook_shared.bench import Comparison, main
from egovideo import MotionAdapter, eject, inject

FRAMES, SPACE, WIDTH = 16, 196, 768


def compare(
    workload: str,
    ours: Callable[[], Any],
    peer: Callable[[], Any],
    *,
    peer_name: str,
    goal: float | None = None,
    repeats: int = 7,
) -> Comparison:
    """As `chapbook_shared.bench.compare`, in CPU time."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats + 1):
        for call, taken in zip((ours, peer), times, strict=True):
            start = time.process_time()
            call()
            if number:
                taken.append((time.process_time() - start) * 1e3)
    mine, theirs = map(statistics.median, times)
    return Comparison(workload, mine, theirs, peer_name, theirs / mine, goal, unit="CPU ms")


def obvious(adapter: MotionAdapter, x: Tensor, frames: int) -> Tensor:
    """The definition, with torch's own convolution over transposed copies, as the official code has it."""
    a = F.gelu(adapter.down(x[:, 1:]))
    clips, tokens, hidden = a.shape
    s = a.reshape(clips, frames, tokens // frames, hidden).permute(0, 2, 3, 1).reshape(-1, hidden, frames)
    m = adapter.mix(adapter.time(s).transpose(1, 2)).reshape(clips, tokens // frames, frames, hidden).transpose(1, 2)
    return torch.cat([x[:, :1], x[:, 1:] + adapter.gamma * adapter.up(a + m.reshape(clips, tokens, hidden))], 1)


def conv3d(dim: int, hidden: int) -> nn.ModuleDict:
    """An ST-Adapter of the same width: depthwise 3 x 1 x 1 convolution as a Conv3d."""
    conv = nn.Conv3d(hidden, hidden, (3, 1, 1), padding=(1, 0, 0), groups=hidden)
    return nn.ModuleDict({"down": nn.Linear(dim, hidden), "conv": conv, "up": nn.Linear(hidden, dim)})


def st_adapter(parts: nn.ModuleDict, x: Tensor, frames: int) -> Tensor:
    a = parts["down"](x[:, 1:])
    clips, tokens, hidden = a.shape
    side = math.isqrt(tokens // frames)
    grid = a.reshape(clips, frames, side, side, hidden).permute(0, 4, 1, 2, 3)
    a = parts["conv"](grid).permute(0, 2, 3, 4, 1).reshape(clips, tokens, hidden)
    return torch.cat([x[:, :1], x[:, 1:] + parts["up"](a)], 1)


def step(forward, parameters) -> None:
    forward().square().mean().backward()
    for parameter in parameters:
        parameter.grad = None


def overhead(frames: int, width: int, attention: str, train: bool) -> Comparison:
    """One block with and without its adapter: `ratio` is bare / injected; 0.91 is 10 % more."""
    import transformers

    config = transformers.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=1,
        num_attention_heads=width // 64,
        image_size=224,
        patch_size=16,
    )
    torch.manual_seed(0)
    bare = inject(transformers.CLIPVisionModel(config), layers=[], num_frames=frames, attention=attention)
    ours = inject(transformers.CLIPVisionModel(config), num_frames=frames, attention=attention)
    clips = torch.randn(1, frames, 3, 224, 224)
    calls = []
    for model in (ours, bare):
        parameters = [p for p in model.parameters() if p.requires_grad]
        if train:
            calls.append(lambda m=model, p=parameters: step(lambda: m(clips).last_hidden_state, p))
        else:
            calls.append(lambda m=model: no_grad(m, clips))
    what = "step" if train else "forward"
    row = compare(
        f"a block's {what} with its adapter, {frames} frames, {attention}",
        *calls,
        peer_name="without",
        goal=1 / 1.1,
        repeats=5,
    )
    eject(ours)
    return row


def no_grad(model: nn.Module, clips: Tensor) -> None:
    with torch.no_grad():
        model(clips)


def run() -> Iterator[Comparison]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    adapter, peer = MotionAdapter(WIDTH), conv3d(WIDTH, WIDTH // 2)
    ours, theirs = list(adapter.parameters()), list(peer.parameters())
    for frames in (4, 16):
        x = torch.randn(1, 1 + frames * SPACE, WIDTH)
        y = x.clone().requires_grad_()
        with torch.no_grad():
            yield compare(
                f"adapter forward, {frames} frames", lambda x=x, f=frames: adapter(x, f),
                lambda x=x, f=frames: obvious(adapter, x, f), peer_name="transposed copies", goal=1.0,
            )  # fmt: skip
            yield compare(
                f"adapter forward, {frames} frames", lambda x=x, f=frames: adapter(x, f),
                lambda x=x, f=frames: st_adapter(peer, x, f), peer_name="ST-Adapter, Conv3d (does less)",
            )  # fmt: skip
        yield compare(
            f"adapter forward + backward, {frames} frames", lambda y=y, f=frames: step(lambda: adapter(y, f), ours),
            lambda y=y, f=frames: step(lambda: obvious(adapter, y, f), ours), peer_name="transposed copies", goal=1.0,
        )  # fmt: skip
        yield compare(
            f"adapter forward + backward, {frames} frames", lambda y=y, f=frames: step(lambda: adapter(y, f), ours),
            lambda y=y, f=frames: step(lambda: st_adapter(peer, y, f), theirs), peer_name="ST-Adapter, Conv3d (does less)",
        )  # fmt: skip
    for train in (False, True):
        for frames, attention in ((4, "joint"), (16, "joint"), (16, "frame")):
            yield overhead(frames, WIDTH, attention, train)


if __name__ == "__main__":
    main(run)
