"""The dataset card: how the rows were made, what was dropped, and what they look like."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from chapbook_shared.jobs import atomic_write
from chapbook_shared.validate import import_extra

from .rows import Record, Run, plain_rows

_LIMITS = (
    "Instructions are what a model thinks that users write. Nothing here was checked for truth; the model's licence may bind what it "
    "wrote."
)
_LABELS = ("task_category", "difficulty", "input_quality", "language")


def write_card(
    run: Run, folder: str | Path | None = None, *, rows: Any = None, title: str = "Magpie data", licence: str = "other"
) -> Path:
    """Write README.md, with plots beside it, into `folder` (by default `card` in the run's folder); returns its path.

    `rows` are what the set holds, when that is less than the run (after filters). `licence` is for you to say: what a model writes may
    be bound by that model's licence. Needs `pip install 'magpie-synth[plot]'`.
    """
    folder = run.out / "card" if folder is None else Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plain = plain_rows(run if rows is None else rows)
    plots = [path.name for path in _plots(plain, folder)]
    path = folder / "README.md"
    with atomic_write(path) as file:
        file.write(_text(run, plain, plots, title, licence))
    return path


def _text(run: Run, rows: Sequence[Record], plots: Sequence[str], title: str, licence: str) -> str:
    settings, stats = run.settings, run.stats()
    languages = sorted({row["language"].lower() for row in rows if row.get("language")})
    head = ["---", f"license: {licence}", "task_categories: [text-generation]", "tags: [synthetic, magpie]"]
    head += [f"language: {json.dumps(languages)}"] if languages else []
    head += [f"pretty_name: {json.dumps(title, ensure_ascii=False)}", "---", ""]
    cells = "".join(
        f"| {place} | {temperature:g} | {top_p:g} | {sum(counts.values())} | {counts.get('kept', 0)} |\n"
        for place, (temperature, top_p) in enumerate(settings["schedule"])
        for counts in [stats["by_cell"].get(str(place), {})]
    )
    dropped = "".join(
        f"| {reason} | {count} |\n"
        for reason, count in {**stats["dropped_instructions"], **stats["dropped_responses"]}.items()
    )
    prompts = "\n\n".join(f"```\n{text}\n```" for text in settings["pre_query"].values())
    made = (
        f"{len(rows)} conversations drawn from `{settings['model']}` by its own chat template (Magpie, Xu et al., ICLR 2025): the "
        f"model was given the template up to the user's text and wrote the instruction; `{settings['responder']}` wrote the "
        "response."
    )
    plural = "s" if len(settings["pre_query"]) > 1 else ""
    cut = stats["responses_cut_at_the_limit"]
    parts = [
        "\n".join(head),
        f"# {title}\n\n{made}\n",
        f"## How it was made\nSeed {settings['seed']}. The pre-query template{plural}:\n\n{prompts}\n",
        f"| cell | temperature | top_p | instructions drawn | kept |\n|---|---|---|---|---|\n{cells}",
        f"Responses: {_sampling(settings['response'])}.\n",
        f"## What was dropped\n| reason | rows |\n|---|---|\n{dropped}" if dropped else "",
        f"Responses cut at their limit, kept and marked by `response_finish_reason`: {cut}.\n",
        f"## What is in it\n{_numbers(rows)}",
        "".join(_counts(rows, label) for label in _LABELS),
        "".join(f"![{name.removesuffix('.png')}]({name})\n" for name in plots),
        f"## Limits\n{_LIMITS}\n",
    ]
    return "\n".join(part for part in parts if part)


def _sampling(settings: Record) -> str:
    how = (
        "greedy"
        if settings["temperature"] == 0
        else f"temperature {settings['temperature']:g}, top_p {settings['top_p']:g}"
    )
    return f"{how}, at most {settings['max_tokens']} tokens"


def _numbers(rows: Sequence[Record]) -> str:
    table = "| | median | least | most |\n|---|---|---|---|\n"
    for name in ("instruction_length", "response_length", "min_neighbor_distance", "instruct_reward"):
        values = [row[name] for row in rows if row.get(name) is not None and row[name] < float("inf")]
        if values:
            table += f"| {name} | {median(values):.4g} | {min(values):.4g} | {max(values):.4g} |\n"
    return table


def _counts(rows: Sequence[Record], label: str) -> str:
    counts = Counter(row[label] for row in rows if row.get(label) is not None)
    if not counts:
        return ""
    lines = "".join(f"| {value} | {count} |\n" for value, count in counts.most_common())
    return f"\n| {label} | rows |\n|---|---|\n{lines}"


def _plots(rows: Sequence[Record], folder: Path) -> list[Path]:
    import_extra("matplotlib", "magpie-synth[plot]")
    paths = []
    lengths = [[row[f"{side}_length"] for row in rows] for side in ("instruction", "response")]
    if rows:
        paths.append(_histogram(folder / "lengths.png", lengths, ["instructions", "responses"], "characters"))
    distances = [row["min_neighbor_distance"] for row in rows if row.get("min_neighbor_distance") is not None]
    finite = [value for value in distances if value < float("inf")]
    if finite:
        paths.append(_histogram(folder / "distances.png", [finite], [""], "squared distance to the nearest neighbour"))
    for label in _LABELS:
        counts = Counter(row[label] for row in rows if row.get(label) is not None)
        if counts:
            paths.append(_bars(folder / f"{label}.png", counts, label))
    return paths


def _histogram(path: Path, series: Sequence[Sequence[float]], names: Sequence[str], axis: str) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.hist(series, bins=40, label=list(names))
    axes.set(xlabel=axis, ylabel="rows")
    if any(names):
        axes.legend()
    return _save(figure, path)


def _bars(path: Path, counts: Counter[str], label: str) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 0.6 + 0.3 * len(counts)), layout="constrained")
    axes = figure.subplots()
    names, values = zip(*reversed(counts.most_common()), strict=True)
    axes.barh(names, values)
    axes.set(xlabel="rows", title=label)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    with atomic_write(path, binary=True) as file:
        figure.savefig(file, format="png", dpi=120, facecolor="white")
    return path
