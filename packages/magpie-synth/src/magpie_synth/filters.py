"""Filters, as in the paper's releases and as you define them (Xu et al. 2025, section 3.3 and the dataset cards).

A row passes if it passes every rule that is set; of those that pass, the k with the longest responses are kept, in the order of
ids. A row without a value that a rule needs does not pass. Labels are compared exactly: they are normalised once, when a tag is
read, and one outside its scale counts as missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from chapbook_shared.seeding import derive_seed
from chapbook_shared.validate import check_choice, check_fraction, check_int

from .rows import Record, like, plain_rows

QUALITIES = ("very poor", "poor", "average", "good", "excellent")
DIFFICULTIES = ("very easy", "easy", "medium", "hard", "very hard")
CODING = "Coding & Debugging"


@dataclass(frozen=True, kw_only=True)
class FilterSpec:
    """Which rows to keep. A rule that is None or False is not set."""

    min_quality: str | None = None
    """The lowest `input_quality`."""
    min_difficulty: str | None = None
    min_reward: float | None = None
    """The lowest `instruct_reward` (tau 1 in the paper)."""
    strict_reward: bool = False
    """The reward must be above `min_reward`, not only reach it."""
    reward_difference_above: float | None = None
    """What `reward_difference` must be above (tau 2 in the paper)."""
    neighbor_distance_above: float | None = None
    """What `min_neighbor_distance` must be above."""
    no_repetition: bool = False
    """`min_similar_id` is None or the row's own id."""
    complete: bool = False
    """The instruction (and that of a second turn) does not end with ":"."""
    language: str | None = None
    """The only `language`: an ISO 639-1 code in capitals."""
    newlines_below: int | None = None
    """How many line breaks an instruction must stay below, unless its `task_category` is coding."""
    turns: int | None = None
    """The number of turns."""
    top: int | None = None
    """Of the rows that pass, how many with the longest responses to keep; ties go to the lower id."""
    shuffle_seed: int | None = None
    """Shuffle what is kept."""

    def __post_init__(self) -> None:
        for name, scale in (("min_quality", QUALITIES), ("min_difficulty", DIFFICULTIES)):
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), scale)
        if self.top is not None:
            check_int("top", self.top, minimum=0)

    def columns(self) -> set[str]:
        """The columns that the rules need."""
        return {column for rule, column in _COLUMNS.items() if self._is_set(rule)}

    def _is_set(self, rule: str) -> bool:
        value = getattr(self, rule)
        return value is not None and value is not False

    def passes(self, row: Mapping[str, Any]) -> bool:
        """Whether a row passes every rule but `top`."""
        rules = (
            _at_least(row.get("input_quality"), self.min_quality, QUALITIES),
            _at_least(row.get("difficulty"), self.min_difficulty, DIFFICULTIES),
            self._reward_passes(row.get("instruct_reward")),
            _above(row.get("reward_difference"), self.reward_difference_above),
            _above(row.get("min_neighbor_distance"), self.neighbor_distance_above),
            not self.no_repetition or row.get("min_similar_id") in (None, row["id"]),
            not self.complete or not any(text.rstrip().endswith(":") for text in _instructions(row)),
            self.language is None or row.get("language") == self.language,
            self.newlines_below is None
            or row.get("task_category") == CODING
            or row["instruction"].count("\n") < self.newlines_below,
            self.turns is None or len(list(_instructions(row))) == self.turns,
        )
        return all(rules)

    def _reward_passes(self, reward: float | None) -> bool:
        if self.min_reward is None:
            return True
        if reward is None:
            return False
        return reward > self.min_reward if self.strict_reward else reward >= self.min_reward


_COLUMNS = {
    "min_quality": "input_quality",
    "min_difficulty": "difficulty",
    "min_reward": "instruct_reward",
    "reward_difference_above": "reward_difference",
    "neighbor_distance_above": "min_neighbor_distance",
    "no_repetition": "min_similar_id",
    "language": "language",
}

