"""Is it gone, or only out of sight? Relearning and quantisation are known to bring unlearned knowledge back; measure it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from chapbook_shared.seeding import derive_seed
from chapbook_shared.validate import check_choice, check_int, check_positive

from .data import Item, UnlearnDataset, as_items
from .losses import token_mean_nll

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Evaluate = Callable[[Any], Mapping[str, float]]
"""A model -> numbers, for instance `lambda m: {"fe": evaluate_unlearning(m, tok, sets).forget_efficacy}`."""


def relearn_probe(
    model: nn.Module,
    processing_class: PreTrainedTokenizerBase,
    items: Sequence[Item] | Any,
    evaluate: Evaluate,
    *,
    steps: Sequence[int] = (0, 5, 10, 20),
    learning_rate: float = 1e-5,
    batch_size: int = 4,
    seed: int = 0,
) -> dict[int, dict[str, float]]:
    """What `evaluate` says of a copy of the model after so many steps of ordinary fine-tuning on `items`.

    `items`: a few of the forgotten ones, or unrelated ones: forget metrics that jump back show that the knowledge was hidden, not removed.
    The model itself is left alone.
    """
    check_positive("learning_rate", learning_rate)
    check_int("batch_size", batch_size, minimum=1)
    rows = as_items(items)
    if not rows:
        raise ValueError("items is empty: relearning needs something to learn")
    if not steps or sorted(set(steps)) != list(steps) or steps[0] < 0:
        raise ValueError(f"steps must be increasing numbers >= 0, got {steps!r}")
    student: Any = copy.deepcopy(model)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(parameter.is_floating_point() and ".reference." not in name)
    optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=learning_rate)
    data = UnlearnDataset(processing_class, rows, None, parts=("forget",), seed=seed)
    generator = torch.Generator().manual_seed(derive_seed(seed, "relearn"))
    device = next(student.parameters()).device
    results: dict[int, dict[str, float]] = {}
    for step in range(steps[-1] + 1):
        if step in steps:
            student.eval()
            results[step] = dict(evaluate(student))
        if step == steps[-1]:
            break
        student.train()
        chosen = torch.randint(len(data), (min(batch_size, len(data)),), generator=generator).tolist()
        examples = [data.forget_example(i) for i in chosen]
        width = max(len(e.input_ids) for e in examples)
        ids = torch.tensor([[*e.input_ids, *[0] * (width - len(e.input_ids))] for e in examples], device=device)
        mask = torch.tensor([[t < len(e.input_ids) for t in range(width)] for e in examples], device=device)
        supervised = torch.tensor(
            [[max(e.prompt_length, 1) <= t < len(e.input_ids) for t in range(width)] for e in examples], device=device
        )
        logits = student(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        token_mean_nll(logits, torch.where(supervised, ids, -100)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return results


def quantization_probe(
    model: nn.Module, evaluate: Evaluate, *, bits: Sequence[int] = (8, 4), group_size: int = 64
) -> dict[str, dict[str, float]]:
    """What `evaluate` says of the model, and of copies whose linear weights went to that many bits and back (`quantize_weights`).

    Small changes of the weights, as unlearning at low learning rates makes, are rounded away: forget metrics that return at 4 bits show it.
    """
    results = {"full": dict(evaluate(model))}
    for width in bits:
        check_choice("bits", width, (2, 3, 4, 5, 6, 7, 8))
        quantized = copy.deepcopy(model)
        quantize_weights(quantized, bits=width, group_size=group_size)
        results[f"int{width}"] = dict(evaluate(quantized))
    return results


@torch.no_grad()
def quantize_weights(model: nn.Module, *, bits: int, group_size: int = 64) -> None:
    """Round every linear layer's weight to `bits` and back, in place: symmetric absmax scales over groups of `group_size` inputs.

    The output layer stays, as is usual.
    """
    check_int("group_size", group_size, minimum=1)
    levels = 2 ** (bits - 1) - 1
    owner: Any = model
    head = owner.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for module in model.modules():
        if not isinstance(module, nn.Linear) or module is head:
            continue
        weight = module.weight
        for start in range(0, weight.shape[1], group_size):
            group = weight[:, start : start + group_size]
            scale = group.abs().amax(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny) / levels
            group.copy_((group / scale).round().clamp(-levels, levels) * scale)
