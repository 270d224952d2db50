import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.nn import functional as F

from topograph_loss import DiceTopographLoss, TopographLoss, critical_regions
from topograph_loss.loss import AGGREGATIONS


def scores_for(pred, *, dtype=torch.float64, seed=0):
    """Random probabilities of the foreground, > 0.5 exactly where `pred`; (B, 1, H, W)."""
    pred = torch.as_tensor(np.asarray(pred))
    u = torch.rand(pred.shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 0.48 + 0.01
    return torch.where(pred, 0.5 + u, 0.5 - u).unsqueeze(1)


@pytest.fixture
def batch(vessels):
    pred, target = vessels
    return scores_for(pred), torch.from_numpy(target).unsqueeze(1)


def logits_and_labels(classes=3, batch=2, side=24, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    smooth = torch.nn.AvgPool2d(5, 1, 2)
    raw = smooth(torch.randn(batch, 2 * classes, side, side, generator=generator, dtype=dtype)) * 5
    return raw[:, :classes], (raw[:, :classes] + raw[:, classes:]).argmax(1, keepdim=True)


# values


def test_golden_losses_of_one_channel(golden):
    expected, arrays = golden
    images = arrays["cases_2d"]
    for case in expected["cases_2d"]:
        p = torch.from_numpy(images[case["name"] + "/prob"])[None, None]
        G = torch.from_numpy(images[case["name"] + "/gt"])[None, None]
        for border in ("open", "background"):
            for connectivity in ("fg8", "fg4"):
                for aggregation, want in case[f"{border}_{connectivity}"]["loss"].items():
                    loss = TopographLoss(aggregation=aggregation, border=border, connectivity=connectivity)
                    assert loss(p.double(), G).item() == pytest.approx(want, rel=1e-6, abs=1e-12)
                    if aggregation == "mean":
                        assert loss(p, G).item() == pytest.approx(want, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("include_background", [False, True])
def test_golden_multiclass_losses_and_the_official_gradient(golden, include_background):
    expected, arrays = golden
    images = arrays[f"multiclass_bg{int(include_background)}"]
    want = expected["multiclass"][f"include_background={include_background}"]
    logits = torch.from_numpy(images["logits"]).double().requires_grad_()
    target = torch.from_numpy(images["target"])
    options = {"softmax": True, "to_onehot_y": True, "include_background": include_background}
    loss = TopographLoss(border="open", **options)(logits, target)
    loss.backward()
    assert loss.item() == pytest.approx(want["reference_open"], rel=1e-6)
    assert torch.allclose(logits.grad, torch.from_numpy(images["grad_open"]), rtol=0, atol=1e-6)
    assert TopographLoss(**options)(logits, target).item() == pytest.approx(want["reference_background"], rel=1e-6)


def test_a_gap_of_one_pixel_costs_the_score_of_background_there():
    target = torch.ones(1, 1, 1, 7)
    p = torch.tensor([[[[0.9, 0.8, 0.9, 0.3, 0.9, 0.8, 0.9]]]], dtype=torch.float64)
    assert TopographLoss()(p, target).item() == pytest.approx(0.7)


def test_the_mean_is_taken_in_each_region_and_the_regions_are_summed():
    target = torch.tensor([[[[1, 1, 0, 0, 0, 0, 0]]]])
    p = torch.tensor(
        [[[[0.9, 0.9, 0.1, 0.8, 0.6, 0.1, 0.9]]]], dtype=torch.float64
    )  # two spurious pieces: {3, 4} and {6}
    assert TopographLoss()(p, target).item() == pytest.approx(0.7 + 0.9)
    assert TopographLoss(aggregation="sum")(p, target).item() == pytest.approx(1.4 + 0.9)
    assert TopographLoss(aggregation="max")(p, target).item() == pytest.approx(0.8 + 0.9)
    assert TopographLoss(aggregation="min")(p, target).item() == pytest.approx(0.6 + 0.9)
    assert TopographLoss(aggregation="rms")(p, target).item() == pytest.approx(0.5**0.5 + 0.9)
    ce = -(np.log(0.2) + np.log(0.4)) / 2 - np.log(0.1)
    assert TopographLoss(aggregation="ce")(p, target).item() == pytest.approx(ce)


def test_a_tie_is_background():
    assert TopographLoss()(torch.full((1, 1, 2, 2), 0.5), torch.zeros(1, 1, 2, 2)).item() == 0


def test_one_wrong_region_over_the_whole_image_is_critical():
    for border in ("background", "open"):
        p = torch.full((1, 1, 4, 4), 0.9, requires_grad=True)
        loss = TopographLoss(border=border)(p, torch.zeros(1, 1, 4, 4))
        assert loss.item() == pytest.approx(0.9)
        loss.backward()
        assert p.grad.unique().tolist() == [1 / 16]


def test_no_critical_region_is_an_exact_zero_that_can_be_differentiated(batch):
    p = batch[0].clone().requires_grad_()
    loss = TopographLoss()(p, p > 0.5)
    assert loss.item() == 0
    loss.backward()
    assert (p.grad == 0).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (2, 1)])
def test_images_of_one_pixel_or_one_row(shape):
    p = torch.full((1, 1, *shape), 0.8)
    assert TopographLoss()(p, torch.zeros(1, 1, *shape)).item() == pytest.approx(0.8)
    assert TopographLoss()(p, torch.ones(1, 1, *shape)).item() == 0


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(bool, st.tuples(st.just(2), st.integers(1, 8), st.integers(1, 8))))
def test_the_loss_equals_that_of_the_thickened_image(reference, masks):
    P, G = masks
    p = scores_for(P[None], seed=int(P.sum()))
    q = torch.where(p > 0.5, p, 1 - p)[0, 0].numpy()
    for border in ("background", "open"):
        want = reference.loss(P, G, q, framed=border == "background")
        assert TopographLoss(border=border)(p, torch.from_numpy(G)[None, None]).item() == pytest.approx(want)


