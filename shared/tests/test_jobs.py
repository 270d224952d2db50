import inspect
import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook_shared.jobs import SettingsMismatchError, Store, StoreLockedError, atomic_write

SETTINGS = {"model": "m", "temperature": 0.5}


put_many = inspect.unwrap(Store.put_many)  # as users have it, without the checks of types that our tests run under


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.sqlite"


def test_what_was_put_is_found_again_in_order(path):
    with Store(path, settings=SETTINGS) as store:
        store.put("b", {"x": 1})
        store.put_many([("a", {"x": 2}), ("c", {"x": 3})])
    with Store(path, settings=SETTINGS) as store:
        assert list(store.items()) == [("b", {"x": 1}), ("a", {"x": 2}), ("c", {"x": 3})]
        assert store.missing(["a", "z", "b", "z", "y"]) == ["z", "y"]
        assert "a" in store
        assert "z" not in store
        assert len(store) == 3
        assert store.get("c") == {"x": 3}
        with pytest.raises(KeyError):
            store.get("z")


def test_prefix_selects_literally(path):
    with Store(path) as store:
        store.put_many([("a%/1", {}), ("a_/1", {}), ("ab/1", {}), ("A%/1", {})])
        assert store.keys("a%") == ["a%/1"]
        assert [key for key, _ in store.items("a_")] == ["a_/1"]


def test_a_key_is_stored_once_unless_replaced(path):
    with Store(path) as store:
        store.put("a", {"x": 1})
        with pytest.raises(KeyError, match="a; pass replace=True"):
            store.put("a", {"x": 2})
        assert store.get("a") == {"x": 1}
        store.put("a", {"x": 2}, replace=True)
        assert list(store.items()) == [("a", {"x": 2})]


def test_a_block_is_stored_whole_or_not_at_all(path):
    with Store(path) as store:
        store.put("c", {})
        with pytest.raises(KeyError, match="c"):
            store.put_many([("a", {}), ("b", {}), ("c", {})])
        with pytest.raises(KeyError, match="twice in one block: d"):
            store.put_many([("d", {}), ("d", {})])
        assert store.keys() == ["c"]


def test_a_second_writer_is_refused_and_a_reader_is_not(path):
    with Store(path, settings=SETTINGS) as first:
        first.put("a", {"x": 1})
        with pytest.raises(StoreLockedError, match=r"run\.sqlite is being written"):
            Store(path, settings=SETTINGS)
        with Store(path, read_only=True) as reader:
            assert reader.get("a") == {"x": 1}
            first.put("b", {"x": 2})
            assert reader.keys() == ["a", "b"]
            with pytest.raises(PermissionError, match="read_only"):
                reader.put("c", {})
    with Store(path, settings=SETTINGS) as second:
        assert len(second) == 2


def test_a_writer_in_another_process_is_refused(path):
    script = f"from chapbook_shared.jobs import Store\nStore({str(path)!r})"
    with Store(path):
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "StoreLockedError" in run.stderr


def test_a_resume_with_other_settings_names_each_difference(path):
    Store(path, settings={"model": "m", "n": 1, "gone": True}).close()
    with pytest.raises(SettingsMismatchError) as caught:
        Store(path, settings={"model": "m", "n": 2, "new": None})
    assert caught.value.differing == {"n": (1, 2), "gone": (True, None), "new": (None, None)}
    assert "n: 1 in the store, 2 now" in str(caught.value)
    with Store(path) as store:  # the refused one has let go of the file
        assert store.settings == {"model": "m", "n": 1, "gone": True}


def test_a_setting_that_is_none_differs_from_one_that_is_absent(path):
    Store(path, settings={"a": 1, "b": None}).close()
    with pytest.raises(SettingsMismatchError, match="b: None on one side, absent on the other"):
        Store(path, settings={"a": 1})


def test_settings_with_nan_equal_themselves_and_types_differ(path):
    Store(path, settings={"x": math.nan, "y": 1}).close()
    Store(path, settings={"x": math.nan, "y": 1}).close()
    with pytest.raises(SettingsMismatchError):
        Store(path, settings={"x": math.nan, "y": True})


