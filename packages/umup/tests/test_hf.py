"""The transformers model, with the real library."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from umup.hf import UmupConfig, UmupForCausalLM, UmupTrainer
from umup.optim import SGD, check_optimizer, get_param_groups
from umup.roles import parameter_roles


def config(**kwargs):
    defaults = {
        "vocab_size": 31,
        "hidden_size": 32,
        "head_dim": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "max_position_embeddings": 32,
    }
    return UmupConfig(**(defaults | kwargs))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return UmupForCausalLM(config())


def test_weights_start_unit_normal_and_logits_small(model):
    for parameter in model.parameters():
        assert parameter.std().item() == pytest.approx(1, abs=0.1)
    logits = model(torch.randint(31, (2, 16))).logits
    assert logits.std().item() == pytest.approx(32**-0.5, rel=0.15)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_generating_with_a_cache_equals_the_full_pass(attention):
    torch.manual_seed(0)
    model = UmupForCausalLM(config(attn_implementation=attention)).double().eval()
    ids = torch.randint(31, (2, 5))
    cached = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=True, pad_token_id=0)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=False, pad_token_id=0)
    assert cached.shape == (2, 17)
    assert torch.equal(cached, plain)
    full = model(ids).logits
    out = model(ids[:, :3], use_cache=True)
    step = [out.logits]
    for i in (3, 4):
        out = model(ids[:, i : i + 1], cache=out.cache, use_cache=True)
        step.append(out.logits)
    torch.testing.assert_close(torch.cat(step, 1), full, rtol=1e-9, atol=1e-10)


def test_the_caches_older_name_is_understood(model):
    ids = torch.randint(31, (1, 6))
    first = model(ids[:, :4], use_cache=True)
    with pytest.warns(FutureWarning, match="past_key_values"):
        rest = model(ids[:, 4:], past_key_values=first.cache)
    torch.testing.assert_close(rest.logits, model(ids).logits[:, 4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_a_padded_batch_generates_what_each_row_alone_does(model, options):
    model = model.double().eval()
    ids = torch.randint(1, 31, (2, 6))
    ids[0, :3] = 0
    mask = (ids != 0).long()
    more = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}  # past the positions it was made for
    both = model.generate(ids, attention_mask=mask, **more, **options)
    alone = model.generate(ids[:1, 3:], **more, use_cache=False, num_beams=options.get("num_beams", 1))
    assert torch.equal(both[0, 3:], alone[0])


def test_left_padding_does_not_change_what_follows(model):
    model = model.double().eval()
    ids = torch.randint(31, (1, 6))
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), ids), 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(padded, attention_mask=mask, position_ids=positions).logits[:, 3:]
    torch.testing.assert_close(out, model(ids).logits, rtol=1e-6, atol=1e-8)


def test_a_saved_model_comes_back_with_its_roles(model, tmp_path):
    model.save_pretrained(tmp_path)
    ids = torch.randint(31, (2, 7))
    for loaded in (UmupForCausalLM.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert isinstance(loaded, UmupForCausalLM)
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
        assert loaded.config.scale_seq_len == 32
        wanted = [(p.name, p.role, p.depth) for p in parameter_roles(model)[0]]
        assert [(p.name, p.role, p.depth) for p in parameter_roles(loaded)[0]] == wanted
        assert len(get_param_groups(loaded, 1.0)) == len(get_param_groups(model, 1.0)) == 4
    half = UmupForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.lm_head.weight.dtype == torch.bfloat16
    torch.testing.assert_close(half(ids).logits.float(), model(ids).logits, atol=0.05, rtol=0.1)


def test_gradient_checkpointing_gives_the_same_gradients(model):
    ids = torch.randint(31, (2, 9))
    model.train()
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    other(ids, labels=ids).loss.backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_loss_ignores_masked_labels_and_unequal_parts_sum_to_the_whole(model):
    model = model.double()
    ids = torch.randint(31, (4, 9))
    labels = ids.clone()
    labels[0, 3:] = -100
    labels[2, :5] = -100
    valid = int((labels[:, 1:] != -100).sum())
    whole = model(ids, labels=labels).loss
    logits = model(ids).logits
    plain = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 31), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(whole, plain.to(whole.dtype), rtol=1e-5, atol=1e-6)
    whole.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    total = 0.0
    for rows in (slice(0, 1), slice(1, 4)):
        loss = model(ids[rows], labels=labels[rows], num_items_in_batch=torch.tensor(valid)).loss
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(whole.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-5, atol=1e-6)


class Rows(torch.utils.data.Dataset):
    def __init__(self, n=16):
        torch.manual_seed(1)
        self.ids = torch.randint(31, (1, 10)).expand(n, 10)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def arguments(path, **kwargs):
    defaults = {
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 0.5,
        "weight_decay": 2**-13,
        "lr_scheduler_type": "cosine",
    }
    return TrainingArguments(
        str(path),
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **(defaults | kwargs),
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_umup_trainer_trains_and_keeps_the_ratios(model, tmp_path, accumulate):
    args = arguments(tmp_path, gradient_accumulation_steps=accumulate)
    trainer = UmupTrainer(model, args, train_dataset=Rows())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    check_optimizer(trainer.optimizer)
    assert {g["umup_scale"] for g in trainer.optimizer.param_groups} >= {1.0, 32**-0.5}
    assert args.max_grad_norm == 1.0
    assert trainer.args.max_grad_norm == pytest.approx(sum(p.numel() for p in model.parameters()) ** 0.5)


def test_clipping_is_on_the_rms_also_when_the_trainer_makes_the_model(tmp_path):
    trainer = UmupTrainer(
        args=arguments(tmp_path, max_grad_norm=2.0), model_init=lambda: UmupForCausalLM(config()), train_dataset=Rows()
    )
    size = sum(p.numel() for p in trainer.model.parameters())
    assert trainer.args.max_grad_norm == pytest.approx(2 * size**0.5)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_a_trainer_that_accumulates_takes_the_step_of_the_whole_batch(accumulate, tmp_path):
    rows = Rows(4)
    rows.ids = torch.randint(31, (4, 10))
    labels = rows.ids.clone()
    labels[0, 2:] = labels[1, :7] = -100  # parts of unequal weight

    class Masked(Rows):
        def __getitem__(self, i):
            return {"input_ids": rows.ids[i], "labels": labels[i]}

    stepped = []
    for parts in (1, accumulate):
        torch.manual_seed(0)
        model = UmupForCausalLM(config())
        args = arguments(
            tmp_path,
            max_grad_norm=0.0,
            max_steps=1,
            gradient_accumulation_steps=parts,
            per_device_train_batch_size=4 // parts,
            lr_scheduler_type="constant",
        )
        optimizer = SGD(model, lr=0.1)  # unlike Adam it would show a wrong gradient scale
        UmupTrainer(model, args, train_dataset=Masked(4), optimizers=(optimizer, None)).train()
        stepped.append([p.detach() for p in model.parameters()])
    for whole, part in zip(*stepped, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-5)


def test_a_plain_trainer_takes_our_optimizer(model, tmp_path):
    optimizer = torch.optim.AdamW(get_param_groups(model, 0.5))
    trainer = Trainer(model, arguments(tmp_path, max_grad_norm=0.0), train_dataset=Rows(), optimizers=(optimizer, None))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    check_optimizer(optimizer)


def test_bfloat16_autocast_trains(model):
    ids = torch.randint(31, (2, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tie_word_embeddings": True}, "tied weight"),
        ({"vocab_size": 1}, "vocab_size"),
        ({"hidden_size": 33}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"alpha_res": 0.0}, "alpha_res"),
        ({"alpha_out": float("nan")}, "alpha_out"),
        ({"scale_seq_len": 0}, "scale_seq_len"),
    ],
)
def test_bad_configurations_are_refused(kwargs, message):
    with pytest.raises(Exception, match=message):
        config(**kwargs)


def test_resizing_is_refused_with_the_way_out(model):
    with pytest.raises(NotImplementedError, match="vocab_size"):
        model.resize_token_embeddings(64)
    with pytest.raises(ValueError, match="exactly one"):
        model.model()
