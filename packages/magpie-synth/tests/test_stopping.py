"""Facts about where instructions end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magpie_synth import derive_template, sanitize
from magpie_synth.stopping import cut_at_role, cut_at_words, reason_to_drop


@pytest.fixture(scope="module")
def template(chatml):
    return derive_template(chatml)


ADVERT = "Write a job advert for a dental assistant in Leeds."


def test_an_assistant_in_a_sentence_is_no_header(template):
    assert cut_at_role(ADVERT, template) == (ADVERT, False)
    assert cut_at_words(ADVERT) == ("Write a job advert for a dental ", True)


@pytest.mark.parametrize(
    "tail",
    [
        "\nassistant\nSure!",
        "\n Assistant: \nSure!",
        "<|im_end|>\n<|im_start|>assistant\nSure!",
        "<|im_end|> assistant Sure!",
    ],
)
def test_a_header_ends_the_instruction(template, tail):
    text, cut = cut_at_role("Tell me a joke." + tail, template)
    assert (text.strip(), cut) == ("Tell me a joke.", True)


@pytest.mark.parametrize(
    ("text", "clean", "reasons"),
    [
        ("3.14 is an approximation of which number?", "3.14 is an approximation of which number?", ()),
        ("3. Which number is 3.14?", "Which number is 3.14?", ("list number",)),
        ("12) Name a bird.", "Name a bird.", ("list number",)),
        ("What is 2+2? Use words. Answer briefly.", "What is 2+2? Use words. Answer briefly.", ()),
        ("What is 2+2?\nAnswer: 4", "What is 2+2?", ("answer",)),
        ("What is 2+2? **Answer:** 4", "What is 2+2?", ("answer",)),
        ("Prove it.\n\nHint: induct.", "Prove it.", ("answer",)),
        ("Solution: is that a good name for a band?", "Solution: is that a good name for a band?", ()),
        ("3. 5 apples cost 2 pounds. And 7?", "3. 5 apples cost 2 pounds. And 7?", ()),
    ],
)
def test_sanitising_takes_numbers_and_answers_and_nothing_else(text, clean, reasons):
    assert sanitize(text) == (clean, reasons)


@given(st.text())
def test_what_is_sanitised_is_a_part_of_the_text(text):
    clean, reasons = sanitize(text)
    assert clean in text
    assert reasons or clean == text.strip()


@pytest.mark.parametrize(
    ("text", "ended", "reason"),
    [
        ("", True, "empty"),
        (" \n", True, "empty"),
        ("<b></b> [INST] ---", True, "markup"),
        ("You are a poet.", True, "system text"),
        ("What is", False, "incomplete"),
        ("你好吗", True, None),
        ("What is it?", True, None),
    ],
)
def test_reasons_to_drop(text, ended, reason):
    assert reason_to_drop(text, ended=ended, system="You are a poet.") == reason