def test_one_channel_equals_two_exclusive_channels_up_to_the_number_of_classes(batch):
    p, target = batch
    two, labels = torch.cat([1 - p, p], 1), target.long()
    one = TopographLoss()(p, target)
    assert TopographLoss(to_onehot_y=True, include_background=False)(two, labels).item() == pytest.approx(one.item())


def test_each_channel_after_a_sigmoid_is_a_problem_of_its_own():
    logits, labels = logits_and_labels()
    target = torch.cat([labels == 0, labels >= 1, labels == 2], 1)
    together = TopographLoss(sigmoid=True, reduction="none")(logits, target)
    alone = [TopographLoss(sigmoid=True, reduction="none")(logits[:, [k]], target[:, [k]]) for k in range(3)]
    assert torch.allclose(together, torch.cat(alone, 1))


def test_a_batch_is_the_loop_over_its_samples_and_classes():
    logits, labels = logits_and_labels(batch=3)
    each = TopographLoss(softmax=True, to_onehot_y=True, reduction="none")
    together = each(logits, labels)
    assert together.shape == (3, 3)
    assert torch.allclose(together, torch.cat([each(x[None], t[None]) for x, t in zip(logits, labels, strict=True)]))
    for reduction in ("mean", "sum"):
        loss = TopographLoss(softmax=True, to_onehot_y=True, reduction=reduction)(logits, labels)
        assert loss.item() == pytest.approx(getattr(together, reduction)().item())


def test_one_hot_targets_and_label_maps_give_the_same():
    logits, labels = logits_and_labels()
    want = TopographLoss(softmax=True, to_onehot_y=True)(logits, labels).item()
    one_hot = F.one_hot(labels[:, 0], 3).movedim(-1, 1)
    assert want > 0
    assert TopographLoss(softmax=True)(logits, one_hot).item() == want
    assert TopographLoss(softmax=True, to_onehot_y=True)(logits, labels[:, 0].float()).item() == want
    soft = one_hot * 0.8 + 0.2 / 3
    assert TopographLoss(softmax=True, soft_label=True)(logits, soft).item() == want
    assert TopographLoss(other_act=lambda x: x.softmax(1), to_onehot_y=True)(logits, labels).item() == want
    assert TopographLoss(to_onehot_y=True)(logits.softmax(1), labels).item() == want


def test_class_weights_multiply_the_classes():
    logits, labels = logits_and_labels()
    options = {"softmax": True, "to_onehot_y": True, "include_background": False, "reduction": "none"}
    plain = TopographLoss(**options)(logits, labels)
    weighed = TopographLoss(class_weight=[0.0, 3.0], **options)(logits, labels)
    assert torch.allclose(weighed, plain * torch.tensor([0.0, 3.0]))


