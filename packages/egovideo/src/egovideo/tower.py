"""The two towers: any injected vision transformer on clips, any transformers text model on captions.

Tokens of a clip (Pei et al. 2025, section 3.3): one class token, then the patches frame by frame, row by row; position = the image
model's own embedding, the same for each frame, + the temporal embedding of the frame. Attention is joint over space and time.
"""

from __future__ import annotations

# ruff: noqa: E402
from typing import Any, Literal

from chapbook_shared.validate import check_choice, import_extra

import_extra("torch", "egovideo[torch]")

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from egovideo.adapter import FastGrad, TimeMixing, inject, is_injected

__all__ = ["TextTower", "VideoTower"]

Pooling = Literal["auto", "pooler", "mean", "first"]


class VideoTower(nn.Module):
    """One feature vector a clip.

    `model` is a vision transformer that `inject` knows, injected already or with `options` now. timm models need `num_classes=0`.
    `width` is the length of the vector.

    `pool="model"` is the model's own: CLIP's is the class token, which no adapter touches, so that the adapter of the last block is
    seen by nobody. `pool="patches"` is the mean of the patch tokens (transformers models).
    """

    def __init__(self, model: nn.Module, *, pool: Literal["model", "patches"] = "model", **options: Any):
        super().__init__()
        check_choice("pool", pool, ("model", "patches"))
        self.pool = pool
        self.model = model if is_injected(model) else inject(model, **options)
        self.width = _width(model)

    @property
    def mixing(self) -> TimeMixing:
        """Where the temporal embedding and the mode of the blocks are kept."""
        made: Any = self.model.time_mixing
        return made

    def forward(
        self,
        clips: Float[Tensor, "clips frames 3 height width"],
        *,
        adapters: bool = True,
        fast_grad: FastGrad = None,
        attention: Literal["joint", "frame"] | None = None,
        checkpoint: bool = False,
    ) -> Float[Tensor, "clips features"]:
        """The class token's (or the model's own pooled) feature, from normalised pixels.

        Args:
            adapters: whether the motion adapters take part; the slow path runs the plain blocks.
            fast_grad: "through" takes the blocks' weights for constants, "detached" also stops gradients at each block.
            attention: "joint" or "frame" for this call; default: as injected. With "frame" the frames' features are averaged.
            checkpoint: recompute blocks in the backward pass.
        """
        mixing = self.mixing
        attention = attention or mixing.mode.attention
        with mixing.run(adapters=adapters, fast_grad=fast_grad, attention=attention, checkpoint=checkpoint):
            output = self.model(clips)
            if self.pool == "patches":
                features = output.last_hidden_state[:, mixing.mode.prefix_tokens :].mean(1)
            else:
                features = _pooled(output)
        if attention == "frame":
            features = features.reshape(clips.shape[0], clips.shape[1], -1).mean(1)
        return features


class TextTower(nn.Module):
    """One feature vector a caption, from any transformers text encoder.

    `pooling`: "pooler" takes the model's own (CLIP: the end-of-text token), "mean" the mean over unmasked tokens, "first" the first token;
    "auto" is "pooler" for models trained to give one vector (CLIP, SigLIP), else "mean".
    """

    def __init__(self, model: nn.Module, *, pooling: Pooling = "auto"):
        super().__init__()
        check_choice("pooling", pooling, ("auto", "pooler", "mean", "first"))
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "hidden_size"):
            raise TypeError(f"text must be a transformers text encoder, got {type(model).__name__}")
        if pooling == "auto":
            pooling = "pooler" if str(config.model_type).startswith(("clip", "siglip")) else "mean"
        self.model, self.pooling, self.width = model, pooling, int(config.hidden_size)

    def forward(
        self,
        input_ids: Int[Tensor, "texts tokens"],
        attention_mask: Int[Tensor, "texts tokens"] | Bool[Tensor, "texts tokens"] | None = None,
    ) -> Float[Tensor, "texts features"]:
        output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        if self.pooling == "pooler":
            pooled: Tensor = output.pooler_output
            return pooled
        hidden: Tensor = output.last_hidden_state
        if self.pooling == "first":
            return hidden[:, 0]
        if attention_mask is None:
            return hidden.mean(1)
        weight = attention_mask.to(hidden.dtype)[..., None]
        return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)


def _pooled(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        if output.ndim != 2:
            raise TypeError(
                f"the vision model gives {tuple(output.shape)}: a pooled output is needed (timm: num_classes=0)"
            )
        return output
    for name in ("image_embeds", "pooler_output"):
        if isinstance(found := getattr(output, name, None), Tensor):
            return found
    hidden: Tensor = output.last_hidden_state
    return hidden[:, 0]


def _width(model: nn.Module) -> int:
    """The length of what `_pooled` will find."""
    m: Any = model
    if hasattr(m, "visual_projection"):
        return int(m.visual_projection.out_features)
    if hasattr(m, "config"):
        return int(m.config.hidden_size)
    if hasattr(m, "num_features"):
        return int(m.num_features)
    return int(m.output_dim)
