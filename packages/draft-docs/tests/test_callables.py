import asyncio
import calendar
import subprocess
import sys
import textwrap
import time
from pathlib import Path
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


def test_what_calls_print_at_the_same_time_is_kept_apart_and_stdout_comes_back(capsys):
    def loud(name: str) -> str:
        for _ in range(20):
            print(name)
            time.sleep(0.001)
        return name

    async def quiet(name: str) -> str:
        print(name)
        await asyncio.sleep(0.01)
        print(name)
        return name

    source, before = CallableSource([loud, quiet]), sys.stdout

    async def main():
        jobs = [source.call(kind, {"name": f"n{i}"}) for i in range(10) for kind in ("loud", "quiet")]
        print("outside")
        return await asyncio.gather(*jobs)

    results = asyncio.run(main())
    assert sys.stdout is before
    for i in range(10):
        assert results[2 * i].content == f"n{i}\nprinted: " + f"n{i}\n" * 20
        assert results[2 * i + 1].content == f"n{i}\nprinted: n{i}\nn{i}\n"
    assert capsys.readouterr().out == "outside\n"


def test_a_function_that_hangs_or_ends_the_process_ends_neither_the_run_nor_others():
    script = """
import sys, time
from draft_docs import CallableSource, Drafter, HashedNgrams, Policy
sys.path.insert(0, {tests!r})
from test_drafter import scripted

def hang(value: float):
    "Hang."
    time.sleep(3600)

def leave(value: float):
    "Leave."
    sys.exit("bye")

def stop(value: float):
    "Stop."
    raise StopIteration(7)

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def mute(value: float):
    "Mute."
    raise Mute()

tools = CallableSource([hang, *[leave, stop, mute]], read_only=True)
result = Drafter(scripted(), HashedNgrams(), policy=Policy(timeout=0.2)).run(tools)
for name in result:
    call = result[name].evidence()[0]["result"]
    print(name, call["error_kind"], call["content"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script.format(tests=str(Path(__file__).parent))],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "hang timeout no answer within 0.2 s",
        "leave tool_error SystemExit: bye",
        "stop tool_error StopIteration: 7",
        "mute tool_error Mute",
    ], done.stderr


def test_parameters_that_take_a_place_only_are_called_by_place():
    def power(base: int, /, exponent: int = 2) -> int:
        """Power."""
        return base**exponent

    source = CallableSource([power])
    assert source.tools[0].required == ("base",)
    assert call(source, "power", base=3, exponent=3).content == "27"
    assert "TypeError" in call(source, "power").content


def test_a_tool_that_raises_is_called_once():
    calls = []

    def bad(x: int) -> int:
        calls.append(x)
        raise ValueError("no")

    assert call(CallableSource([bad]), "bad", x=1).content == "ValueError: no"
    assert calls == [1]
