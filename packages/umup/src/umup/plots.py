"""Figures of scales, coordinate checks and sweeps. Extra: `umup[plot]`. Each returns a matplotlib Figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from chapbook_shared.validate import import_extra
from umup.tracking import CoordCheck, ScaleReport
from umup.tuning import SweepResult

__all__ = ["plot_coord_check", "plot_lr_curves", "plot_scales", "plot_sweep"]


def _new(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    figures = import_extra("matplotlib.figure", "umup[plot]")
    figure = figures.Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def plot_scales(reports: Mapping[str, ScaleReport]) -> Any:
    """Root mean squares of activations and of their gradients, in model order, one line per report."""
    figure, axes = _new(9, 4, 2)
    for label, report in reports.items():
        for ax, values in ((axes[0], report.forward), (axes[1], report.backward)):
            ax.plot([values.get(name, math.nan) for name in report.forward], marker=".", label=label)
    for ax, title in zip(axes, ("activations", "their gradients"), strict=True):
        ax.axhline(1, color="0.6", linewidth=1)
        ax.set(yscale="log", title=title, xlabel="module, in order", ylabel="root mean square")
        ax.legend()
    return figure


def plot_coord_check(check: CoordCheck, *, modules: Sequence[str] | None = None) -> Any:
    """Change of outputs since initialisation against width, after the last step, one line per module."""
    figure, (ax,) = _new(6, 4)
    last = max(r["step"] for r in check.rows)
    for module in modules or dict.fromkeys(r["module"] for r in check.rows):
        by_width: dict[int, list[float]] = {}
        for r in check.rows:
            if r["module"] == module and r["step"] == last:
                by_width.setdefault(r["width"], []).append(r["delta_rms"])
        ax.plot(list(by_width), [sum(v) / len(v) for v in by_width.values()], marker="o", label=module)
    ax.set(xscale="log", yscale="log", xlabel="width", ylabel=f"RMS of the change after {last} steps")
    ax.legend(fontsize="x-small")
    return figure


def plot_sweep(result: SweepResult) -> Any:
    """Loss against each swept value, a panel each; the dashed line is the best learning rate alone."""
    names = [n for n in dict.fromkeys(r["phase"] for r in result.records) if n != "combined"]
    figure, axes = _new(3.2 * len(names), 3.2, len(names))
    for ax, name in zip(axes, names, strict=True):
        points = [(v, loss) for v, loss in result.line(name) if math.isfinite(loss)]
        ax.plot([v for v, _ in points], [loss for _, loss in points], marker="o")
        ax.axhline(result.lr_only[1], color="0.6", linestyle="--", linewidth=1)
        ax.set(xlabel=name, ylabel="loss")
        ax.set_xscale("log", base=2)
    return figure


def plot_lr_curves(curves: Mapping[str, Mapping[str, Mapping[float, float]]]) -> Any:
    """Loss against learning rate: a panel per scheme (first key), a line per width or depth (second), best points marked."""
    figure, axes = _new(4 * len(curves), 3.6, len(curves))
    for ax, (scheme, lines) in zip(axes, curves.items(), strict=True):
        for label, points in lines.items():
            finite = {lr: loss for lr, loss in sorted(points.items()) if math.isfinite(loss)}
            (line,) = ax.plot(list(finite), list(finite.values()), marker=".", label=label)
            if finite:
                best = min(finite, key=lambda lr: finite[lr])
                ax.plot([best], [finite[best]], marker="*", markersize=13, color=line.get_color())
        ax.set(title=scheme, xlabel="learning rate", ylabel="loss (nats)")
        ax.set_xscale("log", base=2)
        ax.legend()
    return figure
