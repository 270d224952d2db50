"""Weights of the official release (github.com/InternRobotics/EgoHOD) under the names of this package.

    official (CLIP's)                          here: transformers' CLIP towers, injected
    visual.conv1, class_embedding, ...         vision_model.embeddings.*
    visual.transformer.resblocks.i.attn        vision_model.encoder.layers.i.self_attn, its joint input projection cut in three
    visual.transformer.resblocks.i.<adapter>   vision_model.encoder.layers.i.motion_adapter
    visual.temporal_embedding                  time_mixing.temporal_embedding
    visual.image_projection                    visual_projection.weight, transposed
    textual.* or the same without prefix       text_model.*, text_projection.weight

Official files also hold a second adapter a block and a 3 x 3 convolution that their code never uses; those are left out and named.
The official towers run with plain GELU and LayerNorm eps 1e-6, whatever CLIP's weights were trained with: `official_vision_config`.
"""

from __future__ import annotations

# ruff: noqa: E402
import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chapbook_shared.validate import import_extra

import_extra("torch", "egovideo[torch]")

import torch
from torch import Tensor, nn

__all__ = ["OfficialWeights", "convert_official", "load_official", "official_vision_config", "read_checkpoint"]

_WRAPPERS = ("module.", "_orig_mod.", "model.")
_ADAPTER = {
    "down_proj.weight": "down.weight",
    "down_proj.bias": "down.bias",
    "dwconv.weight": "time.weight",
    "dwconv.bias": "time.bias",
    "conv.weight": "mix.weight",
    "conv.bias": "mix.bias",
    "up_proj.weight": "up.weight",
    "up_proj.bias": "up.bias",
    "gamma": "gamma",
}
_UNUSED_PARTS = ("conv2d.weight", "conv2d.bias")
_BLOCK = {
    "ln_1.": "layer_norm1.",
    "ln_2.": "layer_norm2.",
    "attn.out_proj.": "self_attn.out_proj.",
    "mlp.c_fc.": "mlp.fc1.",
    "mlp.c_proj.": "mlp.fc2.",
}
_VISION = {
    "class_embedding": "vision_model.embeddings.class_embedding",
    "positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "temporal_embedding": "time_mixing.temporal_embedding",
    "ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "ln_post.weight": "vision_model.post_layernorm.weight",
    "ln_post.bias": "vision_model.post_layernorm.bias",
}
_TEXT = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
}


@dataclass
class OfficialWeights:
    """`vision` for an injected `CLIPVisionModelWithProjection`, `text` for a `CLIPTextModelWithProjection`.

    `unused`: official names that the official code does not use either. `unknown`: names that mean nothing here.
    """

    vision: dict[str, Tensor] = field(default_factory=dict)
    text: dict[str, Tensor] = field(default_factory=dict)
    logit_scale: Tensor | None = None
    unused: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The weights of a `.pt` or `.safetensors` file, without running anything that is in it."""
    if Path(path).suffix == ".safetensors":
        weights: dict[str, Tensor] = import_extra("safetensors.torch", "egovideo[torch]").load_file(str(path))
        return weights
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    for name in ("state_dict", "model", "module"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(name), Mapping):
            loaded = loaded[name]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(
            f"{path} holds no weights: a mapping of names to tensors, or one under 'state_dict', is needed"
        )
    return dict(loaded)


def convert_official(official: Mapping[str, Tensor]) -> OfficialWeights:
    """Rename the weights of an official checkpoint. Nothing is dropped silently: see `unused` and `unknown`."""
    made = OfficialWeights()
    bare = {_unwrapped(name): tensor for name, tensor in official.items()}
    # A lone visual tower has no prefix; in a whole model the bare names are the text tower's.
    lone_tower = "conv1.weight" in bare
    for name, tensor in bare.items():
        if name == "logit_scale":
            made.logit_scale = tensor
        elif name.startswith("visual.") or lone_tower:
            _convert(made, name.removeprefix("visual."), name, tensor, made.vision, "vision_model", _VISION)
        else:
            _convert(made, name.removeprefix("textual."), name, tensor, made.text, "text_model", _TEXT)
    return made


def load_official(model: nn.Module, checkpoint: str | Path | Mapping[str, Tensor]) -> OfficialWeights:
    """Load an official checkpoint into an `EgoVideo` made of transformers' CLIP towers; returns what was read, and what was not used.

    The slow projection and the text projection get the official ones. Raises ValueError naming the first weight that does not fit.
    """
    made: Any = model
    given = checkpoint if isinstance(checkpoint, Mapping) else read_checkpoint(checkpoint)
    official = convert_official(given)
    vision, text = dict(official.vision), dict(official.text)
    for weights, name, layer in (
        (vision, "visual_projection.weight", made.slow_projection),
        (text, "text_projection.weight", made.text_projection),
    ):
        if name in weights:
            _fill(layer, {"weight": weights.pop(name)})
    _fill(made.vision.model, _for_tower(made.vision.model, vision, "vision_model."))
    _fill(made.text.model, _for_tower(made.text.model, text, "text_model."))
    if official.logit_scale is not None:
        made.logit_scale.data.copy_(official.logit_scale)
    return official


def official_vision_config(**changes: Any) -> Any:
    """transformers' CLIPVisionConfig of the official B tower (ViT-B/16, 224 pixels, E = 512); `changes` replace fields.

    L: `hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, patch_size=14, image_size=336`.
    """
    transformers = import_extra("transformers", "egovideo[hf]")
    base = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
        "projection_dim": 512,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
    }
    return transformers.CLIPVisionConfig(**{**base, **changes})


def _for_tower(tower: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Names as this class of transformers has them: some classes hold the tower, some are it."""
    if hasattr(tower, prefix.rstrip(".")):
        return dict(weights)
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}


