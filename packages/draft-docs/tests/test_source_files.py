import ast
import importlib.util
import subprocess

import pytest

from draft_docs import CallableSource
from draft_docs.source_files import patch, rewritten_files, with_docstrings, write

SOURCE = '''\
"""A module."""  # keep me


class Box:
    def area(self, side):   # and me
        """Area."""
        return side * side


def one(a): return a


def two(text: str) -> str:
    """Two.

    Args:
        text: t
    """
    return text
'''


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "sample_tools.py"
    path.write_text(SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("sample_tools", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_only_the_docstring_changes():
    new = with_docstrings(SOURCE, {("Box", "area"): 'Area of a "square"', ("one",): "One.\n\nMore \\ text."})
    assert '        """Area of a "square\\""""\n' in new
    assert 'def one(a):\n    """One.\n\n    More \\\\ text.\n    """\n    return a\n' in new
    assert new.split("def two")[1] == SOURCE.split("def two")[1]
    assert new.startswith('"""A module."""  # keep me\n')
    compile(new, "x", "exec")


def test_files_patch_and_write(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = CallableSource([module.two])
    refined = {"two": source.tools[0].with_docs("Gives the text back.", {"text": "Any text."})}
    files = rewritten_files(source.functions, refined)
    (path, (before, after)) = next(iter(files.items()))
    assert before == SOURCE
    assert after == SOURCE.replace("Two.", "Gives the text back.").replace("text: t\n", "text: Any text.\n")
    assert path.read_text(encoding="utf-8") == SOURCE
    changed = subprocess.run(
        ["patch", "-p0", "-o", "-"], input=patch(files), text=True, capture_output=True, check=False
    )
    assert after in changed.stdout
    write(files)
    assert path.read_text(encoding="utf-8") == after
    assert rewritten_files(source.functions, {"two": source.tools[0]}) == {}


def test_what_has_no_source_is_refused(module):
    with pytest.raises(ValueError, match="does not hold three"):
        with_docstrings(SOURCE, {("three",): "x"})
    source = CallableSource([len])
    with pytest.raises(ValueError, match="len has no source file"):
        rewritten_files(source.functions, {"len": source.tools[0].with_docs("Other words.")})


@pytest.mark.parametrize(
    "words", ['"""', 'a "quoted" end"', "back\\\\slash\\", '\\"', "zero\x00 width\u200b", '"" """" """']
)
def test_any_words_become_a_literal(words):
    source = with_docstrings("def f():\n    return 1\n", {("f",): words})
    assert ast.get_docstring(ast.parse(source).body[0], clean=False) == words.replace("\x00", "").replace("\u200b", "")
