"""Keep secrets and invisible text out of prompts, documents and logs."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

MASK = "[redacted]"

# Common shapes of credentials: provider keys, bearer tokens, JSON web tokens, cloud key ids, private key blocks.
_SHAPES = (
    r"\b(?:sk|pk|rk|xox[abprs]|gh[pousr]|glpat|hf)[-_][A-Za-z0-9_-]{16,}",
    r"\bAKIA[0-9A-Z]{16}\b",
    r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}",
    r"(?i:\bbearer)\s+[A-Za-z0-9._~+/=-]{12,}",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
)


class Redactor:
    """Replaces known secret values, and anything of a credential's shape, by a mask.

    Values shorter than four characters are not searched for: masking every "1" would destroy the text and hide nothing.
    """

    def __init__(self, secrets: Iterable[str] = ()):
        # The longest first: one secret may hold another.
        known = [re.escape(secret) for secret in sorted(set(secrets), key=len, reverse=True) if len(secret) >= 4]
        self._pattern = re.compile("|".join([*known, *(f"(?:{shape})" for shape in _SHAPES)]), re.DOTALL)

    def __call__(self, text: str) -> str:
        return self._pattern.sub(MASK, text)

    def holds_secret(self, text: str) -> bool:
        return self._pattern.search(text) is not None


def visible(text: str) -> str:
    """The text without characters that a person would not see: control and format characters, private use, lone surrogates.

    New lines and tabs stay. Joiners that emoji and scripts need (ZWJ, ZWNJ) go too: in tool output they can hide words.
    """
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Co", "Cs", "Cn"))