def _fill(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    own = module.state_dict()
    for name, tensor in weights.items():
        if name not in own or own[name].shape != tensor.shape:
            here = tuple(own[name].shape) if name in own else "absent"
            raise ValueError(
                f"the checkpoint does not fit the model: {name} is {tuple(tensor.shape)} there, {here} here"
            )
    module.load_state_dict(dict(weights), strict=False)


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def _convert(
    made: OfficialWeights,
    name: str,
    full: str,
    tensor: Tensor,
    into: dict[str, Tensor],
    tower: str,
    table: Mapping[str, str],
) -> None:
    if name in table:
        into[table[name]] = tensor
    elif name == "conv1.weight":
        # Some of the official towers keep the patch embedding as a matrix; the order of its columns is a convolution's.
        side = round((tensor[0].numel() / 3) ** 0.5)
        into["vision_model.embeddings.patch_embedding.weight"] = tensor.reshape(len(tensor), 3, side, side)
    elif name in ("image_projection", "proj"):
        into["visual_projection.weight"] = tensor.T
    elif name == "text_projection":
        into["text_projection.weight"] = tensor.T
    elif match := re.fullmatch(r"transformer\.resblocks\.(\d+)\.(.+)", name):
        _convert_block(made, match[2], full, tensor, into, f"{tower}.encoder.layers.{match[1]}.")
    elif name == "attn_mask":
        made.unused.append(full)
    else:
        made.unknown.append(full)


def _convert_block(
    made: OfficialWeights, part: str, full: str, tensor: Tensor, into: dict[str, Tensor], block: str
) -> None:
    if match := re.fullmatch(r"attn\.in_proj_(weight|bias)", part):
        for letter, third in zip("qkv", tensor.chunk(3), strict=True):
            into[f"{block}self_attn.{letter}_proj.{match[1]}"] = third
        return
    for theirs, ours in _BLOCK.items():
        if part.startswith(theirs):
            into[block + ours + part.removeprefix(theirs)] = tensor
            return
    owner, _, rest = part.partition(".")
    if owner.endswith("_2") or rest in _UNUSED_PARTS:
        made.unused.append(full)
    elif rest in _ADAPTER:
        name = _ADAPTER[rest]
        # A 1 x 1 convolution is a matrix; a depthwise one has a kernel for each channel, whatever its number of axes.
        if name == "mix.weight":
            tensor = tensor.flatten(1)
        elif name == "time.weight":
            tensor = tensor.flatten(1)[:, None]
        elif name == "gamma":
            tensor = tensor.reshape(())
        into[f"{block}motion_adapter.{name}"] = tensor
    else:
        made.unknown.append(full)
