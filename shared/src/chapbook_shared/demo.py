"""What a package's evidence run looks like.

A package registers one callable under the entry-point group `chapbook.demos`, named after its distribution:

    [project.entry-points."chapbook.demos"]
    topograph-loss = "topograph_loss.demo:demo"
"""

from __future__ import annotations

from typing import Protocol

from .progress import Progress
from .report import Report

ENTRY_POINT_GROUP = "chapbook.demos"


class Demo(Protocol):
    """Run the method against its baseline and say what was measured.

    Seeded (the same seed gives the same report), honest (a claim can fail), at most a minute on two cores, and in need of nothing
    that has to be downloaded.
    """

    def __call__(self, *, seed: int, progress: Progress) -> Report: ...
