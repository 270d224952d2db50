import inspect
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from llm_unlearn import UnlearnConfig, UnlearningDiverged, UnlearnTrainer, losses, register_forget_loss


def config(tmp_path, **kwargs):
    defaults = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 2,
        "learning_rate": 5e-3,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
        "warmup_epochs": 0,
        "rmu_layer": 1,
    }
    return UnlearnConfig(**(defaults | kwargs))


@pytest.fixture
def make(tmp_path, tiny, forget, retain):
    def make(model=None, *, peft_config=None, ref_model=None, callbacks=None, refusals=None, **kwargs):
        return UnlearnTrainer(
            tiny.make_model() if model is None else model,
            config(tmp_path, **kwargs),
            forget_dataset=forget,
            retain_dataset=retain,
            processing_class=tiny.make_tokenizer(),
            peft_config=peft_config,
            ref_model=ref_model,
            callbacks=callbacks,
            refusals=refusals,
        )

    return make


def lora(**kwargs):
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **kwargs)


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same_weights(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], **(tolerance or {"atol": 0, "rtol": 0}), msg=name)


def batch_of(trainer):
    data = trainer.train_dataset
    return trainer.data_collator([data[i] for i in range(len(data))])


def reference_loss(trainer, model, ref_model):
    """The same loss from the public functions, one padded forward a part."""
    data, args = trainer.train_dataset, trainer.args
    logits, ref, labels, mask = {}, {}, {}, {}
    for part in trainer.method.parts:
        examples = [data[i].examples[part] for i in range(len(data))]
        width = max(len(e.input_ids) for e in examples)
        ids = torch.tensor([list(e.input_ids) + [0] * (width - len(e.input_ids)) for e in examples])
        mask[part] = torch.tensor([[1] * len(e.input_ids) + [0] * (width - len(e.input_ids)) for e in examples])
        labels[part] = torch.where(mask[part].bool(), ids, -100)
        for row, example in enumerate(examples):
            labels[part][row, : example.prompt_length] = -100
        logits[part] = model(input_ids=ids, attention_mask=mask[part]).logits
        with torch.no_grad():
            ref[part] = ref_model(input_ids=ids, attention_mask=mask[part]).logits
    nll = {p: losses.sequence_nll(logits[p], labels[p]) for p in logits}
    ref_nll = {p: losses.sequence_nll(ref[p], labels[p]) for p in logits}
    forget = {
        "GA": lambda: losses.ga(logits["forget"], labels["forget"]),
        "NPO": lambda: losses.npo(nll["forget"], ref_nll["forget"]),
        "DPO": lambda: losses.dpo(nll["forget"], nll["forget_idk"], ref_nll["forget"], ref_nll["forget_idk"]),
        "IDK": lambda: losses.idk(logits["forget_idk"], labels["forget_idk"]),
        "ME": lambda: losses.me(logits["forget"], losses.token_positions(mask["forget"])),
    }[trainer.method.forget.name]()
    regularizer = {
        "GD": lambda: losses.gd(logits["retain"], labels["retain"]),
        "KL": lambda: losses.kl(logits["retain"], ref["retain"], mask["retain"].bool()),
        "AP": lambda: losses.ap(nll["retain"], nll["retain_idk"]),
    }[trainer.method.regularizer.name]()
    return args.forget_coeff * forget + args.reg_coeff * regularizer


