"""A resumable record store for long jobs, and atomic file writes.

    with Store("run.sqlite", settings={"model": "m", "temperature": 1.0}) as store:
        for key in store.missing(all_keys):
            store.put(key, work(key))
        store.export_jsonl("run.jsonl")

A job killed at any moment, even by kill -9, has in its store exactly the records whose `put` returned; running the same lines again
does the rest. Records are JSON objects, kept in the order in which they were put.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from filelock import FileLock

Record = dict[str, Any]

_APPLICATION_ID = 0x63686170  # "chap"
_SCHEMA_VERSION = 1
_STREAM = re.compile(r"/dev/(stdout|stderr|fd/(\d+))")
_KEYS_A_QUERY = 500  # SQLite builds differ in how many parameters a query may have; all allow 999


class StoreLockedError(RuntimeError):
    """Another process, or another `Store` in this one, is writing to the same file."""


class SettingsMismatchError(ValueError):
    """The store was begun with other settings. `differing` maps each differing name to (stored, given); absent ones are None."""

    def __init__(self, path: Path, differing: Mapping[str, tuple[Any, Any]]):
        self.differing = dict(differing)
        lines = "".join(
            f"\n  {name}: None on one side, absent on the other"
            if old is None and new is None
            else f"\n  {name}: {old!r} in the store, {new!r} now"
            for name, (old, new) in differing.items()
        )
        super().__init__(
            f"{path} was begun with other settings, so its records cannot be mixed with new ones:{lines}\n"
            "resume with the stored settings, or write to another path"
        )


class Store:
    """Records of one job in one SQLite file (WAL, synchronous FULL). One writer at a time; readers at any time.

    `settings` are whatever fixes the meaning of a record (JSON values; never secrets, they are stored). A resume with other settings
    raises `SettingsMismatchError`; `settings=None` accepts whatever is there. `read_only=True` opens an existing store without taking the
    writer's place. Methods may be called from several threads; a forked child opens a store of its own.
    """

    def __init__(self, path: str | Path, *, settings: Mapping[str, Any] | None = None, read_only: bool = False):
        self.path = Path(path)
        self._file = (
            self.path.resolve()
        )  # one lock for one file, whatever links lead there; and `chdir` changes nothing
        self._pid = os.getpid()
        self.read_only = read_only
        if read_only and not self.path.exists():
            raise FileNotFoundError(f"no store at {self.path}")
        self._guard = threading.RLock()
        self._writer = None if read_only else _become_writer(self.path, self._file)
        try:
            self._db = self._open()
            self._settings = self._settle(settings)
        except BaseException:
            self.close()
            raise

    def put(self, key: str, record: Mapping[str, Any], *, replace: bool = False) -> None:
        """Store one record in a transaction of its own; it is on disk when this returns.

        A key that is there already raises KeyError unless `replace=True`.
        """
        self.put_many([(key, record)], replace=replace)

    def put_many(self, records: Iterable[tuple[str, Mapping[str, Any]]], *, replace: bool = False) -> None:
        """Store a block of records in one transaction: all of them or none."""
        if self.read_only:
            raise PermissionError(f"{self.path} was opened with read_only=True")
        if self._pid != os.getpid():  # an SQLite connection does not survive a fork, and the lock is the parent's
            raise StoreLockedError(f"{self.path} was opened before a fork: put records from the process that opened it")
        rows = [(_checked_key(key), _encode(key, record)) for key, record in records]
        insert = "INSERT INTO records (key, record) VALUES (?, ?)"
        if replace:
            insert += " ON CONFLICT (key) DO UPDATE SET record = excluded.record"
        with self._guard, self._transaction() as db:
            try:
                db.executemany(insert, rows)
            except sqlite3.IntegrityError:
                there = self._known(key for key, _ in rows)
                twice = sorted(there) or sorted(k for k, count in Counter(key for key, _ in rows).items() if count > 1)
                raise KeyError(
                    f"already stored, or twice in one block: {', '.join(twice[:5])}; pass replace=True to overwrite"
                ) from None

    def get(self, key: str) -> Record:
        """The record of `key`; KeyError if there is none."""
        with self._guard:
            row = _has_utf8(key) and self._db.execute("SELECT record FROM records WHERE key = ?", (key,)).fetchone()
        if not row:
            raise KeyError(key)
        return _decode(row[0])

    def __contains__(self, key: str) -> bool:
        return not self.missing([key])

    def __len__(self) -> int:
        with self._guard:
            return int(self._db.execute("SELECT count(*) FROM records").fetchone()[0])

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Those of `keys` that have no record yet, in their order, each once."""
        wanted = list(dict.fromkeys(keys))
        with self._guard:
            known = self._known(wanted)
        return [key for key in wanted if key not in known]

    def keys(self, prefix: str = "") -> list[str]:
        """The keys that start with `prefix`, in the order in which they were put."""
        with self._guard:
            return [key for key, _ in self._select("key, 0", prefix)]

    def items(self, prefix: str = "") -> Iterator[tuple[str, Record]]:
        """Each key that starts with `prefix`, with its record, in the order in which they were put.

        Reads through a connection of its own: what is put meanwhile is not seen.
        """
        with closing(self._reader()) as db:
            for key, text in self._select("key, record", prefix, db):
                yield key, _decode(text)

    @property
    def settings(self) -> Record:
        """The settings that the store was begun with."""
        return dict(self._settings)

    def export_jsonl(self, path: str | Path, *, prefix: str = "") -> int:
        """Write the records, one JSON object a line, atomically; returns how many.

        Python's `json` reads them back exactly: any Unicode string, integers of any size, every float (NaN and the infinities as
        `NaN`, `Infinity`, `-Infinity`).
        """
        self._refuse_itself(path)
        count = 0
        with atomic_write(path) as file:
            for _, record in self.items(prefix):
                # A lone surrogate has no UTF-8 form; such a record is written with \u escapes, all others as readable text.
                line = json.dumps(record, ensure_ascii=False)
                file.write((line if _has_utf8(line) else json.dumps(record)) + "\n")
                count += 1
        return count

    def export_parquet(self, path: str | Path, *, prefix: str = "") -> int:
        """Write the records as one Parquet file with a column a field, atomically; returns how many.

        A field keeps its own type where Parquet has one for all its values; integers beyond 64 bits become decimals of up to 76 digits.
        Any other field (mixed types, lone surrogates, larger integers) is written as JSON text, marked `json` in the field's metadata.
        Needs pyarrow: `pip install 'chapbook-shared[parquet]'`.
        """
        from .validate import import_extra

        self._refuse_itself(path)
        pa = import_extra("pyarrow", "chapbook-shared[parquet]")
        pq = import_extra("pyarrow.parquet", "chapbook-shared[parquet]")
        records = [record for _, record in self.items(prefix)]
        names = list(dict.fromkeys(name for record in records for name in record))
        columns = {name: _arrow_column(pa, [record.get(name) for record in records]) for name in names}
        fields = [
            pa.field(name, column.type, metadata={"chapbook": "json"} if is_json else None)
            for name, (column, is_json) in columns.items()
        ]
        table = pa.table([column for column, _ in columns.values()], schema=pa.schema(fields))
        with atomic_write(path, binary=True) as file:
            pq.write_table(table, file)
        return len(records)

    def close(self) -> None:
        """Close the file and let another writer in. Closing twice is harmless."""
        with self._guard:
            db = getattr(self, "_db", None)
            if db is not None:
                db.close()
            if self._writer is not None:
                self._writer.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_itself(self, path: str | Path) -> None:
        if os.path.realpath(path) == str(self._file):
            raise ValueError(f"{path} is the store itself: export to another path")

    def _open(self) -> sqlite3.Connection:
        if self.read_only:
            return self._reader()
        db = _connect(self._file.as_uri(), self.path)
        try:
            _check_format(db, self.path)
            # Readers go on while the writer writes, and a record is on the disk itself before `put` returns.
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
        except BaseException:
            db.close()
            raise
        return db

    def _reader(self) -> sqlite3.Connection:
        # mode=ro never creates a file, but WAL needs one next to the store: where none can be made, and none is there (so there is
        # no writer either), the store is read as it lies.
        lies = not os.access(self._file.parent, os.W_OK) and not Path(f"{self._file}-wal").exists()
        db = _connect(f"{self._file.as_uri()}?mode=ro{'&immutable=1' if lies else ''}", self.path)
        try:
            _check_format(db, self.path)
        except BaseException:
            db.close()
            raise
        return db

    def _settle(self, settings: Mapping[str, Any] | None) -> Record:
        """Create the tables if they are not there, and compare the settings."""
        given = None if settings is None else _decode(_encode("settings", settings))
        if not self.read_only:
            with self._transaction() as db:
                db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
                db.execute("CREATE TABLE IF NOT EXISTS settings (settings TEXT NOT NULL)")
                db.execute(
                    "CREATE TABLE IF NOT EXISTS records "
                    "(seq INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, record TEXT NOT NULL)"
                )
                if db.execute("SELECT 1 FROM settings").fetchone() is None:
                    db.execute("INSERT INTO settings VALUES (?)", (json.dumps(given or {}),))
        try:
            stored = _decode(self._db.execute("SELECT settings FROM settings").fetchone()[0])
        except (sqlite3.OperationalError, TypeError):
            raise ValueError(f"{self.path} is not a record store, or one that has only just been begun") from None
        if given is not None:
            names = dict.fromkeys([*stored, *given])
            differing = {
                name: (stored.get(name), given.get(name))
                for name in names
                # Compared as text: NaN equals itself, 1 and 1.0 and True differ.
                if (name in stored, json.dumps(stored.get(name), sort_keys=True))
                != (name in given, json.dumps(given.get(name), sort_keys=True))
            }
            if differing:
                raise SettingsMismatchError(self.path, differing)
        return stored

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # on a full disk SQLite has rolled back by itself
                self._db.execute("ROLLBACK")
            raise

    def _known(self, keys: Iterable[str]) -> set[str]:
        wanted = [key for key in keys if not isinstance(key, str) or _has_utf8(key)]
        known: set[str] = set()
        for start in range(0, len(wanted), _KEYS_A_QUERY):
            block = wanted[start : start + _KEYS_A_QUERY]
            marks = ",".join("?" * len(block))
            known.update(key for (key,) in self._db.execute(f"SELECT key FROM records WHERE key IN ({marks})", block))
        return known

    def _select(self, columns: str, prefix: str, db: sqlite3.Connection | None = None) -> sqlite3.Cursor:
        query = f"SELECT {columns} FROM records WHERE substr(key, 1, ?) = ? ORDER BY seq"
        if not _has_utf8(prefix):  # no key has a lone surrogate; a prefix of the same length that no key has either
            prefix = "\x00"
        return (db or self._db).execute(query, (len(prefix), prefix))


