"""Question/answer items to token ids, refusals, the pairing of forget with retain items, and batches without padding waste."""

from __future__ import annotations

import hashlib
import json
import logging
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import Dataset, Sampler

from chapbook_shared.seeding import derive_seed
from chapbook_shared.validate import check_int

from .objectives import PartName, Positions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Item = Mapping[str, Any]
Pairing = Literal["fresh", "fixed"]


@dataclass(frozen=True)
class Example:
    """Token ids of prompt + answer; the first `prompt_length` of them are not supervised."""

    input_ids: tuple[int, ...]
    prompt_length: int

    @property
    def supervised(self) -> int:
        """Tokens that are predicted and supervised: the first token of a text without a prompt is not predicted."""
        return len(self.input_ids) - max(self.prompt_length, 1)


def build_example(tokenizer: PreTrainedTokenizerBase, item: Item, *, max_length: int = 512) -> Example:
    """Token ids of one item: prompt ids followed by answer ids, each tokenised on its own, so that the border is where it is said to be.

    `item` has question and answer, prompt and completion, messages (the last by the assistant), or text (all of it supervised).
    Questions go through the tokenizer's chat template if it has one, else `Question: ...\\nAnswer: ...`. The answer ends with the turn's
    own end or EOS, which is supervised. Cut at `max_length` tokens; nothing of the answer may be left then (`supervised` is 0).
    """
    prompt, answer = _texts(tokenizer, item)
    prompt_ids = _prompt_ids(tokenizer, prompt)
    ids = prompt_ids + tokenizer(answer, add_special_tokens=False)["input_ids"]
    if prompt is None and tokenizer.bos_token_id is not None and ids[:1] != [tokenizer.bos_token_id]:
        ids = [tokenizer.bos_token_id, *ids]
    eos = tokenizer.eos_token_id
    if not (prompt is not None and prompt.turn_ended) and eos is not None and ids[-1:] != [eos]:
        ids.append(eos)
    return Example(tuple(ids[:max_length]), min(len(prompt_ids), max_length))


def build_prompt(tokenizer: PreTrainedTokenizerBase, item: Item) -> list[int]:
    """The token ids that a model is given to answer `item`."""
    prompt, _ = _texts(tokenizer, item)
    if prompt is None:
        raise ValueError("an item with only text has no question to answer")
    return _prompt_ids(tokenizer, prompt)


def question_of(item: Item) -> str:
    """The question (last user turn, prompt, or the text itself) of an item."""
    if "question" in item:
        return str(item["question"])
    if "prompt" in item:
        prompt = item["prompt"]
        return str(prompt if isinstance(prompt, str) else prompt[-1]["content"])
    if "messages" in item:
        return str(item["messages"][-2]["content"])
    return str(item["text"])


def answer_of(item: Item) -> str:
    """The answer of an item (the text itself if that is all there is)."""
    if "answer" in item:
        return str(item["answer"])
    if "completion" in item:
        completion = item["completion"]
        return str(completion if isinstance(completion, str) else completion[-1]["content"])
    if "messages" in item:
        return str(item["messages"][-1]["content"])
    return str(item["text"])


def with_answer(item: Item, answer: str) -> dict[str, Any]:
    """The same question with another answer."""
    if "question" in item:
        return {"question": item["question"], "answer": answer}
    if "prompt" in item:
        if isinstance(item["prompt"], str):
            return {"prompt": item["prompt"], "completion": answer}
        return {"messages": [*item["prompt"], {"role": "assistant", "content": answer}]}
    if "messages" in item:
        return {"messages": [*item["messages"][:-1], {"role": "assistant", "content": answer}]}
    raise ValueError(
        "an item with only text has no question to refuse: use question/answer, prompt/completion or messages"
    )


@dataclass(frozen=True)
class _Prompt:
    text: str
    special_tokens: bool
    turn_ended: bool


def _texts(tokenizer: PreTrainedTokenizerBase, item: Item) -> tuple[_Prompt | None, str]:
    """(prompt, answer with the turn's end); prompt is None for a plain text."""
    if "question" in item:
        _need(item, "answer")
        if not tokenizer.chat_template:
            return _Prompt(f"Question: {item['question']}\nAnswer:", True, False), f" {item['answer']}"
        return _chat(tokenizer, [{"role": "user", "content": str(item["question"])}], str(item["answer"]))
    if "prompt" in item:
        _need(item, "completion")
        if isinstance(item["prompt"], str):
            return _Prompt(item["prompt"], True, False), answer_of(item)
        return _chat(tokenizer, item["prompt"], answer_of(item))
    if "messages" in item:
        turns = item["messages"]
        if len(turns) < 2 or turns[-1]["role"] != "assistant":
            raise ValueError(f"messages must end with a turn of the assistant after another turn, got {turns!r}")
        return _chat(tokenizer, turns[:-1], str(turns[-1]["content"]))
    _need(item, "text", "has none of question/answer, prompt/completion, messages, text")
    return None, str(item["text"])


