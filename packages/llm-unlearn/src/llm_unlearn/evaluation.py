"""`evaluate_unlearning`: the metrics of several question/answer sets, with what they add up to."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch

from chapbook_shared.jobs import atomic_write
from chapbook_shared.progress import Progress
from chapbook_shared.validate import check_choice, check_int, import_extra

from . import metrics as m
from .data import Item, answer_of, as_items, build_example, fingerprint, with_answer
from .reference import has_adapter
from .scoring import generate_answers, score_answers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Scenario = Literal["tofu", "real-world"]

_GENERATED = {"rouge", "token_entropy", "cosine_similarity", "entailment"}


@dataclass(frozen=True)
class QASet:
    """Items and what they are: `retain` and `forget` hold free answers; `options` (real authors, world facts) are scored against wrong options.

    Item columns besides question and answer, all optional: `paraphrased_answer`, `perturbed_answer` (a list of wrong answers), and
    `original_answer`, the model's answer before unlearning (default: the answer).
    """

    items: Sequence[Item]
    kind: m.Kind


@dataclass(frozen=True)
class SetResult:
    """One set: the mean of each metric, the values of each item, and what the model generated."""

    kind: m.Kind
    metrics: dict[str, float]
    per_item: dict[str, list[float]]
    generations: list[str]


@dataclass(frozen=True)
class UnlearnReport:
    """Results by set and the aggregates. `partial` says that some metric of the convention is missing, so that MU and FE must not be
    compared with complete ones; `n_metrics` says how many numbers each of them is made of."""

    sets: dict[str, SetResult]
    convention: m.Convention

    @property
    def retain_type(self) -> dict[str, dict[str, float]]:
        wanted = m.METRICS if self.convention == "closer-look" else m.TOFU_METRICS
        return {
            name: {k: v for k, v in result.metrics.items() if k in wanted}
            for name, result in self.sets.items()
            if result.kind != "forget"
        }

    @property
    def forget(self) -> dict[str, float]:
        """Means over the forget sets (there is usually one)."""
        results = [result.metrics for result in self.sets.values() if result.kind == "forget"]
        names = [name for name in m.METRICS if results and all(name in result for result in results)]
        return {name: fmean(result[name] for result in results) for name in names}

    @property
    def model_utility(self) -> float | None:
        """MU over all retain-type sets; None if there is none."""
        values = {name: metrics for name, metrics in self.retain_type.items() if metrics}
        return m.model_utility(values) if values else None

    @property
    def model_utility_retain(self) -> float | None:
        """MU over the sets of kind retain alone."""
        values = {n: v for n, v in self.retain_type.items() if v and self.sets[n].kind == "retain"}
        return m.model_utility(values) if values else None

    @property
    def forget_efficacy(self) -> float | None:
        """FE on the forget set; None if there is none, or under the TOFU convention (which has `ks_forget_quality`)."""
        forget = {name: value for name, value in self.forget.items() if name in m.FORGET_METRICS}
        return m.forget_efficacy(forget) if forget and self.convention == "closer-look" else None

    @property
    def n_metrics(self) -> dict[str, int]:
        forget = [name for name in self.forget if name in m.FORGET_METRICS]
        return {"model_utility": sum(map(len, self.retain_type.values())), "forget_efficacy": len(forget)}

    @property
    def partial(self) -> bool:
        wanted = m.METRICS if self.convention == "closer-look" else m.TOFU_METRICS
        complete = all(set(wanted) <= set(result.metrics) for result in self.sets.values() if result.kind != "forget")
        forget = not any(r.kind == "forget" for r in self.sets.values()) or set(m.FORGET_METRICS) <= set(self.forget)
        return not (complete and (forget or self.convention == "tofu"))

    def to_dict(self) -> dict[str, Any]:
        """Everything but the per-item values, ready for `json.dumps`."""
        return {
            "convention": self.convention,
            "sets": {name: {"kind": r.kind, **r.metrics} for name, r in self.sets.items()},
            "forget_efficacy": self.forget_efficacy,
            "model_utility": self.model_utility,
            "model_utility_retain": self.model_utility_retain,
            "n_metrics": self.n_metrics,
            "partial": self.partial,
        }

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row a set and a column a metric. Needs the extra `eval`."""
        pandas = import_extra("pandas", "llm-unlearn[eval]")
        return pandas.DataFrame({name: result.metrics for name, result in self.sets.items()}).T


