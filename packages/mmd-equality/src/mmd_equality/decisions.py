"""From p-values to verdicts: composite nulls, many endpoints, repeats, planned looks (section 3.4 and the audit protocol of section 5).

A verdict is one of
- `different`: equality is rejected at the audit's level, all endpoints and tasks taken together;
- `same-not-rejected`: it is not. This never says that two models are identical;
- `inconclusive`: no answer should be read from this sample: too many requests failed, the test could not have found the named
  distortion, or the level was already spent on earlier looks at the same endpoint.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from chapbook_shared.seeding import derive_seed
from chapbook_shared.validate import check_choice, check_fraction, check_int
from mmd_equality.kernels import Kernel, kernel_from_name
from mmd_equality.samples import Samples
from mmd_equality.two_sample import Caution, TestResult, check_alpha, two_sample_test

__all__ = [
    "CORRECTIONS",
    "AuditReport",
    "Comparison",
    "Ledger",
    "Look",
    "SequentialAudit",
    "adjust_pvalues",
    "audit",
    "vote_pvalue",
]

CORRECTIONS = ("holm", "bonferroni", "bh", "by", "none")
Verdict = Literal["same-not-rejected", "different", "inconclusive"]
Task = str
Bags = Samples | Mapping[Task, Samples]


def adjust_pvalues(pvalues: Sequence[float], method: str = "holm") -> NDArray[np.float64]:
    """Adjusted p-values: reject where they are <= alpha.

    "bonferroni" and "holm" bound the chance of any false alarm, whatever the dependence; "bh" bounds the expected share of
    false alarms among the rejections under independence or positive dependence, "by" under any dependence; "none" changes nothing.
    """
    check_choice("correction", method, CORRECTIONS)
    p = _checked_pvalues(pvalues)
    count = len(p)
    if method == "none" or count == 0:
        return p.copy()
    if method == "bonferroni":
        return np.minimum(p * count, 1.0)
    order = np.argsort(p, kind="stable")
    ranked = p[order]
    if method == "holm":
        adjusted = np.maximum.accumulate(ranked * (count - np.arange(count)))
    else:
        penalty = 1.0 if method == "bh" else float(np.sum(1 / np.arange(1, count + 1)))
        adjusted = np.minimum.accumulate((ranked * count * penalty / np.arange(1, count + 1))[::-1])[::-1]
    out = np.empty(count)
    out[order] = np.minimum(adjusted, 1.0)
    return out


def _checked_pvalues(pvalues: Sequence[float]) -> NDArray[np.float64]:
    p = np.asarray(pvalues, dtype=np.float64)
    if p.ndim != 1 or not np.isfinite(p).all() or (p < 0).any() or (p > 1).any():
        raise ValueError(f"pvalues must be a flat sequence in [0, 1], got {list(pvalues)!r}")
    return p


def vote_pvalue(pvalues: Sequence[float], share: float = 0.5) -> float:
    """The p-value of "at least this share of the repeats reject" (the paper's audit protocol: half of ten repeats).

    The k-th smallest of K p-values, k = ceil(share K), is at most alpha exactly when at least k repeats reject at alpha. It is
    raised to P(Binomial(K, p) >= k) where that is larger, so that it is a valid p-value for independent repeats at any level.
    """
    from scipy.special import betainc

    check_fraction("share", share)
    p = np.sort(_checked_pvalues(pvalues))
    if not len(p):
        raise ValueError("pvalues is empty: give the p-value of every repeat")
    k = max(1, math.ceil(share * len(p) - 1e-9))
    middle = float(p[k - 1])
    tail = float(betainc(k, len(p) - k + 1, middle))  # P(Binomial(K, middle) >= k)
    return max(middle, tail)


# -- several looks at one growing sample


@dataclass(frozen=True)
class Look:
    """One planned look: n completions a prompt, its share of alpha, the cumulative alpha spent, and the test made there."""

    number: int
    n: int
    alpha: float
    spent: float
    reject: bool
    result: TestResult


@dataclass
class SequentialAudit:
    """Looks at a growing sample, planned beforehand, that together keep the level alpha.

    looks: completions per prompt at each look, increasing. spending: "equal" (alpha / number of looks each), "obf" (little at
    first, most at the end, like O'Brien and Fleming), or a function of the share of information in (0, 1] that gives the
    cumulative alpha, ending at alpha. Look k compares its own permutation p-value with alpha_k; since sum alpha_k <= alpha, the
    level holds under any dependence between looks.
    """

    alpha: float
    looks: Sequence[int]
    spending: str | Callable[[float], float] = "equal"
    history: list[Look] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        looks = list(self.looks)
        if not looks:
            raise ValueError(f"looks must list completions per prompt, at least 2 each; got {looks!r}")
        for n in looks:
            check_int("looks", n, minimum=2)
        if any(b <= a for a, b in itertools.pairwise(looks)):
            raise ValueError(f"looks must increase, got {looks!r}")
        self.looks = [int(n) for n in looks]
        if isinstance(self.spending, str):
            check_choice("spending", self.spending, ("equal", "obf"))
        self.alphas  # noqa: B018  # checks the spending function before any data is seen

    @property
    def alphas(self) -> list[float]:
        """Each look's own level; they sum to at most alpha."""
        from scipy.special import ndtr, ndtri

        count = len(self.looks)
        if self.spending == "equal":
            return [self.alpha / count] * count
        shares = [n / self.looks[-1] for n in self.looks]
        if self.spending == "obf":
            cumulative = [2 * float(ndtr(-ndtri(1 - self.alpha / 2) / math.sqrt(t))) for t in shares]
        else:
            assert callable(self.spending)
            cumulative = [float(self.spending(t)) for t in shares]
        steps = [b - a for a, b in zip([0.0, *cumulative[:-1]], cumulative, strict=True)]
        if min(steps) < 0 or cumulative[-1] > self.alpha * (1 + 1e-9):
            raise ValueError(f"spending must rise and end at alpha = {self.alpha:g} at most, got {cumulative!r}")
        return steps

    @property
    def spent(self) -> float:
        """Alpha spent by the looks made so far."""
        return math.fsum(look.alpha for look in self.history)

    @property
    def rejected(self) -> bool:
        return any(look.reject for look in self.history)

    @property
    def finished(self) -> bool:
        return self.rejected or len(self.history) == len(self.looks)

    def look(self, x: Samples, y: Samples, **options: Any) -> Look:
        """Make the next planned look on the first looks[k] completions of each prompt; `options` go to `two_sample_test`."""
        if "alpha" in options:
            raise TypeError("each look has its own alpha, set by the spending rule: pass alpha to SequentialAudit")
        if self.finished:
            raise RuntimeError(
                "the audit is over: " + ("equality was rejected" if self.rejected else "all planned looks are made")
            )
        number = len(self.history)
        n, alpha = self.looks[number], self.alphas[number]
        for name, side in (("x", x), ("y", y)):
            short = [label for label, have in side.counts.items() if have < n]
            if short:
                raise ValueError(
                    f"look {number + 1} is planned at {n} completions a prompt but {name} has fewer for prompts "
                    f"{', '.join(map(repr, short[:8]))}: sample more first"
                )
        # Too little alpha for the permutations asked for: make more of them, up to a million.
        draws = int(options.pop("n_permutations", 9999))
        if alpha > 0:
            draws = max(draws, min(math.ceil(1 / alpha) - 1, 1_000_000))
        enough = alpha > 0 and (draws + 1) * alpha >= 1 - 1e-9
        result = two_sample_test(
            x.first(n),
            y.first(n),
            alpha=alpha if enough else min(0.5, 2 / (draws + 1)),
            n_permutations=draws,
            **options,
        )
        done = Look(number + 1, n, alpha, self.spent + alpha, enough and result.pvalue <= alpha, result)
        self.history.append(done)
        return done

    def run(self, x: Samples, y: Samples, **options: Any) -> list[Look]:
        """Make all planned looks that the samples allow and that are not made yet; stop at a rejection."""
        while not self.finished and min(*x.counts.values(), *y.counts.values()) >= self.looks[len(self.history)]:
            self.look(x, y, **options)
        return self.history


# -- what was looked at before


class Ledger:
    """Remembers which samples were audited at which level, so that looking again until p is small does not pass unseen.

    path: a JSON file, shared between processes; None keeps it in this process.
    """

    def __init__(self, path: str | Path | None = None):
        self.path = None if path is None else Path(path)
        self._entries: list[dict[str, Any]] = []

    def entries(self) -> list[dict[str, Any]]:
        if self.path is None:
            return self._entries
        if not self.path.exists():
            return []
        try:
            loaded = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.path} is not an audit ledger: {error}") from None
        if not isinstance(loaded, dict) or not isinstance(loaded.get("looks"), list):
            raise ValueError(f"{self.path} is not an audit ledger")
        return list(loaded["looks"])

    def add(self, entries: Sequence[dict[str, Any]]) -> None:
        if self.path is None:
            self._entries.extend(entries)
            return
        from chapbook_shared.jobs import atomic_write

        text = json.dumps({"looks": [*self.entries(), *entries]}, ensure_ascii=True)
        with atomic_write(self.path) as file:
            file.write(text + "\n")


_IN_PROCESS = Ledger()


def _grown_from(before: Mapping[str, list[Any]], now: Mapping[str, list[str]]) -> bool:
    """Whether `now` holds the completions counted and hashed in `before`, in the same order, and perhaps more."""
    if not before:
        return False
    return all(
        label in now and len(now[label]) >= count > 0 and now[label][count - 1] == digest
        for label, (count, digest) in before.items()
    )


# -- the audit


@dataclass(frozen=True)
class Comparison:
    """One line of an audit: one endpoint, one task, all references (or one, under composite="each").

    pvalue: over references the largest, over repeats the vote's. adjusted: after the correction. effect: MMD^2 to the closest
    reference, from all samples (not split into repeats). rejecting: share of repeats that reject at alpha on their own.
    """

    endpoint: str
    task: str
    references: tuple[str, ...]
    pvalue: float
    adjusted: float
    effect: float
    ci: tuple[float, float] | None
    verdict: Verdict
    rejecting: float
    power: float | None
    failure_rate: float
    spent_alpha: float
    cautions: tuple[Caution, ...]
    results: Mapping[str, TestResult]


@dataclass(frozen=True)
class AuditReport:
    """All lines, and what they were decided with."""

    rows: tuple[Comparison, ...]
    alpha: float
    correction: str
    composite: str
    repeats: int
    vote: float
    audit_id: str | None
    settings: Mapping[str, Any]

    @property
    def verdict(self) -> Verdict:
        """`different` if any line is, else `inconclusive` if any line is, else `same-not-rejected`."""
        found = {row.verdict for row in self.rows}
        return (
            "different" if "different" in found else "inconclusive" if "inconclusive" in found else "same-not-rejected"
        )

    def verdict_of(self, endpoint: str) -> Verdict:
        """The same over one endpoint's tasks: the paper's rule of combining prompt sets."""
        rows = [row for row in self.rows if row.endpoint == endpoint]
        if not rows:
            raise KeyError(endpoint)
        found = {row.verdict for row in rows}
        return (
            "different" if "different" in found else "inconclusive" if "inconclusive" in found else "same-not-rejected"
        )

    def table(self) -> str:
        """A plain text table."""
        head = ("endpoint", "task", "against", "MMD^2", "interval", "p", f"p ({self.correction})", "verdict")
        body = [
            (
                row.endpoint,
                row.task,
                "+".join(row.references),
                f"{row.effect:.5f}",
                "-" if row.ci is None else f"[{row.ci[0]:.4f}, {row.ci[1]:.4f}]",
                f"{row.pvalue:.4g}",
                f"{row.adjusted:.4g}",
                row.verdict,
            )
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in (head, *body)
        ]
        notes = [f"{row.endpoint}/{row.task}: {caution}" for row in self.rows for caution in row.cautions]
        return "\n".join([*lines, *(f"warning: {note}" for note in notes)])

    def to_dict(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            entry = {k: v for k, v in vars(row).items() if k not in ("results", "cautions")}
            entry["cautions"] = [vars(c) for c in row.cautions]
            entry["results"] = {name: result.to_dict() for name, result in row.results.items()}
            rows.append(entry)
        top = {k: v for k, v in vars(self).items() if k != "rows"}
        return {"kind": "audit", "verdict": self.verdict, **top, "settings": dict(self.settings), "rows": rows}

    def to_json(self, path: Any = None) -> str:
        """JSON text; written to `path` if given."""
        from chapbook_shared.jobs import atomic_write

        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=True)
        if path is not None:
            with atomic_write(path) as file:
                file.write(text + "\n")
        return text


def _tasks(name: str, bags: Bags) -> dict[Task, Samples]:
    tasks = {"all": bags} if isinstance(bags, Samples) else bags
    if not isinstance(tasks, Mapping) or not all(isinstance(bag, Samples) for bag in tasks.values()):
        raise TypeError(f"{name} must be Samples or a mapping of task names to Samples, got {type(bags).__name__}")
    return dict(tasks)


def audit(
    references: Mapping[str, Bags],
    endpoints: Mapping[str, Bags],
    *,
    composite: Literal["any", "each"] = "any",
    correction: str = "holm",
    alpha: float = 0.01,
    repeats: int = 1,
    vote: float = 0.5,
    kernel: str | Kernel = "hamming",
    normalization: str = "pairs",
    n_permutations: int = 9999,
    max_length: int | None = None,
    failure_limit: float = 0.02,
    distortion: Bags | float | None = None,
    power_floor: float = 0.5,
    audit_id: str | None = None,
    ledger: Ledger | str | Path | None = None,
    random_state: int = 0,
    n_jobs: int = 1,
    **options: Any,
) -> AuditReport:
    """Audit endpoints against references, at one level for all of them (the protocol of section 5, with valid corrections).

    references, endpoints: name -> Samples, or name -> {task: Samples}.
    composite: "any": an endpoint passes if it equals *some* reference, so its p is the largest over references, which needs no
        correction (intersection-union); "each": every reference is a line of its own.
    correction over all lines: "holm", "bonferroni", "bh", "by", "none"; alpha: the level of the whole audit.
    repeats, vote: split the samples into so many disjoint parts, test each against all references, and ask for this share of
        rejections (the paper: 10 and a half).
    max_length: cut; None means the longest completion of a task, over all its samples, so that effects compare.
    failure_limit: a higher share of failed requests is `inconclusive`, since dropped answers bias what is left.
    distortion: an MMD^2, or samples of a distorted reference, that a passing endpoint should have been told from; if the power
        against it is below power_floor the verdict is `inconclusive`.
    audit_id, ledger: see `Ledger`. With an id every run on other data or settings is a look; without one, a run on samples that
        have grown since an earlier run is. A rejection after the level was spent is `inconclusive`: plan with `SequentialAudit`.
    """
    check_choice("composite", composite, ("any", "each"))
    check_choice("correction", correction, CORRECTIONS)
    check_alpha(alpha)
    check_int("repeats", repeats, minimum=1)
    check_int("n_permutations", n_permutations, minimum=1)
    if max_length is not None:
        check_int("max_length", max_length, minimum=1)
    check_fraction("vote", vote)
    check_fraction("failure_limit", failure_limit)
    check_fraction("power_floor", power_floor)
    resolved = kernel_from_name(kernel)
    for name, side in (("references", references), ("endpoints", endpoints)):
        if not isinstance(side, Mapping):
            raise TypeError(f"{name} must map names to Samples, got {type(side).__name__}: {{'name': samples}}")
    reference_tasks = {n: _tasks(f"references[{n!r}]", b) for n, b in references.items()}
    endpoint_tasks = {n: _tasks(f"endpoints[{n!r}]", b) for n, b in endpoints.items()}
    distorted: dict[Task, Samples] = {}
    if isinstance(distortion, (int, float)):
        if not 0 < float(distortion) < math.inf:
            raise ValueError(f"distortion must be an MMD^2 above 0, or samples; got {distortion!r}")
    elif distortion is not None:
        distorted = _tasks("distortion", distortion)
        lacking = {task for tasks in endpoint_tasks.values() for task in tasks} - set(distorted)
        if lacking:
            raise ValueError(f"distortion lacks tasks {', '.join(map(repr, sorted(lacking)))}")
    if not reference_tasks or not endpoint_tasks:
        raise ValueError("give at least one reference and one endpoint")
    book = ledger if isinstance(ledger, Ledger) else _IN_PROCESS if ledger is None else Ledger(ledger)

    lines: list[tuple[str, Task, tuple[str, ...]]] = []
    for endpoint, tasks in endpoint_tasks.items():
        for task in tasks:
            known = tuple(name for name, have in reference_tasks.items() if task in have)
            if not known:
                raise ValueError(f"endpoint {endpoint!r} has task {task!r} but no reference has")
            lines += [(endpoint, task, known)] if composite == "any" else [(endpoint, task, (name,)) for name in known]
    needed = math.ceil(1 / alpha * (1 if correction == "none" else len(lines)) - 1e-9) - 1
    if n_permutations < needed:
        raise ValueError(
            f"n_permutations = {n_permutations} cannot reject at alpha = {alpha:g} after correction over {len(lines)} "
            f"comparisons: it needs at least {needed}"
        )

    def test(x: Samples, y: Samples, *names: object) -> TestResult:
        seed = derive_seed(random_state, *map(str, names))
        wanted = dict(options)
        if max(x.failure_rate, y.failure_rate) > failure_limit:  # inconclusive anyway: show what is left
            wanted |= {"on_small": "drop", "on_missing": "drop"}
        try:
            return two_sample_test(
                x, y, kernel=resolved, normalization=normalization, n_permutations=n_permutations, alpha=alpha,
                max_length=lengths[str(names[1])], random_state=seed, n_jobs=n_jobs, **wanted,
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            raise type(error)(f"{' / '.join(map(str, names))}: {error}") from None

    def power_of(name: str, task: Task, result: TestResult) -> float | None:
        if distortion is None:
            return None
        if isinstance(distortion, (int, float)):
            return result.power_at(float(distortion))
        return result.power_at(test(reference_tasks[name][task], distorted[task], name, task, "distortion").statistic)

    lengths: dict[Task, int | None] = {}
    for task in {task for _, task, _ in lines}:
        bags = [tasks[task] for side in (reference_tasks, endpoint_tasks) for tasks in side.values() if task in tasks]
        lengths[task] = max_length or max((len(c) for bag in bags for c in bag.completions), default=0) or None

    settings = {
        "kernel": resolved.name, "normalization": normalization, "n_permutations": n_permutations,
        "max_length": max_length, "random_state": random_state, "failure_limit": failure_limit,
        "power_floor": power_floor, **{k: v for k, v in options.items() if isinstance(v, (str, int, float, bool))},
    }  # fmt: skip
    drafts: list[dict[str, Any]] = []
    for endpoint, task, names in lines:
        y = endpoint_tasks[endpoint][task]
        results = {name: test(reference_tasks[name][task], y, endpoint, task, name) for name in names}
        rounds = [results]
        if repeats > 1:
            parts = {name: reference_tasks[name][task].parts(repeats) for name in names}
            rounds = [
                {name: test(parts[name][i], part, endpoint, task, name, i) for name in names}
                for i, part in enumerate(y.parts(repeats))
            ]
        # A repeat rejects when every reference is rejected in it; the vote is over repeats.
        ps = [max(result.pvalue for result in found.values()) for found in rounds]
        closest = min(results, key=lambda name: results[name].statistic)
        drafts.append(
            {
                "endpoint": endpoint, "task": task, "references": names, "pvalue": vote_pvalue(ps, vote), "results": results,
                "effect": results[closest].statistic, "ci": results[closest].ci, "rejecting": float(np.mean([p <= alpha for p in ps])),
                "failure_rate": max(y.failure_rate, *(reference_tasks[n][task].failure_rate for n in names)),
                "power": power_of(closest, task, results[closest]),
                "y": y, "x": reference_tasks[closest][task],
            }
        )  # fmt: skip

    adjusted = adjust_pvalues([d["pvalue"] for d in drafts], correction)
    rows: list[Comparison] = []
    looks: list[dict[str, Any]] = []
    for draft, p in zip(drafts, adjusted, strict=True):
        y, x = draft.pop("y"), draft.pop("x")
        unique: dict[str, Caution] = {}
        for result in draft["results"].values():
            for caution in result.warnings:
                unique.setdefault(str(caution), caution)
        cautions = list(unique.values())
        entry = {
            "audit_id": audit_id, "endpoint": draft["endpoint"], "task": draft["task"],
            "references": list(draft["references"]), "alpha": alpha,
            "key": _key(settings, x, y), "prompts": {k: [len(v), v[-1]] for k, v in y.digests().items()},
        }  # fmt: skip
        earlier = _earlier(book.entries(), entry, y)
        spent = math.fsum(look["alpha"] for look in earlier)
        verdict: Verdict = "different" if p <= alpha else "same-not-rejected"
        if earlier:
            cautions.append(
                Caution(
                    "alpha-spent",
                    f"this endpoint was looked at {len(earlier)} time(s) before with other data or settings, which spent "
                    f"alpha = {spent:g}; this look would bring it to {spent + alpha:g}. Plan looks with SequentialAudit",
                )
            )
            if verdict == "different" and not any(look["verdict"] == "different" for look in earlier):
                verdict = "inconclusive"
        if verdict == "same-not-rejected" and (
            any(c.code == "cannot-reject" for c in cautions)
            or (draft["power"] is not None and draft["power"] < power_floor)
        ):
            verdict = "inconclusive"
            if draft["power"] is not None and draft["power"] < power_floor:
                cautions.append(
                    Caution(
                        "low-power",
                        f"power against the named distortion is {draft['power']:.2f}, below {power_floor:g}",
                    )
                )
        if draft["failure_rate"] > failure_limit:
            verdict = "inconclusive"
            cautions.append(
                Caution(
                    "too-many-failures",
                    f"{draft['failure_rate']:.1%} of the requests failed, above {failure_limit:.1%}",
                )
            )
        entry["verdict"] = verdict
        if not any(look["key"] == entry["key"] and _same_line(look, entry) for look in book.entries()):
            looks.append(entry)
        rows.append(
            Comparison(**draft, adjusted=float(p), verdict=verdict, spent_alpha=spent + alpha, cautions=tuple(cautions))
        )
    book.add(looks)
    return AuditReport(tuple(rows), alpha, correction, composite, repeats, vote, audit_id, settings)


def _key(settings: Mapping[str, Any], x: Samples, y: Samples) -> str:
    text = json.dumps(settings, sort_keys=True, default=str) + x.fingerprint() + y.fingerprint()
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _same_line(look: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    return all(look[k] == entry[k] for k in ("audit_id", "endpoint", "task", "references"))


def _earlier(entries: Sequence[dict[str, Any]], entry: Mapping[str, Any], y: Samples) -> list[dict[str, Any]]:
    """Earlier looks at this endpoint that count against the level: other data or settings under the same id, or less of the
    same data without one."""
    now = y.digests()
    out = []
    for look in entries:
        if not _same_line(look, entry) or look["key"] == entry["key"]:
            continue
        smaller = look["prompts"] != entry["prompts"] and _grown_from(look["prompts"], now)
        if entry["audit_id"] is not None or smaller:
            out.append(look)
    return out
