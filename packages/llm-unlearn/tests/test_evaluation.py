import copy
import json
import logging
import math

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from llm_unlearn import QASet, evaluate_unlearning
from llm_unlearn.evaluation import _weights_hash, kind_of
from llm_unlearn.metrics import METRICS
from llm_unlearn.scoring import generate_answers, score_answers


def encoder(texts):
    return np.array([[len(t), t.count("a") + 1.0] for t in texts])


def nli(premises, hypotheses):
    return ["entailment" if h in p else "neutral" for p, h in zip(premises, hypotheses, strict=True)]


def rich(items):
    return [
        {**item, "paraphrased_answer": f"say {item['answer']}", "perturbed_answer": ["a pilot", "gold in baku"]}
        for item in items
    ]


@pytest.fixture
def sets(forget, retain):
    return {"retain": rich(retain[:4]), "forget": rich(forget), "world": rich(retain[4:7])}


@pytest.fixture
def evaluate(model, tokenizer, sets):
    def evaluate(**kwargs):
        return evaluate_unlearning(model, tokenizer, kwargs.pop("sets", sets), max_new_tokens=6, **kwargs)

    return evaluate


def test_complete_report(evaluate):
    report = evaluate(metrics="all", encoder=encoder, nli=nli)
    assert not report.partial
    assert report.n_metrics == {"model_utility": 12, "forget_efficacy": 5}
    assert 0 <= report.forget_efficacy <= 1
    assert 0 <= report.model_utility <= 1
    assert report.to_frame().shape == (3, 6)
    assert json.loads(json.dumps(report.to_dict()))["sets"]["world"]["kind"] == "options"


def test_missing_models_make_it_partial_or_are_asked_for(evaluate, caplog):
    with caplog.at_level(logging.WARNING):
        report = evaluate()
    assert report.partial
    assert report.n_metrics == {"model_utility": 8, "forget_efficacy": 3}
    assert "partial results" in caplog.text
    with pytest.raises(ValueError, match="cosine_similarity and entailment need models"):
        evaluate(metrics="all")
    with pytest.raises(ValueError, match="metrics must be one of"):
        evaluate(metrics=["bleu"])


def test_items_without_wrong_answers(evaluate, retain, forget):
    plain = {"retain": retain, "forget": forget}
    report = evaluate(sets=plain)
    assert "truth_ratio" not in report.sets["retain"].metrics
    with pytest.raises(ValueError, match="no perturbed_answer"):
        evaluate(sets=plain, metrics=["truth_ratio"])


def test_tofu_convention(evaluate):
    ours, theirs = evaluate(metrics=["truth_ratio"]), evaluate(metrics=["truth_ratio"], convention="tofu")
    pair = [r.sets["forget"].metrics["truth_ratio"] for r in (ours, theirs)]
    assert sum(pair) == pytest.approx(1)
    assert theirs.forget_efficacy is None
    assert evaluate(metrics=["rouge", "probability", "truth_ratio"], convention="tofu").partial is False


def test_probability_is_exp_of_the_mean_loss(evaluate, model, tokenizer, sets):
    report = evaluate(metrics=["probability"])
    item = sets["forget"][0]
    ids = tokenizer(f"Question: {item['question']}\nAnswer: {item['answer']}")["input_ids"] + [tokenizer.eos_token_id]
    n = len(tokenizer(f"Question: {item['question']}\nAnswer:")["input_ids"])
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    mean = sum(log_p[t - 1, ids[t]].item() for t in range(n, len(ids))) / (len(ids) - n)
    assert report.sets["forget"].per_item["probability"][0] == pytest.approx(math.exp(mean), rel=1e-4)


def test_batches_do_not_change_scores_or_generations(model, tokenizer, retain):
    together = score_answers(model, retain, tokenizer, batch_size=7)
    alone = score_answers(model, retain, tokenizer, batch_size=1)
    assert [s.nll for s in together] == pytest.approx([s.nll for s in alone], rel=1e-5)
    assert [s.tokens for s in together] == [s.tokens for s in alone]
    texts = [generate_answers(model, tokenizer, retain, batch_size=b, max_new_tokens=5) for b in (1, 6)]
    assert texts[0] == texts[1]


def test_model_and_tokenizer_are_left_as_they_were(evaluate, model, tokenizer):
    model.train()
    side = tokenizer.padding_side
    state = torch.random.get_rng_state()
    evaluate()
    assert model.training
    assert tokenizer.padding_side == side
    assert tokenizer.pad_token is None
    assert torch.equal(state, torch.random.get_rng_state())


def test_long_questions_get_as_much_room(model, tokenizer):
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    items = [{"question": "who is Ada " * n, "answer": "Ada"} for n in (1, 30)]
    lengths = [len(g.token_ids) for g in generate_answers(model, tokenizer, items, max_new_tokens=7)]
    assert lengths == [7, 7]


def test_cache_is_keyed_by_weights_data_and_settings(evaluate, model, tmp_path, sets, monkeypatch):
    first = evaluate(cache_dir=tmp_path)
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == 3
    with monkeypatch.context() as patch:
        patch.setattr("llm_unlearn.evaluation.generate_answers", lambda *a, **k: pytest.fail("not from the cache"))
        assert evaluate(cache_dir=tmp_path).to_dict() == first.to_dict()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert evaluate(cache_dir=tmp_path).to_dict() != first.to_dict()
    assert len(list(tmp_path.glob("*.json"))) == 6
    evaluate(cache_dir=tmp_path, sets={"retain": sets["retain"][:2]})
    assert len(list(tmp_path.glob("*.json"))) == 7


def test_cache_tells_tokenisations_adapters_and_strictness_apart(evaluate, model, tokenizer, tmp_path, retain):
    sets = {"retain": retain[:2]}
    evaluate(cache_dir=tmp_path, sets=sets)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    evaluate(cache_dir=tmp_path, sets=sets)
    assert len(list(tmp_path.glob("*.json"))) == 2
    with pytest.raises(ValueError, match="no perturbed_answer"):
        evaluate(cache_dir=tmp_path, sets=sets, metrics=list(METRICS), encoder=encoder, nli=nli)
    hashes = set()
    for alpha in (8, 16):
        adapted = get_peft_model(
            copy.deepcopy(model), LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj", "v_proj"])
        )
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.ones_(parameter)
        hashes.add(_weights_hash(adapted))
    assert len(hashes) == 2


def test_answers_before_unlearning_are_compared(evaluate, sets):
    seen = []

    def spy(texts):
        seen.append(list(texts))
        return encoder(texts)

    evaluate(
        metrics=["cosine_similarity"], encoder=spy, before={"forget": ["old"] * 5}, sets={"forget": sets["forget"]}
    )
    assert seen[1] == ["old"] * 5


def test_kinds_and_bad_sets(evaluate, retain):
    assert [kind_of(n) for n in ("forget01", "real_authors", "world_facts", "retain", "neighbours")] == [
        "forget", "options", "options", "retain", "retain",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="sets is empty"):
        evaluate(sets={})
    with pytest.raises(ValueError, match="set 'x' is empty"):
        evaluate(sets={"x": []})
    report = evaluate(sets={"x": QASet(retain, "forget")}, metrics=["probability"], max_items=2)
    assert report.model_utility is None
    assert len(report.sets["x"].per_item["probability"]) == 2


def test_an_answer_beyond_the_length_is_an_error_not_nan(model, tokenizer):
    with pytest.raises(ValueError, match="item 0 has no answer token within max_length=5"):
        score_answers(model, [{"question": "who is Ada born", "answer": "x"}], tokenizer, max_length=5)
