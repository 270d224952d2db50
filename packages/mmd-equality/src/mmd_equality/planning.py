"""How many completions a prompt are needed, what they can find, and what they cost (the paper's power simulations, section 4).

Both pools are pilot samples. One Gram matrix is made over them; each simulated data set is an index draw *without replacement*,
with a permutation test inside. Drawing with replacement would repeat rows inside a sample only, which looks like similarity
within and none across, and so overstates power.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chapbook_shared.validate import check_int
from mmd_equality.kernels import Block, Kernel, kernel_from_name
from mmd_equality.permutation import GramProblem, Stratum, permutation_null, pvalue
from mmd_equality.samples import Samples, surely_same
from mmd_equality.two_sample import check_alpha, seed_sequence, strata_of

__all__ = ["Plan", "PlanRow", "plan"]


@dataclass(frozen=True)
class PlanRow:
    """One size. power with its 95% interval; detectable: the MMD^2 found with the wanted power; cost in the price's currency.

    simulated=False: n is more than the pilots hold, and the row is scaled from the largest simulated size by the rates of a
    degenerate U-statistic: the null narrows like 1/n, the estimate like 1/sqrt(n).
    """

    n: int
    power: float
    power_ci: tuple[float, float] | None
    detectable: float
    requests: int
    prompt_tokens: float
    completion_tokens: float
    cost: float | None
    simulated: bool


@dataclass(frozen=True)
class Plan:
    """rows by n; recommended: the smallest n whose power reaches `power`, or None; effect: MMD^2 between the pilots."""

    rows: tuple[PlanRow, ...]
    recommended: int | None
    power: float
    alpha: float
    effect: float
    prompts: int
    tokens_estimated: bool

    def __str__(self) -> str:
        head = f"pilot MMD^2 = {self.effect:.5f}, {self.prompts} prompts, alpha = {self.alpha:g}\n"
        head += "n a prompt  power  95% interval    detectable MMD^2  requests  tokens in/out       cost\n"
        lines = []
        for row in self.rows:
            interval = "   (scaled)   " if row.power_ci is None else f"[{row.power_ci[0]:.2f}, {row.power_ci[1]:.2f}]  "
            cost = "-" if row.cost is None else f"{row.cost:.4f}"
            lines.append(
                f"{row.n:<11d} {row.power:5.2f}  {interval}  {row.detectable:<16.5f}  {row.requests:<8d}  "
                f"{row.prompt_tokens:.0f}/{row.completion_tokens:.0f}".ljust(86)
                + cost
            )
        answer = (
            f"{self.recommended} completions a prompt reach power {self.power:g}"
            if self.recommended is not None
            else f"no size in the grid reaches power {self.power:g}"
        )
        note = "\ntokens estimated as characters / 4: the samples carry no usage" if self.tokens_estimated else ""
        return head + "\n".join(lines) + "\n" + answer + note

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "plan",
            **{k: v for k, v in vars(self).items() if k != "rows"},
            "rows": [vars(r) for r in self.rows],
        }


def plan(
    reference: Samples,
    alternative: Samples,
    *,
    grid: Sequence[int] = (5, 10, 20, 40),
    power: float = 0.8,
    alpha: float = 0.01,
    kernel: str | Kernel = "hamming",
    normalization: str = "pairs",
    max_length: int | None = None,
    n_simulations: int = 200,
    n_permutations: int = 199,
    price_per_million: tuple[float, float] | None = None,
    prompt_tokens: float | None = None,
    random_state: int | np.random.SeedSequence | None = None,
) -> Plan:
    """Power curve of the stratified test between two pilots, minimal detectable effect, and cost of one endpoint's sample.

    grid: completions a prompt on each side. price_per_million: price of a million prompt and completion tokens. prompt_tokens:
    a request's prompt tokens, where the samples carry no usage.
    """
    check_alpha(alpha)
    if not 0 < power < 1:
        raise ValueError(f"power must be in (0, 1), got {power!r}")
    check_int("n_simulations", n_simulations, minimum=2)
    check_int("n_permutations", n_permutations, minimum=1)
    for n in grid:
        check_int("grid", n)
    sizes = sorted({int(n) for n in grid})
    if not sizes or sizes[0] < 2:
        raise ValueError(f"grid must list completions a prompt, at least 2 each; got {list(grid)!r}")
    if max_length is not None:
        check_int("max_length", max_length, minimum=1)
    if price_per_million is not None and not all(0 <= price < math.inf for price in price_per_million):
        raise ValueError(f"price_per_million must be two prices of at least 0, got {price_per_million!r}")
    seed = seed_sequence(random_state)
    needed = math.ceil(1 / alpha - 1e-9) - 1
    if n_permutations < needed:
        raise ValueError(f"n_permutations = {n_permutations} can never reject at alpha = {alpha:g}: at least {needed}")
    if reference.level != alternative.level:
        raise TypeError(f"reference is at {reference.level} level but alternative at {alternative.level}")
    if surely_same(reference, alternative):
        raise ValueError("reference and alternative are the same sample: the power would mean nothing")
    groups_x, groups_y = reference.rows_of(), alternative.rows_of()
    prompts = [label for label in groups_x if label in groups_y]
    if not prompts:
        raise ValueError("no prompt is in both pilots")
    most = min(min(len(groups_x[p]), len(groups_y[p])) for p in prompts)
    if most < 2:
        raise ValueError("a pilot needs at least 2 completions of each prompt on both sides")
    both = (*reference.completions, *alternative.completions)
    length = max_length or max(len(c) for c in both) or 1
    rows_x, rows_y = reference.encode(length), alternative.encode(length)
    blocks = []
    for p in prompts:
        texts = [reference.completions[i][:length] for i in groups_x[p]]
        texts += [alternative.completions[i][:length] for i in groups_y[p]]
        positions = np.array(groups_x[p] + [len(reference) + i for i in groups_y[p]])
        blocks.append(Block(np.concatenate([rows_x[groups_x[p]], rows_y[groups_y[p]]]), texts, positions))
    pool_sizes = [(len(groups_x[p]), len(groups_y[p])) for p in prompts]
    pools = strata_of(kernel_from_name(kernel), blocks, pool_sizes)
    effect = GramProblem(pools, normalization).observed()[0]

    tokens_in, tokens_out, estimated = _tokens(reference, alternative, prompt_tokens)
    inside = [n for n in sizes if n <= most]
    anchor = inside[-1] if inside else most
    measured: dict[int, tuple[int, float, float]] = {}
    for n, child in zip([*inside, *([] if inside else [most])], seed.spawn(max(len(inside), 1)), strict=True):
        measured[n] = _simulate(pools, n, normalization, alpha, n_simulations, n_permutations, child)
    rows = []
    for n in sizes:
        hits, critical, spread = measured.get(n, measured[anchor])
        ci = None
        if n in measured:
            chance, ci = hits / n_simulations, _binomial_interval(hits, n_simulations)
        else:
            from scipy.special import ndtr

            critical, spread = critical * anchor / n, spread * math.sqrt(anchor / n)
            chance = float(ndtr((effect - critical) / spread)) if spread > 0 else float(effect > critical)
        requests = n * len(prompts)
        cost = None
        if price_per_million is not None:
            cost = requests * (tokens_in * price_per_million[0] + tokens_out * price_per_million[1]) / 1e6
        rows.append(
            PlanRow(
                n, chance, ci, critical + _quantile(power) * spread, requests, requests * tokens_in, requests * tokens_out,
                cost, n in measured,
            )
        )  # fmt: skip
    reached = [row.n for row in rows if row.power >= power]
    return Plan(tuple(rows), min(reached, default=None), power, alpha, effect, len(prompts), estimated)


def _simulate(
    pools: Sequence[Stratum],
    n: int,
    normalization: str,
    alpha: float,
    simulations: int,
    draws: int,
    seed: np.random.SeedSequence,
) -> tuple[int, float, float]:
    """Rejections, mean critical value and spread of the statistic over simulated tests with n + n rows a prompt."""
    hits, criticals, observed = 0, np.empty(simulations), np.empty(simulations)
    for i, child in enumerate(seed.spawn(simulations)):
        rng = np.random.default_rng(child.spawn(1)[0])
        strata = []
        for pool in pools:
            index = np.concatenate([rng.permutation(pool.n_x)[:n], pool.n_x + rng.permutation(pool.n_y)[:n]])
            strata.append(Stratum(pool.values[np.ix_(index, index)], pool.scale, n))
        problem = GramProblem(strata, normalization)
        null = permutation_null(problem, draws, child)
        hits += pvalue(null) <= alpha
        criticals[i] = np.quantile(null.statistics, 1 - alpha, method="higher")
        observed[i] = problem.observed()[0]
    return int(hits), float(criticals.mean()), float(observed.std(ddof=1))


def _quantile(power: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(min(max(power, 1e-6), 1 - 1e-6)))


def _binomial_interval(hits: int, n: int) -> tuple[float, float]:
    """Clopper and Pearson's 95% interval."""
    from scipy.special import betaincinv

    low = 0.0 if hits == 0 else float(betaincinv(hits, n - hits + 1, 0.025))
    high = 1.0 if hits == n else float(betaincinv(hits + 1, n - hits, 0.975))
    return low, high


def _tokens(reference: Samples, alternative: Samples, prompt_tokens: float | None) -> tuple[float, float, bool]:
    for side in (alternative, reference):
        usage = side.meta.get("usage")
        if usage and usage["rows"]:
            given = usage["prompt_tokens"] / usage["rows"] if prompt_tokens is None else prompt_tokens
            return float(given), usage["completion_tokens"] / usage["rows"], False
    per_row: NDArray[np.float64] = np.array([len(c) for c in alternative.completions], dtype=np.float64)
    by_token = alternative.level == "token"
    return float(prompt_tokens or 0.0), float(per_row.mean()) / (1 if by_token else 4), not by_token
