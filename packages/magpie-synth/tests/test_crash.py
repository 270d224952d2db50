"""A run that is killed with kill -9, again and again, ends where an unbroken one does."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from chapbook_shared.jobs import Store, StoreLockedError
from magpie_synth import Run

JOB = Path(__file__).parent / "job.py"
ROWS = 60


def start(folder, pause=0.004):
    process = subprocess.Popen(
        [sys.executable, str(JOB), str(folder), str(ROWS), str(pause)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline() == "begun\n", process.stderr.read()
    return process


def records(folder):
    """Every record as the bytes that are on the disk."""
    with sqlite3.connect(f"file:{folder}/run.sqlite?mode=ro", uri=True) as db:
        return dict(db.execute("SELECT key, record FROM records"))


def _count(folder):
    try:
        return len(records(folder))
    except sqlite3.OperationalError:  # only just begun
        return 0


def without_times(folder):
    return {
        key: {name: value for name, value in json.loads(record).items() if name != "created"}
        for key, record in records(folder).items()
    }


def test_killed_anywhere_the_rows_are_those_of_an_unbroken_run(tmp_path):
    whole = start(tmp_path / "whole", 0.0)
    assert whole.communicate()[0] == "done\n"
    broken, before = tmp_path / "broken", {}
    stages, kills = Counter(), 0
    generator = random.Random(0)
    for _ in range(40):
        process = start(broken)
        enough = len(before) + generator.randint(1, 30)
        while process.poll() is None and _count(broken) < enough:
            time.sleep(0.001)
        finished = process.poll() is not None
        process.send_signal(signal.SIGKILL)
        process.communicate()
        now = records(broken) if (broken / "run.sqlite").exists() and _count(broken) else {}
        assert now.items() >= before.items()  # what was finished is there, byte for byte
        stages.update(key.split("/")[0] for key in now.keys() - before.keys())
        kills += len(now) > len(before)
        before = now
        if finished:
            break
    assert kills >= 4
    assert len(stages) == 4  # it was killed in, or between, both steps of both turns
    assert without_times(broken) == without_times(tmp_path / "whole")
    assert [row.to_dict()["messages"] for row in Run(broken).rows()] == [
        row.to_dict()["messages"] for row in Run(tmp_path / "whole").rows()
    ]


def test_one_process_writes_to_a_folder_at_a_time(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(JOB.parent))
    import job

    process = start(tmp_path, 0.05)
    try:
        while not (tmp_path / "run.sqlite").exists():
            time.sleep(0.01)
        time.sleep(0.1)
        with pytest.raises(StoreLockedError, match="being written by another process"):
            job.run(tmp_path, ROWS)
        assert isinstance(Run(tmp_path).stats(), dict)  # reading goes on meanwhile
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_leaves_a_state_that_goes_on(tmp_path):
    process = start(tmp_path, 0.02)
    while not ((tmp_path / "run.sqlite").exists() and _count(tmp_path)):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode != 0
    done = records(tmp_path)
    assert done
    again = start(tmp_path, 0.0)
    assert again.communicate()[0] == "done\n"
    assert records(tmp_path).items() >= done.items()


def test_what_cannot_be_written_is_an_error(tmp_path, scripted, chatml, monkeypatch):
    from magpie_synth import Magpie

    def full(self, block, **options):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Store, "put_many", full)
    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        Magpie(scripted(), tokenizer=chatml).run(tmp_path, rows=5)
