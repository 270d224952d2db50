"""Facts about the filters."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magpie_synth import filters
from magpie_synth.filters import PRESETS, QUALITIES, FilterSpec, apply, thinned_headings

# 60 rows with missing values and values on the borders; kept ids by brute force. "duplicate_of" is `min_similar_id`.
GOLDEN = json.loads((Path(__file__).parent / "data" / "filters.json").read_text(encoding="utf-8"))
ROWS = [{**row, "min_similar_id": row["duplicate_of"]} for row in GOLDEN["rows"]]
NAMES = {"notebook": "qwen2-pro-300k", "pro": "pro-300k", "air": "air-300k", "pro-chinese": "qwen2-pro-200k-zh"}


@pytest.mark.parametrize("name", NAMES)
def test_golden_presets(name):
    expect = GOLDEN["expect"][name]
    kept = apply(ROWS, NAMES[name])
    assert sorted(row["id"] for row in kept) == expect["keep"]
    longest = apply(ROWS, NAMES[name], top=expect["top_longest"])
    assert sorted(row["id"] for row in longest) == expect["top_ids_in_id_order"]


def test_the_notebook_shuffles_and_the_others_keep_the_order_of_ids():
    rows = [{**ROWS[1], "id": i, "min_similar_id": None} for i in reversed(range(20))]
    assert [row["id"] for row in apply(rows, "pro-300k")] == list(range(20))
    shuffled = [row["id"] for row in apply(rows, "qwen2-pro-300k")]
    assert sorted(shuffled) == list(range(20)) != shuffled


def row(**values):
    return {"id": "a", "instruction": "Why?", "response": "So.", **values}


@pytest.mark.parametrize(
    ("spec", "values", "passes"),
    [
        ({"min_quality": "good"}, {"input_quality": "Good"}, False),  # exactly, case included
        ({"min_quality": "good"}, {"input_quality": "excellent"}, True),
        ({"min_quality": "good"}, {"input_quality": None}, False),
        ({"min_quality": "good"}, {"input_quality": "superb"}, False),
        ({"min_difficulty": "medium"}, {"difficulty": "easy"}, False),
        ({"min_reward": -10}, {"instruct_reward": -10.0}, True),
        ({"min_reward": -10, "strict_reward": True}, {"instruct_reward": -10.0}, False),
        ({"neighbor_distance_above": 0}, {"min_neighbor_distance": 0.0}, False),
        ({"no_repetition": True}, {"min_similar_id": "a"}, True),
        ({"no_repetition": True}, {"min_similar_id": "b"}, False),
        ({"complete": True}, {"instruction": "Write this: \n"}, False),
        ({"complete": True}, {"instruction_2": "And this:"}, False),
        ({"newlines_below": 2}, {"instruction": "a\nb\nc"}, False),
        ({"newlines_below": 2}, {"instruction": "a\nb\nc", "task_category": "Coding & Debugging"}, True),
        ({"turns": 2}, {}, False),
        ({"turns": 2}, {"instruction_2": "More?"}, True),
    ],
)
def test_rules(spec, values, passes):
    assert FilterSpec(**spec).passes(row(**values)) is passes


def test_a_column_that_is_missing_is_an_error_unless_said_otherwise():
    rows = [row(input_quality="good")]
    with pytest.raises(ValueError, match=r'have no instruct_reward, min_similar_id.*missing="skip-filter"'):
        apply(rows, "pro-300k")
    assert apply(rows, "pro-300k", missing="skip-filter") == rows
    assert apply(rows, "pro-300k", missing="drop") == []
    assert apply([], "pro-300k") == []


def test_tau_is_an_argument():
    rows = [row(input_quality="good", instruct_reward=-11.0, min_similar_id=None)]
    assert apply(rows, "pro-300k") == []
    assert apply(rows, "pro-300k", tau=-12) == rows


def test_headings_are_thinned():
    rows = [
        {"id": i, "messages": [{"role": "assistant", "content": "## Step 1: go" if i % 2 else "Go."}]}
        for i in range(400)
    ]
    kept = thinned_headings(rows, keep_share=0.25)
    steps = sum(row["id"] % 2 for row in kept)
    assert len(kept) - steps == 200
    assert 25 < steps < 75
    assert thinned_headings(rows, keep_share=1.0) == rows


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: apply(ROWS, "best"), "spec must be one of 'pro-300k'"),
        (lambda: FilterSpec(min_quality="Good"), "min_quality must be one of 'very poor'"),
        (lambda: FilterSpec(min_difficulty="tough"), "min_difficulty must be one of"),
        (lambda: FilterSpec(top=-1), "top must be >= 0"),
        (lambda: apply(ROWS, "dedupe", missing="what"), "missing must be one of"),
        (lambda: thinned_headings([], keep_share=2.0), r"keep_share must be in \[0, 1\]"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@given(st.lists(st.tuples(st.sampled_from([*QUALITIES, None]), st.integers(0, 6)), max_size=30), st.integers(0, 8))
def test_the_longest_are_kept_and_no_row_is_made_up(entries, top):
    rows = [
        {"id": i, "instruction": "q", "response": "r" * length, "input_quality": quality}
        for i, (quality, length) in enumerate(entries)
    ]
    kept = apply(rows, FilterSpec(min_quality="average", top=top))
    good = [row for row in rows if row["input_quality"] in ("average", "good", "excellent")]
    assert len(kept) == min(top, len(good))
    left = [row for row in good if row not in kept]
    assert all(len(a["response"]) >= len(b["response"]) for a in kept for b in left)
    assert [row["id"] for row in kept] == sorted(row["id"] for row in kept)


def test_presets_name_no_rule_that_does_not_exist():
    assert set(filters.PRESETS) == set(PRESETS)
    assert PRESETS["air-300k"].columns() == {
        "input_quality",
        "difficulty",
        "min_neighbor_distance",
        "reward_difference",
    }
