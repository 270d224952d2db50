import base64
import json
from urllib.parse import quote, quote_plus

import pytest

from draft_docs.redact import MASK, Redactor, visible

SECRET = 'pä"ss \\word/+&\n1'


@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        json.dumps({"key": SECRET}),
        json.dumps({"key": SECRET}, ensure_ascii=False),
        f"https://api.example/?key={quote(SECRET)}",
        f"https://api.example/?key={quote(SECRET, safe='')}",
        f"key={quote_plus(SECRET)}",
        f"Basic {base64.b64encode(SECRET.encode()).decode()}",
        base64.urlsafe_b64encode(SECRET.encode()).decode(),
        repr(SECRET),
        repr({"key": SECRET}),
    ],
)
def test_a_secret_is_masked_in_every_form(form):
    masked = Redactor([SECRET])(form)
    assert MASK in masked
    assert "ss" not in masked.replace("https", "").replace("Basic", "")


@pytest.mark.parametrize(
    "text",
    ["sk-abcdefghijklmnop1234", "ghp_0123456789abcdefABCD", "AKIAABCDEFGHIJKLMNOP", "Authorization: Bearer abcdef.123456789",
     "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\n-----END RSA PRIVATE KEY-----"],
)  # fmt: skip
def test_what_has_the_shape_of_a_credential_is_masked(text):
    assert MASK in Redactor()(text)
    assert "MIIE" not in Redactor()(text)


def test_a_key_without_an_end_takes_no_more_than_itself():
    assert Redactor()('{"a": "-----BEGIN PRIVATE KEY-----\\nabc", "b": 1}') == f'{{"a": "{MASK}", "b": 1}}'


def test_very_short_values_are_left_alone():
    assert Redactor(["1", "", "\u200b\u200b\u200b\u200b"])("1 and 1 are 2") == "1 and 1 are 2"


def test_invisible_characters_go_and_visible_ones_stay():
    assert visible("a\u200bb\u202ec\U000e0041d\ufe01e\u3164f\x00g\ud800h") == "abcdefgh"
    assert visible("a\r\nb\rc\u2028d\te") == "a\nb\nc\nd\te"
    assert visible("Grüße 日本語 العربية ❤️ ⚠️") == "Grüße 日本語 العربية ❤️ ⚠️"
