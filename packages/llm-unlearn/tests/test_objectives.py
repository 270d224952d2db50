"""Golden combinations: forget, regulariser and total of every pair of the official code, from the official functions in float64."""

import json
from pathlib import Path

import pytest
import torch

from llm_unlearn import losses
from llm_unlearn.objectives import (
    Hyperparameters,
    Part,
    forget_losses,
    parse_method,
    register_forget_loss,
    regularizers,
)

GOLDEN = json.loads((Path(__file__).parent / "data" / "losses_small.json").read_text(encoding="utf-8"))
HYPER = Hyperparameters(beta=GOLDEN["beta"], me_positions="answer", kl_positions="all")


def golden_part(name, positions):
    batch = GOLDEN["batches"][name]
    logits, reference = (torch.tensor(batch[key], dtype=torch.float64) for key in ("logits", "ref_logits"))
    labels = torch.tensor(batch["labels"])
    answer = losses.answer_positions(labels)
    rows = torch.ones_like(answer) if positions == "all" else answer
    sequence = torch.arange(len(labels))[:, None].expand_as(labels)
    return Part(
        logits[rows],
        torch.roll(labels, -1, dims=1)[rows],
        answer[rows],
        sequence[rows],
        len(labels),
        ref_logits=reference[rows],
        ref_nll=losses.sequence_nll(reference, labels),
    )


@pytest.mark.parametrize("name", [name for name in GOLDEN["combos"] if name != "LLMU"])
def test_every_official_combination(name):
    method = parse_method(name)
    expected = GOLDEN["combos"][name]
    values = []
    for objective in method.objectives:
        parts = {part: golden_part(part, objective.positions_for(HYPER)) for part in objective.parts}
        first = parts[objective.parts[0]]
        per = {"token": int(first.answer.sum()), "position": len(first.targets), "sequence": first.n_sequences}
        values.append(objective.compute(parts, HYPER).item() / per[objective.per])
    assert values == pytest.approx([expected["forget"], expected["reg"]], abs=1e-9)


def test_only_needed_parts_and_references():
    """The paper's own two methods need no reference model."""
    assert parse_method("ME+GD").parts == ("forget", "retain")
    assert parse_method("IDK+AP").parts == ("forget_idk", "retain", "retain_idk")
    assert parse_method("GA").parts == ("forget",)
    assert not parse_method("ME+GD").references
    assert not parse_method("IDK+AP").references
    assert parse_method("NPO+KL").references == {"nll", "logits"}


def test_every_forget_loss_combines_with_every_regularizer():
    for forget in forget_losses():
        for regularizer in (*regularizers(), "none"):
            method = parse_method(f"{forget}+{regularizer}")
            assert method.name == (forget if regularizer == "none" else f"{forget}+{regularizer}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NPQ+GD", "Did you mean 'NPO'.*Known: GA, NPO, ME"),
        ("ME+GDD", "unknown regularizer 'GDD'.*Did you mean 'GD'"),
        ("ME+", "nothing after the"),
        ("ME+GD+KL", "must be 'FORGET'"),
        ("", "must be 'FORGET'"),
        ("GAGA", "unknown forget loss"),  # the official code matches by substring
    ],
)
def test_unknown_methods(name, message):
    with pytest.raises(ValueError, match=message):
        parse_method(name)


def test_case_does_not_matter():
    assert parse_method(" me + gd ").name == "ME+GD"


def test_a_plug_in_is_found_and_cannot_be_registered_twice():
    @register_forget_loss("HalfGA-test")
    def half(parts, hyper):
        return -parts["forget"].token_nll.sum() / 2

    assert parse_method("HalfGA-test+GD").forget.compute is half
    with pytest.raises(ValueError, match="registered already"):
        register_forget_loss("halfga-TEST")
    with pytest.raises((ValueError, TypeError), match="everything"):
        register_forget_loss("Other", parts=("everything",))
    with pytest.raises(ValueError, match="name must not"):
        register_forget_loss("A+B")
