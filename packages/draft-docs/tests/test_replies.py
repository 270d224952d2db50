import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_docs.replies import Analysis, Exploration, ReplyError, Rewrite, parse_reply

GOOD = {"query": "q", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(GOOD),
        "Sure! Here it is:\n" + json.dumps(GOOD) + "\nAnything else?",
        "```json\n" + json.dumps(GOOD, indent=2) + "\n```",
        '{"query": "q", "arguments": {"x": 1,},}',
        "{'query': 'q', 'arguments': {'x': 1}}",
        '{"thought": "hm"} {"query": "q", "arguments": {"x": 1}}',
        '{"query": "q", "arguments": {"x": 1}',
        "\ufeff" + json.dumps(GOOD),
        "{not json} then " + json.dumps(GOOD),
    ],
)
def test_an_object_is_found_in_what_models_write(text):
    answer = parse_reply(text, Exploration)
    assert (answer.query, answer.arguments) == ("q", {"x": 1})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON object"),
        ("I'd rather not.", "no JSON object"),
        ("[1, 2]", "no JSON object"),
        ('{"arguments": {}}', "query: Field required"),
        ('{"query": "  ", "arguments": {}}', "query: String should have at least 1 character"),
        ('{"query": "q", "arguments": [1]}', "arguments: "),
        ('{"query": "q", "arguments": {"x": ' + "[" * 60 + "]" * 60 + "}}", "nested more than 50 levels"),
        ("{" * 5000, "could not be read"),
        ("[" * 100_000, "could not be read"),
    ],
    ids=lambda value: value[:12],
)
def test_anything_else_is_refused_with_the_reason(text, said):
    with pytest.raises(ReplyError, match=said):
        parse_reply(text, Exploration)


def test_lists_of_suggestions_become_text_and_unknown_fields_are_dropped():
    assert parse_reply('{"suggestions": ["a", {"claim": "b"}], "x": 1}', Analysis).suggestions == 'a\n{"claim": "b"}'
    with pytest.raises(ReplyError, match="description"):
        parse_reply('{"description": ""}', Rewrite)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="{}[]\",:\\ ab1\n`'") | st.text())
def test_no_text_breaks_the_reader(text):
    with contextlib.suppress(ReplyError):
        assert parse_reply(text, Exploration).query
