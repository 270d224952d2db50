"""Training with transformers' Trainer: clips from files, captions, and the defaults of the released configuration.

Randomness (crops, flips, frames, captions) comes from torch's generator, which the Trainer's workers seed.
"""

from __future__ import annotations

# ruff: noqa: E402
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from chapbook_shared.validate import check_choice, check_int, check_positive, import_extra

import_extra("torch", "egovideo[hf]")
import_extra("transformers", "egovideo[hf]")

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainingArguments

from egovideo.clips import MediaError, load_clips
from egovideo.describe import swap_sides
from egovideo.encoder import STAGES, EgoVideo
from egovideo.evaluation import mir

__all__ = ["ClipCollator", "ClipDataset", "EgoVideoConfig", "EgoVideoTrainer", "HardNegatives", "retrieval_metrics"]

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class ClipDataset(Dataset[Any]):
    """Clips with captions.

    Args:
        records: mappings with `video` (path), `caption` (text, or several: one is drawn each time) and, unless the clip is the whole file,
            `start` and `end` in seconds; for EgoNCE also `nouns` and `verbs` (lists of class numbers).
        rates: frames of the slow and of the fast path; a single number leaves the fast path out.
        size: side of the square input.
        train: random resized crop (area 0.5 to 1), random frames within segments, random flip; otherwise the middle of everything.
        flip: "swap" mirrors half of the clips and exchanges left and right in their captions; "none" mirrors nothing.
        on_error: "raise" a MediaError for a file that cannot be read, or "skip": the item is None, `skipped` counts, batches are smaller.

    An item has `slow` and `fast` (frames, 3, size, size), normalised as CLIP's, and the caption.
    """

    def __init__(
        self,
        records: Sequence[Mapping[str, Any]],
        *,
        rates: Sequence[int] = (4, 16),
        size: int = 224,
        train: bool = True,
        flip: Literal["swap", "none"] = "swap",
        on_error: Literal["raise", "skip"] = "raise",
    ):
        check_int("size", size, minimum=1)
        check_choice("flip", flip, ("swap", "none"))
        check_choice("on_error", on_error, ("raise", "skip"))
        if len(rates) not in (1, 2):
            raise ValueError(f"rates must hold one number of frames, or two (slow, fast), got {rates!r}")
        for number, record in enumerate(records):
            if not record.get("video") or not record.get("caption"):
                raise ValueError(f"record {number} must have a video and a caption, got {dict(record)!r}")
        self.records, self.rates, self.size = records, tuple(rates), size
        self.train, self.flip, self.on_error = train, flip, on_error
        self.skipped = 0

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        record = self.records[index]
        rng = np.random.default_rng(int(torch.randint(2**62, ()))) if self.train else None
        try:
            clips = load_clips(
                record["video"],
                record.get("start") or 0.0,
                record.get("end"),
                num_frames=self.rates,
                # Decoded no larger than a crop of half the area needs.
                short_side=round(self.size * 1.5) if self.train else self.size,
                rng=rng,
                threads=1,
            )
        except MediaError:
            if self.on_error == "raise":
                raise
            self.skipped += 1
            return None
        caption = record["caption"]
        if not isinstance(caption, str):
            caption = caption[0 if rng is None else int(rng.integers(len(caption)))]
        mirrored = rng is not None and self.flip == "swap" and rng.random() < 0.5
        box = _crop(clips[0].frames.shape[1:3], rng)
        tensors = [_pixels(clip.frames, box, self.size, mirrored) for clip in clips]
        item: dict[str, Any] = dict(zip(("slow", "fast"), tensors, strict=False))
        item["caption"] = swap_sides(caption) if mirrored else caption
        return item | {name: record[name] for name in ("nouns", "verbs") if name in record}


class HardNegatives(Dataset[Any]):
    """Each item together with a neighbour: another clip of the same video, at most `within` seconds away (EgoNCE's hard negatives).

    An item is a list of one or two items of `dataset`; `ClipCollator` lays them flat, so batches are up to twice as large.
    """

    def __init__(self, dataset: ClipDataset, *, within: float = 60.0):
        check_positive("within", within)
        self.dataset = dataset
        starts = [(str(r["video"]), float(r.get("start") or 0)) for r in dataset.records]
        by_video: dict[str, list[int]] = {}
        for number, (video, _) in enumerate(starts):
            by_video.setdefault(video, []).append(number)
        self.neighbours = [
            [j for j in by_video[video] if j != i and abs(starts[j][1] - start) <= within]
            for i, (video, start) in enumerate(starts)
        ]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> list[dict[str, Any] | None]:
        near = self.neighbours[index]
        if not near:
            return [self.dataset[index]]
        return [self.dataset[index], self.dataset[near[int(torch.randint(len(near), ()))]]]


