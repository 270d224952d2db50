"""A stand-in with TOFU's layout (200 authors with 20 questions would be 4000 rows; here 1000), read from local files."""

import json

import pytest

from llm_unlearn.tofu import load_tofu, tofu_retain


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(1000)]
    (tmp_path / "full.json").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    (tmp_path / "forget05.json").write_text("".join(json.dumps(r) + "\n" for r in rows[950:]), encoding="utf-8")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_task_1_is_the_standard_split_and_tasks_do_not_overlap(folder):
    assert load_tofu("forget05", 1, path=folder) == load_tofu("forget05", path=folder)
    tasks = [load_tofu("forget05", k, path=folder) for k in range(1, 11)]
    questions = [row["question"] for task in tasks for row in task]
    assert len(set(questions)) == len(questions) == 500


def test_retained_authors_are_in_no_task(folder):
    kept = {row["question"] for row in tofu_retain("forget05", path=folder)}
    assert len(kept) == 500
    assert not kept & {row["question"] for k in range(1, 11) for row in load_tofu("forget05", k, path=folder)}


def test_wrong_splits(folder):
    with pytest.raises(FileNotFoundError, match=r"holds no retain90\.json"):
        load_tofu("retain90", path=folder)
    with pytest.raises(ValueError, match="split"):
        load_tofu("full", 2, path=folder)
    with pytest.raises(ValueError, match="task_id must be <= 9"):
        load_tofu("forget10", 10, path=folder)