def _need(item: Item, column: str, complaint: str = "") -> None:
    if column not in item:
        raise ValueError(f"item {complaint or f'has no {column!r}'}: its columns are {', '.join(map(repr, item))}")


def _chat(tokenizer: PreTrainedTokenizerBase, turns: Any, answer: str) -> tuple[_Prompt, str]:
    if not tokenizer.chat_template:
        text = "".join(f"{turn['role'].capitalize()}: {turn['content']}\n" for turn in turns)
        return _Prompt(f"{text}Assistant:", True, False), f" {answer}"
    turns = [dict(turn) for turn in turns]
    prompt = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    whole = str(tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": answer}], tokenize=False))
    reply = whole[len(prompt) :].rstrip() if whole.startswith(prompt) else ""
    # A template that rewrites earlier turns, or strips the answer, is not followed: the answer is what the user gave.
    if answer not in reply:
        return _Prompt(prompt, False, False), answer
    return _Prompt(prompt, False, not reply.endswith(answer.rstrip())), reply


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: _Prompt | None) -> list[int]:
    if prompt is None:
        return []
    ids = list(tokenizer(prompt.text, add_special_tokens=prompt.special_tokens)["input_ids"])
    if (
        prompt.special_tokens
        and ids[-1:] == [tokenizer.eos_token_id]
        and not prompt.text.endswith(str(tokenizer.eos_token))
    ):
        ids.pop()  # tokenizers that close every text with EOS
    return ids


class RefusalPool(Sequence[str]):
    """Refusal sentences: the packaged ones, a list, or a UTF-8 file with one a line."""

    def __init__(self, source: Iterable[str] | str | Path | None = None):
        if source is None:
            lines: Iterable[str] = (
                resources.files("llm_unlearn").joinpath("refusals.txt").read_text(encoding="utf-8").splitlines()
            )
        elif isinstance(source, str | Path):
            lines = Path(source).read_text(encoding="utf-8").splitlines()
        else:
            lines = source
        self._sentences = tuple(line.strip() for line in lines if line.strip())
        if not self._sentences:
            raise ValueError("the pool of refusals is empty: give at least one sentence, or None for the packaged ones")

    def __len__(self) -> int:
        return len(self._sentences)

    def __getitem__(self, index: Any) -> Any:
        return self._sentences[index]

    def draw(self, seed: int, *path: str | int) -> str:
        """One sentence, fixed by the seed and the path alone."""
        return self._sentences[derive_seed(seed, *path) % len(self)]


def overlap(forget: Sequence[Item], retain: Sequence[Item]) -> list[int]:
    """Indices of retain items whose question is also a forget question (case, spacing and Unicode form aside)."""
    asked = {_normal(question_of(item)) for item in forget}
    return [i for i, item in enumerate(retain) if _normal(question_of(item)) in asked]


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def check_sets(
    forget: Sequence[Item], retain: Sequence[Item] | None, *, needs_retain: bool, strict: bool = False, method: str = ""
) -> None:
    """Raise on an empty forget set, or an empty retain set where one is needed; warn (`strict`: raise) if they share questions."""
    if len(forget) == 0:
        raise ValueError("the forget set is empty: there is nothing to unlearn")
    if needs_retain and not retain:
        raise ValueError(
            f"method {method!r} needs a retain set, and there is none: pass retain_dataset, or use {method.split('+')[0]!r}"
        )
    shared = overlap(forget, retain or ())
    if shared:
        message = f"{len(shared)} retain items ask a question of the forget set (first: index {shared[0]})"
        if strict:
            raise ValueError(f"{message}: remove them, or pass strict=False")
        warnings.warn(message, UserWarning, stacklevel=3)


def as_items(dataset: Any) -> list[dict[str, Any]]:
    """A list of rows of a list, a `datasets.Dataset`, or anything that iterates over mappings."""
    return [dict(row) for row in dataset]


