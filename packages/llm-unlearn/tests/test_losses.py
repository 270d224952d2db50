"""Golden values: computed in float64 by the official functions driven with a stub model, and by an independent float64 script for the
options (positions, direction) that the official code does not have."""

import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_unlearn import losses

GOLDEN = json.loads((Path(__file__).parent / "data" / "losses_small.json").read_text(encoding="utf-8"))
BETA = GOLDEN["beta"]


def part(name, dtype=torch.float64):
    batch = GOLDEN["batches"][name]
    return {
        "logits": torch.tensor(batch["logits"], dtype=dtype, requires_grad=True),
        "ref": torch.tensor(batch["ref_logits"], dtype=dtype),
        "labels": torch.tensor(batch["labels"]),
        "mask": torch.tensor(batch["attention_mask"]),
    }


def nll(p):
    return losses.sequence_nll(p["logits"], p["labels"])


def ref_nll(p):
    return losses.sequence_nll(p["ref"], p["labels"])


def everything(p):
    return torch.ones_like(p["mask"], dtype=torch.bool)


OFFICIAL = {
    "GA": (("forget",), lambda f: losses.ga(f["logits"], f["labels"])),
    "NPO": (("forget",), lambda f: losses.npo(nll(f), ref_nll(f), beta=BETA)),
    "DPO": (
        ("forget", "forget_idk"),
        lambda f, i: losses.dpo(nll(f), nll(i), ref_nll(f), ref_nll(i), beta=BETA),
    ),
    "ME": (("forget",), lambda f: losses.me(f["logits"], f["labels"])),
    "IDK": (("forget_idk",), lambda i: losses.idk(i["logits"], i["labels"])),
    "GD": (("retain",), lambda r: losses.gd(r["logits"], r["labels"])),
    "KL": (("retain",), lambda r: losses.kl(r["logits"], r["ref"], everything(r))),
    "AP": (("retain", "retain_idk"), lambda r, i: losses.ap(nll(r), nll(i), beta=BETA)),
    "MISMATCH": (("mismatch",), lambda m: losses.token_mean_nll(m["logits"], m["labels"])),
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_loss_and_gradient_equal_the_official_ones(name):
    parts, function = OFFICIAL[name]
    inputs = [part(p) for p in parts]
    loss = function(*inputs)
    loss.backward()
    expected = GOLDEN["expected"][name]
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-9)
    for which, batch in zip(parts, inputs, strict=True):
        torch.testing.assert_close(
            batch["logits"].grad, torch.tensor(expected["grads"][which], dtype=torch.float64), atol=1e-8, rtol=0
        )


@pytest.mark.parametrize("name", OFFICIAL)
def test_float32_is_within_1e_5(name):
    parts, function = OFFICIAL[name]
    loss = function(*(part(p, torch.float32) for p in parts))
    assert loss.item() == pytest.approx(GOLDEN["expected"][name]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("KL_answer", lambda f, r: losses.kl(r["logits"], r["ref"], r["labels"])),
        ("KL_nonpad", lambda f, r: losses.kl(r["logits"], r["ref"], r["mask"].bool())),
        ("ME_nonpad_U_P", lambda f, r: losses.me(f["logits"], losses.token_positions(f["mask"]))),
        (
            "ME_nonpad_P_U",
            lambda f, r: losses.me(f["logits"], losses.token_positions(f["mask"]), direction="model_to_uniform"),
        ),
        ("ME_answer_P_U", lambda f, r: losses.me(f["logits"], f["labels"], direction="model_to_uniform")),
    ],
)
def test_positions_and_directions(name, loss):
    assert loss(part("forget"), part("retain")).item() == pytest.approx(GOLDEN["expected"][name]["loss"], abs=1e-9)


def random_logits(rows=5, vocab=11, dtype=torch.float64, scale=3.0):
    return torch.randn(rows, vocab, dtype=dtype, generator=torch.Generator().manual_seed(0)) * scale


@pytest.mark.parametrize("chunk", [1, 2, None])
def test_gradcheck(chunk):
    z = random_logits().requires_grad_()
    reference, targets = random_logits(scale=1.0), torch.tensor([0, 3, 10, 3, 1])
    assert torch.autograd.gradcheck(lambda z: losses.nll_rows(z, targets, chunk=chunk), z)
    assert torch.autograd.gradcheck(lambda z: losses.kl_rows(z, reference, chunk=chunk), z)
    for direction in ("uniform_to_model", "model_to_uniform"):
        assert torch.autograd.gradcheck(
            lambda z, direction=direction: losses.uniform_divergence_rows(z, direction=direction, chunk=chunk), z
        )


def test_me_is_zero_for_a_uniform_distribution_and_log_k_at_most_when_certain():
    assert losses.uniform_divergence_rows(torch.zeros(1, 8)).item() == pytest.approx(0, abs=1e-6)
    certain = torch.full((1, 8), -1e4)
    certain[0, 3] = 0
    assert losses.uniform_divergence_rows(certain, direction="model_to_uniform").item() == pytest.approx(math.log(8))


