"""The two-sample test (section 3): from two bags of completions to a p-value, an effect size and what to be careful about."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from chapbook_shared.validate import check_choice, check_int
from mmd_equality.kernels import (
    AllSubstrings,
    Block,
    Hamming,
    Kernel,
    KSpectrum,
    OneHot,
    hamming_counts,
    kernel_from_name,
    row_codes,
)
from mmd_equality.permutation import (
    BaselineProblem,
    GramProblem,
    MatchProblem,
    NullDraws,
    Stratum,
    assignments,
    at_least,
    exact_null,
    permutation_null,
    pvalue,
    simulated_null,
)
from mmd_equality.samples import PromptId, Samples, surely_same
from mmd_equality.statistics import BASELINES, NORMALIZATIONS, combine

__all__ = ["Caution", "PromptEffect", "TestResult", "jackknife_interval", "two_sample_test"]

# A Gram matrix of more bytes than this is never made for Hamming or one-hot: counts per position do the same job, from about
# 3,500 rows of a prompt on in less time too.
GRAM_BYTES = 100_000_000
# A simulated null depends on the reference, the sizes and the settings only: one serves every endpoint. The last 16 are kept.
_SIMULATED: dict[Any, NDArray[np.float64]] = {}
Strata = Literal["auto", "prompt", "pooled"]
Null = Literal["auto", "permutation", "exact", "simulated"]


@dataclass(frozen=True)
class Caution:
    """Something a reader of the result must know: a stable `code` and a sentence."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True)
class PromptEffect:
    """One prompt's share: its own MMD^2 (None with fewer than 2 rows on a side) and unadjusted permutation p-value."""

    prompt_id: PromptId
    n_x: int
    n_y: int
    mmd2: float | None
    pvalue: float | None


@dataclass(frozen=True)
class TestResult:
    """What a two-sample test found.

    statistic: MMD^2 or the baseline, on the given samples. pvalue: in (0, 1]. ci: interval for MMD^2 at `ci_level`, or None.
    null_distribution: float [draws]. cautions, `warnings`: things to know. per_prompt: where the samples differ.
    """

    statistic: float
    pvalue: float
    alpha: float
    ci: tuple[float, float] | None
    ci_level: float
    per_prompt: tuple[PromptEffect, ...]
    null_distribution: NDArray[np.float64] = field(repr=False)
    warnings: tuple[Caution, ...]
    statistic_name: str
    kernel: str
    normalization: str
    strata: str
    null: str
    n_draws: int
    n_x: int
    n_y: int
    level: str
    max_length: int
    share_cut: tuple[float, float]
    failure_rate: tuple[float, float]
    standard_error: float | None = None

    # pytest collects classes called Test*; this is not one.
    __test__ = False

    @property
    def reject(self) -> bool:
        """pvalue <= alpha: a valid p-value is at most alpha with probability at most alpha."""
        return self.pvalue <= self.alpha

    @property
    def critical_value(self) -> float:
        """The statistic from which on this null rejects at alpha: the (1 - alpha) quantile of the draws."""
        return float(np.quantile(self.null_distribution, 1 - self.alpha, method="higher"))

    @property
    def null_spread(self) -> float:
        """Standard deviation of the draws (of the finite ones: a pooled shuffle can leave a term without a pair)."""
        finite = self.null_distribution[np.isfinite(self.null_distribution)]
        return float(finite.std()) if len(finite) else 0.0

    def minimal_detectable(self, power: float = 0.8) -> float:
        """The MMD^2 that a test of these sizes would find with probability `power`, by a normal approximation.

        Critical value of this null, plus the power quantile times the spread of the statistic (the null's, or the jackknife's
        where that is larger).
        """
        from scipy.special import ndtri

        spread = self.null_spread
        if self.standard_error is not None:
            spread = max(spread, self.standard_error)
        return self.critical_value + float(ndtri(power)) * spread

    def power_at(self, effect: float) -> float:
        """Probability that a test of these sizes finds an MMD^2 of `effect`, by the same approximation."""
        from scipy.special import ndtr

        spread = self.null_spread
        if spread == 0:
            return float(effect >= self.critical_value and effect > 0)
        return float(ndtr((effect - self.critical_value) / spread))

    def summary(self) -> str:
        """A few lines for a terminal."""
        interval = "" if self.ci is None else f", {self.ci_level:.0%} interval [{self.ci[0]:.5f}, {self.ci[1]:.5f}]"
        name = "MMD^2" if self.statistic_name == "mmd" else self.statistic_name
        verdict = f"rejected at {self.alpha:g}" if self.reject else f"not rejected at {self.alpha:g}"
        lines = [
            f"{name} = {self.statistic:.6g}{interval}",
            f"p = {self.pvalue:.4g} ({self.null} null, {self.n_draws} draws, strata: {self.strata}): equality {verdict}",
            (
                f"{self.n_x} + {self.n_y} completions of {len(self.per_prompt)} prompts, kernel {self.kernel}, "
                f"{self.level} level, length {self.max_length}"
            ),
        ]
        known = [e for e in self.per_prompt if e.mmd2 is not None]
        if self.statistic_name == "mmd" and len(known) > 1:
            top = sorted(known, key=lambda e: -(e.mmd2 or 0.0))[:3]
            lines.append("largest per prompt: " + ", ".join(f"{e.prompt_id}: {e.mmd2:.4f}" for e in top))
        lines += [f"warning: {caution}" for caution in self.warnings]
        return "\n".join(lines)

    def to_dict(self, *, null_draws: int = 2000) -> dict[str, Any]:
        """Plain data for JSON. At most `null_draws` quantiles of the null are kept: enough to plot it."""
        draws = np.sort(self.null_distribution)
        if len(draws) > null_draws:
            draws = draws[np.linspace(0, len(draws) - 1, null_draws).round().astype(int)]
        out = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "null_distribution"}
        out["per_prompt"] = [vars(e) for e in self.per_prompt]
        out["warnings"] = [vars(c) for c in self.warnings]
        out["null_distribution"] = [float(v) if math.isfinite(v) else None for v in draws]
        out["null_standard_deviation"] = self.null_spread
        out["critical_value"] = self.critical_value if math.isfinite(self.critical_value) else None
        out["reject"] = self.reject
        return out

    def to_json(self, path: Any = None) -> str:
        """The same as JSON text; written to `path` if given."""
        from chapbook_shared.jobs import atomic_write

        text = json.dumps({"kind": "test", **self.to_dict()}, indent=1, ensure_ascii=True)
        if path is not None:
            with atomic_write(path) as file:
                file.write(text + "\n")
        return text


