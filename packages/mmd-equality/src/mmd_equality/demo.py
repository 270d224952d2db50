"""Evidence: a real model against itself, against altered copies of itself, and against other engines that run the same file.

The samples were drawn once from SmolLM2-135M-Instruct by `evidence/sample_smollm2.py` in this package's repository, and come with the
package; every number below is computed from them now.
"""

from __future__ import annotations

import gzip
import json
from importlib import resources
from itertools import combinations
from typing import Any

import numpy as np

from chapbook_shared.progress import Progress
from chapbook_shared.report import Report
from chapbook_shared.seeding import derive_seed
from mmd_equality.decisions import adjust_pvalues
from mmd_equality.planning import plan
from mmd_equality.samples import Samples
from mmd_equality.two_sample import TestResult, two_sample_test

__all__ = ["demo", "evidence"]

ALPHA = 0.01
READER = "OpenVINO's GGUF reader"
LABELS = {
    "second_seed": "the same model, second seed",
    "temperature_0.7": "temperature 0.7",
    "temperature_1.3": "temperature 1.3",
    "rounded_8": "weights rounded to 8 bits",
    "rounded_4": "weights rounded to 4 bits",
    "rounded_3": "weights rounded to 3 bits",
    "watermark": "soft watermark",
    "fine_tuned": "12 fine-tuning steps",
    "llama_cpp": "same file, llama.cpp over HTTP",
    "openvino_gguf": "same file, OpenVINO's GGUF reader",
    "openvino_ir": "OpenVINO, float32 export",
}


def evidence() -> dict[str, Samples]:
    """The packaged samples of SmolLM2-135M-Instruct, by variant (characters)."""
    packed = resources.files("mmd_equality").joinpath("data", "smollm2_samples.jsonl.gz").read_bytes()
    rows: dict[str, list[dict[str, Any]]] = {}
    for line in gzip.decompress(packed).decode("utf-8").splitlines():
        row = json.loads(line)
        rows.setdefault(row.pop("variant"), []).append(row)
    return {name: Samples.from_rows(entries, source=name) for name, entries in rows.items()}


