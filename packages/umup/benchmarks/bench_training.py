"""Optimiser step, and forward + backward, against unit-scaling, mup and a plain transformer."""

from collections.abc import Callable, Iterator

import mup
import torch
import unit_scaling as uu
from torch import nn

from chapbook_shared.bench import Comparison, compare, main
from umup.bytelm import PlainDecoder
from umup.nn import TransformerDecoder
from umup.optim import get_param_groups

VOCAB = 128


def with_gradients(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def optimizer_rows() -> Iterator[Comparison]:
    settings = {"lr": 1.0, "weight_decay": 2**-13}
    for layers, width in ((24, 32), (6, 64), (24, 64), (24, 128)):

        def ours(layers: int = layers, width: int = width) -> Callable[[], None]:
            model = with_gradients(TransformerDecoder(VOCAB, width, layers, 4))
            return torch.optim.AdamW(get_param_groups(model, 1.0, 2**-13), fused=True).step

        def theirs(layers: int = layers, width: int = width, **kwargs: bool) -> Callable[[], None]:
            model = with_gradients(uu.TransformerDecoder(width, VOCAB, layers, 4))
            return uu.optim.AdamW(model.parameters(), **settings, **kwargs).step

        def plain(layers: int = layers, width: int = width) -> Callable[[], None]:
            model = with_gradients(PlainDecoder(VOCAB, width, layers, 4, 4 * width))
            return torch.optim.AdamW(model.parameters(), fused=True).step

        name = f"AdamW step, {layers} layers of width {width}"
        # Fresh models for each pair, so that all lie in memory alike.
        options = {"repeats": 25, "warmup": 3}
        yield compare(name, ours(), theirs(), peer_name="unit-scaling", goal=3.0, **options)
        yield compare(name, ours(), theirs(fused=True), peer_name="unit-scaling, fused", goal=1.0, **options)
        yield compare(name, ours(), plain(), peer_name="plain torch, fused, one group", **options)

    def mup_net(width: int) -> nn.Module:
        blocks = [nn.Linear(width, width) for _ in range(24 * 5)]
        return nn.Sequential(nn.Linear(16, width), *blocks, mup.MuReadout(width, 16))

    model = mup_net(64)
    mup.set_base_shapes(model, mup_net(16), delta=mup_net(32))
    with_gradients(model)
    decoder = with_gradients(TransformerDecoder(VOCAB, 64, 24, 4))
    step = torch.optim.AdamW(get_param_groups(decoder, 1.0), fused=True).step
    yield compare(
        "AdamW step, 24 layers of width 64 (mup: 120 square layers)",
        step,
        mup.MuAdamW(model.parameters(), lr=1e-3).step,
        peer_name="mup",
        repeats=15,
        warmup=3,
    )


def pass_of(loss: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad()
        loss(ids).backward()

    return run


def pass_rows() -> Iterator[Comparison]:
    for width, batch, length in ((64, 4, 64), (128, 4, 128), (256, 4, 128)):
        ids = torch.randint(VOCAB, (batch, length))
        heads = width // 32
        ours = TransformerDecoder(VOCAB, width, 4, heads, scale_seq_len=length)
        plain = PlainDecoder(VOCAB, width, 4, heads, 4 * width)
        name = f"forward + backward, 4 layers of width {width}, {batch} x {length}"
        # 1 / 1.10 and 1 / 1.03: at most so much slower than the plain transformer.
        yield compare(
            f"{name}, eager",
            pass_of(ours.loss, ours, ids),
            pass_of(plain.loss, plain, ids),
            peer_name="plain torch",
            goal=0.91 if width >= 256 else None,
            repeats=15,
            warmup=2,
        )
        no_rope = TransformerDecoder(VOCAB, width, 4, heads, rope_theta=None)
        theirs = uu.TransformerDecoder(width, VOCAB, 4, heads)
        yield compare(
            f"{name}, eager, no positions",
            pass_of(no_rope.loss, no_rope, ids),
            pass_of(theirs.loss, theirs, ids),
            peer_name="unit-scaling",
            goal=1.0,
            repeats=15,
            warmup=2,
        )
        if width == 256:
            yield compare(
                f"{name}, compiled",
                pass_of(torch.compile(ours.loss), ours, ids),
                pass_of(torch.compile(plain.loss), plain, ids),
                peer_name="plain torch, compiled",
                goal=0.97,
                repeats=11,
                warmup=2,
            )


def run() -> Iterator[Comparison]:
    torch.manual_seed(0)
    yield from optimizer_rows()
    yield from pass_rows()


if __name__ == "__main__":
    main(run)
