"""The evidence run: instructions out of SmolLM2-135M by its template, killed in the middle and resumed, against two other prompts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chapbook_shared import lm
from chapbook_shared.embed import SentenceEmbedder
from chapbook_shared.jobs import Store
from chapbook_shared.progress import Progress
from chapbook_shared.report import Report

from . import filters
from .generation import Magpie
from .neighbors import annotate_neighbors, nearest, pairs_below
from .rows import Record, Run
from .settings import InstructionSettings, ResponseSettings, Schedule
from .stopping import cut_at_words

COLD, WARM = 0.7, 1.2
CONTROLS = {"BOS alone": "<|im_start|>", '"Write a question:"': "Write a question:"}
_IMPERATIVE = re.compile(
    r"^\W*(?:(?:please|can you|could you|i (?:need|want) you to)\s+)?(?:analy[sz]e|calculate|compare|compose|convert|create|"
    r"define|describe|design|develop|discuss|draw|edit|evaluate|explain|find|generate|give|help|identify|implement|list|make|name|"
    r"outline|plan|prove|provide|rewrite|show|solve|suggest|summari[sz]e|tell|translate|use|write)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Sizes:
    """How much is drawn: instructions at each of two temperatures, responses, and their longest lengths in tokens."""

    rows: int
    responses: int
    instruction_tokens: int = 48
    response_tokens: int = 64

    @property
    def schedule(self) -> Schedule:
        """Half of the rows cold, half warm."""
        return ((COLD, 1.0, self.rows), (WARM, 1.0, self.rows))


DEMO = Sizes(rows=24, responses=10, instruction_tokens=40, response_tokens=32)
MAIN = Sizes(rows=100, responses=60)


def demo(*, seed: int, progress: Progress) -> Report:
    """The main job in small."""
    with tempfile.TemporaryDirectory(prefix="magpie-synth-") as folder:
        return evidence(Path(folder) / "run", DEMO, seed=seed, progress=progress, conclusive=False)


def evidence(out: Path, sizes: Sizes, *, seed: int, progress: Progress, conclusive: bool) -> Report:
    """Run the job and measure its claims. `conclusive` says whether the sizes can settle the effect of temperature."""
    report = Report("magpie-synth", method="pre-query template", baseline="other prompts", seed=seed)
    with progress.task("generating", total=6) as task:
        before = killed_in_the_middle(out, sizes, seed)
        task.advance()
        model = small_model()
        magpie = job(model, sizes, seed)
        run = resumed(magpie, out, sizes, before, report)
        task.advance()
        sets = {"template": run.instructions()}
        for name, prompt in CONTROLS.items():
            sets[name] = job(model, sizes, seed, legacy_template=prompt).instructions(schedule=sizes.schedule)
            task.advance()
        embedder = SentenceEmbedder.minilm()
        _prompts(report, sets, embedder)
        task.advance()
        _temperatures(report, sets["template"], embedder, conclusive=conclusive)
        _deduplication(report, run, embedder)
        _stop_words(report, sets["template"])
        task.advance()
    _look(report, run)
    report.note(
        f"SmolLM2-135M-Instruct in float32 ({type(model).__name__}), MiniLM distances (squared, unit vectors). The instructions of a model this "
        "small are noisy: the numbers compare prompts, they do not praise rows."
    )
    return report


def job(model: Any, sizes: Sizes, seed: int, **options: Any) -> Magpie:
    """The job, for any prompt."""
    return Magpie(
        model,
        seed=seed,
        instruction=InstructionSettings(max_tokens=sizes.instruction_tokens),
        response=ResponseSettings(max_tokens=sizes.response_tokens),
        **options,
    )


def small_model(*, batch_size: int = 128) -> Any:
    """SmolLM2 in OpenVINO, or, where it cannot be converted (no uv, no network), in transformers, which is slower."""
    try:
        return lm.OpenVINOModel.smollm2(batch_size=batch_size)
    except (FileNotFoundError, RuntimeError):
        return lm.LocalModel.smollm2(batch_size=batch_size)


def run_alone(out: str, sizes: dict[str, int], seed: int) -> None:
    """What the process does that is to be killed."""
    made = Sizes(**sizes)
    job(small_model(batch_size=16), made, seed).run(
        out, schedule=made.schedule, responses=made.responses, progress=Progress(enabled=False)
    )


def killed_in_the_middle(out: Path, sizes: Sizes, seed: int) -> dict[str, Record]:
    """Start the run in a process of its own, end it with kill -9 when half of the instructions are there, and say what was."""
    code = f"from magpie_synth.demo import run_alone; run_alone({str(out)!r}, {vars(sizes)!r}, {seed})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONWARNINGS": "ignore"}, stderr=subprocess.PIPE, text=True
    )
    try:
        while process.poll() is None and _count(out) < sizes.rows:
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        _, words = process.communicate()
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(
            f"the run ended by itself with {process.returncode} before it could be killed: {words[-500:]}"
        )
    with Store(out / "run.sqlite", read_only=True) as store:
        return dict(store.items())


def resumed(magpie: Magpie, out: Path, sizes: Sizes, before: dict[str, Record], report: Report) -> Run:
    """Go on with the run, and claim that nothing was lost."""
    run = magpie.run(out, schedule=sizes.schedule, responses=sizes.responses, progress=Progress(enabled=False))
    with Store(out / "run.sqlite", read_only=True) as store:
        after = dict(store.items())
    same = sum(json.dumps(after.get(key)) == json.dumps(record) for key, record in before.items())
    drawn = len(run.instructions())
    report.claim(
        "Killed with kill -9 in the middle and resumed: nothing is lost and nothing is done twice",
        expected=f"every finished record as it was, all {2 * sizes.rows} instructions in the end",
        measured=f"{same} of {len(before)} records unchanged, {drawn} instructions, {len(run.rows())} answered rows",
        holds=same == len(before) and drawn == 2 * sizes.rows and 0 < len(before) < 2 * sizes.rows,
    )
    return run


def _count(out: Path) -> int:
    try:
        with Store(out / "run.sqlite", read_only=True) as store:
            return len(store)
    except (OSError, ValueError):  # not begun yet
        return 0


def _prompts(report: Report, sets: dict[str, list[Record]], embedder: SentenceEmbedder) -> None:
    rows, ended = [], {}
    for name, records in sets.items():
        texts = [record["instruction"] for record in records if record["instruction"]]
        ended[name] = float(
            np.mean([record["finish_reason"] == "stop" and bool(record["instruction"]) for record in records])
        )
        asks = float(np.mean(["?" in text or bool(_IMPERATIVE.match(text)) for text in texts])) if texts else 0.0
        rows.append((name, len(records), len(texts), ended[name], asks, _mean_distance(texts, embedder)[0]))
    best = max(share for name, share in ended.items() if name != "template")
    report.claim(
        "Given its own pre-query template, the model ends its text like a user; given other prompts it does not",
        expected="more texts end by an end-of-turn token before the limit than with either control",
        measured=", ".join(f"{name} {share:.0%}" for name, share in ended.items()),
        holds=ended["template"] > best,
    )
    columns = ["prompt", "drawn", "not empty", "ended by a token", "asks (? or verb)", "mean nearest distance"]
    report.table("Prompts", columns, rows)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(rows))
    axes.bar(places - 0.2, [row[3] for row in rows], 0.4, label="ended by a token")
    axes.bar(places + 0.2, [row[4] for row in rows], 0.4, label="asks")
    axes.set(xticks=places, xticklabels=[row[0] for row in rows], ylim=(0, 1), ylabel="share of texts")
    axes.legend()
    report.figure("What the model writes after each prompt", figure)


def _temperatures(report: Report, records: Sequence[Record], embedder: SentenceEmbedder, *, conclusive: bool) -> None:
    distances = {}
    for cell, temperature in enumerate((COLD, WARM)):
        texts = [record["instruction"] for record in records if record["cell"] == cell and record["instruction"]]
        distances[temperature] = nearest(embedder.embed(texts)).distance
    means = {t: (float(d.mean()), float(d.std(ddof=1) / np.sqrt(len(d)))) for t, d in distances.items()}
    report.claim(
        "A higher temperature gives more diverse instructions",
        expected=f"mean nearest distance at {WARM} above that at {COLD}",
        measured=", ".join(f"T={t}: {mean:.3f} ± {error:.3f} (standard error)" for t, (mean, error) in means.items()),
        holds=means[WARM][0] > means[COLD][0],
        within_scale=conclusive,
    )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.hist(list(distances.values()), bins=20, label=[f"T = {t}" for t in distances])
    axes.set(xlabel="squared distance to the nearest other instruction", ylabel="instructions")
    axes.legend()
    report.figure("Diversity by temperature", figure)


def _deduplication(report: Report, run: Run, embedder: SentenceEmbedder) -> None:
    rows = [
        {"id": record["id"], "instruction": record["instruction"]}
        for record in run.instructions()
        if record["instruction"]
    ]
    kept = filters.apply(annotate_neighbors(rows, embedder=embedder), "dedupe")
    vectors = {n: embedder.embed([row["instruction"] for row in part]) for n, part in (("all", rows), ("kept", kept))}
    near = {name: sum(1 for _ in pairs_below(part, 0.05)) for name, part in vectors.items()}
    report.claim(
        "After the official de-duplication no pair of instructions is near",
        expected="0 pairs below 0.05",
        measured=f"{near['all']} such pairs among {len(rows)} before, {near['kept']} among {len(kept)} after",
        holds=near["kept"] == 0,
    )


def _stop_words(report: Report, records: Sequence[Record]) -> None:
    whole = [record for record in records if record["instruction"]]
    upstream = [record for record in whole if cut_at_words(record["instruction"])[1]]
    in_a_sentence = re.compile(r"\w[^\n]*\bassistant|\bassistant\b[^\n]*\w", re.IGNORECASE)
    ours = [
        record
        for record in whole
        if "role header" in record["taken"] and in_a_sentence.search(record["raw_instruction"].splitlines()[0])
    ]
    report.claim(
        'Stopping at the bare word "assistant" damages instructions; stopping at headers does not',
        expected="0 damaged by the rule here",
        measured=f"{len(upstream)} of {len(whole)} damaged by the official stop words, {len(ours)} by the rule here",
        holds=not ours,
    )
    if upstream:
        shown = [(record["instruction"][:120], cut_at_words(record["instruction"])[0][:120]) for record in upstream[:5]]
        report.table("Damaged by the official stop words", ["instruction", "what would be left"], shown)


def _look(report: Report, run: Run) -> None:
    stats = run.stats()
    report.table(
        "What became of the instructions",
        ["", "rows"],
        [
            ("drawn", stats["instructions"]),
            *stats["dropped_instructions"].items(),
            ("kept", stats["kept_instructions"]),
            ("answered", stats["rows"]),
            ("answers cut at the limit", stats["responses_cut_at_the_limit"]),
        ],
    )
    rows = [
        (row.instruction_record["gen_input_configs"]["temperature"], row.instruction[:160], row.response[:160])
        for row in run.rows()[:8]
    ]
    report.table("The first rows", ["T", "instruction", "response"], rows)


def _mean_distance(texts: Sequence[str], embedder: SentenceEmbedder) -> tuple[float, float]:
    if len(texts) < 2:
        return float("nan"), float("nan")
    distance = nearest(embedder.embed(texts)).distance
    return float(distance.mean()), float(distance.std(ddof=1) / np.sqrt(len(distance)))
