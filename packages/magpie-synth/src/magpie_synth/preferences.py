"""Preference pairs: k responses to one instruction, the best against the worst by a reward (Xu et al. 2025, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Scorer = Callable[[Sequence[Sequence[dict[str, str]]]], Sequence[float]]
"""Rewards, one float a conversation (a list of `{"role", "content"}`); higher is better."""


def pair(id: str, instruction: str, responses: Sequence[str], scores: Sequence[float]) -> dict[str, Any] | None:
    """TRL's conversational preference row: the first of the best responses as `chosen`, the first of the worst as `rejected`.

    None where there is nothing to prefer: fewer than two responses that are not empty, equal scores, or equal texts (the
    official code keeps such rows). Raises ValueError for a score that is no finite number.
    """
    if len(scores) != len(responses):
        raise ValueError(f"the scorer gave {len(scores)} scores for {len(responses)} responses to row {id}")
    for score in scores:
        if not math.isfinite(score):
            raise ValueError(f"the scorer gave {float(score)!r} for a response to row {id}: scores must be finite")
    kept = [(float(score), text) for score, text in zip(scores, responses, strict=True) if text.strip()]
    if len(kept) < 2:
        return None
    best = max(kept, key=lambda entry: entry[0])
    worst = min(kept, key=lambda entry: entry[0])
    if best[0] == worst[0] or best[1] == worst[1]:
        return None
    return {
        "id": id,
        "prompt": [{"role": "user", "content": instruction}],
        "chosen": [{"role": "assistant", "content": best[1]}],
        "rejected": [{"role": "assistant", "content": worst[1]}],
        "score_chosen": best[0],
        "score_rejected": worst[0],
    }
