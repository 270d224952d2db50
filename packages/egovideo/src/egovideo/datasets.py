"""Annotation files of the field as records: `id`, `video`, `start`, `end` (seconds), `narration`, and verbs and nouns where there are any.

The records are what `HODPipeline`, `ClipDataset` and the command take.
"""

from __future__ import annotations

import ast
import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["read_egoclip", "read_epic_kitchens"]

Record = dict[str, Any]


def read_epic_kitchens(path: str | Path, videos: str | Path) -> list[Record]:
    """EPIC-KITCHENS-100's CSV files (`EPIC_100_train.csv`, `..._retrieval_test.csv`, sentences without times included).

    `videos` is the folder that holds `P01/videos/P01_01.MP4` or `P01_01.MP4`. Records also have `verbs` ([class]) and `nouns` (all
    noun classes). Raises ValueError naming file and line for what is no such line.
    """

    def record(row: Mapping[str, str]) -> Record:
        made: Record = {"id": row["narration_id"], "narration": row["narration"]}
        if "video_id" in row:
            video = row["video_id"]
            nested = Path(videos) / video.split("_")[0] / "videos" / f"{video}.MP4"
            made["video"] = str(nested if nested.exists() else Path(videos) / f"{video}.MP4")
            made |= {"start": _seconds(row["start_timestamp"]), "end": _seconds(row["stop_timestamp"])}
        made["verbs"] = [int(row["verb_class"])]
        made["nouns"] = [int(n) for n in ast.literal_eval(row["all_noun_classes"])]
        return made

    return list(_rows(path, ",", record))


def read_egoclip(path: str | Path, videos: str | Path) -> list[Record]:
    """EgoClip's table (tab-separated: video_uid, clip_start, clip_end, clip_text, tag_verb, tag_noun) of Ego4D clips.

    `videos` is the folder that holds `<video_uid>.mp4`. Records also have `verbs` and `nouns` (class numbers).
    """

    def record(row: Mapping[str, str]) -> Record:
        start, end = float(row["clip_start"]), float(row["clip_end"])
        return {
            "id": f"{row['video_uid']}-{start:.3f}-{end:.3f}-{row.get('narration_ind', '')}",
            "video": str(Path(videos) / f"{row['video_uid']}.mp4"),
            "start": max(0.0, start),
            "end": end,
            "narration": row["clip_text"],
            "verbs": [int(v) for v in ast.literal_eval(row["tag_verb"])],
            "nouns": [int(n) for n in ast.literal_eval(row["tag_noun"])],
        }

    return list(_rows(path, "\t", record))


def _rows(path: str | Path, delimiter: str, record: Callable[[Mapping[str, str]], Record]) -> Iterator[Record]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        for row in (reader := csv.DictReader(file, delimiter=delimiter)):
            try:
                yield record(row)
            except (ValueError, KeyError, TypeError, SyntaxError) as error:
                what = f"there is no column {error}" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{path}:{reader.line_num}: {what}") from error


def _seconds(timestamp: str) -> float:
    """Seconds of "HH:MM:SS.hh"."""
    hours, minutes, seconds = timestamp.split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
