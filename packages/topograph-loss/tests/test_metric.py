import numpy as np
import pytest
import torch

from topograph_loss import diu

pytest.importorskip("monai")
from topograph_loss import DIUMetric


@pytest.fixture
def masks(vessels):
    """One-hot predictions and targets, (2, 2, 96, 96)."""
    return tuple(torch.stack([~torch.from_numpy(m), torch.from_numpy(m)], 1) for m in vessels)


def test_the_metric_is_the_mean_of_diu(masks, vessels):
    metric = DIUMetric(include_background=False)
    each = metric(y_pred=masks[0], y=masks[1])
    want = [diu(P, G).total for P, G in zip(*vessels, strict=True)]
    assert each.tolist() == [[value] for value in want]
    assert metric.aggregate().item() == pytest.approx(np.mean(want))
    metric.reset()
    metric(y_pred=masks[0][:1], y=masks[1][:1])
    metric(y_pred=masks[0][1:], y=masks[1][1:])
    assert metric.aggregate().item() == pytest.approx(np.mean(want))
    assert metric.aggregate("sum").item() == sum(want)


def test_terms_apart(masks, vessels):
    metric = DIUMetric(include_background=False, per_term=True)
    metric(y_pred=masks[0], y=masks[1])
    got = metric.aggregate("sum")
    want = [diu(P, G) for P, G in zip(*vessels, strict=True)]
    assert got["total"].item() == sum(one.total for one in want)
    for term, value in want[0].as_dict().items():
        assert got[term].item() == value + want[1].as_dict()[term]


def test_reductions_and_counts_follow_monai(masks):
    metric = DIUMetric(reduction="mean_batch", get_not_nans=True)
    each = metric(y_pred=masks[0], y=masks[1])
    value, not_nans = metric.aggregate()
    assert torch.allclose(value, each.mean(0))
    assert not_nans.tolist() == [2, 2]
    assert metric.aggregate("none")[0].tolist() == each.tolist()


def test_label_maps_and_lists_are_accepted(masks):
    want = DIUMetric()(y_pred=masks[0], y=masks[1])
    labels = [m.long().argmax(1, keepdim=True) for m in masks]
    assert torch.equal(DIUMetric(num_classes=2)(y_pred=labels[0], y=labels[1]), want)
    from_lists = DIUMetric()
    from_lists(y_pred=list(masks[0]), y=list(masks[1]))
    assert torch.equal(from_lists.aggregate("none"), want)


def test_works_in_monais_handler_of_3d_batches():
    pytest.importorskip("gudhi")
    y = torch.zeros(1, 1, 5, 5, 5)
    y[..., 1:4, 1:4, 1:4] = 1
    hollow = y.clone()
    hollow[..., 2, 2, 2] = 0
    assert DIUMetric()(y_pred=hollow, y=y).tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("options", "y_pred", "y", "message"),
    [
        ({}, torch.full((1, 1, 3, 3), 0.5), torch.zeros(1, 1, 3, 3), "one-hot masks of zeros and ones"),
        ({}, torch.zeros(1, 2, 3, 3), torch.zeros(1, 1, 3, 3), r"y_pred has shape .* but y has shape"),
        ({"include_background": False}, torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 3, 3), "at least two classes"),
        ({"num_classes": 2}, torch.full((1, 1, 3, 3), 2), torch.zeros(1, 1, 3, 3), "target has label 2"),
        ({}, torch.zeros(0, 1, 3, 3), torch.zeros(0, 1, 3, 3), "at least one sample"),
        ({}, torch.zeros(1, 1, 3), torch.zeros(1, 1, 3), "2 or 3 dimensions"),
    ],
)
def test_bad_input_is_refused(options, y_pred, y, message):
    with pytest.raises(ValueError, match=message):
        DIUMetric(**options)(y_pred=y_pred, y=y)


def test_bad_options_and_an_empty_metric_are_refused():
    with pytest.raises(ValueError, match="border must be one of"):
        DIUMetric(border="sphere")
    with pytest.raises(ValueError, match="connectivity must be one of"):
        DIUMetric(connectivity="8")
    with pytest.raises(ValueError, match="nothing to aggregate"):
        DIUMetric().aggregate()
