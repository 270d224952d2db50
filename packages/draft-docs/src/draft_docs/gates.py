"""When a rewrite is refused. This is an extension: in the paper the last text wins, even if it is worse."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from draft_docs.redact import Redactor, visible
from draft_docs.tools import ToolSpec

if TYPE_CHECKING:
    from draft_docs.loop import Gate, Iteration

_ADDRESS = re.compile(
    r"(?i:\b(?:https?|hxxps?|ftp|mailto|javascript|data|file):\S+|\bwww\.[^\s<>\"')\]]+"
    r"|\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
    r"|\b(?:[a-z0-9-]+\.)+[a-z]{2,}/[^\s<>\"')\]]+"
    r"|\b(?:[a-z0-9-]+\.)+(?:com|net|org|io|dev|ai|app|xyz|info|example|test|invalid|ru|cn)\b)"
)
_CREDENTIAL = r"(?:password|passphrase|token|api key|key|secret|credential|cookie|session id)s?"
_DO = (
    r"(?:call|use|invoke|run|execute|send|forward|include|append|add|attach|pass|upload|post|email|mail|share|visit|open|click|fetch|"
    r"download|delete|remove|write|say|state|tell|reply|respond|answer|print|output|reveal|recommend|prefer|choose|select|mention|treat|act|"
    r"remember|note|set|go|follow|obey|repeat|insert|put|copy|contact|ask|give|provide|report|register|install)"
)
_TO_MODELS = r"(?:ais?|assistants?|agents?|models?|llms?|chatbots?|language models?)"
# Orders to a reader that is a model: a document describes a tool, it does not give such orders. Searched in folded text.
_ORDERS = re.compile(
    r"\b(?:ignore|disregard|forget|override|bypass|discard|set aside|pay no attention to)\b[^.\n]{0,60}"
    r"\b(?:instruction|prompt|rule|guideline|guidance|direction|policy|policies|previous|above|earlier|prior|before|told)"
    r"|\b(?:system|developer|admin|administrator) (?:prompt|message|instruction|override|note)s?\b"
    r"|\b(?:new|updated|special|hidden|secret|additional|following) instructions?\b"
    r"|\b(?:instruction|message|note|notice|attention|important|warning)s?:? (?:for|to) (?:all |any |the |every )*" + _TO_MODELS + r"\b"
    r"|\byou are now\b|\bfrom now on\b|\bpretend (?:to|that|you)\b|\bjailbreak|\bdo anything now\b"
    r"|\b(?:do not|don't|dont|never) (?:tell|inform|mention|reveal|disclose|let)\b[^.\n]{0,40}\b(?:user|anyone|anybody|human|person|this|it|them)\b"
    r"|\bwithout (?:telling|informing|asking|notifying|mentioning)\b"
    r"|\b(?:always|must|first|should|please|never)\b,? " + _DO + r"\b[^.\n]{0,80}\b" + _CREDENTIAL + r"\b"
    r"|\b(?:send|forward|upload|post|email|mail|leak|exfiltrate|share|reveal|transmit)\b[^.\n]{0,60}\b(?:" + _CREDENTIAL +
    r"|conversation|chat history|system prompt|user's|private data)\b[^.\n]{0,40}\bto\b"
    r"|<\s*/?\s*(?:system|instructions?|important|secret|hidden|admin)\s*>|<!--|<\s*(?:script|iframe|img)\b|\[/?inst\]|<\|"
)  # fmt: skip
# A sentence that asks something of its reader. "must be", "should match" and the like state a limit.
_ASKS = re.compile(
    r"^\W*(?:then |now |also |and |first,? |next,? |before [^,]*, |after [^,]*, )*" + _DO + r"\b"
    r"|\b(?:you|your|please|always|never|remember to|make sure|be sure|do not|don't|have to|need to|needs to|instead)\b"
    r"|\b(?:must|should|shall) (?:not )?(?:first |always |also |never )*" + _DO + r"\b"
    r"|\b" + _TO_MODELS + r"\b|\b(?:best|only|better) (?:tool|choice|option|api)\b"
)  # fmt: skip
_COPIED_WORDS = 12
_ASKED_WORDS = 4
# Letters of other alphabets that pass for Latin ones.
_LOOKALIKES = str.maketrans(
    "абвгдеёзіїйјкӏмнопрстуүхһцчԁԛѕԝѵαβεζηικμνορτυχωϲϳ",
    "a6brdee3iiijkimhonpctyyxhu4dqswvabeznikuvoptuxwcj",
)


def lint_gate(*, max_chars: int, redactor: Redactor) -> Gate:
    """Refuse a rewrite that loses a documented value, is too long, holds a secret, or carries what only a result said as an order."""

    async def gate(old: ToolSpec, new: ToolSpec, iteration: Iteration, results: Sequence[str]) -> str:
        return next(problems(old, new, iteration, results, max_chars=max_chars, redactor=redactor), "")

    return gate


def replay_gate(first: Gate, queries: Sequence[str], serve: Callable[[ToolSpec, str], Awaitable[bool | None]]) -> Gate:
    """Refuse what `first` refuses, and a rewrite with which fewer of the held-out requests are served than before.

    `serve(tool, query)` lets a model make the call from the document alone: True if it succeeds, False if it fails, None if the outcome
    says nothing (a time-out, say). Requests count if both documents have an outcome.
    """

    async def gate(old: ToolSpec, new: ToolSpec, iteration: Iteration, results: Sequence[str]) -> str:
        reason = await first(old, new, iteration, results)
        if reason:
            return reason
        pairs = [(await serve(old, query), await serve(new, query)) for query in queries]
        known = [(was, now) for was, now in pairs if was is not None and now is not None]
        was, now = (sum(side) for side in zip(*known, strict=True)) if known else (0, 0)
        return f"{now} of {len(known)} held-out requests are served with it, {was} without" if now < was else ""

    return gate


def problems(
    old: ToolSpec,
    new: ToolSpec,
    iteration: Iteration,
    results: Sequence[str],
    *,
    max_chars: int,
    redactor: Redactor,
) -> Iterator[str]:
    """Everything that is wrong with a rewrite, the gravest first. `results` are those of all calls so far."""
    was, now = _words(old), _words(new)
    if redactor.holds_secret(now) or ("[redacted]" in now and "[redacted]" not in was):
        yield "it holds a secret"
    if visible(now) != now and not set(now) - set(visible(now)) <= set(was):
        yield "it holds invisible characters"
    known = folded(was)
    for order in orders(now):
        if order not in known:
            yield f"it gives an order to its reader: {order!r}"
    for address in _ADDRESS.findall(unicodedata.normalize("NFKC", now)):
        if address not in was:
            yield f"it holds an address that the documentation did not: {address}"
    if len(new.description) > max_chars:
        yield f"its description has {len(new.description)} characters, more than {max_chars}"
    yield from _borrowed(now, results, was)
    for value in _enum_values(old):
        if _mentions(was, value) and not _mentions(now, value) and value not in iteration.suggestions:
            yield f"it no longer names the allowed value {value!r}"
    for name in old.required:
        if _mentions(old.description, name) and not _mentions(new.description, name):
            yield f"its description no longer names the required parameter {name!r}"


def orders(text: str) -> list[str]:
    """What in a text tells a model that reads it to do something that no document of a tool would; folded."""
    return [found.group() for found in _ORDERS.finditer(folded(text))]


def folded(text: str) -> str:
    """The text as a reader would take it who sees no difference between letters that look alike: small Latin letters without marks,
    letters that are set apart one by one put together."""
    text = unicodedata.normalize("NFKD", visible(text)).casefold().translate(_LOOKALIKES)
    text = "".join(c for c in text if not unicodedata.combining(c)).replace("’", "'")
    text = re.sub(r"\b\w(?:[ .·_*-]\w\b){3,}", lambda found: re.sub(r"\W|_", "", found.group()), text)
    text = re.sub(r"[*`]|(?<![^\W_])_|_(?![^\W_])", "", text)  # marks of emphasis
    return re.sub(r"[^\S\n]+|\n(?=\w)", " ", text)


def _borrowed(now: str, results: Sequence[str], was: str) -> Iterator[str]:
    """Long runs of words, and orders, that stand in the text and in a result but not in the old document."""
    before = _spaced(was)
    known = [_spaced(result) for result in results]
    for sentence in re.split(r"(?<=[.!?;:])\s+|\n+", now):
        plain = folded(sentence)
        words = re.findall(r"\w+", plain)
        length = _ASKED_WORDS if _ASKS.search(plain) else _COPIED_WORDS
        for i in range(len(words) - length + 1):
            run = f" {' '.join(words[i : i + length])} "
            if run not in before and any(run in result for result in known):
                if length == _ASKED_WORDS:
                    yield f"it repeats what only a result asks of its reader: {sentence.strip()!r}"
                else:
                    yield f"it copies from a result: {run.strip()!r}"
                break


def _spaced(text: str) -> str:
    words = re.findall(r"\w+", folded(text))
    return f" {' '.join(words)} "


def _words(tool: ToolSpec) -> str:
    return "\n".join([tool.description, *tool.parameter_docs.values()])


def _enum_values(tool: ToolSpec) -> Iterator[str]:
    def walk(schema: Any) -> Iterator[str]:
        if isinstance(schema, dict):
            values = schema.get("enum")
            yield from (value for value in (values if isinstance(values, list) else []) if isinstance(value, str))
            for inner in schema.values():
                yield from walk(inner)
        elif isinstance(schema, list):
            for inner in schema:
                yield from walk(inner)

    yield from walk(dict(tool.input_schema))


def _mentions(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None