@dataclass
class ClipCollator:
    """Batches of `ClipDataset` or `HardNegatives`: pixels stacked, captions tokenised, nouns and verbs multi-hot."""

    tokenizer: Any
    max_length: int = 77
    num_nouns: int = 0
    num_verbs: int = 0

    def __call__(self, items: Sequence[Any]) -> dict[str, Tensor]:
        flat = [one for item in items for one in (item if isinstance(item, list) else [item]) if one is not None]
        if not flat:
            raise MediaError("batch", f"none of its {len(items)} clips can be read")
        batch = {name: torch.stack([one[name] for one in flat]) for name in ("slow", "fast") if name in flat[0]}
        tokens = self.tokenizer(
            [one["caption"] for one in flat],
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        )
        batch |= {name: tokens[name] for name in ("input_ids", "attention_mask")}
        for name, count in (("nouns", self.num_nouns), ("verbs", self.num_verbs)):
            if count:
                hot = torch.zeros(len(flat), count)
                for row, one in enumerate(flat):
                    hot[row, list(one[name])] = 1
                batch[name] = hot
        return batch


@dataclass
class EgoVideoConfig(TrainingArguments):
    """TrainingArguments with the released configuration's values (B; for L: learning_rate=1e-5) and the stage to train."""

    learning_rate: float = 4e-5
    weight_decay: float = 0.01
    lr_scheduler_type: Any = "constant"
    max_grad_norm: float = 0.0
    num_train_epochs: float = 15
    per_device_train_batch_size: int = 128
    remove_unused_columns: bool = False
    stage: str | None = field(default=None, metadata={"help": "pretrain, adapt or joint; None: as the model is set"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage is not None:
            check_choice("stage", self.stage, tuple(STAGES))


class EgoVideoTrainer(Trainer):
    """A Trainer for `EgoVideo`: sets the stage, decays matrices only, evaluates retrieval, saves what `EgoVideo.from_pretrained` reads.

    The loss it logs is the mean over ranks of the ranks' shares: the loss of the global batch.
    """

    def __init__(self, model: EgoVideo, args: EgoVideoConfig, **options: Any):
        if args.stage is not None:
            model.set_stage(args.stage)  # type: ignore[arg-type]
        options.setdefault("compute_metrics", retrieval_metrics)
        super().__init__(model=model, args=args, **options)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        output = model(**inputs)
        return (output.loss, output) if return_outputs else output.loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        with torch.no_grad():
            output = model(**self._prepare_inputs(inputs))
        rows = torch.arange(len(output.video_embeds), device=output.video_embeds.device)
        return output.loss.detach(), None if prediction_loss_only else (output.video_embeds, output.text_embeds), rows

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Weight decay for matrices; none for vectors and scalars."""
        return [name for name, parameter in model.named_parameters() if parameter.ndim > 1]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.args.should_save:
            model: Any = self.accelerator.unwrap_model(self.model)
            model.save_pretrained(output_dir or self.args.output_dir)


def retrieval_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """mAP of finding each clip's own caption among all, and the reverse, over the whole evaluation set."""
    video, text = (np.asarray(part, np.float32) for part in prediction.predictions)
    result = mir(video @ text.T, np.eye(len(video), dtype=np.float32))
    return {f"mAP_{direction}": value for direction, value in result["mAP"].items()}


def _crop(shape: tuple[int, ...], rng: np.random.Generator | None) -> tuple[int, int, int, int]:
    """(top, left, height, width): a random part of half to all of the area, of a ratio from 3/4 to 4/3; without `rng` the middle square."""
    height, width = shape
    side = min(height, width)
    if rng is not None:
        for _ in range(10):
            area = rng.uniform(0.5, 1) * height * width
            ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
            w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if w <= width and h <= height:
                return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    return (height - side) // 2, (width - side) // 2, side, side


def _pixels(
    frames: UInt8[np.ndarray, "frames height width 3"], box: tuple[int, int, int, int], size: int, mirrored: bool
) -> Float[Tensor, "frames 3 size size"]:
    top, left, height, width = box
    cut = torch.from_numpy(np.ascontiguousarray(frames[:, top : top + height, left : left + width]))
    pixels = cut.permute(0, 3, 1, 2).float() / 255
    if pixels.shape[-2:] != (size, size):
        pixels = F.interpolate(pixels, size=(size, size), mode="bicubic", antialias=True).clamp(0, 1)
    mean, std = (torch.tensor(part)[:, None, None] for part in (CLIP_MEAN, CLIP_STD))
    pixels = (pixels - mean) / std
    return pixels.flip(-1) if mirrored else pixels