def test_minimising_me_from_model_to_uniform_is_maximising_entropy():
    z = random_logits().requires_grad_()
    entropy = torch.distributions.Categorical(logits=z).entropy()
    divergence = losses.uniform_divergence_rows(z, direction="model_to_uniform")
    torch.testing.assert_close(divergence, math.log(11) - entropy)
    ours = torch.autograd.grad(divergence.sum(), z, retain_graph=True)[0]
    torch.testing.assert_close(ours, -torch.autograd.grad(entropy.sum(), z)[0])


def test_npo_grows_as_the_model_gets_likelier_than_the_reference():
    """nll < ref_nll means likelier than before, which NPO punishes."""
    likelier = losses.npo(torch.tensor([1.0]), torch.tensor([5.0]))
    unlikelier = losses.npo(torch.tensor([5.0]), torch.tensor([1.0]))
    assert likelier > unlikelier
    assert losses.npo(torch.tensor([2.0]), torch.tensor([2.0]), beta=0.1).item() == pytest.approx(20 * math.log(2))


@given(st.floats(-50, 50), st.floats(0.01, 5))
@settings(max_examples=50, deadline=None)
def test_ap_gradient_has_the_adaptive_weight_of_the_paper(log_ratio, beta):
    answer = torch.tensor([60.0], dtype=torch.float64, requires_grad=True)
    refusal = torch.tensor([60.0 + log_ratio], dtype=torch.float64, requires_grad=True)
    losses.ap(answer, refusal, beta=beta).backward()
    weight = 1 / (1 + math.exp(beta * log_ratio))
    assert answer.grad.item() == pytest.approx(weight, abs=1e-9)
    assert refusal.grad.item() == pytest.approx(-weight, abs=1e-9)


def test_simnpo_of_one_token_without_margin_is_npo_against_a_certain_reference():
    nll = torch.tensor([0.7, 2.0], dtype=torch.float64)
    ours = losses.simnpo(nll, torch.ones(2, dtype=torch.long), beta=2.5)
    torch.testing.assert_close(ours, losses.npo(nll, torch.zeros_like(nll), beta=2.5))


def test_wga_with_alpha_0_is_ga_and_its_weights_carry_no_gradient():
    p = part("forget")
    torch.testing.assert_close(losses.wga(p["logits"], p["labels"], alpha=0.0), losses.ga(p["logits"], p["labels"]))
    nll = torch.tensor([0.5, 1.0], dtype=torch.float64, requires_grad=True)
    losses.wga_sum(nll).backward()
    torch.testing.assert_close(nll.grad, -(-nll.detach()).exp())


def test_rmu_distances():
    hidden = torch.tensor([[1.0, 3.0]], requires_grad=True)
    assert losses.rmu_forget(hidden, torch.tensor([1.0, 1.0])).item() == 2
    assert losses.rmu_retain(hidden, torch.tensor([[0.0, 3.0]])).item() == 0.5


