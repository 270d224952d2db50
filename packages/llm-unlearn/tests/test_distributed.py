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
METHODS = {
    "ddp": ("NPO+KL", "ME+GD", "IDK+AP"),
    "fsdp": ("NPO+KL", "ME+GD", "IDK+AP"),
    "deepspeed": ("NPO+GD", "ME+GD", "IDK+AP"),
}


def kinds():
    """DeepSpeed compiles its communication for a CPU at the first use, which takes minutes."""
    return [pytest.param(k, marks=pytest.mark.slow) if k == "deepspeed" else k for k in METHODS]


@pytest.fixture(scope="module", params=kinds())
def two_processes(tmp_path_factory, request):
    """What two gloo processes trained: replicated (DDP), sharded (FSDP2), or with sharded gradients (ZeRO 2), all through accelerate."""
    if request.param == "deepspeed":
        pytest.importorskip("deepspeed")
    output = tmp_path_factory.mktemp(request.param)
    here = Path(__file__).parent
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    port = 20_000 + (len(METHODS) * os.getpid() + list(METHODS).index(request.param)) % 20_000
    environment["MASTER_PORT"] = str(port)
    processes = [
        subprocess.Popen(
            [sys.executable, str(here / "ddp_worker.py"), str(output), request.param, *METHODS[request.param]],
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
    return request.param, output


@pytest.mark.parametrize("place", range(3))
def test_two_processes_equal_one_when_their_shares_differ_in_size(two_processes, place, tmp_path):
    kind, output = two_processes
    method = METHODS[kind][place]
    saved = torch.load(output / f"{method}.pt", weights_only=True)
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
