"""The loop against what the official script did with the same scripted replies and embeddings (tests/data/loop.json)."""

import json
from pathlib import Path

import numpy as np
import pytest

from draft_docs.journal import Journal
from draft_docs.loop import LoopSettings, refine
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
    import asyncio

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