def jackknife_interval(problem: Any, *, pooled: bool, level: float) -> tuple[tuple[float, float], float] | None:
    """Interval for MMD^2 and its standard error, by a delete-one jackknife within each prompt and side.

    A bootstrap would repeat rows inside a sample, which looks like similarity; leaving out does not. The jackknife variance of
    a U-statistic errs upwards (Efron & Stein 1981), so near equality, where the statistic is degenerate, the interval is wide.
    None where a side of a prompt has fewer than 3 rows. Student's t with the rows' degrees of freedom.
    """
    from scipy.special import stdtrit

    sizes = problem.sizes
    if not pooled and any(min(size) < 3 for size in sizes):
        return None
    n_x, n_y = (np.array([s[i] for s in sizes], dtype=np.float64) for i in (0, 1))
    rows = [problem.row_sums(q) for q in range(len(sizes))]
    halves = [(r[0][:a], r[1][:a], r[0][a:], r[1][a:]) for r, (a, _) in zip(rows, sizes, strict=True)]  # xx, xy, yx, yy
    s_xx = np.array([h[0].sum() for h in halves])
    s_xy = np.array([h[1].sum() for h in halves])
    s_yy = np.array([h[3].sum() for h in halves])
    variance, free = 0.0, 0
    groups: dict[str, list[NDArray[np.float64]]] = {"x": [], "y": []}
    for q, (xx, xy, yx, yy) in enumerate(halves):
        a, b = n_x[q], n_y[q]
        for side, (own, cross, n_own) in {"x": (xx, xy, a), "y": (yy, yx, b)}.items():
            mine, other = (s_xx, s_yy) if side == "x" else (s_yy, s_xx)
            n_mine, n_other = (n_x, n_y) if side == "x" else (n_y, n_x)
            if problem.normalization == "per_prompt":
                weights = np.full(len(sizes), 1 / len(sizes)) if problem.weights is None else problem.weights
                share = weights[q] / np.sum(weights)
                left = share * combine(
                    mine[q] - 2 * own, s_xy[q] - cross, other[q],
                    (n_own - 1) * (n_own - 2), (n_own - 1) * n_other[q], n_other[q] * (n_other[q] - 1),
                )  # fmt: skip
            else:
                if problem.normalization == "pairs":
                    n_xx = np.sum(n_mine * (n_mine - 1)) - 2 * (n_own - 1)
                    n_xy = np.sum(n_mine * n_other) - n_other[q]
                    n_yy = np.sum(n_other * (n_other - 1))
                else:
                    total, opposite = n_mine.sum() - 1, n_other.sum()
                    n_xx, n_xy, n_yy = total * (total - 1), total * opposite, opposite * (opposite - 1)
                left = combine(mine.sum() - 2 * own, s_xy.sum() - cross, other.sum(), n_xx, n_xy, n_yy)
            if pooled:
                groups[side].append(left)
            else:
                variance += (n_own - 1) / n_own * float(((left - left.mean()) ** 2).sum())
                free += int(n_own) - 1
    if pooled:
        for parts in groups.values():
            left = np.concatenate(parts)
            if len(left) < 3 or not np.isfinite(left).all():
                return None
            variance += (len(left) - 1) / len(left) * float(((left - left.mean()) ** 2).sum())
            free += len(left) - 1
    error = math.sqrt(variance)
    value = problem.observed()[0]
    half = float(stdtrit(max(free, 1), (1 + level) / 2)) * error
    return (value - half, value + half), error


