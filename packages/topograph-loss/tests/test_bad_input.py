"""One test for each row of the table of bad input."""

import inspect

import numpy as np
import pytest
import torch

from topograph_loss import DiceTopographLoss, TopographLoss

LOSSES = pytest.mark.parametrize("Loss", [TopographLoss, DiceTopographLoss])


def logits(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@LOSSES
@pytest.mark.parametrize(
    ("options", "input", "target", "message"),
    [
        (
            {},
            (2, 3, 4, 4),
            torch.zeros(2, 2, 4, 4),
            r"target has shape \(2, 2, 4, 4\) but input has shape \(2, 3, 4, 4\)",
        ),
        ({}, (2, 3, 4, 4), torch.zeros(2, 1, 4, 4), "pass to_onehot_y=True for label maps"),
        ({}, (2, 1, 4, 4), torch.zeros(2, 1, 4, 1), r"target has shape \(2, 1, 4, 1\)"),
        ({"to_onehot_y": True}, (2, 3, 4, 4), torch.zeros(1, 1, 4, 4), "a label map of shape"),
        ({"to_onehot_y": True}, (2, 3, 4, 4), torch.zeros(2, 3, 4, 4), "a label map of shape"),
        (
            {"to_onehot_y": True},
            (1, 3, 2, 2),
            torch.full((1, 1, 2, 2), 3),
            r"target has label 3 but input has 3 channels",
        ),
        ({"to_onehot_y": True}, (1, 3, 2, 2), torch.full((1, 1, 2, 2), -1), r"target has label -1 .* 0\.\.2"),
        ({"to_onehot_y": True}, (1, 3, 2, 2), torch.full((1, 1, 2, 2), 0.5), r"target has label 0\.5"),
        ({"to_onehot_y": True}, (1, 1, 2, 2), torch.full((1, 1, 2, 2), 2), r"target has label 2 .* 0\.\.1"),
        ({}, (1, 2, 2, 2), torch.full((1, 2, 2, 2), 0.5), r"one-hot, got a value 0\.5.*soft_label=True"),
        ({}, (1, 2, 2, 2), torch.ones(1, 2, 2, 2), "one-hot: 4 pixels do not have exactly one class"),
        ({}, (1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5), "binary, got a value 0.5"),
        ({}, (1, 1, 2, 2), torch.full((1, 1, 2, 2), float("nan")), "binary, got a value nan"),
        ({"soft_label": True}, (1, 2, 2, 2), torch.full((1, 2, 2, 2), 0.9), "sum to 1 over the channels"),
        ({"soft_label": True}, (1, 2, 2, 2), torch.full((1, 2, 2, 2), 2.0), r"in \[0, 1\], got 2"),
        ({"softmax": True}, (1, 1, 2, 2), torch.zeros(1, 1, 2, 2), "softmax=True needs at least two channels"),
        (
            {"include_background": False},
            (1, 1, 2, 2),
            torch.zeros(1, 1, 2, 2),
            "include_background=False needs at least two",
        ),
        ({}, (0, 1, 2, 2), torch.zeros(0, 1, 2, 2), "at least one sample, channel and pixel"),
        ({}, (1, 1, 0, 2), torch.zeros(1, 1, 0, 2), "at least one sample, channel and pixel"),
        ({}, (1, 1, 4), torch.zeros(1, 1, 4), "2 or 3 spatial dimensions, got 1"),
        ({"connectivity": "fg26"}, (1, 1, 4, 4), torch.zeros(1, 1, 4, 4), "connectivity of a 2D image must be one of"),
        ({"threshold": 0.3}, (1, 2, 2, 2), torch.zeros(1, 2, 2, 2), "threshold=0.3 has no meaning"),
        ({"class_weight": [1.0]}, (1, 2, 2, 2), torch.zeros(1, 2, 2, 2), "1 values but 2 classes are counted"),
    ],
)
def test_wrong_shapes_labels_and_targets(Loss, options, input, target, message):
    with pytest.raises(ValueError, match=message):
        Loss(**options)(logits(*input), target)


@LOSSES
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softmax": True, "sigmoid": True}, "more than 1 of"),
        ({"softmax": True, "other_act": torch.relu}, "more than 1 of"),
        ({"aggregation": "median"}, "aggregation must be one of 'mean'"),
        ({"connectivity": "fg5"}, "connectivity must be one of"),
        ({"border": "sphere"}, "border must be one of"),
        ({"rule": "fast"}, "rule must be one of 'exact', 'neighbours', got 'fast'"),
        ({"threshold": 1.5}, r"threshold must be in \[0, 1\], got 1.5"),
        ({"threshold_noise": "cauchy"}, "threshold_noise must be one of"),
        ({"noise_scale": -1.0}, "noise_scale must be >= 0"),
        ({"reduction": "median"}, "reduction must be"),
        ({"class_weight": [1.0, -1.0]}, "class_weight must be a sequence of finite numbers >= 0"),
        ({"class_weight": [1.0, float("inf")]}, "class_weight must be a sequence of finite numbers >= 0"),
        ({"workers": -1}, "workers must be >= 0"),
    ],
)
def test_wrong_options(Loss, options, message):
    with pytest.raises(ValueError, match=message):
        Loss(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "none"}, "no common shape"),
        ({"lambda_topo": -0.1}, "lambda_topo must be >= 0"),
        ({"lambda_topo": float("nan")}, "lambda_topo must be >= 0"),
        ({"smooth": 0.0}, "smooth must be positive"),
        ({"cldice_weight": 2.0}, "cldice_weight must be in"),
    ],
)
def test_wrong_options_of_the_sum(options, message):
    with pytest.raises(ValueError, match=message):
        DiceTopographLoss(**options)


