from textwrap import dedent

import docstring_parser
import pytest

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