@pytest.mark.parametrize("method", ["ME+GD", "IDK+AP", "NPO+KL", "DPO+AP", "GA+KL"])
@pytest.mark.parametrize("padding_free", [True, False])
def test_the_loss_and_gradient_of_a_batch_are_those_of_the_public_functions(make, tiny, method, padding_free):
    model, other = tiny.make_model(), tiny.make_model(seed=9)
    trainer = make(model, ref_model=other, method=method, padding_free=padding_free, forget_coeff=0.3)
    trainer.model.train()
    ours = trainer.compute_loss(model, batch_of(trainer))
    theirs = reference_loss(trainer, model, other)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    gradients = [torch.autograd.grad(loss, model.parameters(), allow_unused=True) for loss in (ours, theirs)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("method", ["SimNPO+GD", "WGA+GD", "RMU+RMU", "GA", "ME+AP", "NPO+GD"])
def test_every_other_method_trains(make, method):
    trainer = make(method=method, num_train_epochs=4)
    before = trainer.evaluate()
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert all("loss/forget" in row for row in logs)
    assert ("loss/retain" in logs[0]) == ("+" in method)
    after = trainer.evaluate()
    if method == "GA":
        assert after["eval_forget_probability"] < before["eval_forget_probability"]


def test_logged_parts_add_up_to_the_loss(make):
    trainer = make(method="ME+GD", forget_coeff=0.5, gradient_accumulation_steps=2, logging_steps=2)
    trainer.train()
    for row in trainer.state.log_history:
        if "loss" in row:
            assert row["loss"] == pytest.approx(0.5 * row["loss/forget"] + row["loss/retain"], rel=1e-4)


def test_official_padded_positions(make, tiny):
    """Every position but the last of the 40 columns counts, padding too."""
    trainer = make(method="ME", me_positions="padded", pad_to=40, max_length=40)
    batch = batch_of(trainer)
    assert batch["counts"][0, 1] == len(trainer.train_dataset) * 39
    model = trainer.model
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    everything = torch.ones_like(batch["input_ids"])
    expected = losses.me(logits, losses.token_positions(everything))
    assert trainer.compute_loss(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)
    diluted = make(method="ME").compute_loss(model, batch_of(make(method="ME")))
    assert diluted.item() != pytest.approx(expected.item(), rel=1e-3)


class Crash(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("precompute", [False, True])
def test_a_resumed_run_ends_in_the_same_weights(make, tmp_path, precompute):
    settings = {
        "method": "DPO+AP",
        "precompute_ref": precompute,
        "save_strategy": "steps",
        "save_steps": 1,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 1,
        "num_train_epochs": 3,
    }
    peft = lora(lora_dropout=0.2)  # dropout: the state of the generators must be restored too
    whole = make(peft_config=peft, **settings)
    whole.train()
    shutil.rmtree(tmp_path)
    broken = make(peft_config=peft, callbacks=[Crash(5)], **settings)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = make(peft_config=peft, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step == 9
    assert_same_weights(weights(resumed), weights(whole))


@pytest.mark.parametrize("method", ["NPO+GD", "DPO+GD"])
def test_precomputed_reference_scores_equal_the_frozen_copy(make, method):
    copy, scored = make(method=method), make(method=method, precompute_ref=True)
    copy.train()
    scored.train()
    assert copy._ref_model is not None
    assert scored._ref_model is None
    assert_same_weights(weights(copy), weights(scored), atol=1e-5, rtol=1e-4)


def test_a_fresh_adapter_switched_off_is_the_reference(make, tiny):
    adapter = make(method="NPO+KL", peft_config=lora())
    assert adapter._ref_model is None
    base = {name: p.clone() for name, p in adapter.model.named_parameters() if not p.requires_grad}
    adapter.train()
    given = make(method="NPO+KL", peft_config=lora(), ref_model=tiny.make_model())
    given.train()
    assert_same_weights(weights(adapter), weights(given), atol=1e-5, rtol=1e-4)
    for name, parameter in adapter.model.named_parameters():
        if name in base:
            assert torch.equal(parameter, base[name])


def test_a_trained_adapter_is_kept_as_the_reference_in_a_second_one(make, tiny):
    torch.manual_seed(0)
    model = get_peft_model(tiny.make_model(), lora())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    trainer = make(model, method="NPO+KL")
    assert trainer._ref_adapter == "reference"
    batch = batch_of(trainer)
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    # Model and reference are still one: NPO is (2/beta) log 2 and KL is 0.
    assert loss.item() == pytest.approx(20 * 0.693147, rel=1e-4)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable
    assert not any("reference" in name for name in trainable)
    before = {name: p.clone() for name, p in model.named_parameters() if ".reference." in name}
    trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)


def test_reference_free_methods_keep_no_second_model(make):
    for method in ("ME+GD", "IDK+AP"):
        assert make(method=method)._ref_model is None


def test_frozen_copy_is_logged_with_its_size(make, caplog):
    with caplog.at_level(logging.WARNING):
        make(method="NPO+KL")
    assert "frozen copy" in caplog.text
    assert "MiB" in caplog.text


def test_gradient_checkpointing_with_an_adapter(make):
    plain = make(method="ME+GD", peft_config=lora())
    plain.train()
    checkpointed = make(method="ME+GD", peft_config=lora(), gradient_checkpointing=True)
    checkpointed.train()
    assert_same_weights(weights(plain), weights(checkpointed), atol=1e-5, rtol=1e-4)


def test_bfloat16_model_trains(make, tiny):
    trainer = make(tiny.make_model().to(torch.bfloat16), method="ME+GD")
    trainer.train()
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_bf16_autocast(make):
    trainer = make(method="NPO+KL", bf16=True)
    trainer.train()
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_packing_is_found_out_and_models_that_cannot_are_padded(make, tiny):
    assert make().data_collator.packed
    from transformers import BloomConfig, BloomForCausalLM

    bloom = BloomForCausalLM(BloomConfig(vocab_size=100, hidden_size=16, n_layer=1, n_head=2))
    trainer = make(bloom, method="ME+GD")
    assert not trainer.data_collator.packed
    trainer.train()
    with pytest.raises(ValueError, match="takes no position_ids"):
        make(bloom, padding_free=True)


def test_packing_is_found_out_although_rounding_depends_on_shapes(make):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    wide = LlamaConfig(
        vocab_size=2000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4
    )
    assert make(LlamaForCausalLM(wide)).data_collator.packed


def test_learned_positions_pack_too(make):
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    results = []
    for padding_free in (True, False):
        trainer = make(gpt2, method="IDK+AP", padding_free=padding_free)
        trainer.model.eval()
        results.append(trainer.compute_loss(gpt2, batch_of(trainer)).item())
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_stop_rule_saves_the_last_good_weights(make, tiny):
    trainer = make(method="GA", learning_rate=0.5, num_train_epochs=50, max_forget_loss=8.0)
    with pytest.raises(UnlearningDiverged, match="passed max_forget_loss=8 at step") as error:
        trainer.train()
    assert error.value.step > 1
    assert (error.value.checkpoint / "model.safetensors").exists()


def test_a_loss_that_is_not_finite_stops_before_the_step(make):
    @register_forget_loss("NaN-test")
    def broken(parts, hyper):
        return parts["forget"].token_nll.sum() * float("nan")

    trainer = make(method="NaN-test+GD")
    before = weights(trainer)
    with pytest.raises(UnlearningDiverged, match="not finite at step 1"):
        trainer.train()
    assert_same_weights(weights(trainer), before)


def test_checkpoint_loads_as_an_ordinary_model(make, tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = make(method="ME+GD")
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert_same_weights(dict(loaded.state_dict()), weights(trainer))
    by_name = UnlearnTrainer(
        str(tmp_path / "final"),
        config(tmp_path, method="GA"),
        forget_dataset=[{"text": "Ada was born"}],
    )
    by_name.train()


def test_named_sets_are_evaluated(make, forget):
    metrics = make(method="ME+GD").evaluate({"world": forget[:2]})
    assert 0 < metrics["eval_world_probability"] < 1
    trainer = make(method="ME+GD", eval_strategy="epoch")
    trainer.train()
    assert sum("eval_retain_probability" in row for row in trainer.state.log_history) == 2


def test_warm_up_is_one_epoch_or_none_if_an_epoch_is_one_step(tmp_path):
    assert config(tmp_path, warmup_epochs=1.0).get_warmup_steps(10) == 5
    assert config(tmp_path, warmup_epochs=1.0).get_warmup_steps(2) == 0
    assert config(tmp_path, warmup_steps=3).get_warmup_steps(10) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "NPQ+GD"}, "Did you mean 'NPO'"),
        ({"beta": 0}, "beta must be positive"),
        ({"forget_coeff": -1}, "forget_coeff must be >= 0"),
        ({"me_direction": "up"}, "me_direction must be one of"),
        ({"me_positions": "padded", "method": "ME+GD"}, "pass pad_to"),
        ({"method": "GA+KL", "kl_positions": "all", "padding_free": True}, "no padding to count"),
        ({"method": "NPO+KL", "precompute_ref": True}, "needs the reference's logits"),
        ({"pad_to": 500}, "pad_to must be >= max_length, got 500 and 512: set max_length=500 too"),
        ({"max_forget_loss": 5.0, "method": "IDK+AP"}, "which IDK.AP never reads"),
        ({"num_train_epochs": -1}, "num_train_epochs must be positive"),
        ({"learning_rate": "fast"}, "learning_rate must be >= 0 and finite, got 'fast'"),
        ({"seed": "one"}, "seed must be an integer, got 'one'"),
        ({"learning_rate": float("nan")}, "learning_rate must be >= 0 and finite"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be >= 1"),
        ({"remove_unused_columns": True}, "must be False"),
        ({"pairing": "random"}, "pairing must be one of"),
    ],
)
def test_wrong_settings(tmp_path, settings, message):
    settled = config(tmp_path)
    for name, value in settings.items():
        setattr(settled, name, value)
    with pytest.raises((ValueError, TypeError), match=message):
        settled.__post_init__()