PRESETS: Mapping[str, FilterSpec] = MappingProxyType(
    {
        # The paper's thresholds for the reward are -12; what was released used -10.
        "pro-300k": FilterSpec(min_quality="average", min_reward=-10, no_repetition=True, complete=True, top=300_000),
        "air-300k": FilterSpec(
            min_quality="good",
            min_difficulty="medium",
            neighbor_distance_above=0,
            reward_difference_above=0,
            top=300_000,
        ),
        "qwen2-pro-300k": FilterSpec(
            min_quality="good",
            min_reward=-10,
            strict_reward=True,
            no_repetition=True,
            complete=True,
            top=300_000,
            shuffle_seed=42,
        ),
        "qwen2-pro-200k-zh": FilterSpec(
            min_quality="average", min_reward=-10, no_repetition=True, complete=True, language="ZH", top=200_000
        ),
        "pro-mt-300k": FilterSpec(min_quality="good", min_difficulty="easy", turns=2, top=300_000),
        "llama31-pro-500k": FilterSpec(min_quality="good", newlines_below=5, top=500_000),
        "llama31-pro-mt-300k": FilterSpec(min_quality="good", newlines_below=5, complete=True, turns=2, top=300_000),
        "dedupe": FilterSpec(no_repetition=True),
    }
)
"""The filters of the releases as far as their cards and notebooks tell, and `dedupe`, which needs no tags."""


def apply(
    rows: Any,
    spec: FilterSpec | str,
    *,
    missing: str = "error",
    top: int | None = None,
    tau: float | None = None,
) -> Any:
    """The rows that a filter keeps, in the order of ids; a Dataset for a Dataset.

    `spec` is a `FilterSpec` or the name of a preset; `top` and `tau` (the lowest reward) override its values. A column that no
    row has is an error, unless `missing="skip-filter"` leaves the rules out that need it, or `missing="drop"` drops the rows.
    """
    check_choice("missing", missing, ("error", "skip-filter", "drop"))
    if isinstance(spec, str):
        check_choice("spec", spec, PRESETS)
        spec = PRESETS[spec]
    if top is not None:
        spec = replace(spec, top=top)
    if tau is not None:
        spec = replace(spec, min_reward=tau)
    plain = sorted(plain_rows(rows), key=lambda row: row["id"])
    if plain and missing != "drop":
        there = {name for row in plain for name in row}
        absent = sorted(spec.columns() - there)
        if absent and missing == "error":
            raise ValueError(
                f"the rows have no {', '.join(absent)}, which the filter needs: tag them first, or pass "
                'missing="skip-filter" to leave those rules out'
            )
        spec = _without(spec, absent)
    kept = [row for row in plain if spec.passes(row)]
    if spec.top is not None and len(kept) > spec.top:
        longest = sorted(kept, key=lambda row: (-len(row.get("response") or ""), row["id"]))[: spec.top]
        kept = sorted(longest, key=lambda row: row["id"])
    if spec.shuffle_seed is not None:
        order = np.random.default_rng(spec.shuffle_seed).permutation(len(kept))
        kept = [kept[place] for place in order]
    return like(rows, kept)


def _without(spec: FilterSpec, absent: Sequence[str]) -> FilterSpec:
    off: dict[str, Any] = {field.name: field.default for field in fields(FilterSpec)}
    return replace(spec, **{rule: off[rule] for rule, column in _COLUMNS.items() if column in absent})


def _at_least(label: Any, lowest: str | None, scale: Sequence[str]) -> bool:
    return lowest is None or (label in scale and scale.index(label) >= scale.index(lowest))


def _above(value: float | None, border: float | None) -> bool:
    return border is None or (value is not None and value > border)


def _instructions(row: Mapping[str, Any]) -> list[str]:
    """The instructions of all turns."""
    texts, turn = [row["instruction"]], 2
    while row.get(f"instruction_{turn}") is not None:
        texts.append(row[f"instruction_{turn}"])
        turn += 1
    return texts


def thinned_headings(
    rows: Sequence[Record], *, keep_share: float, seed: int = 0, heading: str = "## Step 1"
) -> list[Record]:
    """Rows whose responses hold `heading` thinned out to about `keep_share` of them, as the Llama-3.1 multi-turn release does."""
    check_fraction("keep_share", keep_share)
    return [
        row
        for row in rows
        if not any(heading in message["content"] for message in row["messages"] if message["role"] == "assistant")
        or derive_seed(seed, "heading", str(row["id"])) / 2**63 < keep_share
    ]
