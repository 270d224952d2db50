"""The TOFU benchmark (Maini et al. 2024): its splits, the retain sets that the paper pairs with them, and continual tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chapbook_shared.validate import check_choice, check_int, import_extra

REPOSITORY = "locuslab/TOFU"
_FORGET_PERCENT = {"forget01": 1, "forget05": 5, "forget10": 10}


def load_tofu(split: str, task_id: int | None = None, *, path: str | Path = REPOSITORY) -> list[dict[str, Any]]:
    """Rows with question, answer and, where the split has them, paraphrased_answer and perturbed_answer.

    split: a configuration of the dataset (`full`, `forget10`, `retain90`, `forget01_perturbed`, `world_facts_perturbed`, ...).
    task_id: for forget01/05/10, the task of a continual run: task 1 is the standard split (the last authors), task 2 the same number of
        authors before them, and so on.
    path: the hub's name, or a local folder with one `<split>.json` (JSON lines), `.jsonl` or `.parquet` a split. Needs the extra `tofu`.
    """
    if task_id is None:
        return _rows(split, path)
    check_choice("split (with a task_id)", split, tuple(_FORGET_PERCENT))
    full = _rows("full", path)
    size = len(full) * _FORGET_PERCENT[split] // 100
    check_int("task_id", task_id, minimum=1, maximum=9 if split == "forget10" else 10)
    end = len(full) - (task_id - 1) * size
    return full[end - size : end]


def tofu_retain(split: str, *, path: str | Path = REPOSITORY) -> list[dict[str, Any]]:
    """The paper's retain set of forget01/05/10: the first 90, 50, 10 % of `full`, which no continual task touches."""
    check_choice("split", split, tuple(_FORGET_PERCENT))
    full = _rows("full", path)
    kept = 100 - min(10 * _FORGET_PERCENT[split], 90)
    return full[: len(full) * kept // 100]


def _rows(split: str, path: str | Path) -> list[dict[str, Any]]:
    datasets = import_extra("datasets", "llm-unlearn[tofu]")
    folder = Path(path)
    if not folder.is_dir():
        return [dict(row) for row in datasets.load_dataset(str(path), split, split="train")]
    for suffix, reader in ((".json", "json"), (".jsonl", "json"), (".parquet", "parquet")):
        file = folder / f"{split}{suffix}"
        if file.exists():
            return [dict(row) for row in datasets.load_dataset(reader, data_files=str(file), split="train")]
    raise FileNotFoundError(f"{folder} holds no {split}.json, {split}.jsonl or {split}.parquet")