def demo(*, seed: int, progress: Progress) -> Report:
    """Null and altered copies under Hamming and the baselines, the level on resampled halves, power against n, engines."""
    from matplotlib.figure import Figure

    bags = evidence()
    whole = dict(bags)
    reference = bags.pop("reference")
    names = list(LABELS)
    length = max(len(c) for bag in (reference, *bags.values()) for c in bag.completions)
    n = min(min(bag.counts.values()) for bag in bags.values())
    ref_n, bags = reference.first(n), {name: bag.first(n) for name, bag in bags.items()}
    report = Report(
        "mmd-equality", method="stratified Hamming MMD test", baseline="L1 and one-hot tests, pooled shuffle", seed=seed
    )

    methods: dict[str, dict[str, Any]] = {
        "Hamming": {"kernel": "hamming"},
        "all substrings": {"kernel": "all_substrings"},
        "one-hot": {"kernel": "onehot"},
        "L1": {"statistic": "l1"},
    }
    found: dict[str, dict[str, TestResult]] = {name: {} for name in names}
    with progress.task("testing", total=len(names) * len(methods)) as task:
        for name in names:
            for label, options in methods.items():
                draw = derive_seed(seed, name, label)
                found[name][label] = two_sample_test(
                    ref_n, bags[name], max_length=length, alpha=ALPHA, random_state=draw, n_permutations=9999, **options
                )
                task.advance()
    more = {
        name: two_sample_test(
            reference,
            bags[name],
            max_length=length,
            alpha=ALPHA,
            random_state=derive_seed(seed, name, "all of the reference"),
        )
        for name in names
    }
    pool = min(reference.counts.values())
    report.table(
        f"SmolLM2-135M-Instruct against altered copies: {len(ref_n.counts)} prompts x {n} + {n}, characters, 9,999 permutations",
        ["variant", "MMD^2 (Hamming)", "interval", *(f"p {label}" for label in methods), f"p Hamming, {pool} + {n}"],
        [
            [
                LABELS[name],
                f"{found[name]['Hamming'].statistic:.5f}",
                "[{:.4f}, {:.4f}]".format(*(found[name]["Hamming"].ci or (float("nan"),) * 2)),
                *(f"{found[name][label].pvalue:.4f}" for label in methods),
                f"{more[name].pvalue:.4f}",
            ]
            for name in names
        ],
    )

    def p(name: str, label: str = "Hamming") -> float:
        return found[name][label].pvalue

    altered = [name for name in names if name not in ("second_seed", "llama_cpp", "openvino_gguf", "openvino_ir")]
    caught = {label: sum(p(name, label) <= ALPHA for name in altered) for label in methods}
    report.claim(
        "The model is not told from itself (second seed)",
        expected=f"p > {ALPHA:g}",
        measured=f"p = {p('second_seed'):.3f}, MMD^2 = {found['second_seed']['Hamming'].statistic:.5f}",
        holds=p("second_seed") > ALPHA,
    )
    for name in ("temperature_0.7", "temperature_1.3", "rounded_3", "watermark"):
        report.claim(
            f"Detected at {n} completions a prompt: {LABELS[name]}",
            expected=f"p <= {ALPHA:g}",
            measured=f"p = {p(name):.4f}, MMD^2 = {found[name]['Hamming'].statistic:.5f}",
            holds=p(name) <= ALPHA,
            within_scale=False,
        )
    for name in ("rounded_4", "fine_tuned"):
        report.claim(
            f"Harder, detected at larger n: {LABELS[name]}",
            expected=f"p <= {ALPHA:g} at enough completions",
            measured=f"p = {p(name):.4f} at {n} a prompt",
            holds=p(name) <= ALPHA,
            within_scale=False,
        )
    report.claim(
        "Rounding to 8 bits is not detectable at this size (paper: near the level)",
        expected=f"p > {ALPHA:g}",
        measured=f"p = {p('rounded_8'):.3f}",
        holds=p("rounded_8") > ALPHA,
    )
    report.claim(
        "Hamming finds more altered copies than tests that need exact repeats",
        expected="more than L1 and one-hot at equal n",
        measured=", ".join(f"{label} {count}/{len(altered)}" for label, count in caught.items()),
        holds=caught["Hamming"] > max(caught["one-hot"], caught["L1"]),
    )
    _engines(report, whole, length, seed)

    rates, halves = _level(reference, length, seed, progress)
    allowed = 0.05 + 3 * float(np.sqrt(0.05 * 0.95 / halves))
    report.claim(
        "The false alarm rate is what it says: random halves of one sample",
        expected=f"rejects at most {allowed:.3f} of the time at 0.05 (three binomial standard deviations)",
        measured=f"{rates:.3f} over {halves} pairs of halves",
        holds=rates <= allowed,
    )

    strong = ("temperature_0.7", "rounded_4", "rounded_3", "watermark", "fine_tuned")
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    grid = sorted({5, 10, 20, n // 2 * 2})
    with progress.task("power curves", total=len(strong)) as task:
        for name in strong:
            curve = plan(
                reference, bags[name], grid=grid, alpha=0.05, max_length=length, n_simulations=50, n_permutations=99,
                random_state=derive_seed(seed, "power", name),
            )  # fmt: skip
            axes.plot([r.n for r in curve.rows], [r.power for r in curve.rows], marker="o", label=LABELS[name])
            task.advance()
    axes.axhline(0.05, color="#888", linestyle=":", linewidth=1)
    axes.set(xlabel="completions a prompt, on each side", ylabel="power at level 0.05", ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=8)
    report.figure(
        "Power against sample size", figure, caption="Subsamples of the pilot without replacement; dotted: the level."
    )

    figure = Figure(figsize=(8, 0.34 * len(names) + 1), layout="constrained")
    axes = figure.subplots()
    for row, name in enumerate(reversed(names)):
        result = found[name]["Hamming"]
        low, high = result.ci or (result.statistic, result.statistic)
        color = "#c0392b" if result.reject else "#5b7f95"
        axes.plot([low, high], [row, row], color=color)
        axes.plot(result.statistic, row, "o", color=color)
        axes.plot(result.critical_value, row, "|", color="#444")
    axes.axvline(0, color="#999", linewidth=0.8)
    axes.set_yticks(range(len(names)), [LABELS[name] for name in reversed(names)], fontsize=8)
    axes.set(xlabel=f"MMD² with 95% interval (red: rejected at {ALPHA:g}; bar: critical value)")
    report.figure("How far each copy is", figure)
    return report


def _engines(report: Report, bags: dict[str, Samples], length: int, seed: int) -> None:
    """Every pair of engines that run the same file, at half of the completions and at all."""
    engines = {
        "transformers": "reference",
        "llama.cpp": "llama_cpp",
        "OpenVINO export": "openvino_ir",
        READER: "openvino_gguf",
    }
    pairs = list(combinations(engines, 2))
    rows = [[f"{a} / {b}"] for a, b in pairs]
    most = min(bags[name].counts[label] for name in engines.values() for label in bags[name].counts)
    adjusted = np.zeros(len(pairs))
    for n in (most // 2, most):
        found = [
            two_sample_test(
                *(bags[engines[name]].first(n) for name in pair), max_length=length, alpha=ALPHA,
                random_state=derive_seed(seed, n, *pair),
            )
            for pair in pairs
        ]  # fmt: skip
        adjusted = adjust_pvalues([result.pvalue for result in found], "holm")
        for row, result, p in zip(rows, found, adjusted, strict=True):
            row += [f"{result.statistic:.5f}", f"{result.pvalue:.4f}", f"{p:.4f}"]
    head = [f"{what}, {n} + {n}" for n in (most // 2, most) for what in ("MMD^2", "p", "p (Holm)")]
    report.table("Engines on the same file, every pair", ["pair", *head], rows)
    with_reader = max(p for p, pair in zip(adjusted, pairs, strict=True) if READER in pair)
    others = min(p for p, pair in zip(adjusted, pairs, strict=True) if READER not in pair)
    report.claim(
        "OpenVINO's GGUF reader answers differently from every other engine on the same file",
        expected=f"p <= {ALPHA:g} in all three pairs, Holm over six",
        measured=f"largest p = {with_reader:.4f} at {most} + {most}",
        holds=bool(with_reader <= ALPHA),
    )
    report.claim(
        "transformers, llama.cpp and OpenVINO on an export of the same file are not told apart",
        expected=f"p > {ALPHA:g} in all three pairs, Holm over six",
        measured=f"smallest p = {others:.3f} at {most} + {most}",
        holds=bool(others > ALPHA),
    )


def _level(reference: Samples, length: int, seed: int, progress: Progress, repeats: int = 200) -> tuple[float, int]:
    """Share of rejections at 0.05 over random disjoint halves of the reference pool."""
    half = min(reference.counts.values()) // 2
    hits = 0
    with progress.task("level on halves", total=repeats) as task:
        for i in range(repeats):
            a, b = reference.split(half, random_state=derive_seed(seed, "half", i) % 2**32)
            result = two_sample_test(a, b, max_length=length, n_permutations=199, random_state=i)
            hits += result.pvalue <= 0.05
            task.advance()
    return hits / repeats, repeats