def two_sample_test(
    x: Samples,
    y: Samples,
    *,
    kernel: str | Kernel = "hamming",
    statistic: str = "mmd",
    normalization: str = "pairs",
    strata: Strata = "auto",
    null: Null = "auto",
    n_permutations: int = 9999,
    alpha: float = 0.05,
    max_length: int | None = None,
    prompt_weights: Mapping[PromptId, float] | None = None,
    on_small: Literal["error", "drop"] = "error",
    on_missing: Literal["error", "drop"] = "error",
    normalize: str | None = None,
    alternative_pool: Samples | None = None,
    stop_after: int | None = None,
    ci_level: float = 0.95,
    random_state: int | np.random.SeedSequence | None = None,
    n_jobs: int = 1,
) -> TestResult:
    """Test whether two samples of completions come from one distribution (Model Equality Testing, section 3).

    x: the reference; y: the endpoint. Symmetric but for the simulated null.
    kernel: a name (see `kernel_from_name`) or a kernel object. statistic: "mmd", or a baseline "l1", "l2", "chi2".
    normalization: "pairs" (official code), "paper" (eq. 4) or "per_prompt" (with `prompt_weights`, default equal).
    strata: shuffle labels within prompts ("prompt") or over everything ("pooled"); "auto" pools only when both samples say
        design="random".
    null: "permutation"; "exact" lists every assignment; "auto" is exact where there are at most n_permutations of them;
        "simulated" draws pairs of samples from `alternative_pool` (default: x itself, which then must hold enough).
    n_permutations: B. p = (1 + #{>= observed}) / (B + 1).
    max_length: cut both sides to so many code points or tokens; None means the longest completion.
    on_small, on_missing: what to do with prompts that have fewer than 2 completions on a side, or stand in one sample only.
    normalize: Unicode form for both sides. stop_after: end early after so many exceedances (Besag & Clifford).
    ci_level: of the interval for MMD^2. random_state: seed. n_jobs: threads; the result does not depend on it.
    """
    check_choice("statistic", statistic, ("mmd", *BASELINES))
    check_choice("normalization", normalization, NORMALIZATIONS)
    check_choice("strata", strata, ("auto", "prompt", "pooled"))
    check_choice("null", null, ("auto", "permutation", "exact", "simulated"))
    check_choice("on_small", on_small, ("error", "drop"))
    check_choice("on_missing", on_missing, ("error", "drop"))
    check_int("n_permutations", n_permutations, minimum=1)
    check_int("n_jobs", n_jobs, minimum=1)
    if stop_after is not None:
        check_int("stop_after", stop_after, minimum=1)
    check_alpha(alpha)
    if max_length is not None:
        check_int("max_length", max_length, minimum=1)
    if not 0 < ci_level < 1:
        raise ValueError(f"ci_level must be in (0, 1), got {ci_level!r}")
    if prompt_weights is not None and normalization != "per_prompt":
        raise ValueError(f"prompt_weights needs normalization='per_prompt', got {normalization!r}")
    alpha, n_permutations = float(alpha), int(n_permutations)
    seed = seed_sequence(random_state)
    resolved = kernel_from_name(kernel)
    needed = math.ceil(1 / alpha - 1e-9) - 1
    if null in ("permutation", "simulated") and n_permutations < needed:
        raise ValueError(
            f"n_permutations = {n_permutations} can never give p <= alpha = {alpha:g}: it needs at least {needed}"
        )
    _check_pair(x, y)
    cautions: list[Caution] = []
    if normalize is not None:
        x, y = x.normalized(normalize), y.normalized(normalize)
    pooled = strata == "pooled" or (strata == "auto" and x.design == y.design == "random")
    if pooled and normalization == "per_prompt":
        raise ValueError(
            "normalization='per_prompt' needs strata='prompt': a pooled shuffle can leave a prompt with no pair"
        )
    prompts, x, y, dropped = _shared_prompts(x, y, pooled, on_small, on_missing, cautions)

    length = max_length or max((len(c) for c in (*x.completions, *y.completions)), default=0) or 1
    rows_x, rows_y = x.encode(length), y.encode(length)
    groups_x, groups_y = x.rows_of(), y.rows_of()
    blocks: list[Block] = []
    sizes: list[tuple[int, int]] = []
    for label in prompts:
        ix, iy = groups_x.get(label, []), groups_y.get(label, [])
        rows = np.concatenate([rows_x[ix], rows_y[iy]])
        texts = [x.completions[i][:length] for i in ix] + [y.completions[i][:length] for i in iy]
        # Where each row stands among the rows that were handed in, dropped prompts included.
        positions = np.array([dropped.x[i] for i in ix] + [dropped.n_x + dropped.y[i] for i in iy], dtype=np.int64)
        blocks.append(Block(rows, texts, positions))
        sizes.append((len(ix), len(iy)))

    weights = _prompt_weights(prompts, prompt_weights)
    problem = _problem(statistic, resolved, blocks, sizes, normalization, weights)
    observed, each = problem.observed()
    if not math.isfinite(observed):
        raise ValueError(
            "the samples hold no pair to compare (no prompt has two completions on a side, or none is shared): "
            "collect at least 2 completions of each prompt on both sides"
        )
    drawn, how = _null(
        problem, null, n_permutations, alpha, seed, pooled, stop_after, n_jobs, needed, cautions,
        x if alternative_pool is None else alternative_pool, resolved, prompts, length, observed,
    )  # fmt: skip

    interval = None
    if statistic == "mmd":
        interval = jackknife_interval(problem, pooled=pooled, level=ci_level)
        if interval is None:
            cautions.append(
                Caution("no-interval", "an interval for MMD^2 needs 3 completions of each prompt on both sides")
            )
    _data_cautions(x, y, prompts, blocks, sizes, length, max_length, cautions)
    result = TestResult(
        statistic=observed,
        pvalue=pvalue(drawn),
        alpha=alpha,
        ci=None if interval is None else interval[0],
        ci_level=ci_level,
        per_prompt=_effects(prompts, sizes, each, drawn),
        null_distribution=drawn.statistics,
        warnings=tuple(cautions),
        statistic_name=statistic,
        kernel=resolved.name if statistic == "mmd" else "-",
        normalization=normalization if statistic == "mmd" else "-",
        strata="pooled" if pooled else "prompt",
        null=how,
        n_draws=drawn.draws,
        n_x=len(x),
        n_y=len(y),
        level=str(x.level),
        max_length=length,
        share_cut=(x.share_longer_than(max_length), y.share_longer_than(max_length)),
        failure_rate=(x.failure_rate, y.failure_rate),
        standard_error=None if interval is None else interval[1],
    )
    if x.level == "char" and _leading_space_gap(x, y) > 0.2:
        stripped = two_sample_test(
            x.map(str.lstrip), y.map(str.lstrip), kernel=kernel, statistic=statistic, normalization=normalization,
            strata=strata, null=null, n_permutations=n_permutations, alpha=alpha, max_length=length,
            prompt_weights=prompt_weights, alternative_pool=None if alternative_pool is None else alternative_pool.map(str.lstrip),
            random_state=seed.entropy if isinstance(seed.entropy, int) else None, n_jobs=n_jobs,
        )  # fmt: skip
        shares = tuple(_leading_space(side) for side in (x, y))
        note = Caution(
            "formatting",
            f"{shares[0]:.0%} and {shares[1]:.0%} of the completions start with white space, which shifts every position; "
            f"with it removed on both sides p = {stripped.pvalue:.4g}, statistic {stripped.statistic:.4g}",
        )
        result = replace(result, warnings=(*result.warnings, note))
    return result


