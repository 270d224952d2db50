"""EgoVideo: a dual encoder that looks at a clip at two rates.

Symbols (Pei et al. 2025, section 3.3)    here
    slow path  4 frames, plain blocks     slow
    fast path  lambda 4 = 16 frames, the same blocks as constants, motion adapters trained   fast
    v = W_f [proj(slow); proj(fast)]      fusion, slow_projection, fast_projection
    exp(logit_scale) = 1 / 0.07           logit_scale, frozen

Because both paths share their weights, the fast one sees every step that the slow one takes. Upstream runs the frozen blocks without
autograd; then no gradient passes a block, and of all adapters only the last is trained. The default here lets gradients through.
"""

from __future__ import annotations

# ruff: noqa: E402
import json
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

from chapbook_shared.jobs import atomic_write
from chapbook_shared.validate import check_choice, check_int, import_extra

import_extra("torch", "egovideo[torch]")

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from egovideo.losses import Gather, clip_loss, ego_nce, max_margin_loss
from egovideo.tower import Pooling, TextTower, VideoTower

__all__ = ["STAGES", "EgoVideo", "EgoVideoOutput", "Stage"]

Stage = Literal["pretrain", "adapt", "joint"]
STAGES: dict[str, tuple[str, ...]] = {
    "pretrain": ("vision", "temporal", "slow_projection", "text", "text_projection"),
    "adapt": ("adapters", "temporal", "class_token", "slow_projection", "fast_projection", "fusion", "text_projection"),
    "joint": (
        "vision",
        "adapters",
        "temporal",
        "slow_projection",
        "fast_projection",
        "fusion",
        "text",
        "text_projection",
    ),
}
"""Which groups of parameters a stage trains. "pretrain" sees the slow path alone; "adapt" is the released second stage; "joint" is the paper's
co-training, in which the fast path takes the vision blocks for constants."""


class EgoVideoOutput(NamedTuple):
    """`loss` is None without texts; embeddings are unit rows."""

    loss: Tensor | None
    video_embeds: Tensor | None
    text_embeds: Tensor | None


