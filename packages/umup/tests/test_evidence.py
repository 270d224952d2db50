"""The README's long runs (slow): `pytest packages/umup/tests/test_evidence.py -m slow -s`.

Finished runs are kept under UMUP_EVIDENCE (default: a temporary folder), so an interrupted test goes on; UMUP_JOBS is the
number of processes. Settings were fixed before the first run: 150 steps of 8 x 64 bytes, powers of two for every rate.
"""

import functools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean

import pytest

from chapbook_shared.progress import Progress
from umup.bytelm import train
from umup.demo import COLUMNS, best_lr, evidence, mean_curve, rows, spread, transfer_costs
from umup.tuning import log2grid, sweep

pytestmark = pytest.mark.slow
STEPS, SEEDS = 150, [0, 1, 2]
LRS = {"sp": log2grid(-9, -3), "mup": log2grid(-9, -3), "umup": log2grid(-2, 4)}
JOBS = int(os.environ.get("UMUP_JOBS", os.cpu_count() or 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = Path(os.environ.get("UMUP_EVIDENCE") or tmp_path_factory.mktemp("evidence"))
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(JOBS, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def settings(folder, pool):
    """alpha_res from an independent sweep on the proxy of width 32."""
    result = sweep(
        functools.partial(train, "umup", 32),
        lrs=LRS["umup"],
        alphas={"alpha_res": log2grid(-6, 1)},
        fixed={"steps": STEPS},
        seeds=SEEDS,
        store=folder / "proxy.sqlite",
        jobs=JOBS,
        pool=pool,
    )
    print("\nproxy:", {k: [(v, round(loss, 3)) for v, loss in result.line(k)] for k in ("lr", "alpha_res")})
    alpha_res = min(result.line("alpha_res"), key=lambda point: point[1])[0]
    return {
        "SP": {"scheme": "sp"},
        "muP": {"scheme": "mup"},
        "u-muP, all ones": {"scheme": "umup"},
        "u-muP": {"scheme": "umup", "alpha_res": alpha_res},
    }


def transfer(pool, folder, settings, sizes):
    losses = evidence(
        pool,
        Progress(),
        settings=settings,
        sizes=sizes,
        lrs={label: LRS[setting["scheme"]] for label, setting in settings.items()},
        seeds=dict.fromkeys(settings, SEEDS),
        steps=STEPS,
        store=folder / "transfer.sqlite",
    )
    proxy, *targets = sizes
    for target in targets:
        print("", *COLUMNS, sep=" | ")
        for row in rows(losses, proxy, target):
            print("", *row, sep=" | ")
    for label, by_size in losses.items():
        for size, curve in by_size.items():
            print(label, size, {f"{lr:g}": round(loss, 3) for lr, loss in mean_curve(curve).items()})
    return losses


WIDTHS = {f"width {w}": {"width": w} for w in (32, 128)}


def test_learning_rates_transfer_across_width(pool, folder, settings):
    losses = transfer(pool, folder, settings, WIDTHS)
    costs = {label: fmean(transfer_costs(sizes, "width 32", "width 128")) for label, sizes in losses.items()}
    assert costs["u-muP"] <= 0.03
    assert costs["SP"] > costs["u-muP"]


def test_training_in_simulated_fp8_costs_little(pool, folder, settings):
    """At width 128, each scheme at its own best learning rate, seed by seed."""
    chosen = {label: settings[label] for label in ("SP", "u-muP")}
    tuned = transfer(pool, folder, chosen, WIDTHS)
    lrs = {label: best_lr(tuned[label]["width 128"]) for label in chosen}
    losses = evidence(
        pool,
        Progress(),
        settings={
            label: setting | {"fp8_options": {"backend": "simulate", "plain": True}}
            for label, setting in chosen.items()
        },
        sizes={"width 128": WIDTHS["width 128"]},
        lrs={label: [lr] for label, lr in lrs.items()},
        seeds=dict.fromkeys(chosen, SEEDS),
        steps=STEPS,
        store=folder / "transfer.sqlite",
    )
    gaps = {}
    for label, lr in lrs.items():
        exact, low = tuned[label]["width 128"][lr], losses[label]["width 128"][lr]
        gaps[label] = [b - a for a, b in zip(exact, low, strict=True)]
        print(f"{label}: float32 {spread(exact)}, FP8 - float32 {spread(gaps[label])}")
    assert fmean(gaps["u-muP"]) <= 0.05


def test_learning_rates_transfer_across_depth(pool, folder, settings):
    sizes = {"depth 2": {"width": 32}, "depth 8": {"width": 32, "depth": 8}}
    losses = transfer(pool, folder, {label: settings[label] for label in ("SP", "u-muP")}, sizes)
    assert fmean(transfer_costs(losses["u-muP"], "depth 2", "depth 8")) <= 0.05
