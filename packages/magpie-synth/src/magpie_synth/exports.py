"""Rows as others expect them: TRL, ShareGPT, and the columns of the official release; as JSONL or Parquet, whole or in shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from chapbook_shared.jobs import atomic_write
from chapbook_shared.validate import check_choice, check_int, import_extra

from .rows import Record

OFFICIAL_COLUMNS = (
    "intent",
    "knowledge",
    "difficulty",
    "difficulty_generator",
    "input_quality",
    "quality_explanation",
    "quality_generator",
    "task_category",
    "other_task_category",
    "task_category_generator",
    "llama_guard_2",
    "instruct_reward",
    "reward_model",
    "min_neighbor_distance",
    "repeat_count",
    "min_similar_uuid",
    "instruction_length",
    "response_length",
    "language",
)


def to_trl(row: Mapping[str, Any]) -> Record:
    """`messages`, as TRL's trainers read conversations; the id beside it."""
    return {"id": row["id"], "messages": row["messages"]}


def to_sharegpt(row: Mapping[str, Any]) -> Record:
    """`conversations` of `{"from": "human" or "gpt", "value": ...}`."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[message["role"]], "value": message["content"]} for message in row["messages"]]
    return {"id": row["id"], "conversations": turns}


def to_official_schema(row: Mapping[str, Any], *, id_column: str = "uuid") -> Record:
    """The columns of the released sets, by their names; None for tags that are not there.

    Older sets call the id `conversation_id`; sets of several turns have `instruction_2` and `response_2`.
    """
    check_choice("id_column", id_column, ("uuid", "conversation_id"))
    similar = f"min_similar_{id_column}"
    made = {
        id_column: row["id"],
        "instruction": row["instruction"],
        "response": row["response"],
        "conversations": to_sharegpt(row)["conversations"],
        "gen_input_configs": row.get("gen_input_configs"),
        "gen_response_configs": row.get("gen_response_configs"),
    }
    turn = 2
    while f"instruction_{turn}" in row:
        made |= {name: row[name] for name in (f"instruction_{turn}", f"response_{turn}")}
        turn += 1
    for column in OFFICIAL_COLUMNS:
        if column == "min_similar_uuid":
            made[similar] = row.get("min_similar_id")
        else:
            made[column] = row.get(column)
    return made


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Record]] = {
    "rows": dict,
    "trl": to_trl,
    "sharegpt": to_sharegpt,
    "official": to_official_schema,
}


def write_rows(rows: Iterable[Mapping[str, Any]], path: str | Path) -> int:
    """Write rows to a .jsonl or .parquet file, whole or not at all; returns how many."""
    path, records = Path(path), [dict(row) for row in rows]
    check_choice("the ending of the file", path.suffix, (".jsonl", ".parquet"))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        with atomic_write(path) as file:
            for record in records:
                file.write(_line(record) + "\n")
        return len(records)
    pa: Any = import_extra("pyarrow", "magpie-synth[parquet]")
    parquet: Any = import_extra("pyarrow.parquet", "magpie-synth[parquet]")
    names = list(dict.fromkeys(name for record in records for name in record))
    columns = {name: pa.array([record.get(name) for record in records]) for name in names}
    with atomic_write(path, binary=True) as binary:
        parquet.write_table(pa.table(columns), binary)
    return len(records)


def write_shards(
    rows: Iterable[Mapping[str, Any]], folder: str | Path, *, size: int = 10_000, ending: str = ".parquet"
) -> list[Path]:
    """Write rows in files of `size`, named by their place and the number of files, so that no two are the same."""
    check_int("size", size, minimum=1)
    records = [dict(row) for row in rows]
    parts = [records[start : start + size] for start in range(0, len(records), size)]
    paths = [Path(folder) / f"rows-{place:05d}-of-{len(parts):05d}{ending}" for place in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        write_rows(part, path)
    return paths


def read_rows(path: str | Path) -> list[Record]:
    """Rows of a .jsonl or .parquet file."""
    path = Path(path)
    check_choice("the ending of the file", path.suffix, (".jsonl", ".parquet"))
    if path.suffix == ".parquet":
        parquet: Any = import_extra("pyarrow.parquet", "magpie-synth[parquet]")
        return list(parquet.read_table(path).to_pylist())
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number} of {path} is not JSON: {error}") from None
    return rows


def _line(record: Record) -> str:
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8 form, but a JSON escape
        return json.dumps(record)
    return line
