"""How time and memory grow with the image, and the worst image: iid noise."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from road_images import roads

from chapbook_shared.bench import Comparison, main
from topograph_loss import TopographLoss

# In a process of its own, so that the peak is that of this work; it includes torch itself.
NOISE = """
import json, resource, time, torch
from topograph_loss import TopographLoss
torch.set_num_threads(1)
logits = torch.randn(1, 1, 1024, 1024, generator=torch.Generator().manual_seed(0), requires_grad=True)
target = (torch.rand(1, 1, 1024, 1024, generator=torch.Generator().manual_seed(1)) > 0.5).float()
loss = TopographLoss(sigmoid=True)
start = time.perf_counter()
loss(logits, target).backward()
seconds = time.perf_counter() - start
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]))
"""


def run() -> Iterator[Comparison]:
    torch.set_num_threads(1)
    loss = TopographLoss(sigmoid=True)
    for side in (64, 128, 256, 512, 1024, 2048):
        logits, target = roads(side, noise=0.15)
        times = []
        for _ in range(6):
            x = logits.clone().requires_grad_()
            start = time.perf_counter()
            loss(x, target).backward()
            times.append(time.perf_counter() - start)
        yield Comparison(
            f"{side}x{side}, fwd+bwd, time a pixel", statistics.median(times[1:]) / side**2 * 1e9, unit="ns"
        )
    done = subprocess.run([sys.executable, "-c", NOISE], capture_output=True, text=True, check=True)
    seconds, gigabytes = json.loads(done.stdout)
    yield Comparison("1024x1024 iid noise, fwd+bwd", seconds, goal=3, unit="s")
    yield Comparison("1024x1024 iid noise, peak memory of the process", gigabytes, goal=1, unit="GB")


if __name__ == "__main__":
    main(run)
