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
METHODS = ("NPO+KL", "ME+GD", "IDK+AP")


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def two_processes(tmp_path_factory, request):
    """The folder with what two gloo processes trained: replicated (DDP), or sharded (FSDP2 through accelerate)."""
    output = tmp_path_factory.mktemp(request.param)
    here = Path(__file__).parent
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    environment["MASTER_PORT"] = str(20_000 + os.getpid() % 20_000)
    processes = [
        subprocess.Popen(
            [sys.executable, str(here / "ddp_worker.py"), str(output), request.param, *METHODS],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return output


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_equal_one_when_their_shares_differ_in_size(two_processes, method, tmp_path):
    saved = torch.load(two_processes / f"{method}.pt", weights_only=True)
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