def check_alpha(alpha: float) -> None:
    """Raise ValueError unless 0 < alpha < 1."""
    if isinstance(alpha, bool) or not isinstance(alpha, Real) or not 0 < float(alpha) < 1:
        raise ValueError(f"alpha must be in (0, 1), got {alpha!r}")


def seed_sequence(random_state: int | np.random.SeedSequence | None) -> np.random.SeedSequence:
    """The source of everything random: None draws from the system."""
    if isinstance(random_state, np.random.SeedSequence):
        return random_state
    if random_state is not None:
        check_int("random_state", random_state, minimum=0)
    return np.random.SeedSequence(random_state)


@dataclass
class _Kept:
    """Row numbers in the samples as handed in, after dropping prompts."""

    x: list[int]
    y: list[int]
    n_x: int


def _check_pair(x: Samples, y: Samples) -> None:
    for name, side in (("x", x), ("y", y)):
        if not isinstance(side, Samples):
            raise TypeError(f"{name} must be Samples, got {type(side).__name__}: use Samples(prompt_ids, completions)")
        if not len(side):
            source = side.meta.get("source")
            raise ValueError(f"{name} has no completions" + (f" ({source})" if source else ""))
    if x.level != y.level:
        raise TypeError(
            f"x is compared by {x.level} but y by {y.level}: give text on both sides, or token ids of one tokenizer on both"
        )
    sources = [side.meta.get("source") for side in (x, y)]
    same_file = sources[0] == sources[1] and str(sources[0]).endswith((".jsonl", ".json"))
    if x is y or (same_file and x.fingerprint() == y.fingerprint()) or surely_same(x, y):
        raise ValueError(
            "x and y are the same sample: a p-value would mean nothing; sample the reference twice instead"
        )