def fingerprint(items: Iterable[Item]) -> str:
    """A hash of the items' content and order, the same in every process."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(item, sort_keys=True, default=repr).encode("utf-8") + b"\n")
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Draw:
    """What a sampler yields: an item of the forget set in an epoch. A filler only keeps the processes in step and counts for nothing."""

    epoch: int
    index: int
    filler: bool = False


@dataclass(frozen=True)
class Sample:
    """The examples of one draw, by part, and which refusal was drawn."""

    draw: Draw
    examples: Mapping[PartName, Example]
    refusal: int


class UnlearnDataset(Dataset[Sample]):
    """Forget items, each paired with a retain item and a refusal that are fixed by (seed, epoch, index).

    `pairing="fresh"` draws anew each epoch. "fixed" is the official code's: every epoch sees the pair drawn from a generator seeded with
    the index. Neither touches a global generator. Items whose question fills `max_length` are dropped with a log line.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        forget: Sequence[Item],
        retain: Sequence[Item] | None,
        *,
        parts: Sequence[PartName],
        refusals: RefusalPool | None = None,
        max_length: int = 512,
        pairing: Pairing = "fresh",
        seed: int = 0,
    ):
        check_int("max_length", max_length, minimum=2)
        self.parts = tuple(parts)
        self.pairing, self.seed, self._max_length, self._tokenizer = pairing, seed, max_length, tokenizer
        self.refusals = refusals or RefusalPool()
        if any(part.endswith("_idk") for part in parts):
            for item in (*forget[:1], *(retain or ())[:1]):
                with_answer(item, "")
        self.forget, self._forget = self._usable(forget, "forget")
        needs_retain = any(part.startswith("retain") for part in parts)
        self.retain, self._retain = self._usable(retain or (), "retain") if needs_retain else ([], [])
        self._refused = lru_cache(maxsize=4096)(self._refuse)

    def __len__(self) -> int:
        return len(self.forget)

    def __getitem__(self, draw: Draw | int) -> Sample:
        draw = draw if isinstance(draw, Draw) else Draw(0, draw)
        retain, refusal = self.pair(draw)
        examples: dict[PartName, Example] = {}
        for part in self.parts:
            if part == "forget":
                examples[part] = self._forget[draw.index]
            elif part == "retain":
                examples[part] = self._retain[retain]
            else:
                examples[part] = self._refused(part, draw.index if part == "forget_idk" else retain, refusal)
        return Sample(draw, examples, refusal)

    def pair(self, draw: Draw) -> tuple[int, int]:
        """(retain index, refusal index) of a draw."""
        path: tuple[str | int, ...] = ("pair", draw.epoch, draw.index)
        seed = draw.index if self.pairing == "fixed" else derive_seed(self.seed, *path)
        generator = torch.Generator().manual_seed(seed)
        sizes = (max(len(self.retain), 1), len(self.refusals))
        retain, refusal = (int(torch.randint(size, (1,), generator=generator)) for size in sizes)
        return retain, refusal

    def refused_example(self, index: int, refusal: int) -> Example:
        """Forget question `index` answered with refusal `refusal`."""
        return self._refused("forget_idk", index, refusal)

    def forget_example(self, index: int) -> Example:
        return self._forget[index]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_refused"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._refused = lru_cache(maxsize=4096)(self._refuse)

    def _refuse(self, part: PartName, index: int, refusal: int) -> Example:
        item = (self.forget if part == "forget_idk" else self.retain)[index]
        return build_example(self._tokenizer, with_answer(item, self.refusals[refusal]), max_length=self._max_length)

    def _usable(self, items: Sequence[Item], name: str) -> tuple[list[Item], list[Example]]:
        examples = [build_example(self._tokenizer, item, max_length=self._max_length) for item in items]
        kept = [i for i, example in enumerate(examples) if example.supervised > 0]
        dropped = len(examples) - len(kept)
        if dropped:
            logger.warning(
                "%d of %d %s items dropped: no answer token is left within max_length=%d",
                dropped,
                len(examples),
                name,
                self._max_length,
            )
        if not kept:
            raise ValueError(
                f"no {name} item has an answer token within max_length={self._max_length} ({dropped} dropped): raise max_length"
            )
        return [items[i] for i in kept], [examples[i] for i in kept]


