"""Learning-rate transfer on real text: SP, muP and u-muP at two widths, u-muP's scales, and FP8 without scale factors.

Tiny byte-level transformers on Python sources. The proxy is width 32; its best learning rate is used unchanged at width 128
and compared with the best found there. u-muP runs twice: all multipliers 1, and with alpha_res from an independent sweep on
the proxy. `evidence` is the same at any size; the README has its long run.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from chapbook_shared.progress import Progress
from chapbook_shared.report import Report
from umup.bytelm import batches, build, text_bytes, train
from umup.precision import simulate_fp8
from umup.tracking import scale_report
from umup.tuning import log2grid, sweep

Curve = dict[float, float]
Curves = dict[str, dict[str, Curve]]

LRS = {"sp": log2grid(-8, -5), "mup": log2grid(-8, -5), "umup": log2grid(-1, 2)}


def run(params: Mapping[str, Any]) -> float:
    """One training run, in a worker process with one thread."""
    torch.set_num_threads(1)
    return train(**params)


def evidence(
    pool: Executor,
    progress: Progress,
    *,
    settings: Mapping[str, Mapping[str, Any]],
    seeds: Mapping[str, Sequence[int]],
    sizes: Mapping[str, Mapping[str, int]],
    lrs: Mapping[str, Sequence[float]],
    steps: int,
) -> Curves:
    """Mean loss over seeds of every setting (label -> arguments of `train`), size (label -> width, depth) and lr."""
    jobs = [
        (label, size, lr, {**settings[label], **sizes[size], "lr": lr, "steps": steps, "seed": seed})
        for label in settings
        for size in sizes
        for lr in lrs[settings[label]["scheme"]]
        for seed in seeds[label]
    ]
    found: dict[tuple[str, str, float], list[float]] = {}
    # Longest first, so that no core waits for a last long run.
    jobs.sort(key=lambda job: -job[3]["width"] * job[3].get("depth", 2))
    with progress.task("training", total=len(jobs)) as task:
        for (label, size, lr, _), loss in zip(jobs, pool.map(run, [job[3] for job in jobs]), strict=True):
            found.setdefault((label, size, lr), []).append(loss)
            task.advance()
    curves: Curves = {label: {size: {} for size in sizes} for label in settings}
    for (label, size, lr), losses in sorted(found.items(), key=lambda item: item[0][2]):
        curves[label][size][lr] = sum(losses) / len(losses)
    return curves


def best_lr(curve: Curve) -> float:
    """The learning rate with the least loss."""
    return min(curve, key=lambda lr: curve[lr])


def transfer_cost(sizes: Mapping[str, Curve], proxy: str, target: str) -> float:
    """Loss at the target with the proxy's best lr, minus the target's own best, in nats."""
    return sizes[target][best_lr(sizes[proxy])] - min(sizes[target].values())


def _power(lr: float) -> str:
    return f"2^{round(math.log2(lr))}"


def rows(curves: Curves, proxy: str, target: str) -> list[list[Any]]:
    """Per setting: best lr at each size, losses there and the cost of transfer."""
    return [
        [
            label,
            _power(best_lr(sizes[proxy])),
            _power(best_lr(sizes[target])),
            round(min(sizes[proxy].values()), 3),
            round(sizes[target][best_lr(sizes[proxy])], 3),
            round(transfer_cost(sizes, proxy, target), 3),
        ]
        for label, sizes in curves.items()
    ]


COLUMNS = ["scheme", "best lr, proxy", "best lr, target", "loss, proxy", "target at proxy's lr", "cost of transfer"]


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
    steps, small, large = 60, 32, 128
    proxy, target = f"width {small}", f"width {large}"
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        with tempfile.TemporaryDirectory() as folder:
            tuned = sweep(
                functools.partial(train, "umup", small),
                lrs=LRS["umup"],
                alphas={"alpha_res": [0.125, 0.25, 0.5, 2.0]},
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
        curves = evidence(
            pool,
            progress,
            settings=settings,
            seeds={"SP": [seed, seed + 1], "muP": [seed], "u-muP, all ones": [seed], "u-muP": [seed, seed + 1]},
            sizes={proxy: {"width": small}, target: {"width": large}},
            lrs=LRS,
            steps=steps,
        )
        lr = best_lr(curves["u-muP"][proxy])
        low = list(
            pool.map(
                run,
                [
                    {**settings[label], "width": 64, "lr": rate, "steps": steps, "seed": seed, "fp8_options": options}
                    for label, rate in (("u-muP", lr), ("SP", best_lr(curves["SP"][proxy])))
                    for options in (None, {"backend": "simulate", "plain": True})
                ],
            )
        )
    report.table("Learning-rate transfer (losses in nats)", COLUMNS, rows(curves, proxy, target))
    report.figure(
        "Loss against learning rate",
        plot_lr_curves(curves),
        caption="Stars: best points. Under u-muP the star should not move with width.",
    )
    cost = {label: transfer_cost(sizes, proxy, target) for label, sizes in curves.items()}
    report.claim(
        "The proxy's learning rate is near-optimal on the wide model under u-muP",
        expected="costs at most 0.03 nats",
        measured=f"{cost['u-muP']:.3f} nats",
        holds=cost["u-muP"] <= 0.03,
    )
    report.claim(
        "SP's best learning rate falls as width grows, so that transfer costs more than under u-muP",
        expected="a lower best lr and a larger cost",
        measured=f"best {_power(best_lr(curves['SP'][proxy]))} -> {_power(best_lr(curves['SP'][target]))},"
        f" cost {cost['SP']:.3f} nats",
        holds=best_lr(curves["SP"][target]) < best_lr(curves["SP"][proxy]) and cost["SP"] > cost["u-muP"],
    )
    wide, narrow = curves["u-muP"][target][lr], curves["u-muP"][proxy][lr]
    report.claim(
        "Wider is better at the shared learning rate",
        expected="a lower loss at width 128",
        measured=f"{narrow:.3f} -> {wide:.3f} nats",
        holds=wide < narrow,
        within_scale=False,  # turns with the length of so short a run: 45 steps gave the opposite
    )
    at_target = {label: sizes[target][best_lr(sizes[proxy])] for label, sizes in curves.items()}
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
        caption="Root mean square of every module's output and of its gradient, width 128.",
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
        f"{steps} steps of 8 x 64 bytes of Python sources, 2 layers. u-muP and SP: two seeds; the others one. The paper trains"
        " 8192 steps and more; in so short a run the all-ones default starts with residual branches that are large against"
        " what training adds, which the sweep of alpha_res repairs. The README has a longer run with three seeds."
    )
    return report