@LOSSES
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64])
def test_masks_in_the_place_of_scores(Loss, dtype):
    forward = inspect.unwrap(Loss.forward)  # as users have it, without the checks of types that our tests run under
    with pytest.raises(ValueError, match="input must be scores of a floating type, got torch"):
        forward(Loss(), torch.ones(1, 1, 4, 4, dtype=dtype), torch.ones(1, 1, 4, 4))


def test_wrong_mask():
    with pytest.raises(ValueError, match=r"mask has shape \(1, 2, 2\).* it needs one channel"):
        TopographLoss()(logits(2, 1, 2, 2), torch.zeros(2, 1, 2, 2), torch.zeros(1, 2, 2))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@LOSSES
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("channels", [1, 3])
def test_scores_that_are_not_finite_give_nan_and_an_error_in_anomaly_mode(Loss, value, channels):
    x = logits(2, channels, 6, 6)
    x[0, 0, 3, 3] = value
    options = {"sigmoid": True} if channels == 1 else {"softmax": True}
    loss = Loss(to_onehot_y=True, **options)
    target = torch.zeros(2, 1, 6, 6)
    assert loss(x, target).isnan()
    with torch.autograd.detect_anomaly(check_nan=False), pytest.raises(ValueError, match="NaN or infinite"):
        loss(x, target)


def test_only_the_sample_with_a_nan_is_nan():
    x = logits(2, 1, 6, 6)
    x[0, 0, 3, 3] = float("nan")
    each = TopographLoss(sigmoid=True, reduction="none")(x, torch.zeros(2, 1, 6, 6))
    assert each.isnan().tolist() == [[True], [False]]


@pytest.mark.parametrize("predicted", [0.1, 0.9])
@pytest.mark.parametrize("true", [0, 1])
def test_empty_foreground_is_normal_data(predicted, true):
    p = torch.full((1, 1, 5, 5), predicted, requires_grad=True)
    loss = TopographLoss()(p, torch.full((1, 1, 5, 5), true))
    loss.backward()
    assert loss.item() == pytest.approx(0.9 if (predicted > 0.5) != (true == 1) else 0.0)


def test_more_than_256_classes_do_not_overflow():
    p = torch.zeros(1, 300, 3, 3)
    p[:, 299] = 0.9
    target = torch.full((1, 1, 3, 3), 299 - 256)
    assert TopographLoss(to_onehot_y=True, reduction="sum")(p, target).item() == pytest.approx(1.8)


def test_keys_of_many_regions_do_not_overflow():
    from topograph_loss.regions import _neighbour_counts

    n = 4_000_000
    counts = _neighbour_counts(np.array([n, n, n], np.uint32), np.array([n - 1, n - 1, 5], np.uint32), n)
    assert counts[n] == 2
    assert counts.sum() == 2
