import math

import pytest
import torch

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

import umup.nn as unn
from umup.plots import plot_coord_check, plot_lr_curves, plot_scales, plot_sweep
from umup.tracking import CoordCheck, scale_report
from umup.tuning import SweepResult


def lines(figure):
    return [line for ax in figure.axes for line in ax.get_lines()]


def test_figures_show_what_they_are_given():
    curves = {"SP": {"32": {0.5: 1.0, 1.0: math.inf, 2.0: 0.5}}, "u-muP": {"32": {0.5: math.inf}}}
    figure = plot_lr_curves(curves)
    assert isinstance(figure, Figure)
    assert list(lines(figure)[0].get_xdata()) == [0.5, 2.0]  # the diverged point is left out
    assert list(lines(figure)[1].get_xdata()) == [2.0]  # the star
    rows = [{"width": w, "seed": s, "step": 1, "module": "a", "delta_rms": w + s} for w in (8, 16) for s in (0, 2)]
    assert list(lines(plot_coord_check(CoordCheck(rows)))[0].get_ydata()) == [9, 17]
    records = [{"phase": "lr", "params": {"lr": v}, "loss": v} for v in (2.0, 1.0)]
    figure = plot_sweep(SweepResult({"lr": 1.0}, 1.0, (1.0, 1.0), None, records))
    assert list(lines(figure)[0].get_xdata()) == [1.0, 2.0]
    torch.manual_seed(0)
    model = unn.TransformerDecoder(8, 16, 1, 2)
    report = scale_report(model, lambda m: m.loss(torch.randint(8, (2, 5))))
    figure = plot_scales({"ours": report})
    assert len(lines(figure)[0].get_ydata()) == len(report.forward)
