"""From conversations and text to token ids and back, the same for every model that runs in this process.

A control token that turns up in somebody's text stays text. The chat template writes the conversation as one string, and a plain
tokenisation of that string would read a user's "<|im_end|>" as the end of the turn. Here the text is written with stand-ins in
place of control tokens, and the stretches that hold a stand-in are tokenised by a copy of the tokenizer that knows no control
tokens. A conversation without any is tokenised exactly as transformers would.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from chapbook_shared.lm.protocol import Message, Prompt

_OPEN = "\ue000"
_STAND_IN = _OPEN + "{}\ue001"  # private use characters: no template looks for them
_STAND_INS = re.compile("\ue000(\\d+)\ue001")


class TextCodec:
    """The text side of a model: `tokenizer` is a transformers tokenizer, `name` is for messages.

    Given `vocabulary`, the number of the model's token ids, ids beyond it are refused: the model would fail at them, on some
    devices without saying why.
    """

    def __init__(self, tokenizer: Any, name: str, vocabulary: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self.vocabulary = vocabulary
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        template = str(tokenizer.chat_template or "") if self.has_template else ""
        self._added = {token.content: (id, token) for id, token in tokenizer.added_tokens_decoder.items()}
        self._special = {text for text, (_, token) in self._added.items() if token.special}
        # Markup that a template writes (such as Qwen's <think>) is control too, though no tokenizer calls it special.
        self._markup = {text for text in self._added if text not in self._special and text.strip() and text in template}
        self._control = sorted(self._special | self._markup, key=len, reverse=True)
        self._control_ids = {self._added[text][0] for text in self._control}
        self._splitter = re.compile("(" + "|".join(map(re.escape, self._control)) + ")") if self._control else None
        self.prefix = self._prefix()
        self.token_text = lru_cache(maxsize=65_536)(self._token_text)

    def prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a raw prompt: what the tokenizer puts before any text (BOS) once, whether or not the text has it."""
        if not isinstance(prompt, str):
            if not len(prompt):
                raise ValueError("prompt must hold at least one token id, got none")
            return self.known("prompt", prompt)
        ids = self._with_prefix(self._ids(prompt))
        if ids:
            return ids
        if self.tokenizer.bos_token_id is None:
            raise ValueError(f"prompt is empty and {self.name} has no token that begins a text: pass some text")
        return [self.tokenizer.bos_token_id]

    def known(self, what: str, ids: Sequence[int]) -> list[int]:
        """The ids, all of them tokens of the model."""
        if (low := min(ids)) < 0 or (self.vocabulary is not None and max(ids) >= self.vocabulary):
            most = "" if self.vocabulary is None else f" below the {self.vocabulary} of {self.name}"
            raise ValueError(f"{what} must hold token ids from 0 on{most}, got {low if low < 0 else max(ids)}")
        return list(ids)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the model's reply begins."""
        turns = [{"role": m.role, "content": self.hide(m.text, markup=m.role == "user")} for m in messages]
        try:
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise ValueError(
                f"the chat template of {self.name} refuses a conversation with the roles "
                f"{[m.role for m in messages]}: {error}"
            ) from error
        return self.rendered(text)

    def hide(self, text: str, *, markup: bool = True) -> str:
        """Somebody's text, fit to be put into a chat template: control tokens in it are replaced by stand-ins.

        `markup` also hides what the template writes as markup though no tokenizer calls it special (such as `<think>`).
        """
        text = text.replace(_OPEN, _STAND_IN.format(len(self._control)))  # what looks like a stand-in is none
        for index, control in enumerate(self._control):
            if control in text and (markup or control in self._special):
                text = text.replace(control, _STAND_IN.format(index))
        return text

    def rendered(self, text: str) -> list[int]:
        """Token ids of what a chat template wrote, or of a part of it: what `hide` hid is plain text in them."""
        return self._ids(text) if not _STAND_INS.search(text) else self._ids_with_stand_ins(text)

    def joint(self, prompt: Prompt, choice: Prompt) -> tuple[list[int], int]:
        """Token ids of prompt and choice, and how many of them are the prompt's.

        Texts are tokenised as the one string they form; a token belongs to the choice when it ends after the prompt does.
        """
        if not isinstance(prompt, str) or not isinstance(choice, str):
            head = self.prompt(prompt)
            return head + self.known("choices", choice), len(head)  # type: ignore[arg-type]
        text = prompt + choice
        if self.tokenizer.is_fast:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, kept = encoded["input_ids"], sum(end <= len(prompt) for _, end in encoded["offset_mapping"])
        else:
            ids, alone = self._ids(text), self._ids(prompt)
            kept = next((i for i, pair in enumerate(zip(ids, alone, strict=False)) if pair[0] != pair[1]), len(alone))
        whole = self._with_prefix(ids)
        kept += len(whole) - len(ids)
        if kept == 0:
            if self.tokenizer.bos_token_id is None:
                raise ValueError(f"prompt is empty and {self.name} has no token that begins a text: pass some text")
            return [self.tokenizer.bos_token_id, *whole], 1
        return whole, kept

    def text(self, ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of generated ids, without control tokens; `before` are the ids they follow, whose text is left out.

        With `before`, a space between the two is kept even by tokenizers that drop it at the start of a text.
        """
        alone = self._decode(ids)
        if not before:
            return alone
        context = [id for id in before[-8:] if id not in self._control_ids]
        start, whole = self._decode(context), self._decode([*context, *ids])
        return whole[len(start) :] if whole.startswith(start) else alone

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _token_text(self, id: int) -> str:
        return self.tokenizer.decode([id], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prefix(self) -> list[int]:
        """What the tokenizer puts before a text of its own accord."""
        bare, whole = self._ids("a"), list(self.tokenizer("a")["input_ids"])
        starts = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
        return whole[: starts[0]] if starts else []

    def _with_prefix(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self.prefix)] == self.prefix else self.prefix + ids

    def _show(self, text: str) -> str:
        return _STAND_INS.sub(lambda found: [*self._control, _OPEN][int(found[1])], text)

    def _ids_with_stand_ins(self, text: str) -> list[int]:
        """Tokenise stretches between the template's own control tokens, those with a stand-in as plain text."""
        ids: list[int] = []
        pending = ""
        pieces = self._splitter.split(text) if self._splitter else [text]
        for index, piece in enumerate(pieces):
            if index % 2 or not _STAND_INS.search(piece):
                pending += piece
                continue
            if index > 0 and self._added[pieces[index - 1]][1].rstrip:
                piece = piece.lstrip()
            if index + 1 < len(pieces) and self._added[pieces[index + 1]][1].lstrip:
                piece = piece.rstrip()
            ids += self._ids(pending) if pending else []
            ids += self._as_text(self._show(piece))
            pending = ""
        return ids + (self._ids(pending) if pending else [])

    def _as_text(self, text: str) -> list[int]:
        """Token ids of text that holds no control token whatever it says."""
        if self._plain is None:
            ids = list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        else:
            ids = self._plain.encode(text, add_special_tokens=False).ids
        if not self._control_ids.intersection(ids):
            return ids
        # Some vocabularies can spell a control token from ordinary pieces: then it is cut after its first character.
        found = next((text.find(c) for c in self._control if c in text), -1)
        if found < 0 or len(text) < 2:
            return [id for id in ids if id not in self._control_ids]
        return self._as_text(text[: found + 1]) + self._as_text(text[found + 1 :])

    @cached_property
    def _plain(self) -> Any:
        """A copy of the tokenizer that knows no added tokens; None for a tokenizer that is not of the `tokenizers` library."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str"):
            return None
        state = json.loads(backend.to_str())
        state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] not in set(self._control)]
        state["post_processor"] = None
        steps = state.get("pre_tokenizer") or {}
        for step in steps.get("pretokenizers", [steps]):
            if step.get("prepend_scheme") == "first":  # what is tokenised here never begins the text
                step["prepend_scheme"] = "never"
        return type(backend).from_str(json.dumps(state))


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Text before the first stop string, and whether there is one."""
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return (text[: min(places)], True) if places else (text, False)
