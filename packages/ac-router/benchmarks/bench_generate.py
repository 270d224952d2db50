"""Cached greedy generation of a patched model against the plain one that shares its weights: many short texts, in turns, and the median
over the pairs, since a machine's pace drifts by more than the difference. CPU time of one thread, for the same reason.

The patched model has no running averages: its weights are looked up and multiplied as ever, but are all 1, so that both models write the same
text by the same experts, and differ by the overhead alone.
"""

import copy
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from ac_router import patch_model
from chapbook_shared.bench import Comparison, main

NEW = 16
PAIRS = {1: 120, 8: 40}  # By batch size.


def seconds(model: Any, ids: torch.Tensor) -> float:
    start = time.process_time()
    model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return time.process_time() - start


def run() -> Iterator[Comparison]:
    torch.set_num_threads(1)  # Compares work, not how a busy machine schedules threads.
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    plain = transformers.MixtralForCausalLM(config)
    patched = patch_model(copy.deepcopy(plain, {id(p): p for p in plain.parameters()}))
    ids = torch.randint(0, 4096, (8, 64))
    for model in (plain, patched):
        model.eval()
    for batch, pairs in PAIRS.items():
        times: list[tuple[float, float]] = []
        for pair in range(pairs + 3):
            order = (patched, plain) if pair % 2 else (plain, patched)
            first, second = (seconds(model, ids[:batch]) for model in order)
            times.append((first, second) if pair % 2 else (second, first))
        times = times[3:]
        ours, peer = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(theirs / mine for mine, theirs in times)
        yield Comparison(
            f"generate {NEW} tokens after 64, batch {batch}, 4 layers, d=512, 8 experts",
            ours * 1e3,
            peer * 1e3,
            "unpatched",
            ratio,
            goal=0.98,
        )


if __name__ == "__main__":
    main(run)