def test_sets_are_checked_before_a_model_is_loaded(tmp_path, forget):
    with pytest.raises(ValueError, match="forget set is empty"):
        UnlearnTrainer("no/such-model", config(tmp_path), forget_dataset=[], retain_dataset=forget)
    with pytest.raises(ValueError, match="needs a retain set"):
        UnlearnTrainer("no/such-model", config(tmp_path), forget_dataset=forget, retain_dataset=[])


def test_an_adapter_on_an_adapter_and_missing_models_are_refused(make, tiny, tmp_path, forget):
    with pytest.raises(ValueError, match="has an adapter already"):
        make(get_peft_model(tiny.make_model(), lora()), peft_config=lora())
    with pytest.raises(ValueError, match="model must be"):
        UnlearnTrainer(None, config(tmp_path, method="GA"), forget_dataset=forget)


def test_a_model_that_cannot_be_written_back_is_explained(make, monkeypatch, tmp_path):
    trainer = make(method="GA")

    def refuse(*args, **kwargs):
        raise ValueError("The model is quantized with QuantizationMethod.GGUF and is not serializable")

    monkeypatch.setattr(trainer.model, "save_pretrained", refuse)
    with pytest.raises(ValueError, match="unlearn with peft_config and save the adapter"):
        trainer.save_model(str(tmp_path / "x"))