class DrawSampler(Sampler[Draw]):
    """Every forget item once an epoch, in an order fixed by (seed, epoch); fillers make the length a multiple of `multiple_of`.

    `epoch` is set from outside before each pass.
    """

    def __init__(self, size: int, *, seed: int, multiple_of: int = 1, shuffle: bool = True):
        self.size, self.seed, self.multiple_of, self.shuffle = size, seed, multiple_of, shuffle
        self.epoch = 0

    def __len__(self) -> int:
        return -(-self.size // self.multiple_of) * self.multiple_of

    def __iter__(self) -> Iterator[Draw]:
        order = list(range(self.size))
        if self.shuffle:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", self.epoch))
            order = torch.randperm(self.size, generator=generator).tolist()
        yield from (Draw(self.epoch, index) for index in order)
        yield from (Draw(self.epoch, order[0], filler=True) for _ in range(len(self) - self.size))


@dataclass
class UnlearnCollator:
    """Batches for one forward pass over all parts, side by side: [forget | forget_idk | retain | retain_idk], only those that are there.

    `packed=True` lays all sequences out in one row without any padding, told apart by `position_ids`; `packed=False` pads to the longest
    (or to `pad_to`). `positions[part]` says which rows of logits that part needs. Besides the model's inputs a batch holds

    rows, targets, answer, sequence   for each needed row of logits: its flat place, the token it predicts (-1: none), whether that is
                                      supervised, the sequence within its part
    part_rows, part_sequences         how many rows and sequences each part has
    part_tokens                       packed: tokens of each part; padded: rows of the batch
    counts                            (parts, 3): supervised tokens, rows, sequences; what sums are divided by
    draws                             (index, refusal) of each sample that is no filler
    """

    parts: Sequence[PartName]
    positions: Mapping[PartName, Positions]
    pad_token_id: int
    packed: bool = False
    pad_to: int | None = None

    def __post_init__(self) -> None:
        grid = [part for part in self.parts if self.positions[part] in ("padded", "all")]
        if grid and self.packed:
            raise ValueError(
                f"positions 'padded' and 'all' ({', '.join(grid)}) count padding, so the batch cannot be packed"
            )

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        examples = [(part, sample) for part in self.parts for sample in samples]
        width = max(len(sample.examples[part].input_ids) for part, sample in examples)
        if self.pad_to is not None:
            if width > self.pad_to:
                raise ValueError(f"a sequence has {width} tokens, more than pad_to={self.pad_to}")
            width = self.pad_to
        ids: list[list[int]] = []
        rows: list[int] = []
        targets: list[int] = []
        answer: list[bool] = []
        sequence: list[int] = []
        counts = {part: [0, 0, 0] for part in self.parts}
        tokens = dict.fromkeys(self.parts, 0)
        offset = 0
        for part, sample in examples:
            example = sample.examples[part]
            ids.append(list(example.input_ids))
            length = len(example.input_ids) if self.packed else width
            tokens[part] += length if self.packed else 1
            if not sample.draw.filler:
                chosen = _positions(example, width, self.positions[part])
                supervised = [max(example.prompt_length, 1) <= t + 1 < len(example.input_ids) for t in chosen]
                rows.extend(offset + t for t in chosen)
                targets.extend(example.input_ids[t + 1] if t + 1 < len(example.input_ids) else -1 for t in chosen)
                answer.extend(supervised)
                sequence.extend([counts[part][2]] * len(chosen))
                counts[part][0] += sum(supervised)
                counts[part][1] += len(chosen)
                counts[part][2] += 1
            offset += length
        return {
            **self._model_inputs(ids, width),
            "rows": torch.tensor(rows, dtype=torch.long),
            "targets": torch.tensor(targets, dtype=torch.long),
            "answer": torch.tensor(answer, dtype=torch.bool),
            "sequence": torch.tensor(sequence, dtype=torch.long),
            "counts": torch.tensor([counts[part] for part in self.parts], dtype=torch.float32),
            "part_rows": [counts[part][1] for part in self.parts],
            "part_sequences": [counts[part][2] for part in self.parts],
            "part_tokens": [tokens[part] for part in self.parts],
            "draws": [(sample.draw.index, sample.refusal) for sample in samples if not sample.draw.filler],
        }

    def _model_inputs(self, ids: list[list[int]], width: int) -> dict[str, torch.Tensor]:
        if self.packed:
            return {
                "input_ids": torch.tensor([[token for row in ids for token in row]]),
                "position_ids": torch.tensor([[t for row in ids for t in range(len(row))]]),
            }
        return {
            "input_ids": torch.tensor([row + [self.pad_token_id] * (width - len(row)) for row in ids]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids]),
        }


def _positions(example: Example, width: int, kind: Positions) -> range:
    length = len(example.input_ids)
    if kind == "answer":
        return range(max(example.prompt_length, 1) - 1, length - 1)
    ends: dict[str, Callable[[], int]] = {
        "nonpad": lambda: length - 1,
        "tokens": lambda: length,
        "padded": lambda: width - 1,
        "all": lambda: width,
    }
    return range(ends[kind]())
