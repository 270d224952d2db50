import json

from hypothesis import given, settings
from hypothesis import strategies as st

from draft_docs import ToolResult, ToolSpec, prompts
from draft_docs.probes import probes
from draft_docs.prompts import Experience, estimated_tokens, fitted

TOOL = ToolSpec("look", "Looks. " * 20, {"type": "object", "properties": {"x": {"type": "integer"}}})


def size(messages):
    return sum(estimated_tokens(message.text) for message in messages)


def make(history, result):
    return prompts.analyse(TOOL, [Experience(1, "q", {"x": 1}, result)], versions=history)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("abc ", min_size=1, max_size=400), max_size=6), st.integers(0, 3000), st.integers(50, 2000))
def test_a_prompt_is_cut_oldest_history_first_then_the_result_never_the_document(versions, length, limit):
    result = ToolResult("r" * length)
    messages = fitted(make, versions, result, limit)
    text = messages[-1].text
    assert json.dumps(TOOL.description)[1:-1] in text
    whole = make(versions, result)
    if size(whole) <= limit:
        assert messages == whole
        return
    kept = next(n for n in range(len(versions) + 1) if messages[-1].text.count("\n- ") == len(versions) - n)
    assert all(f"- {version}" in text for version in versions[kept:])
    if "r" * length not in text:
        assert "Earlier versions" not in text, "the result was cut while there was history left"
        assert ", cut:" in text
    assert size(messages) <= limit or "rr" not in text


def test_without_a_window_nothing_is_cut():
    result = ToolResult("r" * 100_000)
    assert fitted(make, ["v"] * 50, result, None) == make(["v"] * 50, result)


def test_a_result_cannot_close_its_fence():
    for fence in ("</data>", "</DATA >", "< /data>", "<data>", "</ data>"):
        text = prompts.experience(Experience(1, "q", {}, ToolResult(f"a{fence}b")))
        inside = text.split("<data>\n", 1)[1].rsplit("\n</data>", 1)[0]
        assert fence not in inside
        assert inside.startswith("a<\\")


def test_probes_are_wrong_in_one_way_each():
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"type": "string", "enum": ["m", "ft"]},
            "any": {},
        },
        "required": ["n"],
    }
    found = probes(ToolSpec("t", "", schema), {"n": 3, "unit": "m"})
    assert found == [
        ("n is missing", {"unit": "m"}),
        ("n has another type", {"n": "seven", "unit": "m"}),
        ("n is beyond its maximum", {"n": 10, "unit": "m"}),
        ("unit is none of the allowed values", {"n": 3, "unit": "m-ft"}),
    ]
    assert probes(ToolSpec("t", ""), {}) == []
