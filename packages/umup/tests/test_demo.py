"""The demo's parts, quickly. The long runs are in test_evidence.py."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from chapbook_shared.progress import Progress
from umup.bytelm import build, optimizer_for, text_bytes, train
from umup.demo import COLUMNS, best_lr, evidence, rows, spread, transfer_costs

LOSSES = {
    "SP": {"width 32": {0.25: [2.0, 2.2], 0.5: [1.0, 1.2]}, "width 128": {0.25: [0.5, 0.7], 0.5: [0.8, 1.2]}},
    "u-muP": {"width 32": {1.0: [1.0], 2.0: [1.5]}, "width 128": {1.0: [0.8], 2.0: [1.0]}},
}


def test_cost_of_transfer_by_hand():
    assert best_lr(LOSSES["SP"]["width 32"]) == 0.5
    assert transfer_costs(LOSSES["SP"], "width 32", "width 128") == pytest.approx([0.3, 0.5])
    table = rows(LOSSES, "width 32", "width 128")
    assert len(table[0]) == len(COLUMNS)
    assert table[0] == ["SP", 2, "2^-1", "2^-2", "1.100 \u00b1 0.141", "1.000 \u00b1 0.283", "0.400 \u00b1 0.141"]
    assert table[1][-1] == "0.000"
    assert spread([1.0, float("inf")]) == "inf"


def test_evidence_covers_the_grid_and_goes_on_where_it_stopped(tmp_path):
    threads = torch.get_num_threads()
    progress = Recorder()
    options = {
        "settings": {"a": {"scheme": "umup"}, "b": {"scheme": "mup"}},
        "sizes": {"w16": {"width": 16, "depth": 1}},
        "lrs": {"a": [0.5, 1.0], "b": [0.01]},
        "seeds": {"a": [0, 1], "b": [0]},
        "steps": 2,
        "store": tmp_path / "runs.sqlite",
    }
    try:
        with ThreadPoolExecutor(1) as pool:
            losses = evidence(pool, progress, **options)
            assert evidence(pool, progress, **options) == losses
            more = evidence(pool, progress, **options | {"seeds": {"a": [0, 1, 2], "b": [0]}})
    finally:
        torch.set_num_threads(threads)
    assert progress.totals == [5, 0, 2]
    assert more["a"]["w16"][0.5][:2] == losses["a"]["w16"][0.5]
    each = [train("umup", 16, 0.5, depth=1, steps=2, seed=s) for s in (0, 1)]
    assert losses["a"]["w16"][0.5] == pytest.approx(each, rel=1e-4)
    assert set(losses["b"]["w16"]) == {0.01}


class Recorder(Progress):
    """Silent; remembers how many runs each call had to do."""

    def __init__(self):
        super().__init__(enabled=False)
        self.totals = []

    def task(self, description, total=None):
        self.totals.append(total)
        return super().task(description, total=total)


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
