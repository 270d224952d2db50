"""Keep secrets and invisible text out of prompts, documents and logs."""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from urllib.parse import quote, quote_plus

MASK = "[redacted]"

# Common shapes of credentials: provider keys, bearer tokens, JSON web tokens, cloud key ids, private key blocks.
_SHAPES = (
    r"\b(?:sk|pk|rk|xox[abprs]|gh[pousr]|glpat|hf)[-_][A-Za-z0-9_-]{16,}",
    r"\bAKIA[0-9A-Z]{16}\b",
    r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}",
    r"(?i:\bbearer)\s+[A-Za-z0-9._~+/=-]{12,}",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[A-Za-z0-9+/=\s\\:,-]*",
)


# Variation selectors (but for one after a symbol, as emoji have it), the grapheme joiner, and letters that show nothing (Hangul fillers,
# the blank Braille pattern).
_BLANK = re.compile(
    "[\ufe00-\ufe0d\U000e0100-\U000e01ef\u180b-\u180f\u034f\u115f\u1160\u3164\uffa0\u2800]"
    "|(?<![\xa9\xae0-9#*\u2000-\u303d\U0001f000-\U0001faff])[\ufe0e\ufe0f]"
)


class Redactor:
    """Replaces known secret values, and anything of a credential's shape, by a mask.

    A value is also found as it stands in JSON, in an address, in base64, and in a `repr`.
    Values shorter than four characters are not searched for: masking every "1" would destroy the text and hide nothing.
    """

    def __init__(self, secrets: Iterable[str] = ()):
        # The longest first: one secret may hold another.
        forms = {form for secret in secrets for form in _forms(secret)}
        known = [re.escape(form) for form in sorted(forms, key=len, reverse=True) if len(form) >= 4]
        self._pattern = re.compile("|".join([*known, *(f"(?:{shape})" for shape in _SHAPES)]), re.DOTALL)

    def __call__(self, text: str) -> str:
        return self._pattern.sub(MASK, text)

    def holds_secret(self, text: str) -> bool:
        return self._pattern.search(text) is not None


def _forms(secret: str) -> Iterator[str]:
    """A secret as other software may write it."""
    data = secret.encode("utf-8", "surrogateescape")
    for text in (
        secret,
        visible(secret),
        data.decode("latin-1"),
    ):  # as it is, as a cleaned result has it, as HTTP servers read it
        yield text
        yield repr(text)[1:-1]
        for is_ascii in (True, False):
            yield json.dumps(text, ensure_ascii=is_ascii)[1:-1]
    yield quote(data, safe="")
    yield quote(data)
    yield quote_plus(data)
    yield base64.b64encode(data).decode("ascii").rstrip("=")
    yield base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def visible(text: str) -> str:
    """The text without characters that a person would not see: control and format characters, private use, lone surrogates.

    New lines and tabs stay; other line ends become new lines. Joiners that emoji and scripts need (ZWJ, ZWNJ) go too, and so do
    variation selectors and blank letters: in tool output they can hide words.
    """
    if text.isascii() and text.isprintable():
        return text
    text = re.sub("\r\n?|[\u2028\u2029]", "\n", text)
    kept = (c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Co", "Cs", "Cn"))
    return _BLANK.sub("", "".join(kept))
