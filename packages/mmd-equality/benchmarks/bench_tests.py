"""Whole tests against the official package (model-equality-testing 0.0.2), scipy's permutation_test and hyppo.

The official package recomputes the statistic from the strings for every permutation, so its cost is that of one statistic
times the number of permutations plus one. Rows marked "extrapolated" time a few of its permutations and scale; nothing else is.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterable

import numpy as np

from chapbook_shared.bench import Comparison, compare, main
from mmd_equality import AllSubstrings, Hamming, Samples, plan, two_sample_test
from mmd_equality.kernels import Block


def bag(n: int, length: int, prompts: int = 1, symbols: int = 26, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, symbols, (n * prompts, length))
    return Samples(np.repeat(np.arange(prompts), n).tolist(), rows.tolist())


def official_ms(x: Samples, y: Samples, stat: str, draws: int, timed: int) -> float:
    """Milliseconds that the official permutation test takes for `draws` permutations, from `timed` of them."""
    import torch
    from model_equality_testing.algorithm import run_two_sample_test
    from model_equality_testing.distribution import CompletionSample

    length = max(len(c) for c in (*x.completions, *y.completions))
    sides = [
        CompletionSample(
            prompts=torch.tensor(s.prompt_ids), completions=torch.tensor(s.encode(length)).long(), m=len(x.counts)
        )
        for s in (x, y)
    ]
    start = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):
        run_two_sample_test(*sides, pvalue_type="permutation_pvalue", stat_type=stat, b=timed)
    return (time.perf_counter() - start) * 1e3 / (timed + 1) * (draws + 1)


def against_official(
    name: str, x: Samples, y: Samples, stat: str, draws: int, timed: int, goal: float | None, **ours: object
) -> Comparison:
    mine = compare(
        name, lambda: two_sample_test(x, y, n_permutations=draws, null="permutation", random_state=0, **ours), repeats=3
    )  # type: ignore[arg-type]
    peer = official_ms(x, y, stat, draws, timed)
    label = f"official, extrapolated from {timed} permutations"
    return Comparison(name, mine.ours, peer, label, peer / mine.ours, goal)


def run() -> Iterable[Comparison]:
    x, y = bag(1000, 50, seed=1), bag(1000, 50, seed=2)
    yield against_official("Hamming 1000+1000, L=50, B=1000", x, y, "mmd_hamming", 1000, 2, 1000.0)
    yield compare(
        "Hamming 1000+1000, L=50, B=1000 (absolute)",
        lambda: two_sample_test(x, y, n_permutations=1000, random_state=0),
        goal=1000.0,
        repeats=5,
    )
    x, y = bag(10, 1000, 25, seed=1), bag(10, 1000, 25, seed=2)
    yield compare(
        "Hamming 25 prompts x 10+10, L=1000, B=9999 (absolute)",
        lambda: two_sample_test(x, y, n_permutations=9999, random_state=0),
        goal=300.0,
        repeats=5,
    )
    yield against_official("Hamming 25 prompts x 10+10, L=1000, B=999", x, y, "mmd_hamming", 999, 2, None)
    x, y = bag(500, 50, seed=1), bag(500, 50, seed=2)
    yield against_official("L1 500+500, L=50, B=1000", x, y, "two_sample_L1", 1000, 20, None, statistic="l1")
    x, y = bag(50, 50, seed=1), bag(50, 50, seed=2)
    yield against_official(
        "k-spectrum k=5 50+50, L=50, B=1000", x, y, "mmd_kspectrum", 1000, 1, None, kernel="kspectrum5"
    )
    yield substrings_per_pair()
    yield permutation_engine_against_scipy()
    yield permutation_engine_against_hyppo()
    for n in (125, 250, 500, 1000, 2000):
        x, y = bag(n, 50, seed=1), bag(n, 50, seed=2)
        yield compare(
            f"growth: Hamming {n}+{n}, L=50, B=1000",
            lambda x=x, y=y: two_sample_test(x, y, n_permutations=1000, random_state=0),
            repeats=3,
        )  # type: ignore[misc]
    ref, alt = bag(40, 200, 25, symbols=5, seed=3), bag(40, 200, 25, symbols=6, seed=4)
    yield compare(
        "planning: 200 simulations x 199 permutations at 25 prompts x 20+20 (absolute)",
        lambda: plan(ref, alt, grid=[20], random_state=0),
        goal=10_000.0,
        repeats=1,
        warmup=0,
    )


def substrings_per_pair() -> Comparison:
    """One pair of strings under all-substrings: ours over 500 strings, the official kernel over few pairs."""
    from model_equality_testing.tests import _compute_dot_product_counts

    rows = bag(500, 50, seed=5).encode()
    ours = compare("", lambda: AllSubstrings().counts(Block(rows)), repeats=3).ours / (500 * 501 / 2)
    pairs = [(tuple(map(int, rows[2 * i])), tuple(map(int, rows[2 * i + 1]))) for i in range(40)]
    start = time.perf_counter()
    for a, b in pairs:
        _compute_dot_product_counts(a, b, 50, True)
    peer = (time.perf_counter() - start) * 1e3 / len(pairs)
    return Comparison("all-substrings, one pair, L=50", ours, peer, "official, 40 pairs", peer / ours, 50.0)


def permutation_engine_against_scipy() -> Comparison:
    """One prompt, 100+100, B=999: scipy with the Gram matrix precomputed and the statistic from a row order."""
    from scipy.stats import permutation_test

    x, y = bag(100, 50, seed=1), bag(100, 50, seed=2)
    gram = Hamming().gram(np.concatenate([x.encode(), y.encode()]))
    np.fill_diagonal(gram, 0)

    def statistic(a: np.ndarray, b: np.ndarray) -> float:
        i, j = a.astype(int), b.astype(int)
        within = gram[np.ix_(i, i)].sum() + gram[np.ix_(j, j)].sum()
        return float(within / (100 * 99) - 2 * gram[np.ix_(i, j)].mean())

    def scipy() -> object:
        rows = np.arange(200.0)
        return permutation_test((rows[:100], rows[100:]), statistic, n_resamples=999, alternative="greater", rng=0)

    return compare(
        "Hamming 100+100, L=50, B=999",
        lambda: two_sample_test(x, y, n_permutations=999, random_state=0),
        scipy,
        peer_name="scipy permutation_test on our Gram matrix",
        repeats=5,
    )


def permutation_engine_against_hyppo() -> Comparison:
    """One prompt, 100+100, B=999: hyppo's MMD test on one-hot vectors with a linear kernel, which is the Hamming kernel."""
    from hyppo.ksample import MMD

    x, y = bag(100, 20, symbols=8, seed=1), bag(100, 20, symbols=8, seed=2)
    vectors = [np.eye(8)[s.encode()].reshape(100, -1) for s in (x, y)]

    def hyppo() -> object:
        return MMD(compute_kernel="linear").test(*vectors, reps=999, workers=1, auto=False, random_state=0)

    return compare(
        "Hamming 100+100, L=20, B=999",
        lambda: two_sample_test(x, y, n_permutations=999, random_state=0),
        hyppo,
        peer_name="hyppo MMD, linear kernel on one-hot vectors",
        repeats=3,
    )


if __name__ == "__main__":
    main(run)