def test_ignored_pixels_count_as_right_and_may_hold_any_label():
    logits, labels = logits_and_labels()
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :, 6:18, 6:18] = True
    healed = torch.where(mask, logits.argmax(1, keepdim=True), labels)
    loss = TopographLoss(softmax=True, to_onehot_y=True)
    logits = logits.requires_grad_()
    masked = loss(logits, torch.where(mask, 0, labels), mask)
    masked.backward()
    assert (logits.grad * mask == 0).all()
    assert logits.grad.any()
    with_garbage = loss(logits, torch.where(mask, 255, labels), mask)
    assert with_garbage.item() == masked.item()
    assert loss(logits, healed, torch.ones_like(mask)).item() == 0


def test_copying_the_target_into_the_prediction_is_what_ignoring_means():
    logits, labels = logits_and_labels()
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :, :, :10] = True
    copied = torch.where(mask, 20.0 * F.one_hot(labels[:, 0], 3).movedim(-1, 1), logits)
    loss = TopographLoss(softmax=True, to_onehot_y=True)
    assert loss(logits, labels, mask).item() == pytest.approx(loss(copied, labels).item())


def test_3d_volumes_and_their_two_rules():
    target = torch.zeros(1, 1, 5, 7, 7)
    target[..., 2, 1:6, 1:6] = 1
    target[..., 2, 2:5, 2:5] = 0
    p = torch.where(target > 0, 0.9, 0.1)
    p[..., 2, 1, 3] = 0.2
    assert TopographLoss()(p, target).item() == pytest.approx(0.8)
    assert TopographLoss(connectivity="fg6")(p, target).item() == pytest.approx(0.8)
    assert TopographLoss(rule="neighbours")(p, target).item() == 0


# gradients


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradcheck_through_the_activation(aggregation):
    logits, labels = logits_and_labels(side=5, batch=1)
    loss = TopographLoss(softmax=True, to_onehot_y=True, aggregation=aggregation)
    assert loss(logits, labels) > 0
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), logits.requires_grad_(), eps=1e-7, atol=1e-5)
    binary = TopographLoss(sigmoid=True, aggregation=aggregation)
    x = logits[:, :1].detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: binary(x, labels == 0), x, eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("aggregation", ["mean", "sum", "rms"])
def test_double_backward(aggregation):
    logits, labels = logits_and_labels(side=5, batch=1)
    loss = TopographLoss(softmax=True, to_onehot_y=True, aggregation=aggregation)
    assert loss(logits, labels) > 0
    assert torch.autograd.gradgradcheck(lambda x: loss(x, labels), logits.requires_grad_())


def test_the_gradient_is_one_over_the_region_size_on_critical_pixels_and_zero_elsewhere(batch, vessels):
    p, target = batch
    p = p.requires_grad_()
    TopographLoss(reduction="sum")(p, target).backward()
    for grad, P, G in zip(p.grad[:, 0], *vessels, strict=True):
        found = critical_regions(P, G)
        size = np.array([1, *[region.size for region in found.regions]])[found.labels]
        want = np.where(found.labels > 0, np.where(P, 1, -1) / size, 0)
        assert np.allclose(grad.numpy(), want)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("value", [100.0, -100.0, 0.0])
def test_gradients_of_saturated_logits_are_finite(aggregation, value):
    labels = torch.zeros(1, 1, 6, 6, dtype=torch.long)
    labels[..., 2:4, 2:4] = 1
    for logits, options in (
        (torch.full((1, 1, 6, 6), value), {"sigmoid": True}),
        (torch.stack([torch.zeros(6, 6), torch.full((6, 6), value)])[None], {"softmax": True, "to_onehot_y": True}),
    ):
        x = logits.requires_grad_()
        loss = DiceTopographLoss(aggregation=aggregation, **options)(x, labels)
        loss.backward()
        assert loss.isfinite()
        assert x.grad.isfinite().all()
        assert loss > 0.5


def test_rms_of_scores_that_are_exactly_zero_has_a_finite_gradient():
    x = torch.zeros(1, 2, 3, 3, requires_grad=True)
    target = torch.ones(1, 1, 3, 3)
    TopographLoss(aggregation="rms", to_onehot_y=True)(x, target).backward()
    assert x.grad.isfinite().all()


# dtypes, layouts, contexts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_are_summed_in_float32(batch, dtype):
    p, target = batch
    logit = p.logit().to(dtype)
    loss = TopographLoss(sigmoid=True)
    got = loss(logit, target)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(loss(logit.float(), target).item())