def _shared_prompts(
    x: Samples, y: Samples, pooled: bool, on_small: str, on_missing: str, cautions: list[Caution]
) -> tuple[list[PromptId], Samples, Samples, _Kept]:
    counts_x, counts_y = x.counts, y.counts
    kept = _Kept(list(range(len(x))), list(range(len(y))), len(x))
    shared = [label for label in counts_x if label in counts_y]
    if not shared:
        raise ValueError(
            f"no prompt is in both samples (x has {_listed(counts_x)}; y has {_listed(counts_y)}): "
            "both sides must answer the same prompts"
        )
    alone = [label for label in (*counts_x, *counts_y) if label not in counts_x or label not in counts_y]
    if alone and not pooled:
        if on_missing == "error":
            raise ValueError(f"in one sample only: prompts {_listed(alone)}; pass on_missing='drop' to leave them out")
        cautions.append(Caution("prompts-dropped", f"in one sample only and left out: {_listed(alone)}"))
    # A pooled shuffle treats the prompt as part of the row, so a prompt of one side only is information, not a mistake.
    prompts = shared if not pooled else list(dict.fromkeys((*counts_x, *counts_y)))
    if not pooled:
        small = [label for label in prompts if min(counts_x[label], counts_y[label]) < 2]
        if small and on_small == "error":
            raise ValueError(
                f"fewer than 2 completions on a side for prompts {_listed(small)}, so they have no pair inside that sample; "
                "collect more, or pass on_small='drop'"
            )
        if small:
            cautions.append(
                Caution("prompts-dropped", f"fewer than 2 completions on a side, left out: {_listed(small)}")
            )
            prompts = [label for label in prompts if label not in set(small)]
            if not prompts:
                raise ValueError("no prompt has 2 completions on both sides: nothing is left to test")
        uneven = {(counts_x[label], counts_y[label]) for label in prompts}
        if len(uneven) > 1:
            cautions.append(
                Caution("uneven-counts", "completions per prompt differ; labels are shuffled within each prompt")
            )
    keep = set(prompts)
    if len(keep) < len(counts_x):
        kept.x = [i for i, label in enumerate(x.prompt_ids) if label in keep]
        x = x.take(kept.x)
    if len(keep) < len(counts_y):
        kept.y = [i for i, label in enumerate(y.prompt_ids) if label in keep]
        y = y.take(kept.y)
    return prompts, x, y, kept


