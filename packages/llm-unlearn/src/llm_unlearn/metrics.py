"""The paper's metrics on texts and losses, and their aggregates: model utility (MU) and forget efficacy (FE). No model here.

All metrics lie in [0, 1]. l(y) is the mean NLL a token of an answer, in nats. Section 4 and appendix of the paper; where a metric
differs between the conventions "closer-look" (this paper) and "tofu" (Maini et al. 2024), the convention is an argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import fmean, harmonic_mean
from typing import Any, Literal

import numpy as np

from chapbook_shared.validate import check_choice, import_extra

Convention = Literal["closer-look", "tofu"]
Kind = Literal["retain", "options", "forget"]
Encoder = Callable[[Sequence[str]], Any]
"""Texts -> one vector a text."""
NLI = Callable[[Sequence[str], Sequence[str]], Sequence[str]]
"""(premises, hypotheses) -> one label a pair; "entailment" counts."""

METRICS = ("rouge", "probability", "truth_ratio", "token_entropy", "cosine_similarity", "entailment")
FORGET_METRICS = ("rouge", "probability", "truth_ratio", "cosine_similarity", "entailment")
"""What FE is the mean of: token entropy has no truth to leak."""
TOFU_METRICS = ("rouge", "probability", "truth_ratio")


def rouge_l_recall(generated: Sequence[str], truths: Sequence[str]) -> list[float]:
    """ROUGE-L recall of each truth in the generation, Porter stemmer on. Needs the extra `eval`."""
    scorer_module = import_extra("rouge_score.rouge_scorer", "llm-unlearn[eval]")
    scorer = scorer_module.RougeScorer(["rougeL"], use_stemmer=True)
    return [
        float(scorer.score(truth, text)["rougeL"].recall)
        for text, truth in zip(_same_length(generated, truths), truths, strict=True)
    ]


def answer_probability(losses: Sequence[float], options: Sequence[Sequence[float]] | None = None) -> list[float]:
    """exp(-l(y)) of each answer; with the losses of wrong options, its share exp(-l(y)) / (exp(-l(y)) + sum_j exp(-l(y_j)))."""
    _no_nan("probability", losses)
    if options is None:
        return [math.exp(-loss) for loss in losses]
    shares = []
    for loss, wrong in zip(losses, _same_length(options, losses), strict=True):
        # Relative to the best, so that no sum underflows.
        all_losses = np.array([loss, *wrong], dtype=np.float64)
        weights = np.exp(all_losses.min() - all_losses)
        shares.append(float(weights[0] / weights.sum()))
    return shares


def truth_statistics(paraphrased: Sequence[float], perturbed: Sequence[Sequence[float]]) -> list[float]:
    """s = exp(mean_j l(y_j) - l(y)) of each item: how much likelier the paraphrased answer is than the perturbed ones."""
    _no_nan("truth ratio", paraphrased)
    for i, wrong in enumerate(_same_length(perturbed, paraphrased)):
        if len(wrong) == 0:
            raise ValueError(f"item {i} has no perturbed answer: the truth ratio needs at least one")
    return [math.exp(min(fmean(wrong) - loss, 700.0)) for loss, wrong in zip(paraphrased, perturbed, strict=True)]


def truth_ratio(statistics: Sequence[float], *, kind: Kind, convention: Convention = "closer-look") -> list[float]:
    """From `truth_statistics` to the truth ratio of each item.

    Retain-type sets: max(0, 1 - 1/s). Forget set: min(s, 1/s), which the closer-look convention turns into 1 - min(s, 1/s).
    """
    check_choice("convention", convention, ("closer-look", "tofu"))
    if kind != "forget":
        return [max(0.0, 1 - 1 / s) if s > 0 else 0.0 for s in statistics]
    closeness = [min(s, 1 / s) if s > 0 else 0.0 for s in statistics]
    return closeness if convention == "tofu" else [1 - c for c in closeness]


def token_entropy(token_ids: Sequence[Hashable], *, normalize: bool = True) -> float:
    """Entropy of the unigrams of one generation, over log2 of its length (in tokens, not in distinct ones); 0 up to one token."""
    n = len(token_ids)
    if n <= 1:
        return 0.0
    entropy = -sum(count / n * math.log2(count / n) for count in Counter(token_ids).values())
    entropy = max(entropy, 0.0)
    return entropy / math.log2(n) if normalize else entropy


def cosine_similarity(generated: Sequence[str], before: Sequence[str], *, encoder: Encoder) -> list[float]:
    """max(0, cosine) between the embeddings of each generation and of the answer before unlearning."""
    if not generated:
        return []
    left, right = (
        np.asarray(encoder(list(texts)), dtype=np.float64) for texts in (_same_length(generated, before), before)
    )
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    cosine = (left * right).sum(1) / np.where(norms > 0, norms, 1)
    return [float(value) for value in np.clip(cosine, 0, 1)]


def entailment_score(
    generated: Sequence[str],
    truths: Sequence[str],
    *,
    nli: NLI,
    truth_is_premise: bool,
    rouge: Sequence[float] | None = None,
) -> list[float]:
    """1 for each item where the premise entails the hypothesis, else 0; a ROUGE-L recall below 0.1 counts as not entailed.

    `truth_is_premise`: truth -> generation (TOFU's retain-type sets), or generation -> truth (forget sets, real-world data).
    """
    premises, hypotheses = (truths, generated) if truth_is_premise else (generated, truths)
    labels = nli(list(_same_length(premises, hypotheses)), list(hypotheses)) if generated else []
    recalls = rouge if rouge is not None else [1.0] * len(generated)
    return [
        float(label.lower() == "entailment" and recall >= 0.1) for label, recall in zip(labels, recalls, strict=True)
    ]


def model_utility(sets: Mapping[str, Mapping[str, float]]) -> float:
    """MU: harmonic mean of every metric of every retain-type set; 0 if any is 0. NaN is an error that names the metric."""
    values = [(f"{name} {metric}", value) for name, metrics in sets.items() for metric, value in metrics.items()]
    if not values:
        raise ValueError("model utility needs at least one metric of one retain-type set")
    for name, value in values:
        _in_range(name, value)
    return float(harmonic_mean([value for _, value in values]))


def forget_efficacy(metrics: Mapping[str, float]) -> float:
    """FE = 1 - mean of ROUGE, probability, truth ratio, cosine similarity and entailment on the forget set (those that are there)."""
    chosen = {name: metrics[name] for name in FORGET_METRICS if name in metrics}
    if not chosen:
        raise ValueError(
            f"forget efficacy needs some of {', '.join(FORGET_METRICS)}, got {', '.join(metrics) or 'none'}"
        )
    for name, value in chosen.items():
        _in_range(f"forget {name}", value)
    return 1 - fmean(chosen.values())


def ks_forget_quality(statistics: Sequence[float], retrained: Sequence[float]) -> float:
    """TOFU's forget quality: p-value of a two-sample Kolmogorov-Smirnov test between the truth ratios of the unlearned and of a retrained model."""
    stats = import_extra("scipy.stats", "llm-unlearn[eval]")
    return float(stats.ks_2samp(statistics, retrained).pvalue)


def sentence_encoder(name: str = "sentence-transformers/paraphrase-MiniLM-L6-v2", **kwargs: Any) -> Encoder:
    """The paper's encoder (or another), through sentence-transformers. Needs the extra `eval`."""
    library = import_extra("sentence_transformers", "llm-unlearn[eval]")
    model = library.SentenceTransformer(name, **kwargs)

    def encode(texts: Sequence[str]) -> Any:
        return model.encode(list(texts), show_progress_bar=False)

    encode.__qualname__ = f"sentence_encoder({name!r})"  # what a cache tells encoders apart by
    return encode


def nli_model(name: str = "sileod/deberta-v3-base-tasksource-nli", *, batch_size: int = 32, **kwargs: Any) -> NLI:
    """The paper's entailment model (or another sequence classifier with a label "entailment")."""
    from transformers import pipeline

    classify = pipeline("text-classification", model=name, **kwargs)
    labels = {str(label).lower() for label in (classify.model.config.id2label or {}).values()}
    if "entailment" not in labels:
        raise ValueError(f"{name} has no label 'entailment', only {', '.join(sorted(labels))}: give an NLI model")

    def label_pairs(premises: Sequence[str], hypotheses: Sequence[str]) -> list[str]:
        pairs = [{"text": p, "text_pair": h} for p, h in zip(premises, hypotheses, strict=True)]
        return [result["label"] for result in classify(pairs, batch_size=batch_size, truncation=True)]

    label_pairs.__qualname__ = f"nli_model({name!r})"
    return label_pairs


def _same_length(values: Sequence[Any], others: Sequence[Any]) -> Sequence[Any]:
    if len(values) != len(others):
        raise ValueError(f"there are {len(values)} items on one side and {len(others)} on the other")
    return values


def _no_nan(name: str, values: Sequence[float]) -> None:
    for i, value in enumerate(values):
        if math.isnan(value):
            raise ValueError(f"{name}: the loss of item {i} is NaN")


def _in_range(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value!r}")
