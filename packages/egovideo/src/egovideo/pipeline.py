"""HOD: clips with terse narrations in, clips with sentences about hands and objects out (Pei et al. 2025, section 3.1).

    decode 16 frames -> detect -> trajectory -> a language model rewrites the narration -> the check -> store

Videos are decoded and searched in parallel threads (decoder and detectors work outside the interpreter's lock). A clip that cannot be read is a
record with its `error`, never the end of a run. Every record is on disk before the next block begins: kill a run, start it again, and it
does the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from chapbook_shared.jobs import Store
from chapbook_shared.lm import BudgetExceeded, Completion, LanguageModelError, Message
from chapbook_shared.progress import Progress
from chapbook_shared.validate import check_int
from egovideo.clips import MediaError, load_clip
from egovideo.describe import LLMCaptioner, TemplateCaptioner, check_caption, correction, prompt
from egovideo.detection import Detector, Precomputed
from egovideo.trajectory import Trajectory, track

__all__ = ["HODPipeline", "read_clips", "summary"]

Record = dict[str, Any]


@dataclass
class _Seen:
    """A clip on its way: its record so far, and its trajectory if hands were seen."""

    record: Record
    trajectory: Trajectory | None = None


class HODPipeline:
    """From clips to captions.

    Args:
        detector: see `egovideo.detection`; called from one thread at a time unless it has an attribute `parallel` that is true.
        captioner: rewrites narrations; None: the template alone.
        fallback: speaks where the captioner fails.
        num_frames: F, frames a clip.
        short_side: of the frames that the detector sees; None: as stored.
        retries: how often a caption that fails the check is asked for again.
        check: whether captions are checked against the trajectory.
    """

    def __init__(
        self,
        detector: Detector | Precomputed,
        captioner: LLMCaptioner | None = None,
        *,
        fallback: TemplateCaptioner | None = None,
        num_frames: int = 16,
        short_side: int | None = None,
        retries: int = 1,
        check: bool = True,
    ):
        check_int("num_frames", num_frames, minimum=1)
        check_int("retries", retries, minimum=0)
        self.detector, self.captioner = detector, captioner
        self.fallback = fallback or TemplateCaptioner()
        self.num_frames, self.short_side = num_frames, short_side
        self.retries, self.check = retries, check
        self._turn: AbstractContextManager[Any] = nullcontext() if getattr(detector, "parallel", False) else Lock()

    @property
    def settings(self) -> Record:
        """What fixes the meaning of a record; a store begun with others is refused."""
        sampling = None if self.captioner is None else repr(self.captioner.sampling)
        return {
            "detector": self.detector.name,
            "captioner": None if self.captioner is None else self.captioner.name,
            "sampling": sampling,
            "num_frames": self.num_frames,
            "short_side": self.short_side,
            "retries": self.retries,
            "check": self.check,
        }

    def run(
        self,
        clips: Iterable[Mapping[str, Any]] | str | Path,
        store: str | Path,
        *,
        workers: int = 2,
        block: int | None = None,
        progress: Progress | None = None,
    ) -> Record:
        """Caption what is not in the store yet; returns the `summary` of all its records.

        Args:
            clips: mappings, or a JSON Lines file of them: `video` (path; relative ones are relative to the file), `narration`, and optionally
                `start` and `end` (seconds) and `id` (default: made of video and times).
            store: an SQLite file of `chapbook_shared.jobs.Store`; export it with `egovideo describe --jsonl` or the store's own methods.
            workers: videos at a time; the order of the records does not depend on it.
            block: clips whose captions are asked for together; default 8 a worker.

        Raises ValueError for a clip without a video, or two with one id, before any work; BudgetExceeded when a language model's
        budget is used up (what was done is stored).
        """
        check_int("workers", workers, minimum=1)
        entries = read_clips(clips) if isinstance(clips, str | Path) else _numbered(clips)
        size = block or 8 * workers
        with Store(store, settings=self.settings) as records:
            missing = set(records.missing(entries))
            todo = [entry for key, entry in entries.items() if key in missing]
            pool = ThreadPoolExecutor(workers)
            try:
                with (progress or Progress()).task("describing clips", total=len(todo)) as task:
                    for start in range(0, len(todo), size):
                        seen = list(pool.map(self._look, todo[start : start + size]))
                        self._caption(seen)
                        records.put_many((str(one.record["id"]), one.record) for one in seen)
                        task.advance(len(seen))
            finally:
                pool.shutdown(cancel_futures=True)  # interrupted, it does not first read the rest of the block
            return summary(record for _, record in records.items())

    def describe(self, clip: Mapping[str, Any]) -> Record:
        """The record of one clip, without a store."""
        (entry,) = _numbered([clip]).values()
        seen = [self._look(entry)]
        self._caption(seen)
        return seen[0].record

    def _look(self, entry: Mapping[str, Any]) -> _Seen:
        record: Record = {
            "id": entry["id"],
            "video": str(entry["video"]),
            "start": entry.get("start"),
            "end": entry.get("end"),
        }
        record["narration"] = str(entry.get("narration") or "")
        record |= {
            "caption": record["narration"],
            "source": "narration",
            "reason": None,
            "hands": "none",
            "error": None,
        }
        try:
            clip = load_clip(
                entry["video"],
                entry.get("start") or 0.0,
                entry.get("end"),
                num_frames=self.num_frames,
                short_side=self.short_side,
                threads=1,
            )
            if isinstance(self.detector, Precomputed):
                detections = self.detector.detect_at(entry["video"], clip.times)
            else:
                with self._turn:
                    detections = self.detector.detect(clip.frames)
        except (MediaError, ValueError) as error:
            record["error"] = str(error)
            return _Seen(record)
        trajectory = track(detections, clip.times.tolist())
        record |= {"hands": trajectory.hands, "repeated": clip.repeated, "warnings": list(clip.warnings)}
        record["trajectory"] = trajectory.to_record()
        if trajectory.hands == "none":
            record["reason"] = "no hand in any frame"
            return _Seen(record)
        return _Seen(record, trajectory)

    def _caption(self, seen: Sequence[_Seen]) -> None:
        waiting = [one for one in seen if one.trajectory is not None]
        problems: dict[int, list[str]] = {id(one): ["no language model"] for one in waiting}
        if self.captioner is not None:
            conversations = {
                id(one): prompt(one.record["narration"], one.trajectory) for one in waiting if one.trajectory
            }
            for _ in range(self.retries + 1):
                replies = self._ask([conversations[id(one)] for one in waiting])
                failed = []
                for one, reply in zip(waiting, replies, strict=True):
                    caption, wrong = self._judge(one, reply)
                    if not wrong:
                        one.record |= {"caption": caption, "source": "llm"}
                        continue
                    problems[id(one)] = wrong
                    if not isinstance(reply, str):  # a reply that came can be mended
                        conversations[id(one)] = [*conversations[id(one)], *correction(caption, wrong)]
                    failed.append(one)
                waiting = failed
                if not waiting:
                    break
        for one in waiting:
            assert one.trajectory is not None
            caption = self.fallback.caption(one.record["narration"], one.trajectory)
            reason = "; ".join(problems[id(one)])
            one.record |= {"caption": caption, "source": self.fallback.name, "reason": reason}

    def _judge(self, one: _Seen, reply: Completion | str) -> tuple[str, list[str]]:
        assert self.captioner is not None
        assert one.trajectory is not None
        if isinstance(reply, str):
            return "", [reply]
        if reply.finish_reason == "length":
            return self.captioner.read(reply), ["it was cut off"]
        caption = self.captioner.read(reply)
        if not caption:
            return "", ["no caption in the reply"]
        return caption, check_caption(caption, one.trajectory, narration=one.record["narration"]) if self.check else []

    def _ask(self, conversations: list[list[Message]]) -> list[Completion | str]:
        """A reply to each, or why there is none."""
        assert self.captioner is not None
        if not conversations:
            return []
        try:
            return list(self.captioner.ask(conversations))
        except BudgetExceeded:
            raise
        except LanguageModelError as error:
            partial = list(error.partial or [None] * len(conversations))
        replies: list[Completion | str] = []
        for conversation, done in zip(conversations, partial, strict=True):
            if done is not None:
                replies.append(done)
                continue
            try:
                replies += self.captioner.ask([conversation])
            except BudgetExceeded:
                raise
            except LanguageModelError as error:
                replies.append(f"the model failed: {error}")
        return replies


def read_clips(path: str | Path) -> dict[str, Record]:
    """The clips of a JSON Lines file by id; relative video paths become relative to the file's folder."""
    path = Path(path)
    entries = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(entry, dict):
                raise ValueError(f"{path}:{number}: a clip is an object with a video, got {line.strip()[:60]}")
            if entry.get("video") and not Path(entry["video"]).is_absolute():
                entry["video"] = str(path.parent / entry["video"])
            entries.append(entry)
    return _numbered(entries)


