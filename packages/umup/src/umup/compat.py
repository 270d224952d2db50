"""Weights of the authors' library, `unit-scaling`, in our names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxtyping import Shaped
from torch import Tensor

_NAMES = {
    "mhsa.linear_o": "self_attn.o_proj",
    "mlp.linear_1": "mlp.up_proj",
    "mlp.linear_gate": "mlp.gate_proj",
    "mlp.linear_2": "mlp.down_proj",
}


def from_unit_scaling(state_dict: Mapping[str, Shaped[Tensor, "..."]]) -> dict[str, Shaped[Tensor, "..."]]:
    """The state of a `unit_scaling.TransformerDecoder`, for `umup.nn.TransformerDecoder` of the same sizes.

    The fused qkv weight is split in three (which changes nothing: their fan-in is the same). The reference has no position
    encoding and takes attention's scale at the run-time length: build ours with `rope_theta=None, scale_seq_len=None`.
    """
    ours: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if name == "embedding.weight":
            ours["embed_tokens.weight"] = tensor
        elif name == "projection.weight":
            ours["lm_head.weight"] = tensor
        elif match := re.fullmatch(r"layers\.(\d+)\.mhsa\.linear_qkv\.weight", name):
            for part, weight in zip("qkv", tensor.chunk(3), strict=True):
                ours[f"layers.{match[1]}.self_attn.{part}_proj.weight"] = weight.clone()
        elif (match := re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)) and match[2] in _NAMES:
            ours[f"layers.{match[1]}.{_NAMES[match[2]]}.weight"] = tensor
        else:
            raise ValueError(f"{name!r} is no parameter of a unit_scaling.TransformerDecoder")
    return ours