@given(st.integers(1, 4), st.integers(2, 6), st.integers(2, 9), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_losses_equal_the_slow_reference(batch, time, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, time, vocab, generator=generator, dtype=torch.float64) * 4
    labels = torch.randint(0, vocab, (batch, time), generator=generator)
    labels[torch.rand(batch, time, generator=generator) < 0.4] = -100
    total, count, entropy = torch.zeros(batch, dtype=torch.float64), 0, 0.0
    for b in range(batch):
        for t in range(time - 1):
            if labels[b, t + 1] != -100:
                p = torch.softmax(logits[b, t], 0)
                total[b] -= p[labels[b, t + 1]].log()
                entropy += (math.log(vocab) + (p * p.log()).sum()).item()
                count += 1
    torch.testing.assert_close(losses.sequence_nll(logits, labels), total)
    assert losses.token_mean_nll(logits, labels).item() == pytest.approx(total.sum().item() / max(count, 1))
    assert losses.me(logits, labels, direction="model_to_uniform").item() == pytest.approx(
        entropy / max(count, 1), abs=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("direction", ["uniform_to_model", "model_to_uniform"])
def test_saturated_logits_of_a_large_vocabulary_stay_finite(dtype, direction):
    z = torch.full((2, 150_000), -60.0, dtype=dtype)
    z[0, 7] = 60
    z.requires_grad_()
    value = losses.uniform_divergence_rows(z, direction=direction)
    value.sum().backward()
    assert value.dtype == torch.float32
    assert value.isfinite().all()
    assert z.grad.isfinite().all()
    assert z.grad.dtype == dtype


def test_tokens_ruled_out_with_minus_infinity():
    z = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    value = losses.uniform_divergence_rows(z, direction="model_to_uniform")
    value.sum().backward()
    assert value.item() == pytest.approx(math.log(3) - math.log(2))
    assert z.grad.isfinite().all()
    assert losses.uniform_divergence_rows(z.detach()).item() == math.inf


def test_nothing_supervised_gives_zero_and_a_zero_gradient():
    logits = torch.randn(2, 4, 5, requires_grad=True)
    labels = torch.full((2, 4), -100)
    loss = losses.token_mean_nll(logits, labels) + losses.me(logits, labels) + losses.kl(logits, logits * 2, labels)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.abs().max() == 0


def test_a_batch_is_its_rows_and_strides_do_not_matter():
    p = part("forget")
    one_by_one = torch.cat([losses.sequence_nll(p["logits"][b : b + 1], p["labels"][b : b + 1]) for b in range(3)])
    torch.testing.assert_close(nll(p), one_by_one)
    strided = p["logits"].transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    torch.testing.assert_close(losses.sequence_nll(strided, p["labels"]), one_by_one)


def test_positions_not_counted_get_no_gradient():
    p = part("forget")
    losses.me(p["logits"], p["labels"]).backward()
    counted = losses.answer_positions(p["labels"])
    assert p["logits"].grad[~counted].abs().max() == 0
    assert not counted[:, -1].any()
    assert losses.me(p["logits"], p["labels"], reduction="none").shape == p["labels"].shape


def test_compiles_and_runs_under_autocast():
    z = torch.randn(6, 32, requires_grad=True)

    divergence, nll = (inspect.unwrap(f) for f in (losses.uniform_divergence_rows, losses.nll_rows))

    def step(z):
        return divergence(z).mean() + nll(z, torch.arange(6)).mean()

    compiled = torch.compile(step, backend="aot_eager")
    torch.testing.assert_close(compiled(z), step(z))
    ours, theirs = torch.autograd.grad(compiled(z), z)[0], torch.autograd.grad(step(z), z)[0]
    torch.testing.assert_close(ours, theirs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = torch.randn(4, 8) @ torch.randn(8, 16)
        assert logits.dtype == torch.bfloat16
        assert losses.uniform_divergence_rows(logits).dtype == torch.float32


def test_shapes_that_would_broadcast_and_labels_outside_the_vocabulary_are_refused():
    four, one, column = torch.zeros(4), torch.zeros(1), torch.zeros(4, 1)
    npo, dpo, ap, simnpo = (inspect.unwrap(f) for f in (losses.npo, losses.dpo, losses.ap, losses.simnpo))
    with pytest.raises(ValueError, match=r"got nll \(4,\), ref_nll \(1,\)"):
        npo(four, one)
    with pytest.raises(ValueError, match="same shape"):
        dpo(four, four, one, four)
    with pytest.raises(ValueError, match="same shape"):
        ap(four, column)
    with pytest.raises(ValueError, match="same shape"):
        simnpo(four, torch.ones(1, dtype=torch.long))
    logits = torch.zeros(1, 3, 5)
    with pytest.raises(ValueError, match="labels must be token ids below the vocabulary's 5, or -100, got 7 to 7"):
        losses.sequence_nll(logits, torch.full((1, 3), 7))
    with pytest.raises(ValueError, match="got -1 to -1"):
        losses.token_mean_nll(logits, torch.full((1, 3), -1))
    with pytest.raises(TypeError, match=r"labels \(integers\) or a mask"):
        inspect.unwrap(losses.me)(logits, torch.ones(1, 3))


def test_llmu_is_ascent_with_other_answers_and_kl():
    """The official code's undocumented LLMU, from the losses: forget answers, retain answers to forget questions, KL on retain."""
    forget, mismatch, retain = part("forget"), part("mismatch"), part("retain")
    expected = GOLDEN["combos"]["LLMU"]
    regularizer = losses.token_mean_nll(mismatch["logits"], mismatch["labels"]) + losses.kl(
        retain["logits"], retain["ref"], everything(retain)
    )
    ascent = losses.ga(forget["logits"], forget["labels"])
    assert ascent.item() == pytest.approx(expected["forget"], abs=1e-9)
    assert regularizer.item() == pytest.approx(expected["reg"], abs=1e-9)
    assert (ascent + regularizer).item() == pytest.approx(expected["total"], abs=1e-9)


def test_wrong_use_is_named():
    z = torch.zeros(1, 3, 4)
    with pytest.raises(ValueError, match="direction must be"):
        inspect.unwrap(losses.uniform_divergence_rows)(z[0], direction="sideways")
    with pytest.raises(ValueError, match="beta must be positive"):
        losses.npo(torch.zeros(1), torch.zeros(1), beta=0)
    with pytest.raises(ValueError, match="chunk must be"):
        losses.nll_rows(z[0], torch.zeros(3, dtype=torch.long), chunk=0)
    with pytest.raises((ValueError, TypeError)):
        losses.sequence_nll(z, torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises((ValueError, TypeError)):
        losses.kl(z, torch.zeros(1, 1, 4), torch.ones(1, 3, dtype=torch.bool))
