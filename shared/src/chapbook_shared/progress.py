"""Progress bars on stderr, silent when stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import rich.progress

T = TypeVar("T")


class Task:
    """One bar. `advance()` moves it; `describe()` changes its text."""

    def __init__(self, bars: rich.progress.Progress | None = None, id: rich.progress.TaskID | None = None):
        self._bars, self._id = bars, id

    def advance(self, steps: float = 1) -> None:
        if self._bars is not None and self._id is not None:
            self._bars.advance(self._id, steps)

    def describe(self, description: str) -> None:
        if self._bars is not None and self._id is not None:
            self._bars.update(self._id, description=description)


class Progress:
    """Bars for one job; tasks may be nested.

    `enabled=None` shows bars only when stderr is a terminal.
    """

    def __init__(self, *, enabled: bool | None = None):
        self.enabled = sys.stderr.isatty() if enabled is None else enabled
        self._bars: rich.progress.Progress | None = None
        self._open = 0

    @contextmanager
    def task(self, description: str, total: float | None = None) -> Iterator[Task]:
        """Show a bar while the block runs; `total=None` shows that something moves without saying how far."""
        if not self.enabled:
            yield Task()
            return
        if self._bars is None:
            self._bars = _new_bars()
        if self._open == 0:
            self._bars.start()
        self._open += 1
        task = self._bars.add_task(description, total=total)
        try:
            yield Task(self._bars, task)
        finally:
            self._bars.remove_task(task)
            self._open -= 1
            if self._open == 0:
                self._bars.stop()


def track(
    items: Iterable[T], description: str, *, total: int | None = None, progress: Progress | None = None
) -> Iterator[T]:
    """Yield the items, moving a bar."""
    if total is None:
        try:
            total = len(items)  # type: ignore[arg-type]
        except TypeError:
            total = None
    with (progress or Progress()).task(description, total) as task:
        for item in items:
            yield item
            task.advance()


def _new_bars() -> rich.progress.Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Bars(*columns, console=Console(stderr=True, force_terminal=True), transient=True)
