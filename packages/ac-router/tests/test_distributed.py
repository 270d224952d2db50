"""Two gloo processes with shards of different sizes give what one process gives: weights, gradients, running averages."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")


def run(folder: Path, world: int) -> list[dict[str, torch.Tensor]]:
    script = Path(__file__).parent / "run_distributed.py"
    outs = [folder / f"{world}-{rank}.pt" for rank in range(world)]
    command = [sys.executable, str(script)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder / f"init-{world}"), str(out)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    return [torch.load(out) for out in outs]


def test_two_processes_give_what_one_gives(tmp_path):
    (single,) = run(tmp_path, 1)
    both = run(tmp_path, 2)
    assert {"weights mad", "weights of one shard", "router buffer"} < single.keys()
    assert any(name.startswith("mixtral grad") for name in single)
    for shard in both:
        assert shard.keys() == single.keys()
        for name, expected in single.items():
            tight = expected.dtype == torch.float64
            torch.testing.assert_close(
                shard[name],
                expected,
                rtol=1e-8 if tight else 1e-5,
                atol=1e-10 if tight else 1e-6,
                msg=lambda m, n=name: f"{n}: {m}",
            )
