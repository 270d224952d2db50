from textwrap import dedent

import docstring_parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_docs.sources.docstrings import rewrite_docstring

NUMPY = dedent(
    """\
    Old.

    Parameters
    ----------
    x, y : float
        Old words
        on two lines.
    unit : {'m', 'ft'}, optional

    Returns
    -------
    float
        The value.

    Notes
    -----
    Old notes.
    """
).rstrip()


def test_numpy_style():
    new = rewrite_docstring(NUMPY, "New.\n\nMore.", {"y": "Both.", "unit": "m or ft.\nNo other.", "z": "New one."})
    assert (
        new
        == dedent(
            """\
        New.

        More.

        Parameters
        ----------
        x, y : float
            Both.
        unit : {'m', 'ft'}, optional
            m or ft.
            No other.
        z
            New one.

        Returns
        -------
        float
            The value.

        Notes
        -----
        Old notes.
        """
        ).rstrip()
    )


def test_numpy_style_without_parameters_gets_the_section():
    assert rewrite_docstring("Old.\n\nReturns\n-------\nint", "New.", {"x": "The x."}) == (
        "New.\n\nParameters\n----------\nx\n    The x.\n\nReturns\n-------\nint"
    )


def test_rest_style_with_types_and_continuation_lines():
    old = "Old.\n\n:param int x: old\n   words\n:type x: int\n:returns: y\n:raises E: never"
    assert rewrite_docstring(old, "New.", {"x": "new", "y": "added"}) == (
        "New.\n\n:param int x: new\n:type x: int\n:param y: added\n:returns: y\n:raises E: never"
    )


def test_google_style_keeps_types_stars_and_later_sections():
    old = "Old.\n\nArgs:\n  x (int, optional): old\n    words\n\n  **kw: more\n\nExample:\n  >>> f(1)\n"
    assert rewrite_docstring(old, "New.", {"x": "new", "kw": "rest"}) == (
        "New.\n\nArgs:\n  x (int, optional): new\n\n  **kw: rest\n\nExample:\n  >>> f(1)"
    )


@pytest.mark.parametrize("text", ["", "Old.", "Old.\n\nStill the description."])
def test_without_sections_the_words_are_the_docstring(text):
    assert rewrite_docstring(text, "New.", {}) == "New."
    assert rewrite_docstring(text, "New.", {"x": "The x.", "y": ""}) == "New.\n\nArgs:\n    x: The x."


def test_what_is_written_is_read_back():
    for old in (NUMPY, "Old.\n\nArgs:\n    x: old\n", "Old.\n\n:param x: old\n"):
        read = docstring_parser.parse(rewrite_docstring(old, "New.", {"x": "new words"}))
        assert read.short_description == "New."
        assert any("x" in p.arg_name and p.description == "new words" for p in read.params)


STYLES = {
    "google": "Old.\n\nArgs:\n    a (int): x\n    b: y\n\nReturns:\n    z",
    "numpy": "Old.\n\nParameters\n----------\na : int\n    x\nb\n    y\n\nReturns\n-------\nint\n    z",
    "rest": "Old.\n\n:param int a: x\n:param b: y\n:returns: z",
    "none": "Old.",
}
line = st.text("abc d.-", min_size=1, max_size=12).map(str.strip).filter(lambda text: text and text[0] != "-")


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(STYLES)), line, line, line)
def test_what_is_written_is_read_back_and_writing_it_again_changes_nothing(style, description, a, b):
    words = {"a": a, "b": b, "c": "new one"}
    new = rewrite_docstring(STYLES[style], description, words)
    read = docstring_parser.parse(new)
    assert read.description.strip() == description
    assert {parameter.arg_name: parameter.description for parameter in read.params} == words
    assert style == "none" or "z" in (read.returns.description, read.returns.type_name)
    assert rewrite_docstring(new, description, words) == new
