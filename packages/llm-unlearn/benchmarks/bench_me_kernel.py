"""The ME loss with its gradient against the obvious expression and the official one: time and peak memory over rows of a 49k vocabulary."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from chapbook_shared.bench import Comparison, compare, main
from llm_unlearn.losses import uniform_divergence_rows

VOCAB = 49_152


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)).mul_(3)


def ours(z: torch.Tensor) -> torch.Tensor:
    return uniform_divergence_rows(z).mean()


def obvious(z: torch.Tensor) -> torch.Tensor:
    """KL(U || softmax z), written down: softmax, a uniform tensor, a log with an epsilon, F.kl_div."""
    p = torch.softmax(z, dim=-1)
    uniform = torch.full_like(p, 1 / p.shape[-1])
    return torch.nn.functional.kl_div((p + 1e-12).log(), uniform, reduction="none").sum(-1).mean()


def autograd(z: torch.Tensor) -> torch.Tensor:
    return (z.logsumexp(-1) - z.mean(-1)).mean()


LOSSES = {"ours": ours, "obvious": obvious, "autograd": autograd}


def step(loss, z: torch.Tensor) -> None:
    z.grad = None
    loss(z).backward()


def peak_mib(name: str, rows: int) -> float:
    """Peak memory of one step beyond the logits, in a process of its own."""
    code = f"import sys; sys.argv = ['x', {name!r}, '{rows}']; exec(open({__file__!r}, encoding='utf-8').read())"
    environment = os.environ | {"LLM_UNLEARN_PEAK": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def report_peak() -> None:
    """Linux only: the kernel's high-water mark of resident memory, set back before the step."""
    name, rows = sys.argv[1], int(sys.argv[2])
    step(LOSSES[name], logits_of(1).requires_grad_())  # what is loaded at the first use does not count
    z = logits_of(rows).requires_grad_()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = high_water_kib()
    step(LOSSES[name], z)
    print((high_water_kib() - before) / 1024)


def high_water_kib() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def run() -> Iterator[Comparison]:
    for rows in (64, 256, 512):
        z = logits_of(rows).requires_grad_()
        goal = 3.0 if rows == 512 else None
        for name in ("obvious", "autograd"):
            yield compare(
                f"ME forward + backward, {rows} x 49k float32",
                lambda z=z: step(ours, z),
                lambda z=z, name=name: step(LOSSES[name], z),
                peer_name={"obvious": "softmax, log, kl_div", "autograd": "logsumexp - mean by autograd"}[name],
                goal=goal if name == "obvious" else None,
                repeats=5,
            )
    mine, theirs = peak_mib("ours", 512), peak_mib("obvious", 512)
    yield Comparison(
        "ME peak memory beyond the logits, 512 x 49k", mine, theirs, "softmax, log, kl_div", theirs / mine, 3.0, "MiB"
    )


if __name__ == "__main__":
    if os.environ.get("LLM_UNLEARN_PEAK"):
        report_peak()
    else:
        main(run)