def test_autocast_returns_float32_and_the_same_regions():
    logits, labels = logits_and_labels(dtype=torch.float32)
    conv = torch.nn.Conv2d(3, 3, 1)
    loss = DiceTopographLoss(softmax=True, to_onehot_y=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = conv(logits)
        assert out.dtype == torch.bfloat16
        got = loss(out, labels)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(loss(out.detach(), labels).item(), rel=1e-6)
    got.backward()
    assert conv.weight.grad.isfinite().all()
    assert conv.weight.grad.any()


def test_layout_does_not_matter():
    logits, labels = logits_and_labels()
    loss = DiceTopographLoss(softmax=True, to_onehot_y=True)
    want = loss(logits, labels).item()
    assert loss(logits.to(memory_format=torch.channels_last), labels).item() == want
    strided = torch.empty(*logits.shape[:-1], 2 * logits.shape[-1], dtype=logits.dtype)[..., ::2]
    strided.copy_(logits)
    assert not strided.is_contiguous()
    assert loss(strided, labels.expand(-1, 1, -1, -1).mT.contiguous().mT).item() == want
    with torch.no_grad():
        assert loss(logits, labels).item() == want
    with torch.inference_mode():
        assert loss(logits, labels).item() == want
    assert loss(logits.requires_grad_(), labels).item() == want


def test_meta_tensors_give_the_same_value_and_gradient():
    MetaTensor = pytest.importorskip("monai.data").MetaTensor
    logits, labels = logits_and_labels()
    loss = DiceTopographLoss(softmax=True, to_onehot_y=True)
    x = MetaTensor(logits).requires_grad_()
    got = loss(x, MetaTensor(labels), MetaTensor(torch.zeros_like(labels)))
    assert got.item() == loss(logits, labels).item()
    got.backward()
    assert x.grad.any()


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_threads_do_not_change_a_bit(workers):
    logits, labels = logits_and_labels(batch=4)
    one = TopographLoss(softmax=True, to_onehot_y=True)(logits, labels)
    many = TopographLoss(softmax=True, to_onehot_y=True, workers=workers)(logits, labels)
    assert torch.equal(one, many)


def test_torch_compile_breaks_the_graph_and_keeps_the_value():
    logits, labels = logits_and_labels(dtype=torch.float32)
    loss = DiceTopographLoss(softmax=True, to_onehot_y=True)
    compiled = torch.compile(loss, backend="aot_eager")
    for scale in (1.0, 3.0):
        x, y = (scale * logits).requires_grad_(), (scale * logits).detach().requires_grad_()
        want, got = loss(x, labels), compiled(y, labels)
        assert got.item() == pytest.approx(want.item(), rel=1e-6)
        want.backward(), got.backward()
        assert torch.allclose(x.grad, y.grad, atol=1e-7)


def test_vmap_is_refused_instead_of_giving_something_else():
    logits, labels = logits_and_labels()
    loss = TopographLoss(softmax=True, to_onehot_y=True)
    with pytest.raises(RuntimeError):
        torch.vmap(lambda x, t: loss(x[None], t[None]))(logits, labels)


def test_the_loss_can_be_pickled_and_copied_with_its_generator():
    logits, labels = logits_and_labels()
    generator = torch.Generator().manual_seed(3)
    loss = DiceTopographLoss(
        softmax=True,
        to_onehot_y=True,
        threshold_noise="normal",
        noise_scale=1.0,
        generator=generator,
        class_weight=[1, 2, 3],
    )
    loss(logits, labels)
    twins = [pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)]
    want = loss(logits, labels).item()
    assert [twin(logits, labels).item() for twin in twins] == [want, want]


# threshold noise


def noisy(generator_seed, **options):
    generator = torch.Generator().manual_seed(generator_seed)
    options = {"threshold_noise": "uniform", "noise_scale": 1.0} | options
    return TopographLoss(softmax=True, to_onehot_y=True, generator=generator, **options)


@pytest.mark.parametrize("noise", ["uniform", "normal"])
def test_noise_is_reproducible_moves_the_regions_and_rests_in_evaluation(noise):
    logits, labels = logits_and_labels()
    clean = TopographLoss(softmax=True, to_onehot_y=True)(logits, labels).item()
    values = {noisy(seed, threshold_noise=noise)(logits, labels).item() for seed in range(4)}
    assert len(values) > 1
    assert (
        noisy(1, threshold_noise=noise)(logits, labels).item() == noisy(1, threshold_noise=noise)(logits, labels).item()
    )
    assert noisy(1, threshold_noise=noise).eval()(logits, labels).item() == clean
    assert noisy(1, noise_scale=0.0)(logits, labels).item() == clean
    assert noisy(1, threshold_noise=None)(logits, labels).item() == clean