def summary(records: Iterable[Mapping[str, Any]]) -> Record:
    """How many clips there are, where their captions come from, what hands were seen, why fallbacks were needed, what could not be read."""
    sources: Counter[str] = Counter()
    hands: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    errors = 0
    for record in records:
        sources[record["source"]] += 1
        errors += record["error"] is not None
        if record["error"] is None:
            hands[record["hands"]] += 1
        reasons.update((record["reason"] or "").split("; ") if record["reason"] else [])
    return {
        "clips": sum(sources.values()),
        "captions": dict(sources),
        "hands": dict(hands),
        "reasons": dict(reasons.most_common(10)),
        "errors": errors,
    }


def _numbered(clips: Iterable[Mapping[str, Any]]) -> dict[str, Record]:
    entries: dict[str, Record] = {}
    for place, clip in enumerate(clips):
        if not clip.get("video"):
            raise ValueError(f"clip {place} has no video: {dict(clip)!r}")
        for name in ("start", "end"):
            value = clip.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"clip {place}: {name} must be a number of seconds, got {value!r}")
        key = str(clip.get("id") or _made_id(clip))
        if key in entries:
            raise ValueError(f"clip {place} has the id {key!r}, which an earlier one has: ids must differ")
        entries[key] = {**clip, "id": key}
    return entries


def _made_id(clip: Mapping[str, Any]) -> str:
    """Made of what the clip is, so that another run finds it again."""
    what = json.dumps([Path(clip["video"]).name, clip.get("start"), clip.get("end"), clip.get("narration")])
    return f"{Path(clip['video']).stem}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
