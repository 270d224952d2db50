"""The independent sweep."""

import functools
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from chapbook_shared.jobs import SettingsMismatchError, StoreLockedError
from umup.tuning import SweepError, log2grid, sweep, transfer_error

CALLS: list[dict] = []


def bowl(lr, seed=0, alpha_res=1.0, alpha_ffn_act=1.0, offset=0.0):
    """Least at lr = 2, alpha_res = 1/4, alpha_ffn_act = 1."""
    CALLS.append({"lr": lr, "seed": seed, "alpha_res": alpha_res})
    return (
        (math.log2(lr) - 1) ** 2
        + 0.5 * (math.log2(alpha_res) + 2) ** 2
        + math.log2(alpha_ffn_act) ** 2
        + offset
        + 0.01 * seed
    )


ALPHAS = {"alpha_res": [0.125, 0.25, 0.5], "alpha_ffn_act": [0.5, 2.0]}


def test_lr_first_then_each_multiplier_then_all(tmp_path):
    result = sweep(
        bowl, lrs=log2grid(-2, 3), alphas=ALPHAS, seeds=(0, 1), store=tmp_path / "s.sqlite", export=tmp_path / "s.jsonl"
    )
    assert result.best == {"lr": 2.0, "alpha_res": 0.25}
    assert result.lr_only[0] == 2.0
    assert result.loss == pytest.approx(0.005)
    assert result.line("alpha_res") == [(v, pytest.approx(b)) for v, b in [(0.125, 0.505), (0.25, 0.005), (0.5, 0.505)]]
    assert [r["phase"] for r in result.records] == ["lr"] * 6 + ["alpha_res"] * 3 + ["alpha_ffn_act"] * 2 + ["combined"]
    lines = (tmp_path / "s.jsonl").read_text(encoding="utf-8").splitlines()
    # The combination is the best alpha_res alone here, so it was not run again.
    assert len(lines) == (6 + 3 + 2) * 2
    assert json.loads(lines[0]) == {"params": {"lr": 0.25, "seed": 0}, "loss": pytest.approx(9 + 2)}


def test_a_combination_that_is_worse_is_not_kept(tmp_path):
    def rival(lr, seed, a=1.0, b=1.0):
        return 1.0 - 0.5 * (a == 2) - 0.5 * (b == 2) + 3.0 * (a == 2 and b == 2)

    result = sweep(rival, lrs=[1.0], alphas={"a": [2.0], "b": [2.0]}, store=tmp_path / "s.sqlite")
    assert result.combined == ({"lr": 1.0, "a": 2.0, "b": 2.0}, pytest.approx(3.0))
    assert (result.best, result.loss) == ({"lr": 1.0}, 1.0)


def test_a_second_sweep_runs_nothing_again(tmp_path):
    first = sweep(bowl, lrs=[1.0, 2.0], alphas=ALPHAS, store=tmp_path / "s.sqlite")
    CALLS.clear()
    again = sweep(bowl, lrs=[1.0, 2.0], alphas=ALPHAS, store=tmp_path / "s.sqlite")
    assert CALLS == []
    assert again == first
    sweep(bowl, lrs=[1.0, 2.0, 4.0], alphas=ALPHAS, store=tmp_path / "s.sqlite")
    assert [c["lr"] for c in CALLS] == [4.0]


def test_a_diverged_run_is_infinite_and_a_raising_one_is_retried(tmp_path):
    broken = {"now": True}

    def fragile(lr, seed):
        if lr == 4.0:
            return math.nan
        if lr == 2.0 and broken["now"]:
            raise OSError("disk on fire")
        return lr

    with pytest.raises(SweepError, match=r"1 of 3 runs raised[\s\S]*disk on fire"):
        sweep(fragile, lrs=[1.0, 2.0, 4.0], store=tmp_path / "s.sqlite", export=tmp_path / "s.jsonl")
    assert len((tmp_path / "s.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    broken["now"] = False
    result = sweep(fragile, lrs=[1.0, 2.0, 4.0], store=tmp_path / "s.sqlite")
    assert [r["loss"] for r in result.records] == [1.0, 2.0, math.inf]
    with pytest.raises(SweepError, match="every learning rate diverged"):
        sweep(fragile, lrs=[4.0], store=tmp_path / "s.sqlite")


def test_other_settings_or_code_do_not_mix(tmp_path):
    sweep(bowl, lrs=[1.0], store=tmp_path / "s.sqlite", fixed={"offset": 0.0})
    with pytest.raises(SettingsMismatchError, match="fixed"):
        sweep(bowl, lrs=[1.0], store=tmp_path / "s.sqlite", fixed={"offset": 1.0})
    with pytest.raises(SettingsMismatchError, match="train"):
        sweep(lambda lr, seed, offset: lr, lrs=[1.0], store=tmp_path / "s.sqlite", fixed={"offset": 0.0})


def test_a_partial_of_another_width_is_another_sweep(tmp_path):
    sweep(functools.partial(bowl, offset=1.0), lrs=[1.0], store=tmp_path / "s.sqlite")
    with pytest.raises(SettingsMismatchError, match="train"):
        sweep(functools.partial(bowl, offset=2.0), lrs=[1.0], store=tmp_path / "s.sqlite")


SCRIPT = """
    import sys, time
    from umup.tuning import sweep

    def slow(lr, seed):
        time.sleep(0.2)
        return lr

    if __name__ == "__main__":
        result = sweep(slow, lrs=[1.0 + i for i in range(12)], store=sys.argv[1], jobs=int(sys.argv[2]))
        print(len(result.records), result.best)
"""


def test_a_killed_sweep_resumes_and_a_second_writer_is_refused(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    store = tmp_path / "s.sqlite"
    process = subprocess.Popen([sys.executable, str(script), str(store), "1"])
    from chapbook_shared.jobs import Store

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if store.exists():
            try:
                with Store(store, read_only=True) as runs:
                    if len(runs) >= 2:
                        break
            except Exception:
                pass
        time.sleep(0.05)
    with pytest.raises(StoreLockedError):
        sweep(bowl, lrs=[1.0], store=store)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with Store(store, read_only=True) as runs:
        before = dict(runs.items())
    assert 2 <= len(before) < 12
    done = subprocess.run(
        [sys.executable, str(script), str(store), "2"], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "12 {'lr': 1.0}"
    with Store(store, read_only=True) as runs:
        after = dict(runs.items())
    assert len(after) == 12
    assert {k: after[k] for k in before} == before


def test_transfer_error_by_hand():
    assert transfer_error([[0.0, 1.0], [1.0, 0.5]]) == 0.5
    assert transfer_error([[0.0, 0.0], [1.0, 1.0]]) == 0.0
    with pytest.raises(ValueError, match="two columns"):
        transfer_error([[1.0], [2.0]])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lrs": []}, "lrs is empty"),
        ({"lrs": [0.0]}, "lr must hold positive"),
        ({"lrs": [1.0], "alphas": {"a": []}}, "a is empty"),
        ({"lrs": [1.0], "alphas": {"a": [-1.0]}}, "a must hold positive"),
        ({"lrs": [1.0], "seeds": ()}, "seeds is empty"),
        ({"lrs": [1.0], "jobs": 0}, "jobs"),
        ({"lrs": [1.0], "fixed": {"lr": 1.0}}, "cannot be fixed"),
    ],
)
def test_bad_grids_are_refused(kwargs, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sweep(bowl, store=tmp_path / "s.sqlite", **kwargs)
    with pytest.raises(ValueError, match="step"):
        log2grid(0.0, 1.0, 0.0)
