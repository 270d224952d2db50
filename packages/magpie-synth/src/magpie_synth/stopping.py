"""Where a generated instruction ends, and what of it is kept.

The official code stops at the bare word "assistant", which cuts "a job advert for a dental assistant" after "dental". Here the
word ends an instruction only where it is a header: a line of its own, right after an end-of-turn marker, or as the template
writes it. The official sanitiser loses the "3." of "3.14" and everything after the first "?"; the rules here take list numbers
and answers, and say what they took.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .template import PromptTemplate

OFFICIAL_STOP_WORDS = ("assistant", "Assistant", "ASSISTANT")
"""The words at which the official scripts stop, wherever they stand; pass as `stop` for parity."""

_ROLE_LINE = re.compile(r"^[ \t]*assistant[ \t]*:?[ \t]*$", re.IGNORECASE | re.MULTILINE)
_LIST_NUMBER = re.compile(r"^\s*\d{1,3}[.)]\s+(?=[^\d\s])")
_ANSWER = r"[*_#>\s]*(?:answer|response|solution|hint|explanation|expected output)s?[*_]*\s*:"
_ANSWER_LINE = re.compile(rf"\n{_ANSWER}", re.IGNORECASE)
_ANSWER_AFTER_QUESTION = re.compile(rf"(?<=\?)[ \t]+{_ANSWER}", re.IGNORECASE)
_TAG = re.compile(r"<[^<>]*>|\[/?[A-Z]+\]")


def cut_at_role(text: str, template: PromptTemplate) -> tuple[str, bool]:
    """`text` before the place where the model goes on as the assistant, and whether there is one."""
    line = _ROLE_LINE.search(text)
    places = [line.start() if line else -1]
    for marker in (template.user_end.strip(), template.assistant_header.strip()):
        if _is_marker(marker):
            places.append(text.find(marker))
    found = [place for place in places if place >= 0]
    return (text[: min(found)], True) if found else (text, False)


def cut_at_words(text: str, words: Sequence[str] = OFFICIAL_STOP_WORDS) -> tuple[str, bool]:
    """`text` before the first of `words` wherever it stands, as the official stop strings have it."""
    found = [place for place in map(text.find, words) if place >= 0]
    return (text[: min(found)], True) if found else (text, False)


def sanitize(text: str) -> tuple[str, tuple[str, ...]]:
    """An instruction without a list number before it and without hints and answers after it; and what was taken.

    A list number is one that a space and no digit follow. Text after a question stays, unless it begins with an answer marker.
    """
    reasons = []
    if match := _LIST_NUMBER.match(text):
        text = text[match.end() :]
        reasons.append("list number")
    places = [m.start() for m in (_ANSWER_LINE.search(text), _ANSWER_AFTER_QUESTION.search(text)) if m]
    if places and text[: min(places)].strip():
        text = text[: min(places)]
        reasons.append("answer")
    return text.strip(), tuple(reasons)


def reason_to_drop(text: str, *, ended: bool, system: str = "") -> str | None:
    """Why an instruction is not worth an answer: "empty", "incomplete", "markup" or "system text"; None if it is."""
    if not text.strip():
        return "empty"
    if not any(letter.isalnum() for letter in _TAG.sub("", text)):
        return "markup"
    if system and text.strip() == system.strip():
        return "system text"
    return None if ended else "incomplete"


def _is_marker(text: str) -> bool:
    """Headers of plain words ("model") are no markers: an instruction may hold them."""
    return any(not letter.isalnum() and not letter.isspace() for letter in text)
