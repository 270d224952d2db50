"""Longer evidence: `python benchmarks/evidence.py motion|language-model`, `motion 400 temporal`. Prints one JSON object a line.

motion [steps] [variant]: direction accuracy of variants of the adapter on the demo's clips, three seeds, and trained on shuffled frames.
language-model: SmolLM2-135M through the pipeline on the demo's rendered files; how many of its captions pass the check.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chapbook_shared.lm import LocalModel
from chapbook_shared.seeding import derive_seed, seed_everything
from egovideo import HODPipeline, LLMCaptioner, Trajectory, check_caption
from egovideo import demo as evidence
from egovideo.rendering import ColorDetector
from egovideo.tower import VideoTower


def motion(steps: int = 150, only: str = "") -> None:
    variants: dict[str, dict[str, Any]] = {
        "temporal": {},
        "spatiotemporal": {"variant": "spatiotemporal"},
        "temporal, frame attention": {"attention": "frame"},
        "temporal embedding alone": {"layers": []},
    }
    for number in range(evidence.SEEDS):
        seed = derive_seed(0, "motion", number)
        seed_everything(seed)
        train = evidence.motion_clips(evidence.TRAIN, derive_seed(seed, "train"))
        test = evidence.motion_clips(evidence.TEST, derive_seed(seed, "test"))
        pixels, test_pixels = evidence._pixels(train[0]), evidence._pixels(test[0])
        labels = torch.from_numpy(train[1])
        state = {k: v.clone() for k, v in evidence._pretrained(pixels, train[1]).state_dict().items()}
        for name, options in variants.items():
            if only and name != only:
                continue
            for shuffle in (False, True):
                start = time.process_time()
                seed_everything(derive_seed(seed, "adapters"))
                model = evidence._image_model()
                model.load_state_dict(state)
                tower = VideoTower(
                    model.eval().requires_grad_(False), num_frames=evidence.FRAMES, pool="patches", **options
                )
                for parameter_name, parameter in tower.named_parameters():
                    parameter.requires_grad_("motion_adapter" in parameter_name or "time_mixing" in parameter_name)
                head = torch.nn.Linear(tower.width, 8)
                trained = [p for p in tower.parameters() if p.requires_grad] + list(head.parameters())

                def score(index, tower=tower, head=head, shuffle=shuffle, pixels=pixels):
                    part = pixels[index]
                    return head(tower(evidence._shuffled(part) if shuffle else part))

                evidence._fit(score, trained, labels, steps=steps, rate=1e-2)
                tower.eval()
                with torch.no_grad():
                    scores = torch.cat([head(tower(part)) for part in test_pixels.split(64)]).numpy()
                row = {
                    "seed": number,
                    "steps": steps,
                    "variant": name,
                    "trained_on": "shuffled" if shuffle else "ordered",
                    "direction": round(evidence.accuracy_of_direction(scores, test[1]), 3),
                    "eight_way": round(float((scores.argmax(1) == test[1]).mean()), 3),
                    "cpu_s": round(time.process_time() - start, 1),
                }
                print(json.dumps(row), flush=True)


def language_model() -> None:
    model = LocalModel.smollm2()
    with tempfile.TemporaryDirectory() as scratch:
        clips = [entry for entry, _ in evidence.hod_clips(Path(scratch), 0)]
        for frames in (4, 16):
            start = time.process_time()
            store = Path(scratch) / f"hod{frames}.sqlite"
            free = HODPipeline(ColorDetector(), LLMCaptioner(model), num_frames=frames, retries=0, check=False)
            first = [free.describe(clip) for clip in clips]
            wrong = [
                check_caption(r["caption"], Trajectory.from_record(r["trajectory"]), narration=r["narration"])
                for r in first
            ]
            checked = HODPipeline(ColorDetector(), LLMCaptioner(model), num_frames=frames, retries=1)
            result = checked.run(clips, store)
            row = {
                "frames": frames,
                "clips": len(clips),
                "first_replies_that_pass": sum(
                    r["source"] == "llm" and not w for r, w in zip(first, wrong, strict=True)
                ),
                "after_one_retry": result["captions"],
                "reasons": result["reasons"],
                "examples": [[r["caption"], w] for r, w in list(zip(first, wrong, strict=True))[:6]],
                "cpu_s": round(time.process_time() - start),
            }
            print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    if sys.argv[1] == "motion":
        motion(*map(int, sys.argv[2:3]), *sys.argv[3:4])
    else:
        language_model()