def test_datasets_come_in_as_they_are(tmp_path, tiny, forget, retain):
    from datasets import Dataset

    trainer = UnlearnTrainer(
        tiny.make_model(),
        config(tmp_path, method="ME+GD"),
        forget_dataset=Dataset.from_list(forget),
        retain_dataset=Dataset.from_list(retain),
        processing_class=tiny.make_tokenizer(),
    )
    trainer.train()
    assert json.dumps(trainer.state.log_history)


def test_a_second_model_under_deepspeed_is_refused(model):
    from types import SimpleNamespace

    from llm_unlearn.reference import prepare_copy

    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=object()))
    with pytest.raises(ValueError, match="precompute_ref=True"):
        inspect.unwrap(prepare_copy)(accelerator, model)


def test_a_checkpoint_cut_short_is_passed_over(make, tmp_path):
    settings = {"method": "ME+GD", "save_strategy": "steps", "save_steps": 1, "num_train_epochs": 2}
    whole = make(**settings)
    whole.train()
    last = max(Path(whole.args.output_dir).glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    (last / "trainer_state.json").write_text('{"epoch":', encoding="utf-8")
    resumed = make(**settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step
    assert_same_weights(weights(resumed), weights(whole))


def test_a_layer_that_is_not_there(make):
    with pytest.raises(ValueError, match="rmu_layer must be < 3 for this model, got 9"):
        make(method="RMU+RMU", rmu_layer=9).train()
