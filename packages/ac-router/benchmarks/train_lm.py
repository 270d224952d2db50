"""Does Adaptive Clustering harm, or help, a small language model trained for longer than the demo's? Minutes a seed.

usage: train_lm.py [--seeds 6] [--steps 500]
"""

import argparse
import statistics

import torch

from ac_router.demo import train_language_model


def mean_and_deviation(values: list[float]) -> str:
    return f"{statistics.mean(values):+.4f} ± {statistics.stdev(values):.4f}"


def run(seeds: int, steps: int) -> None:
    torch.set_num_threads(1)
    names = ("clean", "corrupted", "balance")
    differences: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(seeds):
        plain, ours = (train_language_model(adaptive=kind, seed=seed, steps=steps) for kind in (False, True))
        for name in names:
            differences[name].append(ours[name] - plain[name])
        cells = (f"{name} {plain[name]:.4f} plain, {ours[name]:.4f} AC" for name in names)
        print(f"seed {seed}: {'; '.join(cells)}", flush=True)
    for name in names:
        lower = sum(value < 0 for value in differences[name])
        print(f"AC minus plain, {name}: {mean_and_deviation(differences[name])}, lower in {lower} of {seeds}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    run(options.seeds, options.steps)