@pytest.mark.parametrize("key", ["", "a\x00b", "\ud800", 3])
def test_bad_keys_are_refused(path, key):
    with Store(path) as store, pytest.raises(ValueError, match="key must be a non-empty"):
        put_many(store, [(key, {})])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], "must be a mapping"),
        ({"x": {1: 2}}, "has the name 1: names must be strings"),
        ({"x": b"bytes"}, "JSON values only"),
        ({"x": {1, 2}}, "JSON values only"),
    ],
)
def test_records_that_json_would_change_or_refuse_are_refused(path, record, message):
    with Store(path) as store, pytest.raises(TypeError, match=message):
        put_many(store, [("k", record)])


def test_files_of_other_kinds_are_refused(tmp_path):
    import sqlite3

    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to have a header " * 4, encoding="utf-8")
    with pytest.raises(ValueError, match="is not a record store"):
        Store(text)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (x)")
    db.close()
    with pytest.raises(ValueError, match="of another program"):
        Store(other)
    newer = tmp_path / "newer.sqlite"
    Store(newer).close()
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ValueError, match="upgrade chapbook-shared"):
        Store(newer)
    with pytest.raises(FileNotFoundError, match="no store at"):
        Store(tmp_path / "absent.sqlite", read_only=True)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def same(a, b):
    """Equal, with NaN equal to itself and 1, 1.0 and True distinct."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


@settings(max_examples=60, deadline=None)
@given(records=st.lists(st.dictionaries(st.text(max_size=4), json_values, max_size=4), max_size=5))
def test_any_json_record_comes_back_from_store_and_jsonl(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("records")
    with Store(folder / "s.sqlite") as store:
        store.put_many((str(i), record) for i, record in enumerate(records))
        assert same([record for _, record in store.items()], records)
        assert store.export_jsonl(folder / "out.jsonl") == len(records)
    lines = (folder / "out.jsonl").read_bytes().decode("utf-8").split("\n")
    assert same([json.loads(line) for line in lines[:-1]], records)


def test_parquet_keeps_what_its_types_can_say(path, tmp_path):
    import pyarrow.parquet as pq

    records = [
        {
            "text": "naïve 🧪\n",
            "nan": math.nan,
            "int": 2**63 - 1,
            "big": 2**64,
            "huge": 10**80,
            "mixed": 1,
            "list": [1, 2],
            "bad": "\ud800",
        },
        {
            "text": None,
            "nan": None,
            "int": -1,
            "big": 1,
            "huge": 1,
            "mixed": 0.5,
            "list": [],
            "bad": "ok",
            "late": True,
        },
    ]
    with Store(path) as store:
        store.put_many((str(i), record) for i, record in enumerate(records))
        assert store.export_parquet(tmp_path / "out.parquet") == 2
    table = pq.read_table(tmp_path / "out.parquet")
    column = {name: table[name].to_pylist() for name in table.column_names}
    assert column["text"] == ["naïve 🧪\n", None]
    assert math.isnan(column["nan"][0])
    assert column["nan"][1] is None
    assert column["int"] == [2**63 - 1, -1]
    assert [int(value) for value in column["big"]] == [2**64, 1]
    assert column["list"] == [[1, 2], []]
    assert column["late"] == [None, True]
    is_json = [name for name in table.column_names if table.schema.field(name).metadata == {b"chapbook": b"json"}]
    assert is_json == ["huge", "mixed", "bad"]
    for name in is_json:
        assert [json.loads(value) for value in column[name]] == [record[name] for record in records]


def test_an_empty_store_exports_empty_files(path, tmp_path):
    import pyarrow.parquet as pq

    with Store(path) as store:
        assert store.export_jsonl(tmp_path / "out.jsonl") == 0
        assert store.export_parquet(tmp_path / "out.parquet") == 0
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == ""
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 0


def test_a_store_is_not_exported_over_itself(path):
    link = path.with_name("link")
    link.symlink_to(path)
    with Store(path) as store:
        store.put("a", {"x": 1})
        for target in (path, link, str(path.parent / "." / path.name)):
            for export in (store.export_jsonl, store.export_parquet):
                with pytest.raises(ValueError, match="is the store itself"):
                    export(target)
    with Store(path) as store:
        assert len(store) == 1


def test_threads_may_share_a_store(path):
    with Store(path) as store:
        workers = [
            threading.Thread(target=lambda w=w: [store.put(f"{w}/{i}", {"i": i}) for i in range(20)]) for w in range(8)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert len(store) == 160


def test_atomic_write_replaces_whole_files_and_keeps_the_old_on_error(tmp_path):
    target = tmp_path / "out.txt"
    with atomic_write(target) as file:
        file.write("öld\n")
    assert target.read_bytes() == "öld\n".encode()
    target.chmod(0o640)
    with pytest.raises(TypeError), atomic_write(target) as file:
        file.writelines(["half", None])
    assert target.read_bytes() == "öld\n".encode()
    with atomic_write(target, binary=True) as file:
        file.write(b"\x00\xff")
    assert target.read_bytes() == b"\x00\xff"
    assert target.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["out.txt"]


def test_what_a_killed_writer_left_is_cleared_away_by_the_next_and_a_living_one_is_not_disturbed(tmp_path):
    target = tmp_path / "out.jsonl"
    script = (
        "import os, sys; from chapbook_shared.jobs import atomic_write\n"
        "with atomic_write(sys.argv[1]) as file:\n    file.write('half'); file.flush(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, target])
    others = {".out.jsonl.tmp", ".out.jsonl.mine.tmp", ".other.jsonl.0123456789ab.tmp"}
    for name in others:
        (tmp_path / name).touch()
    assert len(os.listdir(tmp_path)) == 4
    with atomic_write(target) as slow:
        slow.write("slow")
        with atomic_write(target) as quick:
            quick.write("quick")
        assert target.read_text() == "quick"
    assert target.read_text() == "slow"
    assert set(os.listdir(tmp_path)) == {"out.jsonl", *others}


def test_many_writers_of_one_file_leave_one_whole_content(tmp_path):
    script = (
        "import sys; from chapbook_shared.jobs import atomic_write\n"
        "for i in range(100):\n    with atomic_write(sys.argv[1]) as file:\n        file.write(sys.argv[2] * 10_000)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, tmp_path / "out", letter]) for letter in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").read_text() in [letter * 10_000 for letter in "abc"]


def test_a_link_is_followed_and_what_is_no_file_is_written_into(tmp_path):
    link, target, pipe = tmp_path / "link", tmp_path / "target", tmp_path / "pipe"
    link.symlink_to(target)
    with atomic_write(link) as file:
        file.write("content")
    assert link.is_symlink()
    assert target.read_text() == "content"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True)
    with atomic_write(pipe) as file:
        file.write("through")
    assert reader.communicate()[0] == "through"
    assert pipe.is_fifo()
    script = (
        "from chapbook_shared.jobs import atomic_write\nprint('before', flush=True)\n"
        "with atomic_write('/dev/stdout') as file:\n    file.write('content\\n')\nprint('after')"
    )
    with open(tmp_path / "out", "w") as out:
        subprocess.run([sys.executable, "-c", script], stdout=out)
    assert (tmp_path / "out").read_text() == "before\ncontent\nafter\n"
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE).stdout == b"before\ncontent\nafter\n"
    with pytest.raises(IsADirectoryError), atomic_write(tmp_path):
        pass


# Puts records until killed, and says on stdout which have been put.
WORKER = """
import sys
from chapbook_shared.jobs import Store
path, total, block = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Store(path, settings={"total": total}) as store:
    left = store.missing(str(i) for i in range(total))
    for start in range(0, len(left), block):
        keys = left[start:start + block]
        store.put_many((key, {"key": key, "text": "x" * 200}) for key in keys)
        print(*keys, sep="\\n", flush=True)
