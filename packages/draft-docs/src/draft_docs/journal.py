"""What a run has done, kept so that a killed run repeats no chat call and no tool call.

Records of many tools that are refined at once are committed together: a commit waits for the disk once for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from chapbook_shared.jobs import Record, Store


class Journal:
    """A `Store` behind coroutines. `path=None` keeps nothing."""

    def __init__(self, path: str | Path | None, *, settings: Mapping[str, Any] | None = None):
        self._store = None if path is None else Store(path, settings=settings)
        # All in memory: records are small, and a resume looks each of them up.
        self._known: dict[str, Record] = dict(self._store.items()) if self._store else {}
        self._waiting: dict[str, Record] = {}
        self._commit: asyncio.Task[None] | None = None

    def get(self, key: str) -> Record | None:
        return self._known.get(key)

    def items(self, prefix: str = "") -> list[tuple[str, Record]]:
        """The records whose key starts with `prefix`, in the order in which they were first put."""
        return [(key, record) for key, record in self._known.items() if key.startswith(prefix)]

    def note(self, key: str, record: Record) -> None:
        """Keep a record that could be made again from others; it is on disk with the next commit."""
        self._known[key] = record
        if self._store is not None:
            self._waiting[key] = record

    async def put(self, key: str, record: Record) -> None:
        """Keep a record, replacing what was under the key; it is on disk when this returns, and so is all that was noted before."""
        self.note(key, record)
        # The commit under way has taken its records already: wait for the one that takes this.
        while self._store is not None and self._waiting.get(key) is record:
            if self._commit is None or self._commit.done():
                self._commit = asyncio.create_task(self._write())
            await asyncio.shield(self._commit)

    async def _write(self) -> None:
        assert self._store is not None
        batch = dict(self._waiting)
        await asyncio.to_thread(self._store.put_many, list(batch.items()), replace=True)
        for key, record in batch.items():
            if self._waiting.get(key) is record:
                del self._waiting[key]

    def close(self) -> None:
        """Commit what is left and let another run in."""
        if self._store is not None:
            if self._waiting:
                self._store.put_many(list(self._waiting.items()), replace=True)
                self._waiting.clear()
            self._store.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
