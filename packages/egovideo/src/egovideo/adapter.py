"""EgoVideo's motion adapter, and how it is put into a vision transformer that somebody else wrote.

Symbols (Pei et al. 2025, section 3.3)   here
    x      (B, T h w, D)                 patch tokens of a clip, frame by frame, row by row
    Hd                                   hidden: ratio * D
    a = GELU(W_down x)                   down
    s = ReLU(BN(conv3x3(a)))             spatial; only variant "spatiotemporal" (the paper); "temporal" (released checkpoints): s = a
    m = P dwconv3(s)                     time, mix: a depthwise convolution over time, shared over space, then a 1 x 1 one
    x' = x + gamma W_up (a + m)          up, gamma

`up` starts at zero, so a fresh adapter is the identity. Class and register tokens pass untouched. Nothing is written in place.
"""

from __future__ import annotations

# ruff: noqa: E402
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any, Literal

from chapbook_shared.validate import check_choice, check_int, check_positive, import_extra

import_extra("torch", "egovideo[torch]")

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = [
    "MotionAdapter",
    "adapter_parameters",
    "eject",
    "inject",
    "is_injected",
    "load_adapter",
    "resample_frames",
    "save_adapter",
]

Variant = Literal["temporal", "spatiotemporal"]
Attention = Literal["joint", "frame"]
FastGrad = Literal["through", "detached"] | None