def test_noise_raises_one_class_of_each_sample_by_the_intended_rule():
    from topograph_loss.hard_labels import shifted_scores

    p = torch.full((5, 3, 2, 2), 1 / 3, dtype=torch.float64)
    shift = (
        shifted_scores(p, exclusive=True, noise="uniform", scale=0.4, generator=torch.Generator().manual_seed(0)) - p
    )
    assert (shift == shift[:, :, :1, :1]).all()
    per_class = shift[:, :, 0, 0]
    raised = per_class.max(1).values
    assert ((raised > 0) & (raised < 0.4 / 2)).all()
    assert torch.allclose(per_class.sort(1).values[:, :2], (-raised / 2)[:, None].expand(-1, 2))
    assert len(raised.unique()) == 5


def test_penalised_scores_stay_clean_under_noise():
    p = torch.tensor([[[[0.45]]]], dtype=torch.float64)
    loss = TopographLoss(threshold_noise="uniform", noise_scale=10.0, generator=torch.Generator().manual_seed(0))
    seen = {round(loss(p, torch.zeros(1, 1, 1, 1)).item(), 6) for _ in range(30)}
    assert seen == {0.0, 0.45}  # predicted foreground under noise, scored with the clean 0.45


# Dice


@pytest.mark.parametrize("batch", [True, False])
def test_the_pixel_term_is_monais_dice(batch):
    losses = pytest.importorskip("monai.losses")
    logits, labels = logits_and_labels()
    options = {"softmax": True, "to_onehot_y": True, "include_background": False, "batch": batch}
    for reduction in ("mean", "sum"):
        ours = DiceTopographLoss(lambda_topo=0, reduction=reduction, class_weight=[1.0, 2.0], **options)(logits, labels)
        theirs = losses.DiceLoss(reduction=reduction, weight=[1.0, 2.0], **options)(logits, labels)
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)


def test_the_official_pixel_term_is_half_cldice():
    losses = pytest.importorskip("monai.losses")
    logits, labels = logits_and_labels()
    ours = DiceTopographLoss(softmax=True, to_onehot_y=True, lambda_topo=0, cldice_weight=0.5)(logits, labels)
    one_hot = F.one_hot(labels[:, 0], 3).movedim(-1, 1).double()
    dice = losses.DiceLoss(softmax=True, batch=True)(logits, one_hot)
    cldice = losses.SoftclDiceLoss(softmax=True, iter_=5)(logits, one_hot)
    assert ours.item() == pytest.approx(0.5 * dice.item() + 0.5 * cldice.item(), rel=1e-9)


def test_the_sum_is_dice_plus_lambda_times_topograph():
    logits, labels = logits_and_labels()
    options = {"softmax": True, "to_onehot_y": True}
    loss = DiceTopographLoss(lambda_topo=0.3, **options)
    total = loss(logits, labels).item()
    loss.lambda_topo = 0.0
    dice = loss(logits, labels).item()
    assert total == pytest.approx(dice + 0.3 * TopographLoss(**options)(logits, labels).item())


def test_ignored_pixels_leave_dice():
    logits, labels = logits_and_labels()
    mask = torch.zeros_like(labels)
    mask[..., 12:] = 1
    loss = DiceTopographLoss(softmax=True, to_onehot_y=True, lambda_topo=0)
    cropped = loss(logits[..., :12], labels[..., :12]).item()
    assert loss(logits, torch.where(mask > 0, 255, labels), mask).item() == pytest.approx(cropped)


def test_cldice_without_monai_names_the_install_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "monai", None)
    monkeypatch.delitem(__import__("sys").modules, "monai.losses", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'topograph-loss\[monai\]'"):
        DiceTopographLoss(cldice_weight=0.5)


def test_training_repairs_a_broken_line():
    target = torch.zeros(1, 1, 9, 21)
    target[..., 4, :] = 1
    logits = torch.where(target > 0, 2.0, -2.0)
    logits[..., 4, 10] = -1.0
    logits.requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    loss = TopographLoss(sigmoid=True)
    for _ in range(40):
        optimizer.zero_grad()
        loss(logits, target).backward()
        optimizer.step()
    assert ((logits > 0) == (target > 0)).all()
    assert loss(logits, target).item() == 0
