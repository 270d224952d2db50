"""Put new words into a docstring. Its style (Google, NumPy, reST), its other sections and their order stay as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping

_GOOGLE_HEAD = re.compile(
    r"(Args|Arguments|Params|Parameters|Keyword Args|Keyword Arguments|Attributes|Returns?|Yields?|Raises|Warns|Examples?|"
    r"Notes?|Warnings?|References|See Also|Todo)\s*:\s*$"
)
_GOOGLE_ARGS = re.compile(r"(Args|Arguments|Params|Parameters)\s*:\s*$")
_REST_FIELD = re.compile(r":[a-z]+[^:]*:")
_DASHES = re.compile(r"-{3,}\s*$")


def rewrite_docstring(text: str, description: str, parameters: Mapping[str, str]) -> str:
    """The docstring `text` (without indentation, as `inspect.getdoc` gives it) with another description and other parameter texts.

    Parameters whose text is empty keep what they have; one that the docstring does not list is added after those it does.
    """
    lines = text.splitlines()
    start = _sections_start(lines)
    sections = lines[start:]
    for name, words in parameters.items():
        if words:
            sections = _with_parameter(sections, name, words)
    head = description.strip().splitlines()
    return "\n".join([*head, *([""] if head and sections else []), *sections]).rstrip()


def _sections_start(lines: list[str]) -> int:
    for i, line in enumerate(lines):
        is_numpy = i + 1 < len(lines) and line.strip() and _DASHES.match(lines[i + 1])
        if is_numpy or _GOOGLE_HEAD.match(line) or _REST_FIELD.match(line):
            return i
    return len(lines)


def _with_parameter(lines: list[str], name: str, words: str) -> list[str]:
    if any(_REST_FIELD.match(line) for line in lines):
        return _rest(lines, name, words)
    for i, line in enumerate(lines):
        if line.strip() == "Parameters" and i + 1 < len(lines) and _DASHES.match(lines[i + 1]):
            return _numpy(lines, i + 2, name, words)
        if _GOOGLE_ARGS.match(line):
            return _google(lines, i + 1, name, words)
    if any(_DASHES.match(line) for line in lines):
        return _numpy(["Parameters", "----------", "", *lines], 2, name, words)
    return _google(["Args:", *([""] if lines else []), *lines], 1, name, words)


def _rest(lines: list[str], name: str, words: str) -> list[str]:
    field = re.compile(rf":(?:param|parameter|arg|argument)(?:\s+[^:]*?)?\s+\*{{0,2}}{re.escape(name)}\s*:")
    last = 0
    for i, line in enumerate(lines):
        found = field.match(line)
        if found:
            return [*lines[:i], *_hung(found.group(), words, " ", "    "), *lines[_block_end(lines, i) :]]
        if re.match(r":(param|parameter|arg|argument|type)\b", line):
            last = _block_end(lines, i)
    return [*lines[:last], *_hung(f":param {name}:", words, " ", "    "), *lines[last:]]


def _google(lines: list[str], begin: int, name: str, words: str) -> list[str]:
    end = next((i for i in range(begin, len(lines)) if lines[i].strip() and not lines[i][0].isspace()), len(lines))
    while end > begin and not lines[end - 1].strip():
        end -= 1
    indent = re.match(r"\s*", lines[begin]).group() if end > begin else "    "  # type: ignore[union-attr]
    item = re.compile(rf"{indent}\*{{0,2}}{re.escape(name)}(?:\s*\(.*?\))?\s*:")
    for i in range(begin, end):
        found = item.match(lines[i])
        if found:
            stop = min(_block_end(lines, i), end)
            return [*lines[:i], *_hung(found.group(), words, " ", indent * 2), *lines[stop:]]
    return [*lines[:end], *_hung(f"{indent}{name}:", words, " ", indent * 2), *lines[end:]]


def _numpy(lines: list[str], begin: int, name: str, words: str) -> list[str]:
    end = next((i - 1 for i in range(begin, len(lines)) if _DASHES.match(lines[i])), len(lines))
    while end > begin and not lines[end - 1].strip():
        end -= 1
    body = [f"    {line}" if line.strip() else "" for line in words.strip().splitlines()]
    for i in range(begin, end):
        names = re.split(r"\s*:\s*", lines[i], maxsplit=1)[0]
        if not lines[i][:1].isspace() and name in re.split(r"\s*,\s*", names.strip()):
            return [*lines[: i + 1], *body, *lines[min(_block_end(lines, i), end) :]]
    return [*lines[:end], name, *body, *lines[end:]]


def _block_end(lines: list[str], at: int) -> int:
    """The line after the item that begins at `at`: the next one that is indented no deeper, without blank lines before it."""
    depth = len(lines[at]) - len(lines[at].lstrip())
    end = at + 1
    while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > depth):
        end += 1
    while end > at + 1 and not lines[end - 1].strip():
        end -= 1
    return end


def _hung(head: str, words: str, gap: str, indent: str) -> list[str]:
    first, *rest = words.strip().splitlines()
    return [f"{head}{gap}{first}", *(f"{indent}{line.strip()}" if line.strip() else "" for line in rest)]