class EgoVideo(nn.Module):
    """CLIP for clips, at two rates.

    Args:
        vision: a vision transformer that `inject` knows (timm with `num_classes=0`, transformers, open_clip).
        text: a transformers text encoder.
        slow_frames, fast_frames: T and lambda T; `fast_frames=0` builds the slow path alone.
        embed_dim: E.
        loss: "infonce", "egonce" (batches then carry `nouns` and `verbs`) or "max_margin".
        fast_grad: "through", or upstream's "detached", which trains the last adapter only.
        fast_attention: "joint" as in the paper, or "frame": much cheaper, adapters alone carry time on the fast path.
        pooling: of the text encoder, see `TextTower`.
        gather: across ranks, see `egovideo.losses`.
        adapter: further arguments of `inject` (variant, ratio, kernel, layers).
    """

    def __init__(
        self,
        vision: nn.Module,
        text: nn.Module,
        *,
        slow_frames: int = 4,
        fast_frames: int = 16,
        embed_dim: int = 512,
        loss: Literal["infonce", "egonce", "max_margin"] = "infonce",
        fast_grad: Literal["through", "detached"] = "through",
        fast_attention: Literal["joint", "frame"] = "joint",
        pooling: Pooling = "auto",
        gather: Gather = "grad",
        **adapter: Any,
    ):
        super().__init__()
        check_int("slow_frames", slow_frames, minimum=1)
        check_int("fast_frames", fast_frames, minimum=0)
        check_int("embed_dim", embed_dim, minimum=1)
        check_choice("loss", loss, ("infonce", "egonce", "max_margin"))
        check_choice("fast_grad", fast_grad, ("through", "detached"))
        check_choice("fast_attention", fast_attention, ("joint", "frame"))
        check_choice("gather", gather, ("grad", "local", None))
        self.settings = {
            "slow_frames": slow_frames,
            "fast_frames": fast_frames,
            "embed_dim": embed_dim,
            "loss": loss,
            "fast_grad": fast_grad,
            "fast_attention": fast_attention,
            "pooling": pooling,
            "gather": gather,
            **adapter,
        }
        self.slow_frames, self.fast_frames = slow_frames, fast_frames
        self.loss, self.gather = loss, gather
        self.fast_grad: Literal["through", "detached"] = fast_grad
        self.fast_attention: Literal["joint", "frame"] = fast_attention
        self._source: dict[str, Any] | None = None
        self._checkpoint = False
        self.stage: Stage = "joint"
        self.vision = VideoTower(vision, num_frames=slow_frames, **adapter)
        self.text = TextTower(text, pooling=pooling)
        self.slow_projection = nn.Linear(self.vision.width, embed_dim, bias=False)
        self.text_projection = nn.Linear(self.text.width, embed_dim, bias=False)
        for layer in (self.slow_projection, self.text_projection):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        if fast_frames:
            self.fast_projection = nn.Linear(self.vision.width, embed_dim, bias=False)
            self.fusion = nn.Linear(2 * embed_dim, embed_dim, bias=False)
            nn.init.normal_(self.fast_projection.weight, std=self.vision.width**-0.5)
            nn.init.trunc_normal_(self.fusion.weight, std=1 / 32)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)), requires_grad=False)
        self.set_stage("joint" if fast_frames else "pretrain")

    @classmethod
    def from_clip(cls, clip: nn.Module, **options: Any) -> EgoVideo:
        """From a transformers CLIPModel or SiglipModel. Its projections are not taken over, as in the paper: E is new."""
        model: Any = clip
        return cls(model.vision_model, model.text_model, **options)

    @classmethod
    def from_timm(
        cls, name: str, text: nn.Module, *, timm_options: dict[str, Any] | None = None, **options: Any
    ) -> EgoVideo:
        """From a timm model name; `timm_options` go to `timm.create_model` (for example `pretrained=True`)."""
        timm = import_extra("timm", "egovideo[timm]")
        kwargs = {**(timm_options or {}), "num_classes": 0}
        made = cls(timm.create_model(name, **kwargs), text, **options)
        made._source = {"library": "timm", "name": name, "options": {**kwargs, "pretrained": False}}
        return made

    def set_stage(self, stage: Stage) -> list[str]:
        """Train the groups of `STAGES[stage]` and nothing else; returns the names of the parameters that are trained now.

        With `fast_grad="detached"` no gradient reaches an adapter but the last, so the others are frozen too.
        """
        check_choice("stage", stage, tuple(STAGES))
        if not self.fast_frames and stage != "pretrain":
            raise ValueError(f"stage {stage!r} trains the fast path, but the model was built with fast_frames=0")
        self.stage = stage
        groups = self.parameter_groups()
        chosen = {name for group in STAGES[stage] for name in groups[group]}
        if self.fast_grad == "detached":
            last = max((name.split("motion_adapter")[0] for name in groups["adapters"]), key=_numbers, default="")
            chosen -= {name for name in groups["adapters"] if not name.startswith(last)}
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in chosen)
        return sorted(chosen)

    def parameter_groups(self) -> dict[str, list[str]]:
        """Names of parameters by role. Every parameter is in exactly one group but the class token, which is in "vision" too."""
        groups: dict[str, list[str]] = {name: [] for stage in STAGES.values() for name in stage}
        groups["scale"] = []
        for name, _ in self.named_parameters():
            parts = name.split(".")
            if "motion_adapter" in parts:
                groups["adapters"].append(name)
            elif "time_mixing" in parts:
                groups["temporal"].append(name)
            elif parts[0] == "logit_scale":
                groups["scale"].append(name)
            else:
                groups[parts[0]].append(name)
                if parts[0] == "vision" and parts[-1] in ("class_embedding", "cls_token"):
                    groups["class_token"].append(name)
        return groups

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Recompute vision blocks (and the text encoder's, where it can) in the backward pass. The arguments are transformers'."""
        self._checkpoint = True
        for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):  # the older name last
            if hasattr(self.text.model, name):
                getattr(self.text.model, name)(*args, **kwargs)
                return

    gradient_checkpointing_enable = activation_checkpointing_enable

    def encode_video(
        self,
        slow: Float[Tensor, "clips frames 3 height width"],
        fast: Float[Tensor, "clips many 3 height width"] | None = None,
    ) -> Float[Tensor, "clips embed"]:
        """Unit embeddings of clips. `fast` is needed unless the model is built without, or is at, its slow stage."""
        slow_part = self.slow_projection(self.vision(slow, adapters=False, checkpoint=self._checkpoint))
        if not self.fast_frames or (self.stage == "pretrain" and fast is None):
            return F.normalize(slow_part, dim=-1)
        if fast is None:
            raise ValueError(
                f"fast is None, but this model fuses {self.slow_frames} with {self.fast_frames} frames: pass both"
            )
        features = self.vision(
            fast,
            adapters=True,
            fast_grad=self.fast_grad if torch.is_grad_enabled() else None,
            attention=self.fast_attention,
            checkpoint=self._checkpoint,
        )
        both = torch.cat([slow_part, self.fast_projection(features)], dim=-1)
        return F.normalize(self.fusion(both), dim=-1)

    def encode_text(
        self, input_ids: Shaped[Tensor, "texts tokens"], attention_mask: Shaped[Tensor, "texts tokens"] | None = None
    ) -> Float[Tensor, "texts embed"]:
        """Unit embeddings of tokenised captions."""
        return F.normalize(self.text_projection(self.text(input_ids, attention_mask)), dim=-1)

    def forward(
        self,
        slow: Tensor | None = None,
        fast: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        nouns: Tensor | None = None,
        verbs: Tensor | None = None,
    ) -> EgoVideoOutput:
        """Embeddings of what is given, and the loss where both are; row i of the clips belongs to row i of the texts."""
        video = None if slow is None else self.encode_video(slow, fast if self.stage != "pretrain" else None)
        text = None if input_ids is None else self.encode_text(input_ids, attention_mask)
        if video is None or text is None:
            return EgoVideoOutput(None, video, text)
        if self.loss == "max_margin":
            loss = max_margin_loss(video, text, gather=self.gather)
        elif self.loss == "egonce":
            if nouns is None or verbs is None:
                raise ValueError("loss='egonce' needs nouns and verbs, multi-hot, for each clip of the batch")
            loss = ego_nce(video, text, self.logit_scale.exp(), nouns, verbs, gather=self.gather)
        else:
            loss = clip_loss(video, text, self.logit_scale.exp(), gather=self.gather)
        return EgoVideoOutput(loss, video, text)

    def save_pretrained(self, folder: str | Path, **_: Any) -> None:
        """Write config.json and model.safetensors. Weights that towers share are written once."""
        files = import_extra("safetensors.torch", "egovideo[torch]")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "settings": self.settings,
            "stage": self.stage,
            "vision": self._source or _describe(self.vision.model),
            "text": _describe(self.text.model),
        }
        with atomic_write(folder / "config.json") as file:
            json.dump(config, file, indent=1)
        files.save_model(self, str(folder / "model.safetensors"))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> EgoVideo:
        """Read what `save_pretrained` wrote."""
        files = import_extra("safetensors.torch", "egovideo[torch]")
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there: a folder written by EgoVideo.save_pretrained is needed")
        config = json.loads(path.read_text(encoding="utf-8"))
        made = cls(_build(config["vision"]), _build(config["text"]), **config["settings"])
        made._source = config["vision"] if config["vision"]["library"] == "timm" else None
        files.load_model(made, str(Path(folder) / "model.safetensors"))
        made.set_stage(config["stage"])
        return made


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]


def _describe(model: nn.Module) -> dict[str, Any]:
    transformers = import_extra("transformers", "egovideo[hf]")
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(
            f"{type(model).__name__} cannot be written to a config: use a transformers model, EgoVideo.from_timm, or save state_dict()"
        )
    described: Any = model
    return {"library": "transformers", "class": type(model).__name__, "config": described.config.to_dict()}


def _build(described: dict[str, Any]) -> nn.Module:
    if described["library"] == "timm":
        made: nn.Module = import_extra("timm", "egovideo[timm]").create_model(described["name"], **described["options"])
        return made
    transformers = import_extra("transformers", "egovideo[hf]")
    kind: Any = getattr(transformers, described["class"], None)
    if transformers.PreTrainedModel not in getattr(kind, "__mro__", ()):
        raise ValueError(f"config.json names {described['class']!r}, which is no model of this version of transformers")
    built: nn.Module = kind(kind.config_class.from_dict(described["config"]))
    return built
