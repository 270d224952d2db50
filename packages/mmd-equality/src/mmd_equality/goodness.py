"""Goodness of fit when the reference's probabilities are known (appendix B): one sample against an explicit distribution.

Symbols   paper  here
          o_i    observed counts, all of one prompt's rows together
          p_i    joint probability of prompt and completion
          n, k   sample size, number of listed (prompt, completion) rows
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chapbook_shared.validate import check_choice, check_int
from mmd_equality.samples import PromptId, Samples

__all__ = ["FIT_STATISTICS", "GoodnessResult", "fit_statistic", "goodness_of_fit"]

FIT_STATISTICS = ("g2", "chi2", "truncated_chi2", "l1", "l2")


def fit_statistic(name: str, counts: NDArray[Any], probabilities: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """A goodness-of-fit statistic; counts [B, K], probabilities [K] of all K rows (k of them listed), float64 [B].

    g2 = -2 sum over observed o (log p - log(o/n)); chi2 = sum (o - np)^2 / np; truncated_chi2 = sum ((o - np)^2 - o) / max(p, 1/k);
    l1 = sum |o - np|; l2 = sum (o - np)^2. An observed row of probability 0 gives +inf in g2 and chi2.
    """
    o = np.asarray(counts, dtype=np.float64)
    n = o.sum(axis=1, keepdims=True)
    expected = n * probabilities
    gap = o - expected
    if name == "l1":
        return np.abs(gap).sum(axis=1)
    if name == "l2":
        return (gap**2).sum(axis=1)
    if name == "truncated_chi2":
        return ((gap**2 - o) / np.maximum(probabilities, 1 / k)).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        if name == "g2":
            terms = np.where(o > 0, o * (np.log(probabilities) - np.log(o / n)), 0.0)
            return -2 * terms.sum(axis=1)
        return np.where(expected > 0, gap**2 / expected, np.where(o > 0, np.inf, 0.0)).sum(axis=1)


@dataclass(frozen=True)
class GoodnessResult:
    """statistic, pvalue in (0, 1], null_distribution float64 [n_simulations], unlisted: rows outside the table."""

    statistic: float
    pvalue: float
    statistic_name: str
    n: int
    unlisted: int
    null_distribution: NDArray[np.float64] = field(repr=False)


def goodness_of_fit(
    sample: Samples,
    logprob_table: Mapping[PromptId, Mapping[Any, float]],
    *,
    prompt_distribution: Mapping[PromptId, float] | None = None,
    statistic: str = "g2",
    n_simulations: int = 9999,
    random_state: int | np.random.SeedSequence | None = None,
) -> GoodnessResult:
    """Test whether `sample` was drawn from an explicit distribution (appendix B, one-sample tests).

    logprob_table[prompt][completion] is a log-probability (nats); token sequences are tuples. What a prompt's table leaves
    of 1 belongs to one further row, "anything else". prompt_distribution: default uniform over the table's prompts.
    The null is simulated: prompts drawn anew when the sample says design="random", their counts kept otherwise.
    """
    check_choice("statistic", statistic, FIT_STATISTICS)
    check_int("n_simulations", n_simulations, minimum=1)
    if not len(sample):
        raise ValueError("sample has no completions")
    lacking = [p for p in sample.counts if p not in logprob_table]
    if lacking:
        raise ValueError(f"logprob_table lacks prompts {', '.join(map(repr, lacking[:8]))}")
    prompts = list(logprob_table)
    if prompt_distribution is None:
        share = {p: 1 / len(prompts) for p in prompts}
    else:
        total = math.fsum(prompt_distribution.get(p, 0.0) for p in prompts)
        if not math.isclose(total, 1, abs_tol=1e-6):
            raise ValueError(f"prompt_distribution sums to {total:.6g} over the table's prompts; it must sum to 1")
        share = {p: float(prompt_distribution.get(p, 0.0)) for p in prompts}
    probabilities: list[float] = []
    where: dict[tuple[PromptId, Any], int] = {}
    listed = 0
    conditional: dict[PromptId, list[float]] = {}
    for prompt in prompts:
        values = [math.exp(v) for v in logprob_table[prompt].values()]
        mass = math.fsum(values)
        if not math.isfinite(mass) or mass > 1 + 1e-6:
            raise ValueError(
                f"the log-probabilities of prompt {prompt!r} sum to {mass:.6g} as probabilities: at most 1"
            )
        for completion in logprob_table[prompt]:
            key = completion if isinstance(completion, str) else tuple(int(t) for t in completion)
            where[prompt, key] = len(where)
        rest = max(0.0, 1 - mass)
        rest = 0.0 if rest < 1e-9 else rest
        listed += len(values)
        where[prompt, None] = len(where)
        conditional[prompt] = [*values, rest]
        probabilities += [share[prompt] * v for v in conditional[prompt]]
    counts = np.zeros((1, len(where)), dtype=np.int64)
    unlisted = 0
    for prompt, completion in zip(sample.prompt_ids, sample.completions, strict=True):
        index = where.get((prompt, completion))
        if index is None:
            unlisted += 1
            index = where[prompt, None]
        counts[0, index] += 1
    joint = np.array(probabilities)
    rng = np.random.default_rng(random_state)
    if sample.design == "random":
        drawn = rng.multinomial(len(sample), joint / joint.sum(), size=n_simulations)
    else:
        each = sample.counts
        drawn = np.concatenate(
            [
                rng.multinomial(each.get(p, 0), np.array(conditional[p]) / sum(conditional[p]), size=n_simulations)
                for p in prompts
            ],
            axis=1,
        )
        # A fixed design fixes the prompt shares too.
        joint = np.concatenate([each.get(p, 0) / len(sample) * np.array(conditional[p]) for p in prompts])
    observed = float(fit_statistic(statistic, counts, joint, listed)[0])
    null = fit_statistic(statistic, drawn, joint, listed)
    if math.isinf(observed):
        reach = int(np.isinf(null).sum())
    else:
        reach = int((null >= observed - 1e-9 * max(1.0, abs(observed))).sum())
    return GoodnessResult(observed, (1 + reach) / (n_simulations + 1), statistic, len(sample), unlisted, null)