def _listed(labels: Any, most: int = 8) -> str:
    names = [repr(label) for label in labels]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _prompt_weights(
    prompts: Sequence[PromptId], weights: Mapping[PromptId, float] | None
) -> NDArray[np.float64] | None:
    if weights is None:
        return None
    lacking = [label for label in prompts if label not in weights]
    if lacking:
        raise ValueError(f"prompt_weights lacks prompts {_listed(lacking)}")
    out = np.array([float(weights[label]) for label in prompts])
    if not np.isfinite(out).all() or (out < 0).any() or out.sum() == 0:
        raise ValueError("prompt_weights must be finite, at least 0 and not all 0")
    return out


def _problem(
    statistic: str,
    kernel: Kernel,
    blocks: list[Block],
    sizes: list[tuple[int, int]],
    normalization: str,
    weights: NDArray[np.float64] | None,
) -> Any:
    if statistic != "mmd":
        return BaselineProblem(statistic, [row_codes(b.rows) for b in blocks], sizes)
    largest = max(len(b.rows) for b in blocks)
    if type(kernel) in (Hamming, OneHot) and 8 * largest**2 > GRAM_BYTES:
        rows: list[NDArray[Any]] = [b.rows if type(kernel) is Hamming else row_codes(b.rows)[:, None] for b in blocks]
        return MatchProblem(rows, sizes, normalization, weights)
    return GramProblem(strata_of(kernel, blocks, sizes), normalization, weights)


def strata_of(kernel: Kernel, blocks: Sequence[Block], sizes: Sequence[tuple[int, int]]) -> list[Stratum]:
    """Gram values of every prompt; prompts of equal size share one pass under Hamming."""
    if type(kernel) is not Hamming:
        values = [kernel.counts(block) for block in blocks]
        return [Stratum(v, scale, size[0]) for (v, scale), size in zip(values, sizes, strict=True)]
    out: list[Stratum | None] = [None] * len(blocks)
    groups: dict[int, list[int]] = {}
    for i, block in enumerate(blocks):
        groups.setdefault(len(block.rows), []).append(i)
    for index in groups.values():
        scale = float(max(blocks[index[0]].rows.shape[1], 1))
        for i, gram in zip(index, hamming_counts(np.stack([blocks[i].rows for i in index])), strict=True):
            out[i] = Stratum(gram, scale, sizes[i][0])
    return [s for s in out if s is not None]


def _null(
    problem: Any,
    null: str,
    draws: int,
    alpha: float,
    seed: np.random.SeedSequence,
    pooled: bool,
    stop_after: int | None,
    n_jobs: int,
    needed: int,
    cautions: list[Caution],
    pool: Samples,
    kernel: Kernel,
    prompts: list[PromptId],
    length: int,
    observed: float,
) -> tuple[NullDraws, str]:
    total = assignments(problem.sizes, pooled=pooled)
    if null != "simulated" and total <= needed:
        cautions.append(
            Caution(
                "cannot-reject",
                f"there are only {total} label assignments, so the smallest p is {1 / total:.3g}: "
                f"this test cannot reject at alpha = {alpha:g}; collect more completions",
            )
        )
    if null == "exact" or (null == "auto" and total <= draws):
        return exact_null(problem, pooled=pooled), "exact"
    if null in ("auto", "permutation"):
        if draws < needed:
            raise ValueError(
                f"n_permutations = {draws} can never give p <= alpha = {alpha:g}: it needs at least {needed}"
            )
        drawn = permutation_null(problem, draws, seed, pooled=pooled, stop_after=stop_after, n_jobs=n_jobs)
        return drawn, "permutation"
    if isinstance(problem, BaselineProblem):
        raise ValueError("null='simulated' is for statistic='mmd'; use permutations for the baselines")
    if pooled:
        raise ValueError("null='simulated' is for a fixed number of completions for each prompt: pass strata='prompt'")
    groups = pool.rows_of()
    lacking = [label for label in prompts if len(groups.get(label, ())) < 2]
    if lacking:
        raise ValueError(f"alternative_pool has too few completions of prompts {_listed(lacking)}")
    matrix = pool.encode(length)
    blocks = [
        Block(matrix[groups[label]], [pool.completions[i][:length] for i in groups[label]], np.array(groups[label]))
        for label in prompts
    ]
    key = None
    if type(kernel) in (Hamming, OneHot, KSpectrum, AllSubstrings) and isinstance(seed.entropy, int):
        weights = None if problem.weights is None else tuple(problem.weights)
        key = (
            pool.fingerprint(), tuple(prompts), length, tuple(problem.sizes), kernel.name, problem.normalization, weights,
            draws, seed.entropy, seed.spawn_key,
        )  # fmt: skip
    values = _SIMULATED.get(key)
    if values is None:
        grams = [kernel.counts(block) for block in blocks]
        values = simulated_null(
            grams, problem.sizes, draws, seed, normalization=problem.normalization, weights=problem.weights
        )
        if key is not None:
            while len(_SIMULATED) >= 16:
                del _SIMULATED[next(iter(_SIMULATED))]
            _SIMULATED[key] = values
    return NullDraws(values, int(at_least(values, observed, problem.magnitude).sum()), draws), "simulated"


