import subprocess
import sys

import pytest

import draft_docs
from draft_docs import CallableSource, HashedNgrams, McpServer, OpenAIToolsSource, OpenApiSource, load_tools


def look(name: str) -> str:
    """Look."""
    return name


def test_every_public_name_is_there_and_documented():
    for name in draft_docs.__all__:
        assert getattr(draft_docs, name).__doc__, name


def test_load_tools_finds_the_right_source(tmp_path):
    (tmp_path / "tools.json").write_text('[{"name": "a", "description": "b"}]', encoding="utf-8")
    (tmp_path / "api.yaml").write_text("openapi: 3.0.0\npaths: {}\n", encoding="utf-8")
    assert isinstance(load_tools(callables=[look], read_only=["look"]), CallableSource)
    assert isinstance(load_tools(openai=tmp_path / "tools.json"), OpenAIToolsSource)
    assert isinstance(load_tools(openapi=tmp_path / "api.yaml"), OpenApiSource)
    assert load_tools(mcp="server --flag 'a b'") == McpServer(["server", "--flag", "a b"])
    assert load_tools(mcp="http://127.0.0.1:1/mcp") == McpServer("http://127.0.0.1:1/mcp")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of callables, openai, openapi, mcp, got none"),
        ({"mcp": "a", "openai": "b"}, "got openai, mcp"),
        ({"mcp": ""}, "mcp must be a command or a URL"),
        ({"callables": [look], "read_only": ["peek"]}, "read_only names peek"),
        ({"openai": "x", "read_only": ["peek"]}, "read_only must be True or left out"),
    ],
)
def test_load_tools_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        load_tools(**options)


def test_importing_brings_no_optional_library():
    heavy = [
        "torch",
        "transformers",
        "sentence_transformers",
        "mcp",
        "httpx",
        "ruamel.yaml",
        "libcst",
        "aiohttp",
        "typer",
    ]
    code = f"import sys, draft_docs; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_ngrams_are_close_for_close_texts():
    rows = HashedNgrams().embed(["metres to feet", "Metres  to feet", "what time is it", ""])
    unit = rows[:3] / (rows[:3] ** 2).sum(1, keepdims=True) ** 0.5
    assert unit[0] @ unit[1] == pytest.approx(1)
    assert unit[0] @ unit[2] < 0.3
    assert rows.shape == (4, 2048)