def kind_of(name: str) -> m.Kind:
    """What a set is by its name: forget*, world*/real* (options), anything else retain."""
    folded = name.lower()
    if folded.startswith("forget"):
        return "forget"
    return "options" if folded.startswith(("world", "real")) else "retain"


def evaluate_unlearning(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    sets: Mapping[str, QASet | Sequence[Item] | Any],
    *,
    metrics: Sequence[str] | Literal["all", "available"] = "available",
    convention: m.Convention = "closer-look",
    scenario: Scenario = "tofu",
    encoder: m.Encoder | None = None,
    nli: m.NLI | None = None,
    before: Mapping[str, Sequence[str]] | None = None,
    max_items: int | None = 300,
    max_new_tokens: int = 200,
    max_length: int = 512,
    batch_size: int = 16,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> UnlearnReport:
    """Evaluate a model on named sets (`QASet`, or rows whose kind `kind_of` reads from the name).

    metrics: "all" (an error if an encoder or NLI model is missing), "available" (what items and models allow; the report is then
        marked `partial`), or names of `metrics.METRICS`.
    encoder, nli: `metrics.sentence_encoder()` and `metrics.nli_model()`, or any callables.
    before: for each set the answers of the model before unlearning, for the cosine similarity.
    scenario: in "tofu" the truth is the premise of the entailment on retain-type sets; in "real-world" the generation always is.
    max_items: the first so many of a set (the paper's 300); None for all.
    cache_dir: results of a set are kept there under a hash of the weights, the data, their token ids and the settings, and taken from
        there. Your own encoder and NLI model count by their qualified names.
    """
    check_choice("convention", convention, ("closer-look", "tofu"))
    check_choice("scenario", scenario, ("tofu", "real-world"))
    if max_items is not None:
        check_int("max_items", max_items, minimum=1)
    wanted = _wanted(metrics, encoder, nli)
    named = {name: _as_set(name, given, max_items) for name, given in sets.items()}
    if not named:
        raise ValueError("sets is empty: give at least one set of items")
    for name, qa in named.items():
        if not qa.items:
            raise ValueError(f"set {name!r} is empty")
    weights = _weights_hash(model) if cache_dir is not None else ""
    results: dict[str, SetResult] = {}
    with (progress or Progress()).task("evaluating", len(named)) as task:
        for name, qa in named.items():
            earlier = (before or {}).get(name)
            strict = not isinstance(metrics, str) or metrics == "all"
            settings = [
                weights,
                fingerprint(qa.items),
                _tokens_hash(tokenizer, qa.items, max_length) if weights else "",
                qa.kind,
                strict,
                sorted(wanted),
                *(convention, scenario, max_new_tokens, max_length),
                earlier,
                *(getattr(f, "__qualname__", repr(f)) if f else None for f in (encoder, nli)),
            ]

            def compute(qa: QASet = qa, earlier: Sequence[str] | None = earlier, strict: bool = strict) -> SetResult:
                return _evaluate_set(
                    model,
                    tokenizer,
                    qa,
                    wanted,
                    convention,
                    truth_is_premise=scenario == "tofu" and qa.kind != "forget",
                    encoder=encoder,
                    nli=nli,
                    before=earlier,
                    generation={"max_new_tokens": max_new_tokens, "batch_size": batch_size},
                    scoring={"max_length": max_length, "batch_size": batch_size},
                    strict=strict,
                )

            results[name] = _cached(cache_dir, settings, compute)
            task.advance()
    report = UnlearnReport(results, convention)
    if report.partial:
        logger.warning(
            "partial results: MU and FE leave out some metrics (%s), so do not compare them with complete ones",
            report.n_metrics,
        )
    return report


def _wanted(metrics: Sequence[str] | str, encoder: m.Encoder | None, nli: m.NLI | None) -> tuple[str, ...]:
    if metrics in ("all", "available"):
        wanted: tuple[str, ...] = m.METRICS
    else:
        wanted = (metrics,) if isinstance(metrics, str) else tuple(metrics)
        for name in wanted:
            check_choice("metrics", name, ("all", "available", *m.METRICS))
    missing = [
        name
        for name, given in (("cosine_similarity", encoder), ("entailment", nli))
        if name in wanted and given is None
    ]
    if missing and metrics != "available":
        raise ValueError(
            f"{' and '.join(missing)} need models: pass encoder=sentence_encoder() and nli=nli_model(), or metrics='available' to leave them out"
        )
    return tuple(name for name in wanted if name not in missing)


def _as_set(name: str, given: Any, max_items: int | None) -> QASet:
    qa = given if isinstance(given, QASet) else QASet(as_items(given), kind_of(name))
    return QASet(list(qa.items)[:max_items], qa.kind)


def _evaluate_set(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    qa: QASet,
    wanted: Sequence[str],
    convention: m.Convention,
    *,
    truth_is_premise: bool,
    encoder: m.Encoder | None,
    nli: m.NLI | None,
    before: Sequence[str] | None,
    generation: dict[str, Any],
    scoring: dict[str, Any],
    strict: bool,
) -> SetResult:
    items = list(qa.items)
    truths = [answer_of(item) for item in items]
    values: dict[str, list[float]] = {}
    texts: list[str] = []

    def score(answers: Sequence[Item]) -> list[float]:
        return [s.mean for s in score_answers(model, answers, tokenizer, **scoring)]

    def score_lists(lists: Sequence[Sequence[str]]) -> list[list[float]]:
        flat = score([with_answer(item, text) for item, texts in zip(items, lists, strict=True) for text in texts])
        iterator = iter(flat)
        return [[next(iterator) for _ in texts] for texts in lists]

    losses = score(items) if {"probability", "truth_ratio"} & set(wanted) else []
    wrong = [list(item.get("perturbed_answer") or []) for item in items]
    has_wrong = all(wrong)
    wrong_losses = score_lists(wrong) if has_wrong and {"probability", "truth_ratio"} & set(wanted) else []
    if "probability" in wanted and (qa.kind != "options" or has_wrong):
        values["probability"] = m.answer_probability(losses, wrong_losses if qa.kind == "options" else None)
    if "truth_ratio" in wanted and has_wrong:
        if qa.kind != "options" and all("paraphrased_answer" in item for item in items):
            right = score([with_answer(item, str(item["paraphrased_answer"])) for item in items])
        else:
            right = losses
        statistics = m.truth_statistics(right, wrong_losses)
        values["truth_ratio"] = m.truth_ratio(statistics, kind=qa.kind, convention=convention)
        values["truth_statistic"] = statistics
    if strict and not has_wrong and ("truth_ratio" in wanted or (qa.kind == "options" and "probability" in wanted)):
        raise ValueError(
            "some items have no perturbed_answer, which truth_ratio (and probability among options) needs: add wrong answers, or choose metrics"
        )
    if _GENERATED & set(wanted):
        answers = generate_answers(model, tokenizer, items, **generation)
        texts = [answer.text for answer in answers]
        rouge = m.rouge_l_recall(texts, truths) if {"rouge", "entailment"} & set(wanted) else []
        if "rouge" in wanted:
            values["rouge"] = rouge
        if "token_entropy" in wanted:
            values["token_entropy"] = [m.token_entropy(answer.token_ids) for answer in answers]
        if "cosine_similarity" in wanted and encoder is not None:
            earlier = before or [
                str(item.get("original_answer", truth)) for item, truth in zip(items, truths, strict=True)
            ]
            values["cosine_similarity"] = m.cosine_similarity(texts, earlier, encoder=encoder)
        if "entailment" in wanted and nli is not None:
            values["entailment"] = m.entailment_score(
                texts, truths, nli=nli, truth_is_premise=truth_is_premise, rouge=rouge
            )
    means = {name: fmean(values[name]) for name in m.METRICS if name in values}
    return SetResult(qa.kind, means, values, texts)


def _cached(folder: str | Path | None, settings: Any, compute: Callable[[], SetResult]) -> SetResult:
    if folder is None:
        return compute()
    Path(folder).mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode("utf-8")).hexdigest()[:24]
    path = Path(folder) / f"{key}.json"
    if path.exists():
        return SetResult(**json.loads(path.read_text(encoding="utf-8")))
    result = compute()
    with atomic_write(path) as file:
        json.dump(asdict(result), file, ensure_ascii=False)
    return result


def _in_order(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else repr(value)


def _tokens_hash(tokenizer: Any, items: Sequence[Item], max_length: int) -> str:
    """Of the ids the model sees: they change with the tokenizer and its chat template."""
    ids = [build_example(tokenizer, item, max_length=max_length).input_ids for item in items]
    return hashlib.sha256(json.dumps(ids).encode("utf-8")).hexdigest()


def _weights_hash(model: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    if has_adapter(model):  # scales and the active adapter are no weights
        adapters = {name: config.to_dict() for name, config in model.peft_config.items()}
        kept = {"active": model.active_adapter, "adapters": adapters}
        digest.update(json.dumps(kept, sort_keys=True, default=_in_order).encode("utf-8"))
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode("utf-8"))
        if torch.is_tensor(value):
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
