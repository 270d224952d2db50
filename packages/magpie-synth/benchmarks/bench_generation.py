"""Instructions by SmolLM2-135M on this CPU: a whole run here against `generate` of transformers and against distilabel, in one process.

All draw from the same model at temperature 1 and drop what is empty; kept tokens are those of the rows that are left, up to their
end. Ours is a whole run: deriving the template, drawing, cleaning, dropping, writing every row to the store. `generate` gets the same
token ids, in batches of 32. distilabel's MagpieGenerator gets the same prompt as text, if it is installed. Models are loaded before.
Speeds are per second of processor time of the whole process, all threads, which other work on the machine leaves alone; the last
row is by the clock.
"""

import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from chapbook_shared.bench import Comparison, main
from chapbook_shared.lm import LocalModel, OpenVINOModel
from chapbook_shared.local_models import smollm2
from chapbook_shared.progress import Progress
from magpie_synth import InstructionSettings, Magpie, derive_template

TOKENS, BATCH, REPEATS = 64, 32, 2


def whole_run(model: Any, rows: int, seed: int) -> int:
    """Kept tokens of one run of ours."""
    with tempfile.TemporaryDirectory() as folder:
        magpie = Magpie(model, seed=seed, instruction=InstructionSettings(max_tokens=TOKENS))
        run = magpie.run(folder, rows=rows, responses=0, progress=Progress(enabled=False))
        return sum(record["tokens"] for record in run.instructions() if record["drop"] in (None, "incomplete"))


def generate(model: Any, tokenizer: Any, rows: int, seed: int) -> int:
    """The same by transformers, `BATCH` rows at a time."""
    torch.manual_seed(seed)
    prompt = torch.tensor([derive_template(tokenizer).prompt_ids])
    end = model.generation_config.eos_token_id
    kept = 0
    for _ in range(rows // BATCH):
        out = model.generate(
            prompt.expand(BATCH, -1),
            attention_mask=torch.ones(BATCH, prompt.shape[1], dtype=torch.long),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=TOKENS,
            pad_token_id=end,
        )
        for row in out[:, prompt.shape[1] :].tolist():
            ids = row[: row.index(end) + 1] if end in row else row
            kept += len(ids) * bool(tokenizer.decode(ids, skip_special_tokens=True).strip())
    return kept


def distilabel_step(tokenizer: Any, rows: int) -> Any:
    """distilabel's own step for this, loaded."""
    from distilabel.models import TransformersLLM
    from distilabel.steps.tasks import MagpieGenerator

    llm = TransformersLLM(
        model=str(smollm2()),
        torch_dtype="float32",
        device="cpu",
        use_magpie_template=True,
        magpie_pre_query_template=derive_template(tokenizer).pre_query,
        generation_kwargs={"max_new_tokens": TOKENS, "do_sample": True, "temperature": 1.0},
    )
    step = MagpieGenerator(llm=llm, only_instruction=True, num_rows=rows, batch_size=rows)
    step.load()
    return step


def distilabel_run(step: Any, tokenizer: Any, seed: int) -> int:
    """Kept tokens of the step."""
    torch.manual_seed(seed)
    texts = [row["instruction"] or "" for block, _ in step.process() for row in block]
    return sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in texts if text.strip())


def speeds(work: Callable[[int], int], seed: int) -> tuple[float, float]:
    """Kept tokens a second of processor time, and a second."""
    clock, processor = time.perf_counter(), time.process_time()
    kept = work(seed)
    return kept / (time.process_time() - processor), kept / (time.perf_counter() - clock)


def run() -> Iterator[Comparison]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    reference = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()
    mine = "a run with OpenVINOModel, 128 rows"
    local = "a run with LocalModel, 64 rows"
    peer = f"generate, batch {BATCH}"
    works: dict[str, Callable[[int], int]] = {
        mine: partial(whole_run, OpenVINOModel.smollm2(), 128),
        local: partial(whole_run, LocalModel(reference, tokenizer), 64),
        peer: partial(generate, reference, tokenizer, BATCH),
    }
    if find_spec("distilabel") is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            works["distilabel, 8 rows"] = partial(distilabel_run, distilabel_step(tokenizer, 8), tokenizer)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for seed in range(REPEATS):
        for name, work in works.items():
            found[name].append(speeds(work, seed))
            print(f"{name}: {found[name][-1][0]:.1f} kept tokens a CPU-second", file=sys.stderr)
    processor = {name: statistics.median(pair[0] for pair in pairs) for name, pairs in found.items()}
    clock = {name: statistics.median(pair[1] for pair in pairs) for name, pairs in found.items()}
    unit = "kept tokens/CPU-s"
    for name in works:
        if name != mine:
            goal = 4.0 if name == peer else None
            yield Comparison(
                mine, processor[mine], processor[name], name, processor[mine] / processor[name], goal, unit
            )
    yield Comparison(local, processor[local], processor[peer], peer, processor[local] / processor[peer], None, unit)
    yield Comparison(mine, clock[mine], clock[peer], peer, clock[mine] / clock[peer], None, "kept tokens/s")


if __name__ == "__main__":
    main(run)