class MotionAdapter(nn.Module):
    """One adapter, to be put after a transformer block.

    Args:
        dim: D, the width of the tokens.
        ratio: hidden width as a share of D.
        kernel: frames that the convolution over time sees; odd.
        variant: "temporal" as in the released checkpoints, "spatiotemporal" as in the paper.
        grid: (rows, columns) of a frame's tokens; None: a square, told from their number.
        spatial_init: "kaiming", or "upstream": normal with standard deviation sqrt(2/3) whatever the width, as the official code has it.
    """

    def __init__(
        self,
        dim: int,
        *,
        ratio: float = 0.5,
        kernel: int = 3,
        variant: Variant = "temporal",
        grid: tuple[int, int] | None = None,
        spatial_init: Literal["kaiming", "upstream"] = "kaiming",
    ):
        super().__init__()
        check_int("dim", dim, minimum=1)
        check_positive("ratio", ratio)
        check_int("kernel", kernel, minimum=1)
        check_choice("variant", variant, ("temporal", "spatiotemporal"))
        check_choice("spatial_init", spatial_init, ("kaiming", "upstream"))
        if kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, so that a frame stands in its middle, got {kernel}")
        hidden = max(1, round(dim * ratio))
        self.dim, self.hidden, self.kernel, self.variant, self.grid = dim, hidden, kernel, variant, grid
        self.down = nn.Linear(dim, hidden)
        self.time = nn.Conv1d(hidden, hidden, kernel, padding=kernel // 2, groups=hidden)
        self.mix = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, dim)
        self.gamma = nn.Parameter(torch.ones(()))
        self.spatial: nn.Module | None = None
        if variant == "spatiotemporal":
            self.spatial = nn.Sequential(nn.Conv2d(hidden, hidden, 3, padding=1), nn.BatchNorm2d(hidden), nn.ReLU())
        self.reset_parameters(spatial_init)

    def reset_parameters(self, spatial_init: Literal["kaiming", "upstream"] = "kaiming") -> None:
        """Fresh weights: an identity."""
        nn.init.trunc_normal_(self.down.weight, std=0.02)
        nn.init.normal_(self.time.weight, std=math.sqrt(2 / self.kernel))
        nn.init.normal_(self.mix.weight, std=math.sqrt(2 / self.hidden))
        nn.init.zeros_(self.up.weight)
        nn.init.ones_(self.gamma)
        for layer in (self.down, self.time, self.mix, self.up):
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
        if isinstance(self.spatial, nn.Sequential):
            conv, norm = self.spatial[0], self.spatial[1]
            assert isinstance(conv, nn.Conv2d)
            assert isinstance(norm, nn.BatchNorm2d)
            if spatial_init == "kaiming":
                nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            else:
                nn.init.normal_(conv.weight, std=math.sqrt(2 / 3))
            assert conv.bias is not None
            nn.init.zeros_(conv.bias)
            norm.reset_parameters()

    def forward(
        self,
        x: Float[Tensor, "rows tokens dim"],
        num_frames: int,
        prefix_tokens: int = 1,
        layout: Attention = "joint",
    ) -> Float[Tensor, "rows tokens dim"]:
        """Add the motion of the clip to its patch tokens.

        Args:
            x: `layout="joint"`: (clips, prefix + T h w, D), frame by frame; `"frame"`: (clips * T, prefix + h w, D), each frame with
                its own prefix.
            num_frames: T.
            prefix_tokens: class and register tokens at the front of each row; they come back unchanged.

        Raises ValueError, with the numbers, if the tokens do not divide into T frames of the grid.
        """
        rows, tokens, dim = x.shape
        per_row = num_frames if layout == "joint" else 1
        patches = tokens - prefix_tokens
        if dim != self.dim or num_frames < 1 or patches < per_row or patches % per_row or (rows * per_row) % num_frames:
            raise ValueError(
                f"x is {tuple(x.shape)} but num_frames={num_frames}, prefix_tokens={prefix_tokens}, layout={layout!r} and dim={self.dim} "
                f"need ({'clips, prefix + frames * h * w' if layout == 'joint' else 'clips * frames, prefix + h * w'}, {self.dim})"
            )
        space = patches // per_row
        body = x[:, prefix_tokens:]
        a = F.gelu(self.down(body)).reshape(rows * per_row // num_frames, num_frames, space, self.hidden)
        s = a if self.spatial is None else self._spatial(a)
        assert self.time.bias is not None
        assert self.up.bias is not None
        motion = self.mix(_OverTime.apply(s, self.time.weight.squeeze(1).to(s.dtype), self.time.bias.to(s.dtype)))
        # gamma goes into the small matrix, not over all tokens.
        delta = F.linear(a + motion, self.gamma * self.up.weight, self.gamma * self.up.bias)
        moved = body + delta.reshape(rows, patches, dim)
        return moved if prefix_tokens == 0 else torch.cat([x[:, :prefix_tokens], moved], dim=1)

    def _spatial(self, a: Float[Tensor, "clips frames space hidden"]) -> Float[Tensor, "clips frames space hidden"]:
        assert self.spatial is not None
        clips, frames, space, hidden = a.shape
        side = math.isqrt(space)
        height, width = self.grid or (side, side)
        if height * width != space:
            raise ValueError(
                f"a frame has {space} tokens, which is no {height} x {width} grid: pass grid=(rows, columns)"
            )
        pictures = a.reshape(clips * frames, height, width, hidden).permute(0, 3, 1, 2)
        return self.spatial(pictures).permute(0, 2, 3, 1).reshape(clips, frames, space, hidden)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, hidden={self.hidden}, kernel={self.kernel}, variant={self.variant!r}"


class _OverTime(torch.autograd.Function):
    """Depthwise convolution over time, zero padded, as a sum of shifted copies: no transposed copy of the tokens, forward or backward.

    tokens (clips, frames, space, hidden), weight (hidden, kernel), bias (hidden,).
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        reach = weight.shape[1] // 2
        out = torch.addcmul(bias, tokens, weight[:, reach])
        for shift in range(1, min(reach, tokens.shape[1] - 1) + 1):
            out[:, shift:].addcmul_(tokens[:, :-shift], weight[:, reach - shift])
            out[:, :-shift].addcmul_(tokens[:, shift:], weight[:, reach + shift])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, weight = ctx.saved_tensors
        grad, reach = grads[0], weight.shape[1] // 2
        to_tokens = grad * weight[:, reach]
        to_weight = torch.zeros_like(weight)
        to_weight[:, reach] = (grad * tokens).sum((0, 1, 2))
        for shift in range(1, min(reach, tokens.shape[1] - 1) + 1):
            later, earlier = slice(shift, None), slice(None, -shift)
            to_tokens[:, earlier].addcmul_(grad[:, later], weight[:, reach - shift])
            to_tokens[:, later].addcmul_(grad[:, earlier], weight[:, reach + shift])
            to_weight[:, reach - shift] = (grad[:, later] * tokens[:, earlier]).sum((0, 1, 2))
            to_weight[:, reach + shift] = (grad[:, earlier] * tokens[:, later]).sum((0, 1, 2))
        return to_tokens, to_weight, grad.sum((0, 1, 2))


@dataclass(frozen=True)
class Mode:
    """How the blocks of an injected model run: what the last input was, and what its owner has switched."""

    attention: Attention
    num_frames: int = 1
    prefix_tokens: int = 1
    adapters: bool = True
    fast_grad: FastGrad = None
    """None: nothing is frozen. Otherwise the blocks' own weights are constants; with "detached" no gradient passes a block."""
    checkpoint: bool = False


class TimeMixing(nn.Module):
    """What an injected model knows about time: its temporal embedding, and the mode its blocks run in.

    `temporal_embedding` (frames, D) starts at 0; another number of frames gets its linear interpolation.
    """

    def __init__(self, dim: int, num_frames: int, attention: Attention, patch: tuple[int, int]):
        super().__init__()
        self.temporal_embedding = nn.Parameter(torch.zeros(num_frames, dim))
        self.mode = Mode(attention)
        self.patch = patch
        self._space = 1

    def see(self, height: int, width: int, num_frames: int) -> None:
        """Note the shape of the clip that comes next."""
        self._space = (height // self.patch[0]) * (width // self.patch[1])
        self.mode = replace(self.mode, num_frames=num_frames)

    def fold(self, tokens: Float[Tensor, "frames tokens dim"]) -> Tensor:
        """Add each frame's temporal embedding to its patch tokens; for joint attention, join the frames of a clip.

        The class and register tokens of a clip are those of its first frame: they do not depend on the picture.
        """
        frames, prefix = self.mode.num_frames, tokens.shape[1] - self._space
        if prefix < 0 or len(tokens) % frames:
            raise ValueError(
                f"the model gave {tuple(tokens.shape)} tokens, but {frames} frames of {self._space} patches were expected"
            )
        self.mode = replace(self.mode, prefix_tokens=prefix)
        clips, dim = len(tokens) // frames, tokens.shape[2]
        body = tokens[:, prefix:].reshape(clips, frames, self._space, dim)
        if frames > 1:  # a single image has no time
            body = body + resample_frames(self.temporal_embedding, frames)[:, None].to(body.dtype)
        if self.mode.attention == "frame":
            return torch.cat([tokens[:, :prefix], body.reshape(-1, self._space, dim)], dim=1)
        head = tokens.reshape(clips, frames, -1, dim)[:, 0, :prefix]
        return torch.cat([head, body.reshape(clips, frames * self._space, dim)], dim=1)

    @contextmanager
    def run(self, **changes: Any) -> Iterator[None]:
        """Switch parts of the mode while the block runs."""
        before = self.mode
        self.mode = replace(before, **changes)
        try:
            yield
        finally:
            self.mode = before


def resample_frames(embedding: Float[Tensor, "stored dim"], frames: int) -> Float[Tensor, "frames dim"]:
    """A temporal embedding for another number of frames: linear between the stored ones, as `F.interpolate(align_corners=False)`."""
    if frames == len(embedding):
        return embedding
    return F.interpolate(embedding.T[None], size=frames, mode="linear", align_corners=False)[0].T


def inject(
    model: nn.Module,
    *,
    num_frames: int = 16,
    layers: Literal["all"] | Sequence[int] = "all",
    variant: Variant = "temporal",
    ratio: float = 0.5,
    kernel: int = 3,
    attention: Attention = "joint",
) -> nn.Module:
    """Make an image transformer a video transformer, in place, and return it.

    For timm's VisionTransformer, transformers' CLIP, SigLIP, ViT, DeiT and DINOv2 vision models, and open_clip's; any of their sizes. A 4-D
    input (images) still works as before. A 5-D input (clips, frames, 3, height, width) is a clip: with `attention="joint"` (the
    paper) all frames' tokens attend to each other and the model's own head gives one output a clip; with "frame" each frame attends
    to itself, the adapters alone carry time, and the output has one row a frame (clips * frames).

    Args:
        num_frames: frames that the temporal embedding stores; it starts at 0, other numbers are interpolated.
        layers: numbers of the blocks that get an adapter.

    A fresh adapter is the identity. Weights are found under `motion_adapter` in each block and `time_mixing` in the model; the names of all
    others stay. `eject` takes everything out again. Raises TypeError for a model of another kind, ValueError if it is injected already.
    """
    check_int("num_frames", num_frames, minimum=1)
    check_choice("attention", attention, ("joint", "frame"))
    if is_injected(model):
        raise ValueError("model has motion adapters already: eject(model) first")
    anatomy = _anatomy(model)
    blocks = list(anatomy.blocks)
    chosen = range(len(blocks)) if layers == "all" else layers
    for number in chosen:
        check_int("layers", number, minimum=0, maximum=len(blocks) - 1)
    example = next(blocks[0].parameters())
    mixing = TimeMixing(anatomy.dim, num_frames, attention, anatomy.patch).to(example.device, example.dtype)
    model.add_module("time_mixing", mixing)
    for number, block in enumerate(blocks):
        if number in chosen:
            adapter = MotionAdapter(anatomy.dim, ratio=ratio, kernel=kernel, variant=variant)
            block.add_module("motion_adapter", adapter.to(example.device, example.dtype))
        # Bound methods are copied and pickled with their model, closures are not.
        object.__setattr__(block, "_time_mixing", [mixing])  # in a list: not a second owner of the weights
        object.__setattr__(block, "forward", MethodType(_adapted_forward, block))
    handles = [
        model.register_forward_pre_hook(_unfold_clip, with_kwargs=True),
        anatomy.hook(mixing),
    ]
    object.__setattr__(model, "_motion_handles", handles)
    return model


def eject(model: nn.Module) -> nn.Module:
    """Take out what `inject` put in: the model's outputs are what they were, to the bit."""
    if not is_injected(model):
        raise ValueError("model has no motion adapters: inject(model) first")
    anatomy = _anatomy(model)
    anatomy.tokens_at.__dict__.pop("_time_mixing", None)
    for block in anatomy.blocks:
        for name in ("forward", "_time_mixing"):
            block.__dict__.pop(name, None)
        if hasattr(block, "motion_adapter"):
            del block.motion_adapter
    for handle in model.__dict__.pop("_motion_handles"):
        handle.remove()
    del model.time_mixing
    return model


def is_injected(model: nn.Module) -> bool:
    """Whether `inject` was called on this very module."""
    return isinstance(getattr(model, "time_mixing", None), TimeMixing)


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of all that `inject` added: adapters and temporal embedding."""
    return {name: p for name, p in model.named_parameters() if _is_ours(name)}


def save_adapter(model: nn.Module, path: str | Path) -> None:
    """Write what `inject` added (parameters and running statistics), and nothing else, as safetensors."""
    files = import_extra("safetensors.torch", "egovideo[torch]")
    tensors = {name: t.detach().contiguous().cpu() for name, t in model.state_dict().items() if _is_ours(name)}
    if not tensors:
        raise ValueError("model has no motion adapters to save: inject(model) first")
    files.save_file(tensors, str(path), metadata={"format": "pt", "kind": "egovideo.adapter"})


def load_adapter(model: nn.Module, path: str | Path) -> None:
    """Read what `save_adapter` wrote into a model that was injected alike. Raises ValueError naming the first weight that does not fit."""
    files = import_extra("safetensors.torch", "egovideo[torch]")
    given = files.load_file(str(path))
    wanted = {name: t for name, t in model.state_dict().items() if _is_ours(name)}
    for name in sorted(set(given) | set(wanted)):
        theirs, ours = (tuple(d[name].shape) if name in d else None for d in (given, wanted))
        if theirs != ours:
            raise ValueError(
                f"{path} does not fit the model: {name} is {theirs or 'absent'} in the file, {ours or 'absent'} in the model; "
                "inject with the same layers, variant, ratio, kernel and num_frames"
            )
    model.load_state_dict(given, strict=False)


def _is_ours(name: str) -> bool:
    parts = name.split(".")
    return "motion_adapter" in parts or "time_mixing" in parts


def _adapted_forward(block: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """In the place of a block's own `forward`: that, then the adapter, in the mode of the moment."""
    mode = block.__dict__["_time_mixing"][0].mode  # taken here, outside what a checkpoint computes again later
    if mode.checkpoint and torch.is_grad_enabled() and mode.fast_grad != "detached":
        result = checkpoint(_run_block, block, mode.fast_grad, x, args, kwargs, use_reentrant=False)
    else:
        result = _run_block(block, mode.fast_grad, x, args, kwargs)
    # The adapter stays outside the checkpoint: run twice, its batch statistics would count twice.
    adapter = getattr(block, "motion_adapter", None)
    if adapter is None or not mode.adapters:
        return result
    tokens, *rest = result if isinstance(result, tuple) else (result,)
    tokens = adapter(tokens, mode.num_frames, mode.prefix_tokens, mode.attention)
    return (tokens, *rest) if isinstance(result, tuple) else tokens


def _run_block(block: nn.Module, fast_grad: FastGrad, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    forward: Any = type(block).forward
    if fast_grad == "detached":
        with torch.no_grad():
            return forward(block, x, *args, **kwargs)
    if fast_grad == "through":
        with _constant_weights(block):
            return forward(block, x, *args, **kwargs)
    return forward(block, x, *args, **kwargs)


@contextmanager
def _constant_weights(block: nn.Module) -> Iterator[None]:
    """Autograd takes the block's weights for constants while it records, and gradients still pass through."""
    trained = [p for name, p in block.named_parameters() if p.requires_grad and not _is_ours(name)]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _unfold_clip(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand the frames of a clip to the image model as a batch of images, and note how many there were."""
    mixing: Any = model.time_mixing
    name = None if args else "pixel_values" if "pixel_values" in kwargs else next(iter(kwargs), None)
    pixels = args[0] if args else kwargs.get(name or "")
    if not isinstance(pixels, Tensor) or pixels.ndim not in (4, 5):
        shape = tuple(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
        raise ValueError(f"an injected model takes images (n, 3, h, w) or clips (n, frames, 3, h, w), got {shape}")
    frames = pixels.shape[1] if pixels.ndim == 5 else 1
    mixing.see(pixels.shape[-2], pixels.shape[-1], frames)
    flat = pixels.flatten(0, 1) if pixels.ndim == 5 else pixels
    if args:
        return (flat, *args[1:]), kwargs
    return args, {**kwargs, str(name): flat}


@dataclass(frozen=True)
class _Anatomy:
    """Where a vision transformer has what we need. `tokens_at`: the module that takes, or gives, the embedded tokens."""

    blocks: Sequence[nn.Module]
    dim: int
    patch: tuple[int, int]
    tokens_at: nn.Module
    before: bool

    def hook(self, mixing: TimeMixing) -> Any:
        held = [mixing]
        object.__setattr__(self.tokens_at, "_time_mixing", held)
        if self.before:
            return self.tokens_at.register_forward_pre_hook(_fold_before)
        return self.tokens_at.register_forward_hook(_fold_after)


def _fold_before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (module.__dict__["_time_mixing"][0].fold(args[0]), *args[1:])


def _fold_after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    mixing: TimeMixing = module.__dict__["_time_mixing"][0]
    if isinstance(output, tuple):
        return (mixing.fold(output[0]), *output[1:])
    return mixing.fold(output)


def _anatomy(model: nn.Module) -> _Anatomy:
    """Find the parts of a timm, transformers or open_clip vision transformer."""
    m: Any = model
    if hasattr(m, "blocks") and hasattr(m, "patch_embed") and hasattr(m, "pos_drop"):  # timm
        if getattr(m, "rope", None) is not None:
            raise TypeError(
                f"{type(model).__name__} has rotary positions, which know no frames: learned or fixed ones are needed"
            )
        return _Anatomy(list(m.blocks), m.embed_dim, _pair(m.patch_embed.patch_size), m.pos_drop, before=False)
    if hasattr(m, "transformer") and hasattr(m.transformer, "resblocks") and hasattr(m, "conv1"):  # open_clip
        if not getattr(m.transformer, "batch_first", True):
            raise TypeError("the open_clip model keeps tokens first: build it with batch_first=True")
        return _Anatomy(
            list(m.transformer.resblocks),
            m.ln_pre.normalized_shape[0],
            _pair(m.conv1.kernel_size),
            m.ln_pre,
            before=True,
        )
    body = m.vision_model if hasattr(m, "vision_model") else m  # transformers
    if not hasattr(body, "embeddings"):
        body = next((child for child in m.children() if hasattr(child, "embeddings")), body)
    encoder = getattr(body, "encoder", body)
    blocks = next(
        (found for name in ("layers", "layer") if isinstance(found := getattr(encoder, name, None), nn.ModuleList)),
        None,
    )
    config = getattr(body, "config", None)
    if blocks is None or not hasattr(body, "embeddings") or not hasattr(config, "patch_size"):
        raise TypeError(
            f"cannot put motion adapters into {type(model).__name__}: a timm VisionTransformer, a transformers vision transformer "
            "(CLIP, SigLIP, ViT, DeiT, DINOv2) or an open_clip visual transformer is needed"
        )
    assert config is not None
    return _Anatomy(list(blocks), config.hidden_size, _pair(config.patch_size), body.embeddings, before=False)


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
