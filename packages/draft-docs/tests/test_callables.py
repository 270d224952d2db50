import asyncio
import calendar
import textwrap
from typing import Literal

import pytest

from draft_docs.sources.callables import CallableSource


def google(value: float, unit: Literal["m", "ft"] = "m") -> float:
    """Convert a value.

    Longer words.

    Args:
        value: the value
        unit: its unit

    Returns:
        The converted value.
    """
    print("working")
    return value * 3.28084


def rest(path: str, *, deep: bool = False):
    """Walk.

    :param path: where
    :returns: a list
    """
    raise FileNotFoundError(path)


def plain(a, b: int):
    return {"a": a, 1: b, "bytes": b"123"}


async def waiting(x: int) -> int:
    """Wait."""
    return x + 1


def call(source, name, **arguments):
    return asyncio.run(source.call(name, arguments))


@pytest.fixture
def source():
    return CallableSource([google, rest, plain, waiting], read_only=["google"])


def test_schema_and_words_come_from_signature_and_docstring(source):
    google_tool, rest_tool, plain_tool, _ = source.tools
    assert google_tool.input_schema == {
        "type": "object",
        "properties": {
            "value": {"type": "number", "description": "the value"},
            "unit": {"type": "string", "enum": ["m", "ft"], "default": "m", "description": "its unit"},
        },
        "required": ["value"],
    }
    assert google_tool.hints.read_only is True
    assert rest_tool.hints.read_only is None
    assert rest_tool.parameter_docs == {"path": "where", "deep": ""}
    assert plain_tool.description == ""
    assert plain_tool.required == ("a", "b")


def test_results_errors_and_prints_come_back_as_text(source):
    assert call(source, "google", value=1.0).content == "3.28084\nprinted: working\n"
    failed = call(source, "rest", path="/nowhere")
    assert (failed.error_kind, failed.content) == ("tool_error", "FileNotFoundError: /nowhere")
    assert call(source, "plain", a=1, b=2).content == '{"a": 1, "1": 2, "bytes": "3 bytes"}'
    assert call(source, "waiting", x=1).content == "2"


def test_a_docstring_keeps_its_style_and_its_other_sections(source):
    tools = {tool.name: tool for tool in source.tools}
    refined = {
        "google": tools["google"].with_docs("Converts metres to feet.", {"unit": "m or ft; nothing else"}),
        "rest": tools["rest"].with_docs("Walks a folder.", {"deep": "also below"}),
        "plain": tools["plain"].with_docs("Pairs.", {"b": "an integer"}),
    }
    assert source.rewritten(refined) == textwrap.dedent(
        """\
        google:
        Converts metres to feet.

        Args:
            value: the value
            unit: m or ft; nothing else

        Returns:
            The converted value.

        rest:
        Walks a folder.

        :param path: where
        :param deep: also below
        :returns: a list

        plain:
        Pairs.

        Args:
            b: an integer
        """
    )


def test_library_functions_are_tools(source):
    library = CallableSource([textwrap.shorten, calendar.monthrange], read_only=True)
    assert library.tools[0].required == ("text", "width")
    assert library.tools[0].input_schema["additionalProperties"] is True
    assert call(library, "monthrange", year=2026, month=2).content == "[6, 28]"


def test_functions_of_one_name_are_told_apart_and_doubles_refused():
    def google(x):
        return x

    google.__module__ = "other"
    assert [tool.name for tool in CallableSource([globals()["google"], google]).tools] == ["google", "other.google"]
    with pytest.raises(ValueError, match="given twice"):
        CallableSource([google, google, google])
    with pytest.raises(ValueError, match="read_only names nothing_like_it"):
        CallableSource([google], read_only=["nothing_like_it"])
