"""Hand-object dynamics for egocentric video (Pei et al., ICLR 2025)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from egovideo.clips import Clip, MediaError, load_clip, load_clips, segment_ids
from egovideo.datasets import read_egoclip, read_epic_kitchens
from egovideo.describe import LLMCaptioner, TemplateCaptioner, check_caption, prompt, swap_sides
from egovideo.detection import (
    Box,
    Detector,
    FrameDetections,
    Hand,
    MediaPipeHands,
    Precomputed,
    Thing,
    TransformersDetector,
)
from egovideo.evaluation import (
    class_prototypes,
    egomcq,
    marginalise,
    mean_class_accuracy,
    mir,
    narration_relevancy,
    rank_metrics,
    topk_accuracy,
)
from egovideo.pipeline import HODPipeline, read_clips, summary
from egovideo.trajectory import Motion, Trajectory, motion, track

if TYPE_CHECKING:
    from egovideo.adapter import (
        MotionAdapter,
        adapter_parameters,
        eject,
        inject,
        load_adapter,
        resample_frames,
        save_adapter,
    )
    from egovideo.checkpoints import load_official
    from egovideo.encoder import EgoVideo, EgoVideoOutput
    from egovideo.losses import clip_loss, ego_nce, in_batch_accuracy, max_margin_loss
    from egovideo.tower import TextTower, VideoTower
    from egovideo.training import ClipCollator, ClipDataset, EgoVideoConfig, EgoVideoTrainer, HardNegatives

# The captions and the metrics need no torch; what needs it is imported when it is first named.
_LAZY = {
    "MotionAdapter": "adapter",
    "adapter_parameters": "adapter",
    "eject": "adapter",
    "inject": "adapter",
    "load_adapter": "adapter",
    "resample_frames": "adapter",
    "save_adapter": "adapter",
    "load_official": "checkpoints",
    "EgoVideo": "encoder",
    "EgoVideoOutput": "encoder",
    "clip_loss": "losses",
    "ego_nce": "losses",
    "in_batch_accuracy": "losses",
    "max_margin_loss": "losses",
    "TextTower": "tower",
    "VideoTower": "tower",
    "ClipCollator": "training",
    "ClipDataset": "training",
    "EgoVideoConfig": "training",
    "EgoVideoTrainer": "training",
    "HardNegatives": "training",
}

__all__ = [
    # clips
    "Clip",
    "MediaError",
    "load_clip",
    "load_clips",
    "segment_ids",
    "read_epic_kitchens",
    "read_egoclip",
    # hand-object descriptions
    "Box",
    "Hand",
    "Thing",
    "FrameDetections",
    "Detector",
    "MediaPipeHands",
    "Precomputed",
    "TransformersDetector",
    "Motion",
    "Trajectory",
    "motion",
    "track",
    "TemplateCaptioner",
    "LLMCaptioner",
    "prompt",
    "check_caption",
    "swap_sides",
    "HODPipeline",
    "read_clips",
    "summary",
    # the model
    "MotionAdapter",
    "inject",
    "eject",
    "adapter_parameters",
    "save_adapter",
    "load_adapter",
    "resample_frames",
    "VideoTower",
    "TextTower",
    "EgoVideo",
    "EgoVideoOutput",
    "load_official",
    "clip_loss",
    "ego_nce",
    "max_margin_loss",
    "in_batch_accuracy",
    "ClipDataset",
    "HardNegatives",
    "ClipCollator",
    "EgoVideoConfig",
    "EgoVideoTrainer",
    # the metrics
    "mir",
    "rank_metrics",
    "narration_relevancy",
    "class_prototypes",
    "topk_accuracy",
    "mean_class_accuracy",
    "marginalise",
    "egomcq",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"egovideo.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
