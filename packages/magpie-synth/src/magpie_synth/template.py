"""The pre-query template, derived from a tokenizer's own chat template (Xu et al. 2025, section 2).

For one user turn with content q, render([user q], generation prompt on) = A q B.

Symbols   paper                 here
          pre-query template    A, `PromptTemplate.pre_query` and, as the tokens to send, `prompt_ids`
          post-query template   B, `PromptTemplate.post_query`

The official code keeps A in a table by model name. Here the template is asked: a probe word is rendered as the user's text, and
what stands before and after it is A and B. Two things go wrong when A is then sent as text, and both are settled here. The
server puts a second BOS before the one that A spells; so token ids are sent. And the last token of A on its own can differ from
what it is when text follows ("[INST] " ends in a lone space, which forbids the usual first word); so A is tokenised before
several openings, and only the tokens that all of them share are sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from chapbook_shared.lm import TextCodec

from .errors import SystemPromptError, TemplateError

SystemSupport = Literal["native", "rejected", "dropped"]
Turn = Mapping[str, str]
T = TypeVar("T")

_PROBES = ("Qzvb7Kpw", "Mhtd3Rjgfy9Lcx", "Wkq5Znxbv")
"""Words of letters and digits: nothing escapes or trims them. Two that the template's source does not hold are used."""
_WORDS = ("I", "What", "please", "3", "你", "Я", "é")
_OPENERS = (*_WORDS, '"', "(")
"""What a user may begin with. Punctuation can join the end of a prompt (`:"` is a token of many vocabularies)."""
_THINK = re.compile(r"<(think|thinking)>\s*$")


@dataclass(frozen=True)
class PromptTemplate:
    """What surrounds a user's text, and what to send so that the model writes that text."""

    model: str
    pre_query: str
    """A, as text."""
    post_query: str
    """B, as text: the end of the user's turn and the assistant's header."""
    next_turn: str
    """From the end of an assistant's text to the start of the next user's."""
    user_end: str
    assistant_header: str
    user_header: str
    """The start of a user's turn alone, without the end of the turn before it."""
    prompt_ids: tuple[int, ...]
    """A as the tokens to send, healed at its end; BOS is there once, if the template has one."""
    stop_ids: tuple[int, ...]
    """Tokens that end a turn or open another one."""
    stop_strings: tuple[str, ...]
    """The same for templates whose markers are plain text."""
    system: str
    """"template", "none", or the system text."""
    system_support: SystemSupport
    system_prepended: bool
    """The system text stands before the user's, since the template has no place for it: another method than the paper's."""
    opens_thinking: bool
    """B ends with an opened think tag: replies begin with reasoning."""
    notes: tuple[str, ...]

    def explain(self) -> str:
        """What was derived, for a person to check."""
        lines = [
            f"model            {self.model}",
            f"pre-query  (A)   {self.pre_query!r}",
            f"as tokens        {list(self.prompt_ids)}",
            f"post-query (B)   {self.post_query!r}",
            f"  user's end     {self.user_end!r}",
            f"  reply's header {self.assistant_header!r}",
            f"next turn        {self.next_turn!r}",
            f"stops at tokens  {list(self.stop_ids)}",
            f"stops at text    {list(self.stop_strings)}",
            f"system           {self.system!r}; the template's own role: {self.system_support}",
        ]
        return "\n".join([*lines, *(f"note             {note}" for note in self.notes)])


