"""The loop against what the official script did with the same scripted replies and embeddings (tests/data/loop.json)."""

import asyncio
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_docs.journal import Journal
from draft_docs.loop import LoopSettings, refine
from draft_docs.stability import bleu4
from draft_docs.tools import ToolResult, ToolSpec

DATA = Path(__file__).parent / "data"
SCENARIOS = json.loads((DATA / "loop.json").read_text(encoding="utf-8"))["scenarios"]

SCHEMA = {
    "type": "object",
    "properties": {"value": {"type": "number"}, "unit": {"type": "string"}},
    "required": ["value", "unit"],
}


class Converter:
    """A real tool: metres and feet."""

    def __init__(self):
        self.calls = []

    async def call(self, name, arguments):
        self.calls.append(dict(arguments))
        factor = {"m": 3.28084, "ft": 0.3048}.get(arguments["unit"])
        if factor is None:
            return ToolResult(f"unknown unit {arguments['unit']}", "tool_error")
        return ToolResult(str(arguments["value"] * factor))


class Script:
    """Says the scripted replies of one scenario, in our form, and notes who was asked what."""

    def __init__(self, scenario):
        scripted = scenario["scripted"]
        self.replies = {
            "explore": [json.dumps({"query": r["User Query"], "arguments": r["Parameters"]}) for r in scripted["E"]],
            "analyse": [json.dumps({"suggestions": r["Suggestions for tool description"]}) for r in scripted["A"]],
            "rewrite": [
                json.dumps(
                    {"description": r["Rewritten description"], "next_direction": r["Suggestions for exploring"]}
                )
                for r in scripted["R"]
            ],
        }
        self.vectors = scenario["embeddings"]
        self.asked, self.embedded = [], []

    async def ask(self, key, messages, schema):
        role = key.split("/")[3].split("-")[0]
        self.asked.append((role, messages[-1].text))
        return self.replies[role].pop(0)

    async def embed(self, text):
        self.embedded.append(text)
        return np.array(self.vectors[text], dtype=float)


async def run(scenario, journal, script, tool):
    spec = ToolSpec("convert", scenario["initial"], SCHEMA)
    settings = LoopSettings(
        max_iterations=scenario["max_episodes"],
        max_attempts=scenario["max_attempts"],
        phi=scenario["phi"],
        tau=scenario["tau"],
        rewrite_parameters=False,
    )
    return await refine(spec, tool, ask=script.ask, embed=script.embed, journal=journal, settings=settings)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s["name"])
def test_the_loop_goes_as_the_official_one(scenario):
    script, tool = Script(scenario), Converter()
    refined = asyncio.run(run(scenario, Journal(None), script, tool))
    expected = scenario["expected"]
    letters = {"explore": "E", "analyse": "A", "rewrite": "R"}
    assert "".join(letters[role] for role, _ in script.asked) == expected["phases"].removesuffix("T")
    notes = [text.count("too close to an earlier request") for role, text in script.asked if role == "explore"]
    assert notes == expected["retry_notes"]
    history = ["Earlier versions" in text for role, text in script.asked if role != "explore"]
    assert history == expected["history"]
    assert refined.after.description == expected["final_description"]
    assert len(script.embedded) <= expected["embedding_calls"]
    for iteration, delta in zip(refined.iterations, scenario["deltas"], strict=True):
        assert iteration.stability == pytest.approx(delta["delta"], abs=1e-12)


def slow_loop(queries, descriptions, vectors, start, *, phi, tau, most, attempts):
    """The method from its definition: the order of the phases, how many queries were rejected before each call, the last document."""
    asked, phases, rejected = iter(queries), "", []
    documents, accepted = [start], []

    def angle(a, b):
        a, b = vectors[a], vectors[b]
        return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))

    for i in range(most):
        notes = 0
        while True:
            query = next(asked)
            phases += "E"
            if i == 0 or notes == attempts - 1 or max(angle(query, other) for other in accepted) < phi:
                break
            notes += 1
        rejected.append(notes)
        accepted.append(query)
        phases += "AR"
        old, new = documents[-1], descriptions[i]
        documents.append(new)
        if old.split() == new.split() or (angle(old, new) + bleu4(new, old)) / 2 > tau:
            break
    return phases, rejected, documents[-1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.3, 0.75, 0.9]), st.sampled_from([0.3, 0.5, 0.75]))
def test_any_script_goes_as_the_definition_says(seed, phi, tau):
    draw = random.Random(seed)
    queries = [f"query {i}" for i in range(20)]
    words = ["gets", "the", "price", "of", "a", "thing", "by", "name"]
    descriptions = [" ".join(draw.choices(words, k=draw.randint(1, 8))) for _ in range(5)]
    texts = {*queries, *descriptions, "start text"}
    vectors = {text: [abs(draw.gauss(1, 0.5)) + 0.01 for _ in range(4)] for text in texts}
    scenario = {
        "scripted": {
            "E": [{"User Query": query, "Parameters": {"value": 1, "unit": "m"}} for query in queries],
            "A": [{"Suggestions for tool description": "s"}] * 5,
            "R": [{"Rewritten description": words, "Suggestions for exploring": "d"} for words in descriptions],
        },
        "embeddings": vectors,
        "initial": "start text",
        "max_episodes": 5,
        "max_attempts": 3,
        "phi": phi,
        "tau": tau,
    }
    script = Script(scenario)
    refined = asyncio.run(run(scenario, Journal(None), script, Converter()))
    phases, rejected, last = slow_loop(
        queries, descriptions, vectors, "start text", phi=phi, tau=tau, most=5, attempts=3
    )
    assert "".join({"explore": "E", "analyse": "A", "rewrite": "R"}[role] for role, _ in script.asked) == phases
    assert [len(iteration.rejected_queries) for iteration in refined.iterations] == rejected
    assert refined.after.description == last
    assert len(script.embedded) == len(set(script.embedded))