def _effects(
    prompts: list[PromptId], sizes: list[tuple[int, int]], each: NDArray[np.float64] | None, drawn: NullDraws
) -> tuple[PromptEffect, ...]:
    out = []
    for i, (label, (a, b)) in enumerate(zip(prompts, sizes, strict=True)):
        effect = None if each is None or not math.isfinite(each[i]) else float(each[i])
        p = None
        if effect is not None and drawn.per_prompt_exceed is not None and not drawn.stopped:
            hits = int(drawn.per_prompt_exceed[i])
            p = hits / drawn.draws if drawn.exact else (1 + hits) / (drawn.draws + 1)
        out.append(PromptEffect(label, a, b, effect, p))
    return tuple(out)


def _leading_space(samples: Samples) -> float:
    return sum(bool(c) and c[0].isspace() for c in samples.completions) / len(samples)


def _leading_space_gap(x: Samples, y: Samples) -> float:
    return abs(_leading_space(x) - _leading_space(y))


def _data_cautions(
    x: Samples,
    y: Samples,
    prompts: list[PromptId],
    blocks: list[Block],
    sizes: list[tuple[int, int]],
    length: int,
    max_length: int | None,
    cautions: list[Caution],
) -> None:
    constant = all(bool((b.rows == b.rows[0]).all()) for b in blocks)
    if constant:
        cautions.append(
            Caution("no-variation", "all completions of a prompt are identical on both sides: temperature 0?")
        )
    else:
        for name, side in (("x", x), ("y", y)):
            groups = side.rows_of()
            repeated = []
            for label, members in groups.items():
                top = Counter(side.completions[i] for i in members).most_common(1)[0][1]
                if len(members) >= 5 and (top - 1) / (len(members) - 1) > 0.9:
                    repeated.append(label)
            if repeated:
                cautions.append(
                    Caution(
                        "duplicates",
                        f"over 90% of {name}'s completions are copies of one another for prompts {_listed(repeated)}: "
                        "temperature 0 on this side, a fixed seed, or a cache?",
                    )
                )
    cut = [side.share_longer_than(max_length) for side in (x, y)]
    if max(cut) > 0:
        cautions.append(
            Caution(
                "cut", f"{cut[0]:.0%} of x and {cut[1]:.0%} of y were longer than max_length = {length} and were cut"
            )
        )
    for name, side in (("x", x), ("y", y)):
        if side.failures:
            cautions.append(
                Caution(
                    "failed-requests",
                    f"{sum(side.failures.values())} requests of {name} ({side.failure_rate:.1%}) failed",
                )
            )
        if len(side.meta.get("settings_hash", {})) > 1:
            cautions.append(
                Caution("mixed-settings", f"{name} was sampled with {len(side.meta['settings_hash'])} settings")
            )
        for key, code in (("served_model", "served-model-changed"), ("provider", "provider-changed")):
            seen = side.meta.get(key, {})
            if len(seen) > 1:
                cautions.append(Caution(code, f"{name} was answered by {', '.join(sorted(seen))}"))
        for code, count in side.meta.get("sampling_warnings", {}).items():
            cautions.append(Caution(code, f"noted while sampling {name}, {count} times"))