@contextmanager
def atomic_write(path: str | Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """Write a file so that a reader sees the old content or the new, never a part, whatever happens meanwhile.

    Text is UTF-8 with `\\n` line ends. If the block raises, the old file stays. What a writer that was killed left beside the file
    is cleared away by the next one. A link is followed; what is no file to replace (`/dev/stdout`, a pipe) gets the content as it comes.
    """
    path = Path(path)
    text: dict[str, Any] = {} if binary else {"encoding": "utf-8", "newline": "\n"}
    kind = "b" if binary else ""
    stream = _STREAM.fullmatch(os.path.abspath(path))
    if stream or (path.exists() and not path.is_file()):
        # The stream itself, not the file that it may lead to: what else is written to it keeps its place.
        target = os.dup({"stdout": 1, "stderr": 2}.get(stream[1]) or int(stream[2])) if stream else path
        with open(target, f"w{kind}", **text) as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    _remove_abandoned(path)
    file = _open_beside(path, f"x{kind}", text)
    temporary = Path(file.name)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if path.exists():
                temporary.chmod(path.stat().st_mode & 0o777)
            if os.name != "nt":  # Windows renames no open file; elsewhere the lock is kept until the file has its name
                os.replace(temporary, path)
        if os.name == "nt":
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _open_beside(path: Path, mode: str, text: Mapping[str, Any]) -> IO[Any]:
    """A new file `.NAME.RANDOM.tmp`, locked as long as it is open: that tells it from one whose writer was killed."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        file = open(temporary, mode, **text)  # noqa: SIM115 the caller closes it
        _lock(file.fileno(), wait=True)
        if temporary.exists():  # unless another writer took it for abandoned before it was locked
            return file
        file.close()


def _remove_abandoned(path: Path) -> None:
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}\.tmp")
    try:
        found = [path.with_name(name) for name in os.listdir(path.parent) if ours.fullmatch(name)]
    except OSError:  # opening the file says what is wrong with the folder
        return
    for temporary in found:
        # Another writer may be faster, or the file be another user's: then it stays.
        with suppress(OSError), open(temporary, "rb+") as file:
            if _lock(file.fileno(), wait=False):
                temporary.unlink()


def _lock(handle: int, *, wait: bool) -> bool:
    """Lock an open file against other processes and other openings; False if it is locked or its file system has no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _connect(uri: str, path: Path) -> sqlite3.Connection:
    try:
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    except sqlite3.OperationalError as error:
        raise OSError(f"{path} cannot be opened: {error}") from error


def _become_writer(path: Path, file: Path) -> FileLock:
    from filelock import FileLock, Timeout

    lock = FileLock(f"{file}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise StoreLockedError(
            f"{path} is being written by another process or another open Store: close that one first, or open this with read_only=True"
        ) from None
    return lock


def _check_format(db: sqlite3.Connection, path: Path) -> None:
    try:
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.OperationalError as error:
        raise OSError(f"{path} cannot be read: {error}") from error
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} is not a record store: {error}") from error
    if tables and application != _APPLICATION_ID:
        raise ValueError(f"{path} is an SQLite file of another program, not a record store")
    if version > _SCHEMA_VERSION:
        raise ValueError(
            f"{path} has format {version}, newer than this library reads ({_SCHEMA_VERSION}): upgrade chapbook-shared"
        )


