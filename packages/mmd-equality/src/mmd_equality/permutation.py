"""Null distributions: permutation, exact enumeration and simulation, with one Gram matrix for all of them (section 3.3).

Symbols   paper   here
          B       `draws`, the number of permutations
          s       a column of `labels`: 1 where a row goes to sample 1
          K       `values` with a zero diagonal

No kernel is evaluated twice. With r = K 1 and T = 1' K 1, every assignment s has
    S_XX = s' K s,   S_XY = r' s - S_XX,   S_YY = T - 2 r' s + S_XX,
so all B assignments of a prompt are one matrix product.

Labels are shuffled within each prompt when the counts per prompt were fixed by design, and over the pooled sample when the
prompts themselves were drawn at random; the official code always does the latter, which wastes power under a fixed design.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations, pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmd_equality.kernels import exact_in_float32
from mmd_equality.statistics import Sums, baseline_from_counts, mmd2, per_prompt_mmd2

__all__ = [
    "BaselineProblem",
    "GramProblem",
    "MatchProblem",
    "NullDraws",
    "Stratum",
    "assignments",
    "at_least",
    "exact_null",
    "permutation_null",
    "pvalue",
    "simulated_null",
]

TIE = 1e-11
"""Statistics closer than this, relative to the larger of the kernel's largest value and the observed statistic, are ties. Kernel
sums of integers are exact; this covers the last rounding of the three quotients, and errs on the side of not rejecting."""

_CHUNK_BYTES = 24_000_000


@dataclass(frozen=True)
class Stratum:
    """One prompt: Gram values [n, n] over its n pooled rows, k~ = values / scale; n_x rows of sample 1 come first."""

    values: NDArray[Any]
    scale: float
    n_x: int

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def n_y(self) -> int:
        return self.n - self.n_x


class Problem(Protocol):
    """What the engine needs of a statistic: sizes, and its value for blocks of labels."""

    sizes: Sequence[tuple[int, int]]

    @property
    def magnitude(self) -> float: ...

    def evaluate(self, labels: Sequence[NDArray[Any]]) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]: ...

    def observed(self) -> tuple[float, NDArray[np.float64] | None]: ...


@dataclass
class _Batch:
    """Prompts with equal sizes, stacked, so that one batched product serves all: values [g, n, n], diagonal zero."""

    index: list[int]
    values: NDArray[Any]
    scale: float
    narrow: bool  # sums over all pairs are exact in float32 too
    total: NDArray[np.float64]


@dataclass
class GramProblem:
    """MMD^2 over the given strata. per_prompt values come with it."""

    strata: Sequence[Stratum]
    normalization: str = "pairs"
    weights: NDArray[np.float64] | None = None
    sizes: Sequence[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = [(s.n_x, s.n_y) for s in self.strata]

    @cached_property
    def magnitude(self) -> float:
        """The kernel's largest absolute value: 1 for a normalised kernel."""
        return max(float(np.abs(s.values).max(initial=0.0)) / s.scale for s in self.strata)

    @cached_property
    def batches(self) -> list[_Batch]:
        groups: dict[tuple[int, int, float], list[int]] = {}
        for i, s in enumerate(self.strata):
            groups.setdefault((s.n_x, s.n_y, s.scale), []).append(i)
        out = []
        for index in groups.values():
            members = [self.strata[i] for i in index]
            exact = all(exact_in_float32(s.values) for s in members)
            values = np.array([s.values for s in members], dtype=np.float32 if exact else np.float64)
            diagonal = np.arange(values.shape[1])
            values[:, diagonal, diagonal] = 0
            top = float(values.max(initial=0.0)) * values.shape[1] ** 2
            total = values.sum(axis=(1, 2), dtype=np.float64)
            out.append(_Batch(index, values, members[0].scale, exact and top < 2**24, total))
        return out

    def sums(self, labels: Sequence[NDArray[Any]], *, counts_vary: bool = False) -> Sums:
        """Kernel sums for labels[i] = 0/1 [n_i, B] of each stratum."""
        draws = labels[0].shape[1]
        xx, xy, yy, n_x = (np.empty((len(self.strata), draws)) for _ in range(4))
        for batch in self.batches:
            for rows, i in enumerate(batch.index):
                values = batch.values[rows]
                s = labels[i].astype(values.dtype, copy=False)
                product = values @ s
                rs = product.sum(axis=0, dtype=None if batch.narrow else np.float64)
                product *= s
                sxx = product.sum(axis=0, dtype=None if batch.narrow else np.float64)
                # Exact integers so far, under Hamming and one-hot; float64 before anything is divided.
                xx[i], xy[i] = sxx, rs
                xy[i] -= xx[i]
                yy[i] = batch.total[rows] - xx[i] - 2.0 * xy[i]
                if batch.scale != 1:
                    for out in (xx, xy, yy):
                        out[i] /= batch.scale
                n_x[i] = s.sum(axis=0) if counts_vary else self.strata[i].n_x
        n = np.array([[s.n] for s in self.strata], dtype=np.float64)
        return Sums(xx, xy, yy, n_x, n - n_x)

    def evaluate(self, labels: Sequence[NDArray[Any]]) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        sums = self.sums(labels)
        return mmd2(sums, self.normalization, self.weights), per_prompt_mmd2(sums)

    def evaluate_pooled(self, labels: NDArray[Any]) -> NDArray[np.float64]:
        """Statistic for labels [N, B] over all rows, strata one after the other; counts per prompt differ from draw to draw."""
        bounds = np.cumsum([0, *(s.n for s in self.strata)])
        parts = [labels[a:b] for a, b in pairwise(bounds)]
        return mmd2(self.sums(parts, counts_vary=True), self.normalization, self.weights)

    def observed(self) -> tuple[float, NDArray[np.float64]]:
        value, each = self.evaluate([_first(s.n, s.n_x) for s in self.strata])
        assert each is not None
        return float(value[0]), each[:, 0]

    def row_sums(self, prompt: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Kernel sums of every row with all of sample 1 and all of sample 2, itself excluded, float64 [n] each."""
        stratum = self.strata[prompt]
        values = np.asarray(stratum.values)
        diagonal = np.diagonal(values).astype(np.float64)
        to_x = values[:, : stratum.n_x].sum(axis=1, dtype=np.float64)
        to_y = values[:, stratum.n_x :].sum(axis=1, dtype=np.float64)
        to_x[: stratum.n_x] -= diagonal[: stratum.n_x]
        to_y[stratum.n_x :] -= diagonal[stratum.n_x :]
        return to_x / stratum.scale, to_y / stratum.scale


@dataclass
class MatchProblem:
    """MMD^2 under Hamming or one-hot without a Gram matrix, for prompts with thousands of rows.

    With c the number of sample-1 rows that hold a given symbol at a given position, S_XX + n_x L = sum c^2: time and memory
    grow with n L instead of n^2. rows[i]: int [n_i, L] of each prompt; one column per row code gives one-hot.
    """

    rows: Sequence[NDArray[Any]]
    sizes: Sequence[tuple[int, int]]
    normalization: str = "pairs"
    weights: NDArray[np.float64] | None = None
    magnitude: float = field(default=1.0, init=False)

    @cached_property
    def tables(self) -> list[Any]:
        """Indicator matrices of each prompt, sparse [distinct (position, symbol), n]."""
        from scipy import sparse

        out = []
        for rows in self.rows:
            n, length = rows.shape
            if length == 0:
                rows, length = np.zeros((n, 1), dtype=np.int64), 1
            _, codes = np.unique(rows, return_inverse=True)
            codes = codes.reshape(n, length).astype(np.int64)
            keys = codes + np.arange(length) * (int(codes.max(initial=0)) + 1)
            _, dense = np.unique(keys, return_inverse=True)
            dense = dense.reshape(-1)
            columns = np.repeat(np.arange(n), length)
            shape = (int(dense.max(initial=-1)) + 1, n)
            out.append(sparse.csr_matrix((np.ones(n * length), (dense, columns)), shape=shape))
        return out

    def sums(self, labels: Sequence[NDArray[Any]], *, counts_vary: bool = False) -> Sums:
        draws = labels[0].shape[1]
        xx, xy, yy, n_x = (np.empty((len(self.rows), draws)) for _ in range(4))
        for i, (table, s) in enumerate(zip(self.tables, labels, strict=True)):
            length = max(self.rows[i].shape[1], 1)
            n_x[i] = s.sum(axis=0) if counts_vary else self.sizes[i][0]
            total = np.asarray(table.sum(axis=1))
            for column in range(0, draws, 64):  # counts are [distinct symbols, draws]: keep them small
                part = slice(column, column + 64)
                c = table @ s[:, part].astype(np.float64)
                rest = total - c
                n_here = n_x[i, part]
                xx[i, part] = ((c * c).sum(axis=0) - length * n_here) / length
                xy[i, part] = (c * rest).sum(axis=0) / length
                yy[i, part] = ((rest * rest).sum(axis=0) - length * (table.shape[1] - n_here)) / length
        n = np.array([[table.shape[1]] for table in self.tables], dtype=np.float64)
        return Sums(xx, xy, yy, n_x, n - n_x)

    def evaluate(self, labels: Sequence[NDArray[Any]]) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        sums = self.sums(labels)
        return mmd2(sums, self.normalization, self.weights), per_prompt_mmd2(sums)

    def evaluate_pooled(self, labels: NDArray[Any]) -> NDArray[np.float64]:
        bounds = np.cumsum([0, *(len(r) for r in self.rows)])
        parts = [labels[a:b] for a, b in pairwise(bounds)]
        return mmd2(self.sums(parts, counts_vary=True), self.normalization, self.weights)

    def observed(self) -> tuple[float, NDArray[np.float64]]:
        value, each = self.evaluate([_first(a + b, a) for a, b in self.sizes])
        assert each is not None
        return float(value[0]), each[:, 0]

    def row_sums(self, prompt: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Kernel sums of every row with all of sample 1 and all of sample 2, itself excluded, float64 [n] each."""
        table, n_x = self.tables[prompt], self.sizes[prompt][0]
        length = max(self.rows[prompt].shape[1], 1)
        s = np.zeros(table.shape[1])
        s[:n_x] = 1
        c = table @ s
        to_x = np.asarray(table.T @ c)
        to_y = np.asarray(table.T @ (np.asarray(table.sum(axis=1)).ravel() - c))
        to_x[:n_x] -= length
        to_y[n_x:] -= length
        return to_x / length, to_y / length


@dataclass
class BaselineProblem:
    """L1, L2 or chi2 over distinct (prompt, completion) rows: codes[i] int [n_i] of each prompt, n_x of sample 1 first."""

    name: str
    codes: Sequence[NDArray[np.int64]]
    sizes: Sequence[tuple[int, int]]
    magnitude: float = field(default=1.0, init=False)

    @cached_property
    def _sorted(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        out = []
        for codes in self.codes:
            order = np.argsort(codes, kind="stable")
            starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
            totals = np.diff(np.append(starts, len(codes)))
            out.append((order, starts, totals))
        return out

    def counts(self, labels: Sequence[NDArray[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        c1, totals = [], []
        for (order, starts, total), s in zip(self._sorted, labels, strict=True):
            c1.append(np.add.reduceat(s[order].astype(np.int64), starts, axis=0))
            totals.append(total)
        return np.concatenate(c1), np.concatenate(totals)[:, None]

    def evaluate(self, labels: Sequence[NDArray[Any]]) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        c1, total = self.counts(labels)
        n1, n2 = (sum(s[side] for s in self.sizes) for side in (0, 1))
        return baseline_from_counts(self.name, c1, total, n1, n2), None

    def evaluate_pooled(self, labels: NDArray[Any]) -> NDArray[np.float64]:
        bounds = np.cumsum([0, *(len(c) for c in self.codes)])
        return self.evaluate([labels[a:b] for a, b in pairwise(bounds)])[0]

    def observed(self) -> tuple[float, None]:
        return float(
            self.evaluate([_first(len(c), n[0]) for c, n in zip(self.codes, self.sizes, strict=True)])[0][0]
        ), None


def _first(n: int, k: int) -> NDArray[np.float32]:
    out = np.zeros((n, 1), dtype=np.float32)
    out[:k] = 1
    return out


@dataclass
class NullDraws:
    """A null distribution. exceed counts draws at or above the observed statistic (ties count); per_prompt likewise, [m].

    exact: every assignment was listed, the observed one included. stopped: draws ended early after enough exceedances.
    """

    statistics: NDArray[np.float64]
    exceed: int
    draws: int
    exact: bool = False
    stopped: bool = False
    per_prompt_exceed: NDArray[np.int64] | None = None


def pvalue(null: NullDraws) -> float:
    """(1 + #{null >= observed}) / (B + 1), never 0; the plain share when exact; h / draws after an early stop (Besag & Clifford)."""
    if null.exact:
        return null.exceed / null.draws
    if null.stopped:
        return null.exceed / null.draws
    return (1 + null.exceed) / (null.draws + 1)


def draw_labels(
    n: int, k: int, draws: int, rng: np.random.Generator, *, groups: int = 1, dtype: Any = np.float32
) -> NDArray[Any]:
    """Uniform random k-subsets of n rows as 0/1 labels, [groups, n, draws].

    Selection sampling: row j is taken with probability (still needed) / (rows left). One pass over rows, all draws at once.
    """
    labels = np.empty((groups, n, draws), dtype=dtype)
    need = np.full((groups, draws), float(k))
    uniform = np.empty_like(need)
    taken = np.empty(need.shape, dtype=bool)
    for j in range(n):
        rng.random(out=uniform)
        uniform *= n - j
        np.less(uniform, need, out=taken)
        need -= taken
        labels[:, j] = taken
    return labels


def assignments(sizes: Sequence[tuple[int, int]], *, pooled: bool = False) -> int:
    """Number of distinct label assignments: the product over prompts of C(n_x + n_y, n_x), or one binomial when pooled.

    Counted up to 10^15; larger numbers, which nobody lists, come back as 10^15.
    """
    if pooled:
        sizes = [(sum(s[0] for s in sizes), sum(s[1] for s in sizes))]
    most = 10**15
    logarithm = sum(math.lgamma(a + b + 1) - math.lgamma(a + 1) - math.lgamma(b + 1) for a, b in sizes)
    if logarithm > math.log(most):
        return most
    return math.prod(math.comb(a + b, a) for a, b in sizes)


def at_least(values: NDArray[np.float64], observed: Any, magnitude: float) -> NDArray[np.bool_]:
    """values >= observed, ties included; magnitude: the kernel's largest value.

    A prompt with fewer than two rows on a side has no MMD^2 of its own: NaN, and counts as a tie.
    """
    return ~(values < observed - TIE * np.maximum(magnitude, np.abs(observed)))


def _stratified_labels(problem: Any, draws: int, rng: np.random.Generator) -> list[NDArray[Any]]:
    labels: list[Any] = [None] * len(problem.sizes)
    groups: dict[tuple[int, int], list[int]] = {}
    for i, size in enumerate(problem.sizes):
        groups.setdefault(size, []).append(i)
    for (a, b), index in groups.items():
        for i, block in zip(index, draw_labels(a + b, a, draws, rng, groups=len(index)), strict=True):
            labels[i] = block
    return labels


def permutation_null(
    problem: Any,
    draws: int,
    seed: np.random.SeedSequence,
    *,
    pooled: bool = False,
    stop_after: int | None = None,
    n_jobs: int = 1,
) -> NullDraws:
    """`draws` random relabellings. The result depends on the seed and the data only, not on `n_jobs`.

    stop_after=h ends the draws once h of them reach the observed statistic (Besag & Clifford 1991); p is then h / draws.
    """
    observed, each = problem.observed()
    reached = partial(at_least, magnitude=problem.magnitude)
    rows = sum(a + b for a, b in problem.sizes)
    widest = max(a + b for a, b in problem.sizes)
    chunk = int(max(16, min(draws, _CHUNK_BYTES // (4 * rows + 8 * widest + 32 * len(problem.sizes)))))
    if stop_after is not None:
        chunk = min(chunk, max(4 * stop_after, 100))
    starts = list(range(0, draws, chunk))
    seeds = seed.spawn(len(starts))

    def part(k: int) -> tuple[NDArray[np.float64], NDArray[np.int64] | None]:
        rng = np.random.default_rng(seeds[k])
        size = min(chunk, draws - starts[k])
        if pooled:
            n_x = sum(s[0] for s in problem.sizes)
            return problem.evaluate_pooled(draw_labels(rows, n_x, size, rng)[0]), None
        values, prompts = problem.evaluate(_stratified_labels(problem, size, rng))
        hits = None if prompts is None or each is None else reached(prompts, each[:, None]).sum(axis=1)
        return values, hits

    def parts() -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64] | None]]:
        if n_jobs == 1 or len(starts) == 1 or stop_after is not None:
            yield from map(part, range(len(starts)))
        else:
            with ThreadPoolExecutor(n_jobs) as pool:
                yield from pool.map(part, range(len(starts)))

    blocks: list[NDArray[np.float64]] = []
    prompt_hits = None if each is None or pooled else np.zeros(len(each), dtype=np.int64)
    exceed = 0
    for values, hits in parts():
        reach = reached(values, observed)
        if stop_after is not None and exceed + int(reach.sum()) >= stop_after:
            last = int(np.flatnonzero(reach)[stop_after - exceed - 1])
            blocks.append(values[: last + 1])
            done = np.concatenate(blocks)
            return NullDraws(done, stop_after, len(done), stopped=True)
        exceed += int(reach.sum())
        blocks.append(values)
        if prompt_hits is not None and hits is not None:
            prompt_hits += hits
    return NullDraws(np.concatenate(blocks), exceed, draws, per_prompt_exceed=prompt_hits)


def _all_subsets(n: int, k: int) -> NDArray[np.float32]:
    count = math.comb(n, k)
    labels = np.zeros((n, count), dtype=np.float32)
    for column, subset in enumerate(combinations(range(n), k)):
        labels[list(subset), column] = 1
    return labels


def exact_null(problem: Any, *, pooled: bool = False, limit: int = 2_000_000) -> NullDraws:
    """Every distinct assignment once, the observed one included; p is exact."""
    total = assignments(problem.sizes, pooled=pooled)
    if total > limit:
        raise ValueError(f"{total} label assignments are too many to list (limit {limit}): use permutations")
    observed, each = problem.observed()
    reached = partial(at_least, magnitude=problem.magnitude)
    if pooled:
        rows = sum(a + b for a, b in problem.sizes)
        n_x = sum(s[0] for s in problem.sizes)
        values = problem.evaluate_pooled(_all_subsets(rows, n_x))
        return NullDraws(values, int(reached(values, observed).sum()), total, exact=True)
    subsets = [_all_subsets(a + b, a) for a, b in problem.sizes]
    blocks, prompt_hits = [], None if each is None else np.zeros(len(each), dtype=np.int64)
    step = 50_000
    for start in range(0, total, step):
        index = np.arange(start, min(start + step, total))
        labels = []
        for table in subsets:
            labels.append(table[:, index % table.shape[1]])
            index = index // table.shape[1]
        values, prompts = problem.evaluate(labels)
        blocks.append(values)
        if prompt_hits is not None and prompts is not None and each is not None:
            prompt_hits += reached(prompts, each[:, None]).sum(axis=1)
    values = np.concatenate(blocks)
    return NullDraws(values, int(reached(values, observed).sum()), total, exact=True, per_prompt_exceed=prompt_hits)


def simulated_null(
    pool: Sequence[tuple[NDArray[Any], float]],
    sizes: Sequence[tuple[int, int]],
    draws: int,
    seed: np.random.SeedSequence,
    *,
    normalization: str = "pairs",
    weights: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Statistics of `draws` pairs of fresh samples from a pool of reference completions (section 3.3, the simulated null).

    pool: (values [M, M], scale) of each prompt; sizes: (n_x, n_y) to draw of each. The two samples are drawn disjointly and
    *without* replacement: drawing with replacement repeats rows inside a sample, which looks like perfect similarity.
    """
    for q, ((values, _), (a, b)) in enumerate(zip(pool, sizes, strict=True)):
        if len(values) < a + b:
            raise ValueError(
                f"prompt number {q} has {len(values)} completions in the pool but a simulated null needs {a} + {b}: "
                "collect more reference completions, or use null='permutation'"
            )
    rng = np.random.default_rng(seed)
    out = np.empty(draws)
    widest = max(len(values) for values, _ in pool)
    chunk = max(1, min(draws, _CHUNK_BYTES // (48 * widest)))
    for start in range(0, draws, chunk):
        size = min(chunk, draws - start)
        parts = []
        for (values, scale), (a, b) in zip(pool, sizes, strict=True):
            matrix = np.array(values, dtype=np.float64)
            np.fill_diagonal(matrix, 0)
            chosen = draw_labels(len(matrix), a + b, size, rng, dtype=np.float64)[0]
            first = _split_chosen(chosen, a, rng)
            second = chosen - first
            mx, my = matrix @ first, matrix @ second
            parts.append(((mx * first).sum(0) / scale, (my * first).sum(0) / scale, (my * second).sum(0) / scale))
        xx, xy, yy = (np.stack([p[i] for p in parts]) for i in range(3))
        n = np.array(sizes, dtype=np.float64)
        out[start : start + size] = mmd2(Sums(xx, xy, yy, n[:, :1], n[:, 1:]), normalization, weights)
    return out


def _split_chosen(chosen: NDArray[np.float64], k: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Of the chosen rows of each column, a uniform k-subset: the same selection sampling, over chosen rows only."""
    left = chosen.sum(axis=0)
    need = np.full(chosen.shape[1], float(k))
    first = np.zeros_like(chosen)
    for j in range(len(chosen)):
        here = chosen[j] > 0
        taken = here & (rng.random(len(left)) * left < need)
        need -= taken
        left -= here
        first[j] = taken
    return first
