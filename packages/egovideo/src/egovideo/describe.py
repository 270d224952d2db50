"""Trajectories in words: by a template, by a language model, and a check of the words against the trajectory.

The template is exact and needs no model. A language model writes better sentences, and wrong ones; `check_caption` finds those that name a
direction, a hand or a number that the trajectory does not have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, get_args

from chapbook_shared.lm import Completion, LanguageModel, Message, Sampling
from egovideo.detection import Side
from egovideo.trajectory import STILL, Direction, Motion, Slot, Trajectory, excursion

__all__ = [
    "PROMPT_VERSION",
    "LLMCaptioner",
    "TemplateCaptioner",
    "check_caption",
    "motion_claims",
    "prompt",
    "swap_sides",
]

PROMPT_VERSION = "1"
SIDES: tuple[Side, ...] = get_args(Side)
_OPPOSITE: dict[Direction, Direction] = {"up": "down", "down": "up", "left": "right", "right": "left"}
_TOWARDS: dict[Direction, str] = {"up": "up", "down": "down", "left": "to the left", "right": "to the right"}
_LONGEST = 80  # words
_REFUSALS = ("i cannot", "i can't", "i'm sorry", "i am sorry", "as an ai", "i'm unable", "i am unable")

SYSTEM = """You describe what hands do in short first-person video clips.
You get one human narration of a clip, in which C is the person who wears the camera, and where the hands and the objects they touch are in
each sampled frame. Positions are pairs x, y: 0, 0 is the top left corner of the picture, 1, 1 the bottom right; x grows to the right, y grows
downwards. "not visible" means that the detector saw nothing there.
Write one or two sentences that keep the narrated action and add how each visible hand and its object move: up, down, to the left, to the
right, towards each other, apart, or not at all. Write no numbers. Say nothing about a hand that is never visible. Answer with the sentences only."""

_EXAMPLES = (
    (
        (
            "Narration: C lifts the lid\nFrame 1: right hand 0.62, 0.80; its object 0.60, 0.70\n"
            "Frame 2: right hand 0.61, 0.62; its object 0.60, 0.53\nFrame 3: right hand 0.60, 0.45; its object 0.59, 0.36"
        ),
        "C lifts the lid: the right hand moves up and carries the lid up with it.",
    ),
    (
        (
            "Narration: C holds the cup and stirs\nFrame 1: left hand 0.25, 0.60; right hand 0.70, 0.55\n"
            "Frame 2: left hand 0.25, 0.61; right hand 0.58, 0.55\nFrame 3: left hand 0.26, 0.60; right hand 0.45, 0.56"
        ),
        "C holds the cup still with the left hand while the right hand moves to the left, towards it, and stirs.",
    ),
)


class TemplateCaptioner:
    """Sentences by rule: every statement is a fact of the trajectory. `name` goes into the record."""

    name = "template"

    def caption(self, narration: str, trajectory: Trajectory) -> str:
        """The narration, then what each visible hand and its object do."""
        parts = [self._hand(side, trajectory) for side in SIDES if trajectory.motion(f"{side}_hand")]  # type: ignore[arg-type]
        if len(parts) == 2:
            parts.append(_between(trajectory))
        sentences = "; ".join(part for part in parts if part)
        opening = _opening(narration)
        if not sentences:
            return opening
        return f"{opening}: {sentences}." if opening else f"{sentences[0].upper()}{sentences[1:]}."

    def _hand(self, side: Side, trajectory: Trajectory) -> str:
        hand = trajectory.motion(f"{side}_hand")  # type: ignore[arg-type]
        thing = trajectory.motion(f"{side}_object")  # type: ignore[arg-type]
        assert hand is not None
        text = f"the {side} hand {_moves(hand)}"
        contact = trajectory.contact(side)
        if thing is None or contact is None:
            return text
        name = f"the {trajectory.labels[side]}" if trajectory.labels[side] else "the object"
        touching = trajectory.touching[side]
        begins, ends = not touching[0], not touching[-1]
        if begins:
            text += f", reaches {name}"
        if not thing.still:
            together = thing.directions == hand.directions and not begins and not ends
            text += f" and moves {'it' if begins else name} {'along' if together else _way(thing)}"
        elif not begins:
            text += f", touching {name}"
        return text + (" and lets go of it" if ends else "")


class LLMCaptioner:
    """Rewrites narrations through any chat model of `chapbook_shared.lm`.

    A model that can hold a reply to a schema is asked for `{"caption": ...}`; any other for plain sentences.
    """

    def __init__(self, model: LanguageModel, *, sampling: Sampling | None = None):
        if not model.capabilities.chat:
            raise ValueError(f"model {model.name} cannot chat: a chat model is needed to rewrite narrations")
        self.model = model
        self.sampling = sampling or Sampling(temperature=0, max_tokens=160)
        self.name = f"llm:{model.name}:prompt-{PROMPT_VERSION}"
        self._schema: dict[str, Any] | None = None
        if model.capabilities.json_schema:
            self._schema = {
                "type": "object",
                "properties": {"caption": {"type": "string"}},
                "required": ["caption"],
                "additionalProperties": False,
            }

    def ask(self, conversations: list[list[Message]]) -> list[Completion]:
        """One reply to each conversation; raises what the model raises."""
        return self.model.chat_many(conversations, self.sampling, schema=self._schema)

    def read(self, completion: Completion) -> str:
        """The caption in a reply; empty if there is none."""
        text = completion.text.strip()
        if self._schema is not None:
            try:
                caption = json.loads(text)["caption"]
            except (ValueError, KeyError, TypeError):
                return ""
            return " ".join(str(caption).split())
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " ".join(lines[0].strip("\"'*").split()) if lines else ""


def prompt(narration: str, trajectory: Trajectory) -> list[Message]:
    """The conversation that asks for a caption."""
    messages = [Message("system", SYSTEM)]
    for question, answer in _EXAMPLES:
        messages += [Message("user", question), Message("assistant", answer)]
    lines = [f"Narration: {_opening(narration) or 'none'}"]
    for number in range(len(trajectory.times)):
        seen = []
        for side in SIDES:
            hand = trajectory.boxes[f"{side}_hand"][number]  # type: ignore[index]
            thing = trajectory.boxes[f"{side}_object"][number]  # type: ignore[index]
            if not trajectory.motion(f"{side}_hand"):  # type: ignore[arg-type]
                continue
            text = f"{side} hand " + ("not visible" if hand is None else "{:.2f}, {:.2f}".format(*hand.center))
            if trajectory.contact(side):
                name = trajectory.labels[side] or "its object"
                text += f"; {name} " + ("not visible" if thing is None else "{:.2f}, {:.2f}".format(*thing.center))
            seen.append(text)
        lines.append(f"Frame {number + 1}: {'; '.join(seen)}")
    return [*messages, Message("user", "\n".join(lines))]


def correction(caption: str, problems: Iterable[str]) -> list[Message]:
    """The turns that ask a model to mend its caption."""
    return [
        Message("assistant", caption or "(empty)"),
        Message("user", f"That does not fit the positions: {'; '.join(problems)}. Write it again, the sentences only."),
    ]


def check_caption(caption: str, trajectory: Trajectory, *, narration: str = "") -> list[str]:
    """What is wrong with a caption, in words; empty if nothing is.

    It is wrong if it is empty, a refusal, longer than 80 words, holds numbers that the narration has not, speaks of a hand that is never
    visible, or says that a hand moves in a direction in which it does not: less than 5 % of the picture, or less than half as far as in the
    opposite one. Words that are not about a hand's direction are not checked.
    """
    if not caption.strip():
        return ["it is empty"]
    lowered = caption.lower()
    problems = []
    if any(phrase in lowered for phrase in _REFUSALS):
        problems.append("it refuses")
    if len(caption.split()) > _LONGEST:
        problems.append(f"it has {len(caption.split())} words, more than {_LONGEST}")
    numbers = sorted(set(re.findall(r"\d+(?:\.\d+)?", caption)) - set(re.findall(r"\d+(?:\.\d+)?", narration)))
    if numbers:
        problems.append(f"it holds numbers: {', '.join(numbers[:3])}")
    mentioned = {side for side in SIDES if re.search(rf"\b{side}\s+hand", lowered)}
    if re.search(r"\b(both|two)\s+hands", lowered):
        mentioned |= set(SIDES)
    problems += [
        f"the {side} hand is never visible"
        for side in SIDES
        if side in mentioned and not trajectory.motion(f"{side}_hand")  # type: ignore[arg-type]
    ]
    for slot, direction in motion_claims(caption):
        boxes = trajectory.boxes[slot]
        there = excursion(boxes, direction)
        if trajectory.motion(slot) and (there < STILL or there < excursion(boxes, _OPPOSITE[direction]) / 2):
            problems.append(f"the {slot.replace('_', ' ')} does not move {_TOWARDS[direction]}")
    return list(dict.fromkeys(problems))


_TOKENS = re.compile(
    r"(?P<both>\b(?:both|two)\s+hands\b)"
    r"|(?P<hand>\b(?P<side>left|right)(?:\s+and\s+(?P<second>left|right))?\s+hands?\b)"
    r"|(?P<phrase>\b(?:pick|put|set|clean|wash|open|pull|take|hold|turn|hang|wipe|wrap|mix|line|lay|place|press)\w*(?:\s+(?:it|them))?\s+(?:up|down)\b(?!\s*wards?))"
    r"|(?P<side_of>\b(?:on|at|from|in|of)\s+(?:the|its|his|her)\s+(?:left|right)\b)"
    r"|(?P<direction>\b(?:up|down|left|right)(?:wards?|\s+wards?)?\b|\b(?:rises?|rising|raises?|raising|lowers?|lowering)\b)"
    r"|(?P<end>[.;:])"
    r"|(?P<other>\b(?:the|an?|its)\s+(?:object|thing|lid|cup|item)\b)"
)
_WORDS: dict[str, Direction] = {
    "up": "up",
    "down": "down",
    "left": "left",
    "right": "right",
    "ris": "up",
    "rai": "up",
    "low": "down",
}
_NEGATION = re.compile(r"\b(?:not|no|never|without|neither|nor)\b[^.;,]{0,25}$")


def motion_claims(caption: str) -> list[tuple[Slot, Direction]]:
    """The statements "this hand moves in that direction" of a caption: each direction belongs to the hands named last before it.

    Left out are directions that are said of something else: "picks up", "on the left", "the cup to the right", and negations.
    """
    lowered = caption.lower()
    claims: list[tuple[Slot, Direction]] = []
    subjects: tuple[Slot, ...] = ()
    for match in _TOKENS.finditer(lowered):
        kind = match.lastgroup
        if match["both"]:
            subjects = ("left_hand", "right_hand")
        elif match["hand"]:
            named = [match["side"], *([match["second"]] if match["second"] else [])]
            subjects = tuple(f"{side}_hand" for side in named)  # type: ignore[misc]
        elif kind in ("end", "other"):
            subjects = ()
        elif match["direction"] and not _NEGATION.search(lowered[: match.start()]):
            word = match["direction"]
            direction = next(d for start, d in _WORDS.items() if word.startswith(start))
            claims += [(slot, direction) for slot in subjects]
    return claims


def swap_sides(text: str) -> str:
    """The text for the mirrored picture: left and right exchanged, in any case and in "leftwards", "left-hand"."""
    other = {"left": "right", "right": "left"}

    def swap(match: re.Match[str]) -> str:
        word = match[0]
        swapped = other[word.lower()]
        return swapped.upper() if word.isupper() else swapped.capitalize() if word[0].isupper() else swapped

    return re.sub(r"\b(?:left|right)(?=\b|wards?\b|most\b)", swap, text, flags=re.IGNORECASE)


def _opening(narration: str) -> str:
    """The narration without Ego4D's marks (#C, #O, #unsure) and closing point."""
    text = re.sub(r"#\s*(?:[CO]\b|unsure\b|summary\b)", "", narration, flags=re.IGNORECASE)
    return " ".join(text.split()).rstrip(" .")


def _moves(hand: Motion) -> str:
    if hand.visible == 1:
        return "is seen for a moment"
    return "stays where it is" if hand.still else f"moves {_way(hand)}"


def _way(moved: Motion) -> str:
    return "and comes back" if moved.returns else " and ".join(_TOWARDS[d] for d in moved.directions)


def _between(trajectory: Trajectory) -> str:
    """Whether the hands come together or part, over the frames in which both are seen."""
    pairs = [
        (left.center, right.center)
        for left, right in zip(trajectory.boxes["left_hand"], trajectory.boxes["right_hand"], strict=True)
        if left is not None and right is not None
    ]
    if len(pairs) < 2:
        return ""
    first, last = (((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) ** 0.5 for a, b in (pairs[0], pairs[-1]))
    if abs(last - first) < 2 * STILL:
        return ""
    return "the hands come together" if last < first else "the hands move apart"
