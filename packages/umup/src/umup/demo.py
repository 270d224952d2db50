"""Learning-rate transfer on real text: SP, muP and u-muP at two widths, u-muP's scales, and FP8 without scale factors.

Tiny byte-level transformers on Python sources. The proxy is width 32; its best learning rate is used unchanged at width 96
and compared with the best found there. u-muP runs twice: all multipliers 1, and with alpha_res from an independent sweep on
the proxy. `evidence` is the same at any size; the README has its long run.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from chapbook_shared.jobs import Store
from chapbook_shared.progress import Progress
from chapbook_shared.report import Report
from umup.bytelm import batches, build, text_bytes, train
from umup.precision import simulate_fp8
from umup.tracking import scale_report
from umup.tuning import log2grid, sweep

LRS = {"sp": log2grid(-8, -4), "mup": log2grid(-7, -3), "umup": log2grid(-1, 2)}

Losses = dict[str, dict[str, dict[float, list[float]]]]  # setting -> size -> lr -> loss of each seed
Curve = dict[float, float]


def run(params: Mapping[str, Any]) -> float:
    """One training run, in a worker process with one thread."""
    torch.set_num_threads(1)
    return train(**params)


def evidence(
    pool: Executor,
    progress: Progress,
    *,
    settings: Mapping[str, Mapping[str, Any]],
    sizes: Mapping[str, Mapping[str, int]],
    lrs: Mapping[str, Sequence[float]],
    seeds: Mapping[str, Sequence[int]],
    steps: int,
    store: str | Path,
) -> Losses:
    """Final losses of every setting (label -> arguments of `train`), size (label -> width, depth), lr and seed.

    `lrs` and `seeds` are by setting. Finished runs are kept in `store`, so that what was interrupted goes on.
    """
    cells = [
        (label, size, lr, seed) for label in settings for size in sizes for lr in lrs[label] for seed in seeds[label]
    ]
    params = {
        cell: {**settings[cell[0]], **sizes[cell[1]], "lr": cell[2], "steps": steps, "seed": cell[3]} for cell in cells
    }
    keys = {cell: json.dumps(params[cell], sort_keys=True) for cell in cells}
    # Longest first, so that no core waits for a last long run.
    cells.sort(key=lambda cell: -params[cell]["width"] * params[cell].get("depth", 2))
    with Store(store) as runs:
        missing = set(runs.missing(dict.fromkeys(keys.values())))
        todo = {keys[cell]: params[cell] for cell in cells if keys[cell] in missing}
        futures = {pool.submit(run, arguments): key for key, arguments in todo.items()}
        with progress.task("training", total=len(futures)) as task:
            for future in as_completed(futures):
                runs.put(futures[future], {"loss": future.result()})
                task.advance()
        losses: Losses = {label: {size: {lr: [] for lr in lrs[label]} for size in sizes} for label in settings}
        for label, size, lr, seed in sorted(cells):
            losses[label][size][lr].append(runs.get(keys[label, size, lr, seed])["loss"])
    return losses


def mean_curve(losses: Mapping[float, Sequence[float]]) -> Curve:
    """Loss against lr, the mean over seeds."""
    return {lr: statistics.fmean(each) for lr, each in losses.items()}


def best_lr(losses: Mapping[float, Sequence[float]]) -> float:
    """The learning rate with the least mean loss."""
    curve = mean_curve(losses)
    return min(curve, key=lambda lr: curve[lr])


def transfer_costs(sizes: Mapping[str, Mapping[float, Sequence[float]]], proxy: str, target: str) -> list[float]:
    """Seed by seed: loss at the target with the proxy's best lr, minus that with the target's own best, in nats."""
    ours, best = sizes[target][best_lr(sizes[proxy])], sizes[target][best_lr(sizes[target])]
    return [a - b for a, b in zip(ours, best, strict=True)]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    mean = statistics.fmean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return f"{mean:.3f}"
    return f"{mean:.3f} \u00b1 {statistics.stdev(values):.3f}"


def _power(lr: float) -> str:
    return f"2^{round(math.log2(lr))}"


COLUMNS = [
    "scheme",
    "seeds",
    "best lr, proxy",
    "best lr, target",
    "loss, proxy",
    "target at proxy's lr",
    "cost of transfer",
]


def rows(losses: Losses, proxy: str, target: str) -> list[list[Any]]:
    """A table with `COLUMNS`, one row per setting; losses are mean \u00b1 standard deviation over seeds."""
    table: list[list[Any]] = []
    for label, sizes in losses.items():
        lr, own = best_lr(sizes[proxy]), best_lr(sizes[target])
        cost = spread(transfer_costs(sizes, proxy, target))
        at_proxy, at_target = sizes[proxy][lr], sizes[target][lr]
        table.append([label, len(at_target), _power(lr), _power(own), spread(at_proxy), spread(at_target), cost])
    return table


def _underflow(scheme: str, ids: torch.Tensor) -> float:
    """Share of output-gradient values that E5M2 rounds to zero in one pass of a fresh model."""
    torch.manual_seed(0)
    model = build(scheme, 64)
    with simulate_fp8(model, plain=True, count=True) as report:
        model.loss(ids).backward()  # type: ignore[operator]
    return report.share("grad")


def _geometric_spread(values: Iterable[float]) -> float:
    logs = [abs(math.log2(v)) for v in values if v > 0]
    return sum(logs) / len(logs)


def demo(*, seed: int, progress: Progress) -> Report:
    """The evidence run. At most a minute on two idle cores."""
    from umup.plots import plot_lr_curves, plot_scales

    report = Report("umup", method="u-muP", baseline="standard parametrization (SP), muP", seed=seed)
    steps, small, large = 60, 32, 96
    proxy, target = f"width {small}", f"width {large}"
    with (
        ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool,
        tempfile.TemporaryDirectory() as folder,
    ):
        tuned = sweep(
            functools.partial(train, "umup", small),
            lrs=LRS["umup"],
            alphas={"alpha_res": log2grid(-5, -1)},
            fixed={"steps": steps},
            seeds=[seed],
            store=Path(folder) / "proxy.sqlite",
            jobs=2,
            pool=pool,
            progress=progress,
        )
        alpha_res = min(tuned.line("alpha_res"), key=lambda point: point[1])[0]
        settings: dict[str, dict[str, Any]] = {
            "SP": {"scheme": "sp"},
            "muP": {"scheme": "mup"},
            "u-muP, all ones": {"scheme": "umup"},
            "u-muP": {"scheme": "umup", "alpha_res": alpha_res},
        }
        three = [seed, seed + 1, seed + 2]
        losses = evidence(
            pool,
            progress,
            settings=settings,
            sizes={proxy: {"width": small}, target: {"width": large}},
            lrs={label: LRS[setting["scheme"]] for label, setting in settings.items()},
            seeds={"SP": three, "muP": [seed], "u-muP, all ones": [seed], "u-muP": three},
            steps=steps,
            store=Path(folder) / "transfer.sqlite",
        )
        curves = {label: {size: mean_curve(c) for size, c in sizes.items()} for label, sizes in losses.items()}
        lr = best_lr(losses["u-muP"][proxy])
        low = list(
            pool.map(
                run,
                [
                    {**settings[label], "width": 64, "lr": rate, "steps": steps, "seed": seed, "fp8_options": options}
                    for label, rate in (("u-muP", lr), ("SP", best_lr(losses["SP"][proxy])))
                    for options in (None, {"backend": "simulate", "plain": True})
                ],
            )
        )
    report.table("Learning-rate transfer (losses in nats)", COLUMNS, rows(losses, proxy, target))
    report.figure(
        "Loss against learning rate",
        plot_lr_curves(curves),
        caption="Stars: best points. Under u-muP the star should not move with width.",
    )
    cost = {label: statistics.fmean(transfer_costs(sizes, proxy, target)) for label, sizes in losses.items()}
    report.claim(
        "The proxy's learning rate is near-optimal on the wide model under u-muP",
        expected="costs at most 0.03 nats",
        measured=f"{cost['u-muP']:.3f} nats",
        holds=cost["u-muP"] <= 0.03,
    )
    report.claim(
        "SP's best learning rate falls as width grows, so that transfer costs more than under u-muP",
        expected="a lower best lr and a larger cost",
        measured=f"best {_power(best_lr(losses['SP'][proxy]))} -> {_power(best_lr(losses['SP'][target]))},"
        f" cost {cost['SP']:.3f} nats",
        holds=best_lr(losses["SP"][target]) < best_lr(losses["SP"][proxy]) and cost["SP"] > cost["u-muP"],
    )
    wide, narrow = curves["u-muP"][target][lr], curves["u-muP"][proxy][lr]
    report.claim(
        "Wider is better at the shared learning rate",
        expected=f"a lower loss at {target}",
        measured=f"{narrow:.3f} -> {wide:.3f} nats",
        holds=wide < narrow,
        within_scale=False,  # turns with the length of so short a run: 45 steps gave the opposite
    )
    at_target = {label: curves[label][target][best_lr(sizes[proxy])] for label, sizes in losses.items()}
    report.claim(
        "After transfer u-muP's loss is at most muP's",
        expected="u-muP <= muP",
        measured=f"{at_target['u-muP']:.3f} against {at_target['muP']:.3f} nats",
        holds=at_target["u-muP"] <= at_target["muP"],
        within_scale=False,
    )
    ones = at_target["u-muP, all ones"]
    report.claim(
        "A learning-rate sweep alone (all multipliers 1) is near-optimal",
        expected="within 0.03 nats of the run with a swept alpha_res",
        measured=f"{ones - at_target['u-muP']:+.3f} nats (swept alpha_res = {alpha_res:g})",
        holds=ones - at_target["u-muP"] <= 0.03,
        within_scale=False,
    )
    ids = batches(text_bytes(), 1, 8, 64, seed)[0]
    scales = {}
    for label, scheme in (("u-muP", "umup"), ("SP", "sp")):
        torch.manual_seed(seed)
        scales[label] = scale_report(build(scheme, large), lambda m: m.loss(ids))  # type: ignore[operator]
    spread = {k: _geometric_spread([*r.forward.values(), *r.backward.values()]) for k, r in scales.items()}
    report.claim(
        "Activations and gradients start near unit scale",
        expected="u-muP within a factor of 2^1.5 of 1 on average, SP further off",
        measured=f"2^{spread['u-muP']:.2f} against 2^{spread['SP']:.2f}",
        holds=spread["u-muP"] < 1.5 < spread["SP"],
    )
    report.figure(
        "Scales at initialisation",
        plot_scales(scales),
        caption="Root mean square of every module's output and of its gradient, width 96.",
    )
    gap, sp_gap = low[1] - low[0], low[3] - low[2]
    report.claim(
        "FP8 by plain casts costs little under u-muP",
        expected="at most 0.05 nats more than float32",
        measured=f"{gap:+.3f} nats (SP, same casts: {sp_gap:+.3f})",
        holds=gap <= 0.05,
    )
    under = {"u-muP": _underflow("umup", ids), "SP": _underflow("sp", ids)}
    report.claim(
        "u-muP's gradients fit FP8 and SP's do not",
        expected="far fewer output gradients rounded to zero in E5M2",
        measured=f"{under['u-muP']:.1%} against {under['SP']:.1%}",
        holds=under["u-muP"] < 0.5 * under["SP"],
    )
    report.note(
        f"{steps} steps of 8 x 64 bytes of Python sources, 2 layers. u-muP and SP: three seeds; the others one. The paper trains"
        " 8192 steps and more; in so short a run the all-ones default starts with residual branches that are large against"
        " what training adds, which the sweep of alpha_res repairs. Longer runs: pytest packages/umup -m slow."
    )
    return report