class ChatTemplate:
    """A tokenizer's chat template: renders conversations and finds what to send for each stage.

    Args:
        tokenizer: a transformers tokenizer, or anything with its `apply_chat_template`, `__call__`, `decode`, `chat_template`,
            `bos_token`, `eos_token` and `added_tokens_decoder`.
        name: the model's name, for messages.
        template_kwargs: passed to the template (`enable_thinking`, `date_string`, ...).

    Raises TemplateError if the tokenizer has no template, or one that does not pass the user's text on verbatim.
    """

    def __init__(self, tokenizer: Any, *, name: str | None = None, **template_kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.name = name or str(getattr(tokenizer, "name_or_path", "") or "this model")
        self.kwargs = template_kwargs
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                f"{self.name} has no chat template, as base models have none: pass chat_template= with the one it was "
                "aligned with, or take its instruction-tuned sibling",
                code="no_chat_template",
            )
        self.codec = TextCodec(tokenizer, self.name)
        self.source = str(tokenizer.chat_template)
        free = [probe for probe in _PROBES if probe not in self.source]
        if len(free) < 2:
            raise TemplateError(f"the chat template of {self.name} holds the words used as probes", code="probe_taken")
        self.probe, self.other_probe = free[:2]
        self.parts = False
        if self._occurrences(self.probe) != 1:
            self.parts = True  # templates of multimodal models want a list of parts and drop plain text
            try:
                found = self._occurrences(self.probe)
            except TemplateError:
                found = 0
            if found != 1:
                self.parts = False
                self._not_verbatim()
        bare, longer = self.before(()), self.before((), probe=self.other_probe)
        if bare != longer:
            raise TemplateError(
                f"what the chat template of {self.name} writes before the user's text depends on that text: "
                f"{bare!r} before {self.probe!r}, {longer!r} before {self.other_probe!r}",
                code="prefix_depends_on_content",
            )

    def render(self, turns: Sequence[Turn], *, generation: bool = False) -> str:
        """The conversation as the template writes it."""
        messages = [
            {"role": t["role"], "content": [{"type": "text", "text": t["content"]}] if self.parts else t["content"]}
            for t in turns
        ]
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation, **self.kwargs
            )
        except Exception as error:
            raise TemplateError(
                f"the chat template of {self.name} refuses a conversation with the roles "
                f"{[turn['role'] for turn in turns]}: {error}",
                code="refused",
            ) from error

    def before(self, turns: Sequence[Turn], *, probe: str | None = None) -> str:
        """What stands before the text of a user's turn that follows `turns`."""
        probe = probe or self.probe
        text = self.render([*turns, {"role": "user", "content": probe}])
        if text.count(probe) != 1:
            self._not_verbatim(text)
        return text[: text.index(probe)]

    def reply_ids(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Tokens of a conversation up to where the assistant's reply begins. Control tokens in its texts stay text."""
        return tuple(self.codec.rendered(self.render(self._hidden(turns), generation=True)))

    def query_ids(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Tokens of a conversation up to where the next user's text begins, healed at the end."""
        return self.healed(self.before(self._hidden(turns)))

    def healed(self, text: str) -> tuple[int, ...]:
        """The tokens that `text` begins with whatever follows it; they leave out spaces at its end, but nothing else."""
        whole = self._written(self.codec.rendered(text))
        for openers in (_OPENERS, _WORDS):
            shared = _common([self.codec.rendered(text + opener) for opener in openers])
            if self._written(shared) == whole:
                return tuple(shared)
        return tuple(self.codec.rendered(text.rstrip(" ")))

    def _written(self, ids: Sequence[int]) -> str:
        """What tokens say, without spaces at the end."""
        decode = self.tokenizer.decode
        return str(decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)).rstrip(" ")

    def system_support(self) -> SystemSupport:
        """Whether a system text gets through."""
        try:
            text = self.before([{"role": "system", "content": self.other_probe}])
        except TemplateError:
            return "rejected"
        return "native" if self.other_probe in text else "dropped"

    def _hidden(self, turns: Sequence[Turn]) -> list[Turn]:
        return [
            {"role": turn["role"], "content": self.codec.hide(turn["content"], markup=turn["role"] == "user")}
            for turn in turns
        ]

    def _occurrences(self, probe: str) -> int:
        turn = [{"role": "user", "content": probe}]
        return max(self.render(turn).count(probe), self.render(turn, generation=True).count(probe))

    def _not_verbatim(self, text: str | None = None) -> None:
        text = self.render([{"role": "user", "content": self.probe}]) if text is None else text
        raise TemplateError(
            f"the chat template of {self.name} does not pass the user's text on verbatim and once: for {self.probe!r} it "
            f"writes {text[:200]!r}",
            code="user_content_not_verbatim",
        )


def derive_template(
    tokenizer: Any,
    *,
    system: str = "template",
    system_fallback: Literal["prepend"] | None = None,
    legacy_template: str | None = None,
    name: str | None = None,
    **template_kwargs: Any,
) -> PromptTemplate:
    """Derive A, B and all that surrounds them from a tokenizer's chat template (see `ChatTemplate` for the arguments it takes).

    `system` is "template" (what the template writes of its own accord, default system and date blocks included), "none" (BOS and
    the user's header alone), or a system text. A text that the template rejects or drops raises SystemPromptError, unless
    `system_fallback="prepend"` puts it before the user's text. `legacy_template` replaces A by a given string, to reproduce the
    official table.
    """
    return derive_from(
        ChatTemplate(tokenizer, name=name, **template_kwargs),
        system=system,
        system_fallback=system_fallback,
        legacy_template=legacy_template,
    )


def derive_from(
    chat: ChatTemplate,
    *,
    system: str = "template",
    system_fallback: Literal["prepend"] | None = None,
    legacy_template: str | None = None,
) -> PromptTemplate:
    """As `derive_template`, for a `ChatTemplate` that is there."""
    around = _Surroundings(chat)
    support = chat.system_support()
    hidden = visible = chat.before(())
    prepended = False
    if system == "none":
        hidden = visible = around.bare_header(visible)
    elif system != "template":
        visible, hidden, prepended = _with_system(chat, system, support, system_fallback)
    if legacy_template is not None:
        hidden = visible = legacy_template
    ids = chat.healed(hidden)
    written = chat._written(ids)
    if written.replace(" ", "") != visible.replace(" ", ""):  # SentencePiece adds and drops spaces at will
        raise TemplateError(
            f"the tokens of the pre-query template of {chat.name} say {written!r}, not {visible!r}",
            code="tokens_differ",
        )
    return PromptTemplate(
        model=chat.name,
        pre_query=visible,
        post_query=around.post_query,
        next_turn=around.next_turn,
        user_end=around.user_end,
        assistant_header=around.assistant_header,
        user_header=around.user_header,
        prompt_ids=ids,
        stop_ids=around.stop_ids(visible),
        stop_strings=around.stop_strings(),
        system=system,
        system_support=support,
        system_prepended=prepended,
        opens_thinking=bool(_THINK.search(around.post_query)),
        notes=tuple(_notes(chat, prepended=prepended, legacy=legacy_template is not None)),
    )


def _with_system(
    chat: ChatTemplate, system: str, support: SystemSupport, fallback: str | None
) -> tuple[str, str, bool]:
    """A with a system text: as it reads, with its control tokens hidden, and whether the text had to be put before the user's."""
    if not system.strip():
        raise SystemPromptError(
            f'system must be "template", "none" or a text, got {system!r}', code="system_text_empty"
        )
    if support == "native":
        visible = chat.before([{"role": "system", "content": system}])
        if system.strip() in visible:
            return visible, chat.before(chat._hidden([{"role": "system", "content": system}])), False
        support = "dropped"
    if fallback == "prepend":
        before = chat.before(())
        return f"{before}{system}\n\n", f"{before}{chat.codec.hide(system)}\n\n", True
    verb = "rejects" if support == "rejected" else "drops or alters"
    raise SystemPromptError(
        f"the chat template of {chat.name} {verb} the system text {system[:80]!r}: leave it out, or pass "
        'system_fallback="prepend" to put it before the user\'s text (another method: rows say that it was used)',
        code=f"system_{support}",
    )


class _Surroundings:
    """What a template writes between the texts of a conversation."""

    def __init__(self, chat: ChatTemplate) -> None:
        self.chat = chat
        self.eos = str(getattr(chat.tokenizer, "eos_token", None) or "")
        self.bos = str(getattr(chat.tokenizer, "bos_token", None) or "")
        added = chat.tokenizer.added_tokens_decoder
        self.special = {token.content: id for id, token in added.items() if token.special}
        self.markers = {token.content: id for id, token in added.items() if token.content.strip()}
        user = {"role": "user", "content": chat.probe}
        reply = {"role": "assistant", "content": chat.other_probe}
        self.post_query = _after(chat.render([user], generation=True), chat.probe)
        user_tail = _after(chat.render([user]), chat.probe)
        answered = chat.render([user, reply])
        self._between = self._middle(answered, user_tail)
        reply_tail = _after(answered, chat.other_probe) if chat.other_probe in answered else ""
        third = _PROBES[2] if chat.probe != _PROBES[2] and chat.other_probe != _PROBES[2] else _PROBES[0]
        following = chat.before([{"role": "user", "content": third}, reply])
        self.next_turn = _after(following, chat.other_probe) if chat.other_probe in following else ""
        self.user_end = self._user_end(user_tail)
        self.assistant_header = self.post_query[len(self.user_end) :]
        self.user_header = self._user_header(reply_tail)

    def _middle(self, answered: str, fallback: str) -> str:
        """From the end of the user's text to the start of the reply's, in a conversation that has both."""
        probe, other = self.chat.probe, self.chat.other_probe
        return _after(answered, probe).partition(other)[0] if probe in answered else fallback

    def _user_end(self, tail: str) -> str:
        """What closes a user's turn: what the template writes after the text when no reply is asked for, or what that shares with B."""
        for candidate in (tail, tail.removesuffix(self.eos)):
            if self.post_query.startswith(candidate):
                return candidate
        return self._whole_markers(self.post_query, "".join(_common([self.post_query, tail])))

    def _user_header(self, reply_tail: str) -> str:
        """`next_turn` without what closes the assistant's turn."""
        for closing in (reply_tail, reply_tail.removesuffix(self.eos), self.user_end):
            if closing and self.next_turn.startswith(closing) and closing != self.next_turn:
                return self.next_turn[len(closing) :]
        shared = self._whole_markers(self.next_turn, "".join(_common([self.next_turn, reply_tail])))
        return self.next_turn[len(shared) :] or self.next_turn

    def bare_header(self, pre_query: str) -> str:
        """BOS and the user's header; whatever else stands before the header stays if it is tokens alone ("[gMASK]<sop>")."""
        header = self.user_header
        lead = pre_query.removesuffix(header)
        if header and lead != pre_query and not self._without_markers(lead).strip():
            return pre_query
        # In ChatML the token that opens a turn may be BOS as well: then the header has it.
        bos = self.bos if pre_query.startswith(self.bos) and not header.startswith(self.bos) else ""
        return bos + header

    def stop_ids(self, pre_query: str) -> tuple[int, ...]:
        """EOS, and every marker that ends a turn or opens one."""
        text = pre_query + self.post_query + self.next_turn + self._between
        found = {id for marker, id in self.special.items() if marker in text}
        structure = self.user_end + self.next_turn + self._between + self.user_header
        found |= {id for marker, id in self.markers.items() if marker in structure and "think" not in marker}
        if self.chat.tokenizer.eos_token_id is not None:
            found.add(int(self.chat.tokenizer.eos_token_id))
        return tuple(sorted(found))

    def stop_strings(self) -> tuple[str, ...]:
        """Headers and ends that hold no token of their own, such as "[INST]" and "USER:"."""
        texts = (self.user_end, self.user_header, self.assistant_header)
        plain = {text.strip() for text in texts if text.strip() and self._without_markers(text) == text}
        return tuple(sorted(plain))

    def _without_markers(self, text: str) -> str:
        for marker in sorted(self.markers, key=len, reverse=True):
            text = text.replace(marker, "")
        return text

    def _whole_markers(self, text: str, shared: str) -> str:
        """`shared`, a beginning of `text`, cut back where it ends inside one of the template's tokens."""
        for marker in self.markers:
            start = text.find(marker)
            while start >= 0:
                if start < len(shared) < start + len(marker):
                    shared = shared[:start]
                start = text.find(marker, start + 1)
        return shared


def _common(sequences: Sequence[Sequence[T]]) -> list[T]:
    """What all sequences begin with."""
    shared = []
    for entries in zip(*sequences, strict=False):
        if any(entry != entries[0] for entry in entries):
            break
        shared.append(entries[0])
    return shared


def _after(text: str, word: str) -> str:
    return text[text.index(word) + len(word) :]


def _notes(chat: ChatTemplate, *, prepended: bool, legacy: bool) -> list[str]:
    notes = []
    if "strftime_now" in chat.source and "date_string" not in chat.kwargs:
        notes.append("the template prints today's date: pass date_string= for a run that can be repeated and resumed")
    if chat.parts:
        notes.append("the template wants content as a list of parts")
    if prepended:
        notes.append("the system text stands before the user's: the template has no place for it")
    if legacy:
        notes.append("A was given as legacy_template, not derived")
    return notes


def split_reasoning(text: str, *, opens_thinking: bool) -> tuple[str | None, str]:
    """A reply as (reasoning, response). Without a think tag the reasoning is None; one that never closes leaves no response."""
    for tag in ("think", "thinking"):
        head, closed, tail = text.partition(f"</{tag}>")
        opened = head.lstrip().startswith(f"<{tag}>")
        if closed:
            return head.strip().removeprefix(f"<{tag}>").strip(), tail.strip()
        if opened:
            return head.strip().removeprefix(f"<{tag}>").strip(), ""
    return (text.strip(), "") if opens_thinking else (None, text.strip())