print("done", flush=True)
"""


def kill_until_done(path, *, total, block, longest, seed):
    """Run the worker, killing it at random moments, until one run finishes. Returns the keys said to be put, and the number of kills."""
    moments = random.Random(seed)
    said, kills = [], 0
    while True:
        command = [sys.executable, "-c", WORKER, str(path), str(total), str(block)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            after = moments.uniform(0.0, longest * (1 + kills / 50))  # longer in time: a busy machine gets there too
            timer = threading.Timer(after, worker.send_signal, [signal.SIGKILL])
            timer.start()
            lines = worker.stdout.read().split("\n")
            worker.wait()
            timer.cancel()
        # The last line may be torn by the kill; what stands before it was put.
        said += [line for line in lines[:-1] if line and line != "done"]
        if "done" in lines:
            return said, kills
        kills += 1


def check_nothing_lost_or_repeated(path, said, total):
    with Store(path, settings={"total": total}) as store:
        assert sorted(store.keys(), key=int) == [str(i) for i in range(total)]
        assert all(record == {"key": key, "text": "x" * 200} for key, record in store.items())
    assert len(said) == len(set(said)), "a record that was put has been done again"


def test_kill_9_loses_and_repeats_nothing(path):
    said, kills = kill_until_done(path, total=3000, block=1, longest=0.4, seed=0)
    check_nothing_lost_or_repeated(path, said, 3000)
    assert kills >= 1


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 7])
def test_hundreds_of_kills_lose_and_repeat_nothing(tmp_path, block):
    kills = run = 0
    while kills < 150:
        path = tmp_path / f"{run}.sqlite"
        said, died = kill_until_done(path, total=4000, block=block, longest=0.25, seed=run)
        check_nothing_lost_or_repeated(path, said, 4000)
        kills, run = kills + died, run + 1
    print(f"{kills} kills in {run} jobs")


@pytest.mark.slow
def test_a_hundred_thousand_records_in_blocks(path):
    start = time.perf_counter()
    with Store(path) as store:
        for block in range(100):
            store.put_many((f"{block}/{i}", {"i": i, "text": "small"}) for i in range(1000))
        written = time.perf_counter() - start
        start = time.perf_counter()
        assert store.get("57/123") == {"i": 123, "text": "small"}
        found = time.perf_counter() - start
    print(f"written in {written:.2f} s, one found in {found * 1e3:.3f} ms")


def test_a_key_that_cannot_be_stored_is_simply_not_there(path):
    with Store(path) as store:
        store.put("a", {})
        assert "\ud800" not in store
        assert store.missing(["a", "\ud800"]) == ["\ud800"]
        assert store.keys("\ud800") == []
        with pytest.raises(KeyError):
            store.get("\ud800")


def test_a_full_disk_is_named_and_stops_nothing_else(path):
    with Store(path) as store:
        store.put("a", {})
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(sqlite3.OperationalError, match="full"):
            store.put("big", {"x": "y" * 100_000})
        store.put("b", {})
        assert store.keys() == ["a", "b"]


def test_a_large_block_with_a_key_twice_is_refused_at_once(path):
    with Store(path) as store:
        start = time.perf_counter()
        with pytest.raises(KeyError, match="twice"):
            store.put_many([(str(i), {}) for i in range(20_000)] + [("7", {})])
        assert time.perf_counter() - start < 5
        assert len(store) == 0


def test_a_link_to_the_store_does_not_let_a_second_writer_in(path):
    link = path.with_name("link.sqlite")
    link.symlink_to(path)
    with Store(path), pytest.raises(StoreLockedError):
        Store(link)


def test_a_change_of_folder_loses_no_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for name in ("run.sqlite", ":memory:"):
        with Store(name) as store:
            store.put("a", {"x": 1})
            monkeypatch.chdir(tmp_path / "elsewhere")
            assert list(store.items()) == [("a", {"x": 1})]
            monkeypatch.chdir(tmp_path)
        assert (tmp_path / name).stat().st_size > 0


def test_a_forked_child_cannot_write_through_the_connection_of_its_parent(path):
    with Store(path) as store:
        child = os.fork()
        if child == 0:
            try:
                store.put("a", {})
                os._exit(0)
            except StoreLockedError:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_what_cannot_be_opened_says_so(tmp_path):
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(ValueError, match="not a record store"):
        Store(tmp_path / "empty.sqlite", read_only=True)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder cannot be opened"):
        Store(tmp_path / "folder")
    endless: dict[str, object] = {}
    endless["x"] = endless
    with Store(tmp_path / "run.sqlite") as store, pytest.raises(TypeError, match="record of 'a'"):
        store.put("a", endless)


def test_a_store_in_a_folder_that_cannot_be_written_can_be_read(path):
    with Store(path) as store:
        store.put("a", {"x": 1})
    script = (
        "import os, sys; from chapbook_shared.jobs import Store\n"
        "os.chmod(sys.argv[1], 0o555); os.chmod(os.path.dirname(sys.argv[1]), 0o555)\n"
        "os.getuid() or os.setuid(65534)\n"
        "print(Store(sys.argv[1], read_only=True).get('a'))"
    )
    for folder in path.parents[: len(path.parents) - 2]:
        if folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o011)
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True)
    path.parent.chmod(0o755)
    assert done.stdout == "{'x': 1}\n", done.stderr
