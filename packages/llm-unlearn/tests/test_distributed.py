import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SPEC = importlib.util.spec_from_file_location("ddp_worker", Path(__file__).parent / "ddp_worker.py")
worker = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(worker)
train = worker.train
RUNS = [f"{kind}:{method}" for kind in ("ddp", "fsdp") for method in ("NPO+KL", "ME+GD", "IDK+AP")]
DEEPSPEED = ["deepspeed:NPO+GD", "deepspeed:ME+GD", "deepspeed:IDK+AP"]


def two_processes(output, runs):
    """Two gloo processes train replicated (DDP), sharded (FSDP2) or with sharded gradients (ZeRO 2), all through accelerate."""
    here = Path(__file__).parent
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    environment["MASTER_PORT"] = str(20_000 + (2 * os.getpid() + len(runs) % 2) % 20_000)
    processes = [
        subprocess.Popen(
            [sys.executable, str(here / "ddp_worker.py"), str(output), *runs],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return output


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return two_processes(tmp_path_factory.mktemp("trained"), RUNS)


@pytest.fixture(scope="module")
def trained_by_deepspeed(tmp_path_factory):
    """DeepSpeed compiles its communication for a CPU at the first use, which takes minutes."""
    pytest.importorskip("deepspeed")
    return two_processes(tmp_path_factory.mktemp("deepspeed"), DEEPSPEED)


@pytest.mark.parametrize("run", RUNS)
def test_two_processes_equal_one_when_their_shares_differ_in_size(trained, run, tmp_path):
    check_against_one_process(trained, run, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("run", DEEPSPEED)
def test_two_processes_under_deepspeed_equal_one(trained_by_deepspeed, run, tmp_path):
    check_against_one_process(trained_by_deepspeed, run, tmp_path)


def check_against_one_process(output, run, tmp_path):
    kind, method = run.split(":")
    saved = torch.load(output / f"{kind}-{method}.pt", weights_only=True)
    alone = train(str(tmp_path), method, per_device=4, accumulation=1)
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(saved["state"][name], value, atol=1e-6, rtol=1e-5, msg=name)
    for key in ("loss", "loss/forget", "loss/retain"):
        assert key in saved["log"][0]
        theirs = [row[key] for row in saved["log"] if key in row]
        ours = [row[key] for row in alone.state.log_history if key in row]
        assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-6)
    assert saved["scores"] == pytest.approx(alone.evaluate(), rel=1e-4)


@pytest.mark.parametrize("method", ["ME+GD", "DPO+KL"])
def test_accumulated_micro_batches_equal_one_batch(method, tmp_path):
    whole = train(str(tmp_path), method, per_device=4, accumulation=1)
    pieces = train(str(tmp_path), method, per_device=1, accumulation=4)
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(pieces.model.state_dict()[name], value, atol=1e-6, rtol=1e-5, msg=name)