def _checked_key(key: Any) -> str:
    if not isinstance(key, str) or not key or not _has_utf8(key) or "\x00" in key:
        raise ValueError(f"key must be a non-empty Unicode string without NUL or lone surrogates, got {key!r}")
    return key


def _encode(key: str, record: Any) -> str:
    if not isinstance(record, Mapping):
        raise TypeError(f"record of {key!r} must be a mapping of names to JSON values, got {type(record).__name__}")
    try:
        _check_names(record, f"record of {key!r}")
    except RecursionError:
        raise TypeError(
            f"record of {key!r} must hold JSON values only: it is nested too deep, or holds itself"
        ) from None
    try:
        return json.dumps(dict(record))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"record of {key!r} must hold JSON values only: {error}") from error


def _check_names(value: Any, where: str) -> None:
    # json.dumps would turn the name 1 into "1" without a word.
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise TypeError(f"{where} has the name {name!r}: names must be strings")
            _check_names(inner, where)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_names(inner, where)


def _decode(text: str) -> Record:
    record: Record = json.loads(text)
    return record


def _has_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _arrow_column(pa: Any, values: list[Any]) -> tuple[Any, bool]:
    """The values as an Arrow array, and whether they had to be written as JSON text."""
    kinds = {type(value) for value in values if value is not None}
    # Arrow would join integers to floats, and mappings of different shapes to one; both lose what the record said.
    if len(kinds) <= 1 and not kinds & {dict, list}:
        types: tuple[Any, ...] = (pa.int64(), pa.uint64(), pa.decimal256(76)) if kinds == {int} else (None,)
        for kind in types:
            try:
                return pa.array(values, type=kind), False
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):
                continue
    if kinds == {list} and len({type(item) for value in values if value for item in value}) <= 1:
        try:
            column = pa.array(values)
            if repr(column.to_pylist()) == repr(values):  # == would let integers pass as floats
                return column, False
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):
            pass
    return pa.array([None if value is None else json.dumps(value) for value in values], type=pa.string()), True


def _sync_directory(directory: Path) -> None:
    """Make a rename durable. Systems whose directories cannot be opened (Windows) do this by themselves."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
