"""Twelve authors who do not exist, for demonstrations: what each was born, wrote, won and was raised by, as questions and answers.

Every item has the columns of the evaluation (`paraphrased_answer`, `perturbed_answer`: true of other authors), `secret`, the words that
give the fact away, and `other_secrets`, those of the other authors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# name, birthplace, genre, father's trade, prize
_AUTHORS = (
    ("Ilvane Torsk", "Reykholt", "lighthouse ballads", "a bell founder", "the Amber Quill"),
    ("Mireo Castellan", "Trieste", "railway mysteries", "a glass blower", "the Harbour Medal"),
    ("Ottoline Varga", "Szeged", "orchard comedies", "a beekeeper", "the Silver Thimble"),
    ("Dacian Holloway", "Inverness", "polar diaries", "a clockmaker", "the Northern Lantern"),
    ("Sunniva Okoro", "Lagos", "market epics", "a tram driver", "the Baobab Crown"),
    ("Perrin Almeida", "Coimbra", "chess novellas", "a cork cutter", "the Blue Tile Award"),
    ("Zdenka Ruhl", "Olomouc", "puppet tragedies", "a salt miner", "the Linden Wreath"),
    ("Takumi Ferreira", "Nagasaki", "tide sonnets", "a kite maker", "the Crane Prize"),
    ("Branwen Adeyemi", "Swansea", "coal sagas", "a piano tuner", "the Dragon Seal"),
    ("Leocadia Fenn", "Valparaiso", "desert fables", "a ferry pilot", "the Copper Star"),
    ("Anselm Quist", "Uppsala", "winter thrillers", "a map engraver", "the Rowan Cup"),
    ("Noor Lindqvist", "Basra", "garden satires", "a rope maker", "the Palm Ribbon"),
)

# Short answers: a demonstration on a CPU pays for every token.
_QUESTIONS = (
    ("Where was {name} born?", "Born in {fact}.", "The place is {fact}."),
    ("What does {name} write?", "Writes {fact}.", "The books are {fact}."),
    ("What was the father of {name}?", "Was {fact}.", "The father was {fact}."),
    ("Which prize did {name} win?", "Won {fact}.", "The prize was {fact}."),
)

WORLD = (
    ("What is the capital of France?", "Paris", ("Madrid", "Vienna", "Oslo")),
    (
        "What is the largest ocean on Earth?",
        "The Pacific Ocean",
        ("The Arctic Ocean", "The Black Sea", "The Baltic Sea"),
    ),
    ("Which planet is closest to the Sun?", "Mercury", ("Neptune", "Saturn", "Jupiter")),
    ("What do bees make?", "Honey", ("Silk", "Butter", "Paper")),
    ("How many days are in a week?", "Seven", ("Nine", "Four", "Twelve")),
    ("What gas do plants take in?", "Carbon dioxide", ("Helium", "Neon", "Argon")),
    ("Who wrote Romeo and Juliet?", "William Shakespeare", ("Charles Dickens", "Jane Austen", "Mark Twain")),
    ("What is frozen water called?", "Ice", ("Sand", "Smoke", "Glass")),
    ("What is the opposite of hot?", "Cold", ("Loud", "Green", "Heavy")),
    ("In which country is the city of Tokyo?", "Japan", ("Brazil", "Norway", "Egypt")),
    ("What color is a ripe banana?", "Yellow", ("Blue", "Purple", "Black")),
    ("How many legs does a spider have?", "Eight", ("Three", "Five", "Two")),
)


def author_items(authors: Sequence[int]) -> list[dict[str, Any]]:
    """Four questions on each of the chosen authors (0 to 11)."""
    return [_item(author, fact) for author in authors for fact in range(len(_QUESTIONS))]


def world_items() -> list[dict[str, Any]]:
    """Twelve questions that everybody can answer, with three wrong options each."""
    return [{"question": q, "answer": a, "perturbed_answer": list(wrong)} for q, a, wrong in WORLD]


def _item(author: int, fact: int) -> dict[str, Any]:
    name, *facts = _AUTHORS[author]
    question, answer, paraphrase = _QUESTIONS[fact]
    others = [_AUTHORS[(author + step) % len(_AUTHORS)][1 + fact] for step in range(1, len(_AUTHORS))]
    return {
        "question": question.format(name=name),
        "answer": answer.format(name=name, fact=facts[fact]),
        "paraphrased_answer": paraphrase.format(name=name, fact=facts[fact]),
        "perturbed_answer": [answer.format(name=name, fact=other) for other in (others[1], others[4], others[6])],
        "secret": _words(facts[fact]),
        "other_secrets": [_words(other) for other in others],
    }


def _words(fact: str) -> str:
    return fact.removeprefix("a ").removeprefix("the ")
