"""Answers kept on disk, so that no request is paid for twice: one SQLite file, safe for several processes and for Ctrl-C.

A key is a hash of everything that shapes the answer (endpoint, model, messages with their images, every sampling setting, schema).
Prompts are only in the hash; credentials are in neither.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chapbook_shared.lm.protocol import Completion, TokenLogprob, Usage

_FORMAT = 1

_INHERITED: list[sqlite3.Connection] = []
"""Connections of a parent process: a forked child must neither use nor close them."""


def request_key(request: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of a request."""
    canonical = json.dumps(request, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


class ResponseCache:
    """JSON answers by key, in one SQLite file that any number of processes may share.

    Args:
        path: the file; it and its folder are made when missing.
        namespace: part of every key. Runs that must not see each other's samples (repetitions of one experiment without seeds)
            take different namespaces.

    An answer is written in one transaction the moment it arrives; a process that dies leaves the file whole.
    """

    def __init__(self, path: str | Path, *, namespace: str = "") -> None:
        self.path = Path(path)
        self.namespace = namespace
        self.hits = 0
        self.misses = 0
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        with self._lock:
            self._open()

    def get(self, key: str) -> Any | None:
        """The answer, or None."""
        with self._lock:
            row = self._open().execute("SELECT answer FROM answers WHERE key = ?", (self._full(key),)).fetchone()
            self.hits += row is not None
            self.misses += row is None
        return None if row is None else json.loads(row[0])

    def put(self, key: str, answer: Any) -> None:
        """Keep an answer; one that is already there stays."""
        text = json.dumps(answer)
        with self._lock:
            self._open().execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", (self._full(key), text, time.time()))

    def clear(self) -> None:
        """Forget every answer, of all namespaces."""
        with self._lock:
            self._open().execute("DELETE FROM answers")

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def __len__(self) -> int:
        with self._lock:
            return self._open().execute("SELECT count(*) FROM answers").fetchone()[0]

    def __repr__(self) -> str:
        return f"ResponseCache({str(self.path)!r}, namespace={self.namespace!r})"

    def _full(self, key: str) -> str:
        return hashlib.sha256(f"{self.namespace}\0{key}".encode()).hexdigest() if self.namespace else key

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._pid == os.getpid():  # SQLite connections do not survive a fork
            return self._connection
        if self._connection is not None:
            _INHERITED.append(self._connection)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # isolation_level=None: each statement is its own transaction
        connection = sqlite3.connect(self.path, timeout=60, isolation_level=None, check_same_thread=False)
        try:
            _begin_wal(connection)
            connection.execute("PRAGMA synchronous = NORMAL")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _FORMAT):
                raise ValueError(
                    f"{self.path} is a response cache of format {version}, this version reads {_FORMAT}: use another file"
                )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS answers "
                "(key TEXT PRIMARY KEY, answer TEXT NOT NULL, created REAL NOT NULL) WITHOUT ROWID"
            )
            connection.execute(f"PRAGMA user_version = {_FORMAT}")
        except sqlite3.DatabaseError as error:
            connection.close()
            raise ValueError(f"{self.path} cannot be used as a response cache: {error}") from error
        except ValueError:
            connection.close()
            raise
        self._connection, self._pid = connection, os.getpid()
        return connection


def _begin_wal(connection: sqlite3.Connection) -> None:
    """Several processes that begin one file at the same time: SQLite refuses the change at once, whatever its timeout."""
    deadline = time.monotonic() + 60
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """A completion as plain JSON values."""
    return asdict(completion)


def completion_from_json(value: Mapping[str, Any]) -> Completion:
    """The inverse of `completion_to_json`."""
    usage, token_ids, logprobs = value["usage"], value["token_ids"], value["logprobs"]
    return Completion(
        text=value["text"],
        finish_reason=value["finish_reason"],
        model=value["model"],
        usage=None if usage is None else Usage(**usage),
        token_ids=None if token_ids is None else tuple(token_ids),
        logprobs=None
        if logprobs is None
        else tuple(
            TokenLogprob(entry["token"], entry["logprob"], entry["id"], tuple((t, p) for t, p in entry["top"]))
            for entry in logprobs
        ),
        details=value["details"],
    )
