"""The demo's parts, quickly, and the long evidence run (slow)."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch

from chapbook_shared.progress import Progress
from umup.bytelm import build, optimizer_for, text_bytes, train
from umup.demo import COLUMNS, best_lr, evidence, rows, transfer_cost
from umup.tuning import log2grid

CURVES = {
    "SP": {"width 32": {0.25: 2.0, 0.5: 1.0}, "width 128": {0.25: 0.5, 0.5: 0.9}},
    "u-muP": {"width 32": {1.0: 1.0, 2.0: 1.5}, "width 128": {1.0: 0.8, 2.0: 1.0}},
}


def test_cost_of_transfer_by_hand():
    assert best_lr(CURVES["SP"]["width 32"]) == 0.5
    assert transfer_cost(CURVES["SP"], "width 32", "width 128") == pytest.approx(0.4)
    table = rows(CURVES, "width 32", "width 128")
    assert len(table[0]) == len(COLUMNS)
    assert table[0] == ["SP", "2^-1", "2^-2", 1.0, 0.9, 0.4]
    assert table[1][-1] == 0


def test_evidence_averages_over_seeds_and_covers_the_grid():
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as pool:
            curves = evidence(
                pool,
                Progress(enabled=False),
                settings={"a": {"scheme": "umup"}, "b": {"scheme": "mup"}},
                seeds={"a": [0, 1], "b": [0]},
                sizes={"w16": {"width": 16, "depth": 1}},
                lrs={"umup": [0.5, 1.0], "mup": [0.01]},
                steps=2,
            )
    finally:
        torch.set_num_threads(threads)
    assert set(curves["a"]["w16"]) == {0.5, 1.0}
    each = [train("umup", 16, 0.5, depth=1, steps=2, seed=s) for s in (0, 1)]
    assert curves["a"]["w16"][0.5] == pytest.approx(sum(each) / 2, rel=1e-4)


@pytest.mark.parametrize("scheme", ["sp", "mup", "umup"])
def test_every_scheme_learns_and_is_reproducible(scheme):
    lr = 1.0 if scheme == "umup" else 2**-6
    before, after = train(scheme, 32, lr, steps=1, tail=1), train(scheme, 32, lr, steps=30, tail=5)
    assert after < before - 0.5
    assert train(scheme, 32, lr, steps=3, tail=1) == train(scheme, 32, lr, steps=3, tail=1)


def test_fp8_training_stays_close():
    exact = train("umup", 32, 1.0, steps=20, tail=5)
    low = train("umup", 32, 1.0, steps=20, tail=5, fp8_options={"backend": "simulate"})
    assert low != exact
    assert low == pytest.approx(exact, abs=0.1)


def test_divergence_is_infinite():
    assert train("sp", 16, 1e38, steps=12, depth=1) == float("inf")


def test_mup_scales_hidden_rates_only():
    model = build("mup", 128)
    hidden, other = optimizer_for(model, "mup", 0.1).param_groups
    assert (hidden["lr"], other["lr"]) == (pytest.approx(0.025), 0.1)
    assert (model.lm_head.weight == 0).all()


def test_text_is_seven_bit_and_missing_text_is_named(tmp_path):
    assert int(text_bytes().max()) < 128
    with pytest.raises(FileNotFoundError, match="no text"):
        text_bytes(str(tmp_path / "none"))
    (tmp_path / "a.txt").write_text("short", encoding="utf-8")
    with pytest.raises(ValueError, match="at least 1000"):
        text_bytes(str(tmp_path))
    with pytest.raises(ValueError, match="scheme"):
        build("ntk", 32)
    with pytest.raises(ValueError, match="alpha_foo"):
        build("umup", 32, alpha_foo=1.0)
    with pytest.raises(ValueError, match="multipliers of u-muP"):
        build("sp", 32, alpha_res=1.0)


def transfer(settings, seeds, sizes, lrs, steps):
    jobs = min(os.cpu_count() or 1, 8)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        curves = evidence(
            pool,
            Progress(enabled=False),
            settings=settings,
            seeds=dict.fromkeys(settings, seeds),
            sizes=sizes,
            lrs=lrs,
            steps=steps,
        )
    proxy, target = next(iter(sizes)), list(sizes)[-1]
    for row in rows(curves, proxy, target):
        print(row)
    return {label: transfer_cost(c, proxy, target) for label, c in curves.items()}


SETTINGS = {"SP": {"scheme": "sp"}, "u-muP": {"scheme": "umup", "alpha_res": 0.25}}


@pytest.mark.slow
def test_learning_rates_transfer_across_width():
    cost = transfer(
        SETTINGS | {"muP": {"scheme": "mup"}, "u-muP, all ones": {"scheme": "umup"}},
        [0, 1, 2],
        {"width 32": {"width": 32}, "width 128": {"width": 128}},
        {"sp": log2grid(-8, -4), "mup": log2grid(-8, -4), "umup": log2grid(-2, 2)},
        150,
    )
    assert cost["u-muP"] <= 0.03
    assert cost["SP"] > cost["u-muP"] + 0.05


@pytest.mark.slow
def test_learning_rates_transfer_across_depth():
    cost = transfer(
        SETTINGS,
        [0, 1, 2],
        {"depth 2": {"width": 32, "depth": 2}, "depth 8": {"width": 32, "depth": 8}},
        {"sp": log2grid(-8, -4), "umup": log2grid(-2, 2)},
        150,
    )
    assert cost["u-muP"] <= 0.05
