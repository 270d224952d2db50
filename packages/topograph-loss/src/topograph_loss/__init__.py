"""Topograph: a segmentation loss and the DIU metric that count topological errors, not pixels."""

from typing import TYPE_CHECKING, Any

from topograph_loss.diu import DIU, diu
from topograph_loss.loss import DiceTopographLoss, TopographLoss
from topograph_loss.regions import CriticalRegions, Region, critical_regions

if TYPE_CHECKING:
    from topograph_loss.metric import DIUMetric

__all__ = [
    "TopographLoss",
    "DiceTopographLoss",
    "DIU",
    "diu",
    "DIUMetric",
    "CriticalRegions",
    "Region",
    "critical_regions",
]


def __getattr__(name: str) -> Any:
    if name == "DIUMetric":  # MONAI is an extra and slow to import
        from topograph_loss.metric import DIUMetric

        return DIUMetric
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
