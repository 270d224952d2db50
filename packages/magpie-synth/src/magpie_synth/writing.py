"""Records on their way to the store, committed in groups.

A commit waits for the disk (milliseconds); a fast server finishes more rows than that. So a thread takes whatever has come in while
the last commit was under way and puts it into one transaction, and generation never waits.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from chapbook_shared.jobs import Store

_Entry = tuple[str, Mapping[str, Any]]


class Writer:
    """Puts records into a store in the background; on leaving the block all are on disk, or the error is raised."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: SimpleQueue[_Entry | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="magpie-writer", daemon=True)

    def put(self, key: str, record: Mapping[str, Any]) -> None:
        """Hand over one record; raises what an earlier commit failed with."""
        if self._error is not None:
            raise self._error
        self._entries.put((key, record))

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entries.put(None)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        try:
            while (entry := self._entries.get()) is not None:
                block = [entry]
                ended = False
                while not self._entries.empty():
                    following = self._entries.get()
                    if following is None:
                        ended = True
                        break
                    block.append(following)
                self._store.put_many(block)
                if ended:
                    return
        except BaseException as problem:
            self._error = problem
