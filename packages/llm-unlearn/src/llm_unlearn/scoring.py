"""What a model says of given answers (likelihood) and what it answers itself (greedy text), in batches, leaving model and tokenizer as they were."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from chapbook_shared.validate import check_int

from .data import Example, Item, build_example, build_prompt
from .losses import nll_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class AnswerScore:
    """Teacher-forced likelihood of one answer: its summed NLL in nats, and how many tokens that sums."""

    nll: float
    tokens: int

    @property
    def mean(self) -> float:
        """l(y): NLL a token."""
        return self.nll / self.tokens


@dataclass(frozen=True)
class Generation:
    """A greedy answer: its text, and the ids of its tokens without special ones."""

    text: str
    token_ids: tuple[int, ...]


def score_answers(
    model: Any,
    items: Sequence[Item | Example],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    batch_size: int = 16,
    max_length: int = 512,
    pad_token_id: int = 0,
) -> list[AnswerScore]:
    """Score the answer of each item (or ready-made example), in order. Batches are of similar lengths."""
    check_int("batch_size", batch_size, minimum=1)
    examples = []
    for i, item in enumerate(items):
        if isinstance(item, Example):
            example = item
        elif tokenizer is None:
            raise ValueError("items that are not examples yet need a tokenizer")
        else:
            example = build_example(tokenizer, item, max_length=max_length)
        if example.supervised < 1:
            raise ValueError(
                f"item {i} has no answer token within max_length={max_length}: raise max_length, or leave it out"
            )
        examples.append(example)
    scores: list[AnswerScore | None] = [None] * len(examples)
    keeps = "logits_to_keep" in inspect.signature(_unwrapped(model).forward).parameters
    with _evaluating(model) as device:
        for chosen in _batches([len(e.input_ids) for e in examples], batch_size):
            batch = [examples[i] for i in chosen]
            width = max(len(e.input_ids) for e in batch)
            ids = torch.tensor([[*e.input_ids, *[pad_token_id] * (width - len(e.input_ids))] for e in batch])
            mask = torch.tensor([[1] * len(e.input_ids) + [0] * (width - len(e.input_ids)) for e in batch])
            first = min(max(e.prompt_length, 1) for e in batch) - 1
            given = {"logits_to_keep": torch.arange(first, width, device=device)} if keeps else {}
            logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False, **given).logits
            skipped = first if keeps else 0
            for row, (i, example) in enumerate(zip(chosen, batch, strict=True)):
                start, end = max(example.prompt_length, 1), len(example.input_ids)
                targets = torch.tensor(example.input_ids[start:end], device=device)
                nll = nll_rows(logits[row, start - 1 - skipped : end - 1 - skipped], targets)
                scores[i] = AnswerScore(float(nll.double().sum()), end - start)
    return [score for score in scores if score is not None]


def generate_answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
    *,
    batch_size: int = 16,
    max_new_tokens: int = 200,
) -> list[Generation]:
    """The model's greedy answer to each item's question, in order. The limit is on new tokens: long questions get as much room as short ones."""
    from transformers import GenerationConfig

    check_int("max_new_tokens", max_new_tokens, minimum=1)
    check_int("batch_size", batch_size, minimum=1)
    prompts = [build_prompt(tokenizer, item) for item in items]
    config = getattr(model, "generation_config", None)
    stops = config.eos_token_id if config is not None and config.eos_token_id is not None else None
    stop_ids = set(stops if isinstance(stops, list) else [stops]) | {tokenizer.eos_token_id}
    stop_list = sorted(i for i in stop_ids if i is not None)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stop_list[0] if stop_list else 0)
    greedy = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=stop_list or None, pad_token_id=pad
    )
    special = set(tokenizer.all_special_ids)
    answers: list[Generation | None] = [None] * len(prompts)
    with _evaluating(model) as device:
        for chosen in _batches([len(p) for p in prompts], batch_size):
            width = max(len(prompts[i]) for i in chosen)
            # Padded on the left by hand: the tokenizer's own side stays what it is.
            ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in chosen], device=device)
            mask = torch.tensor(
                [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen], device=device
            )
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=greedy)
            for i, row in zip(chosen, output[:, width:].tolist(), strict=True):
                end = next((t for t, token in enumerate(row) if token in stop_ids), len(row))
                tokens = tuple(token for token in row[:end] if token not in special)
                answers[i] = Generation(str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip(), tokens)
    return [answer for answer in answers if answer is not None]


def _unwrapped(model: Any) -> Any:
    inner = getattr(model, "module", model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


@contextmanager
def _evaluating(model: Any) -> Iterator[torch.device]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)


def _batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Indices in batches of similar lengths, longest first: running out of memory shows at once."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for start in range(0, len(order), size):
        yield order[start : start + size]
