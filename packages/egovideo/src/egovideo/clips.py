"""A clip of a video as a few frames, at the places where the paper takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int, UInt8

from chapbook_shared.media import Frames, MediaError, Video, Window
from chapbook_shared.validate import check_int

__all__ = ["Clip", "MediaError", "load_clip", "load_clips", "segment_ids"]


@dataclass(frozen=True)
class Clip:
    """`frames` (T, H, W, 3) uint8 RGB at `times` (T,), seconds since the file's start."""

    frames: UInt8[np.ndarray, "frames height width 3"]
    times: Float[np.ndarray, "frames"]
    repeated: bool = False
    """Some frames stand in it more than once: the clip has hardly more than were asked for, or fewer."""
    warnings: tuple[str, ...] = ()
    """What was not as asked: an end beyond the file, a file that is cut off."""

    def __len__(self) -> int:
        return len(self.frames)


def segment_ids(start: int, end: int, n: int, *, rng: np.random.Generator | None = None) -> Int[np.ndarray, "n"]:
    """Frame numbers in [start, end): one from each of n equal segments, as EgoVLP-style loaders take them.

    Segment i is s = round(seg i) + start to e = round(seg (i + 1)) + start, seg = (end - start - 1) / n, rounded half to even; its middle
    (s + e) // 2 is taken, or with `rng` a uniform number of [s, e]. Never `end` itself, which the official loader can reach.
    Fewer than n frames repeat evenly.
    """
    check_int("n", n, minimum=1)
    if end <= start:
        raise ValueError(f"end must be after start, got start={start} and end={end}")
    seg = (end - start - 1) / n
    bounds = np.array([round(seg * i) for i in range(n + 1)]) + start
    s, e = np.minimum(bounds[:-1], end - 1), np.minimum(bounds[1:], end - 1)
    return (s + e) // 2 if rng is None else rng.integers(s, e, endpoint=True)


def load_clip(
    path: str | Path,
    start: float = 0.0,
    end: float | None = None,
    *,
    num_frames: int = 16,
    size: tuple[int, int] | None = None,
    short_side: int | None = None,
    rng: np.random.Generator | None = None,
    threads: int = 0,
) -> Clip:
    """`num_frames` frames of [start, end) seconds, by `segment_ids` over the frames that are shown there.

    Args:
        end: None, or beyond the file's end: the end of the file; the latter is noted in `warnings`.
        size, short_side: of the frames, see `chapbook_shared.media.Video.read`.
        rng: draws within segments (training); None takes their middles.

    Raises MediaError, with the reason, if the file or the frames cannot be read: no frame ever stands in for another.
    """
    (clip,) = load_clips(
        path, start, end, num_frames=(num_frames,), size=size, short_side=short_side, rng=rng, threads=threads
    )
    return clip


def load_clips(
    path: str | Path,
    start: float = 0.0,
    end: float | None = None,
    *,
    num_frames: Sequence[int] = (4, 16),
    size: tuple[int, int] | None = None,
    short_side: int | None = None,
    rng: np.random.Generator | None = None,
    threads: int = 0,
) -> list[Clip]:
    """The same clip at several rates, as `load_clip` would give each, from one pass over the file."""
    if not (math.isfinite(start) and start >= 0):
        raise ValueError(f"start must be a number of seconds >= 0, got {start!r}")
    with Video(path, threads=threads) as video:
        window = video.window(start, end)
        warnings = _warnings(video, window, end)
        ids = [segment_ids(0, len(window), n, rng=rng) for n in num_frames]
        wanted = np.unique(np.concatenate(ids))
        read: Frames = video.read(wanted, window, size=size, short_side=short_side)
    clips = []
    for each in ids:
        place = np.searchsorted(wanted, each)
        repeated = len(np.unique(each)) < len(each)
        clips.append(Clip(read.images[place], read.times[place], repeated, tuple(warnings)))
    return clips


def _warnings(video: Video, window: Window, end: float | None) -> list[str]:
    length, last = video.info.duration, float(window.times[-1])
    if length is None:
        return []
    # A second without a frame before the end that was asked for, and that the container says is there.
    if min(length, math.inf if end is None else end) > last + 1:
        return [f"the file is cut off: frames end at {last:.2f} s of {length:g} s"]
    return [f"end {end:g} s is beyond the file's {length:g} s"] if end is not None and end > length + 0.5 else []
