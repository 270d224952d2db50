"""Peak memory of a large test above the import, and the time the import takes; each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

from chapbook_shared.bench import Comparison, main

PEAK = """
import resource, sys
import numpy as np, scipy.special
from mmd_equality import Samples, two_sample_test
rng = np.random.default_rng(0)
n, length = int(sys.argv[1]), int(sys.argv[2])
x, y = (Samples([0] * n, rng.integers(0, 26, (n, length)).tolist()) for _ in range(2))
two_sample_test(x.first(5), y.first(5), n_permutations=99, random_state=0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
two_sample_test(x, y, n_permutations=1000, random_state=0)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
IMPORT = "import time; t = time.perf_counter(); import mmd_equality; print((time.perf_counter() - t) * 1e3)"


def _run(code: str, *arguments: str) -> float:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return float(done.stdout)


def run() -> Iterable[Comparison]:
    yield Comparison("peak memory, Hamming 1000+1000, L=50, B=1000", _run(PEAK, "1000", "50"), goal=200, unit="MB")
    yield Comparison("peak memory, Hamming 4000+4000, L=50, B=1000", _run(PEAK, "4000", "50"), unit="MB")
    yield Comparison("import mmd_equality", sorted(_run(IMPORT) for _ in range(5))[2], goal=300, unit="ms")


if __name__ == "__main__":
    main(run)
