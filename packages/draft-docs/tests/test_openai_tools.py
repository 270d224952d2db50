import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_docs.sources.openai_tools import OpenAIToolsSource, replace_strings

TEXT = """[
    {"type": "function",
     "function": {"name": "get_weather", "strict": true,
        "description": "Gets weather\\u2026",
        "parameters": {"type": "object", "properties": {
            "city":  {"type": "string", "description": "city"},
            "unit":  {"enum": ["c", "f"]}
        }, "required": ["city"]}}},
    {"type": "function", "name": "flat", "parameters": {"type":"object","properties":{"x":{}}}}
]
"""


def test_both_forms_are_read():
    source = OpenAIToolsSource(TEXT)
    assert [tool.name for tool in source.tools] == ["get_weather", "flat"]
    assert source.tools[0].description == "Gets weather…"
    assert source.tools[0].parameter_docs == {"city": "city", "unit": ""}
    assert source.tools[0].required == ("city",)


def test_without_a_change_the_file_is_byte_identical():
    source = OpenAIToolsSource(TEXT)
    assert source.rewritten({tool.name: tool for tool in source.tools}) == TEXT


def test_only_the_changed_words_change():
    source = OpenAIToolsSource(TEXT)
    new = source.tools[0].with_docs('Weather of a "city" now.', {"unit": "Celsius or Fahrenheit…"})
    flat = source.tools[1].with_docs("Flat.", {"x": "Anything."})
    assert source.rewritten({"get_weather": new, "flat": flat}) == TEXT.replace(
        '"Gets weather\\u2026"', '"Weather of a \\"city\\" now."'
    ).replace('{"enum": ["c", "f"]}', '{"enum": ["c", "f"], "description": "Celsius or Fahrenheit\\u2026"}').replace(
        '{"x":{}}}}', '{"x":{"description": "Anything."}}}, "description": "Flat."}'
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


def strings(value, path=()):
    if isinstance(value, str):
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from strings(inner, (*path, key))


@given(value=json_values, indent=st.sampled_from([None, 0, 2, "\t"]), ascii=st.booleans(), word=st.text())
def test_any_string_of_any_document_can_be_replaced(value, indent, ascii, word):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    for path in strings(value):
        changed = json.loads(replace_strings(text, {path: word}))
        expected = json.loads(text)
        if not path:
            assert changed == word
            continue
        inner = expected
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = word
        assert changed == expected


def test_calls_go_to_the_given_functions_and_nowhere_else():
    source = OpenAIToolsSource(TEXT, dispatch={"get_weather": lambda city, unit="c": f"{city}: 3 {unit}"})
    assert asyncio.run(source.call("get_weather", {"city": "Oslo"})).content == "Oslo: 3 c"
    assert asyncio.run(source.call("flat", {})).error_kind == "not_executed"


@pytest.mark.parametrize("text", ['"tools"', '[{"type": "function"}]', '[{"name": "a"}, {"name": "a"}]'])
def test_what_is_no_tool_list_is_refused(text):
    with pytest.raises(ValueError, match="tool"):
        OpenAIToolsSource(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "nested more than 100 levels"),
        ('{"a":' * 500 + "1" + "}" * 500, "nested more than 100 levels"),
        ('[{"name": "a"}, {"name": "a"}]', "two tools are called 'a'"),
        ('[{"name": ""}]', "name must be a text that is not empty"),
        ('[{"name": "\\ud83d"}]', "name must be a text"),
        ('[{"name": "a", "description": 5}]', "description of tool a must be a text, got 5"),
        ('[{"name": "a", "parameters": []}]', "parameters of tool a must be a JSON Schema object"),
        ('[{"name": "a", "parameters": {"properties": ["x"]}}]', "properties of tool a must be an object of schemas"),
        (
            '[{"name": "a", "parameters": {"properties": {"x": 3}}}]',
            "properties of tool a must be an object of schemas",
        ),
        ('[{"name": "a", "parameters": {"required": "x"}}]', "'required' of tool a must be a list of names"),
    ],
    ids=lambda value: value[:30],
)
def test_what_is_no_file_of_tools_is_refused_in_one_line(text, said):
    with pytest.raises(ValueError, match=said):
        OpenAIToolsSource(text)


def test_a_byte_order_mark_null_texts_and_true_schemas_are_kept_or_filled():
    text = '\ufeff[{"name": "a", "description": null, "parameters": {"properties": {"x": true, "y": false}}}]'
    source = OpenAIToolsSource(text)
    tool = source.tools[0]
    assert (tool.description, tool.parameter_docs) == ("", {"x": "", "y": ""})
    assert source.rewritten({"a": tool}) == text
    new = source.rewritten({"a": tool.with_docs("Finds.", {"x": "what", "y": "nothing"})})
    assert new == text.replace("null", '"Finds."').replace("true", '{"description": "what"}')


words = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
parameter = st.fixed_dictionaries(
    {}, optional={"type": st.just("string"), "description": words, "enum": st.lists(words)}
)
listed = st.lists(
    st.tuples(words, st.dictionaries(st.text(min_size=1, max_size=5), parameter, max_size=3), st.booleans())
)


@settings(max_examples=80, deadline=None)
@given(listed, st.sampled_from([None, 0, 3]), st.booleans(), words)
def test_any_file_comes_back_with_its_words_and_nothing_else_changed(tools, indent, is_ascii, new):
    document = []
    for i, (text, properties, is_nested) in enumerate(tools):
        function = {"name": f"t{i}", "description": text, "parameters": {"type": "object", "properties": properties}}
        document.append({"type": "function", "function": function} if is_nested else function)
    text = json.dumps(document, indent=indent, ensure_ascii=is_ascii)
    source = OpenAIToolsSource(text)
    assert source.rewritten({tool.name: tool for tool in source.tools}) == text
    refined = {tool.name: tool.with_docs(new, dict.fromkeys(tool.parameters, new)) for tool in source.tools}
    expected = json.loads(text)
    for entry in expected:
        function = entry.get("function", entry)
        function["description"] = new
        for schema in function["parameters"]["properties"].values() if new else ():
            schema["description"] = new
    assert json.loads(source.rewritten(refined)) == expected
