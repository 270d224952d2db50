"""Images and video frames: upright RGB uint8, at their exact presentation times, in bounded memory.

    with Video("clip.mp4") as video:
        window = video.window(0.5, 4.0)           # the frames shown in [0.5 s, 4.0 s)
        frames = video.read([0, 10, 20], window)  # Frames: images (3, H, W, 3), times in seconds

Frames are found by presentation timestamp, never by dividing a time by a frame rate, so variable frame rates are exact. Only what is
asked for is kept: finding frames reads packets without decoding them, decoding starts at the key frame before the first frame wanted,
and an image is resized before it is stored.

What cannot be read is a `MediaError` that names the file and the reason, and holds the frames that could be read.
"""

from __future__ import annotations

import bisect
import io
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from chapbook_shared.validate import check_choice, check_int, import_extra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Images = NDArray[np.uint8]

__all__ = [
    "Frames",
    "MediaError",
    "Video",
    "VideoInfo",
    "Window",
    "read_image",
    "resize",
    "write_video",
]

Size = tuple[int, int]
_EXTRA = "chapbook-shared[media]"
_TOLERANCE = 1e-9  # seconds: a time that went through a float is still the frame's own
_SEEK_AHEAD = 12  # frames: nearer key frames are reached sooner by decoding on than by a seek


class MediaError(ValueError):
    """A file that cannot be read, or not as far as asked. `path` and `reason` say what; `frames` holds what could be read."""

    def __init__(self, path: str | Path, reason: str, frames: Frames | None = None):
        self.path, self.reason, self.frames = str(path), reason, frames
        super().__init__(f"{path}: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:  # crosses process borders whole
        return type(self), (self.path, self.reason, self.frames)


@dataclass(frozen=True)
class VideoInfo:
    """What the container says about its first video stream. `frames` and `duration` are claims; None where it makes none."""

    width: int
    height: int
    """Pixels as stored, before any rotation."""
    codec: str
    time_base: Fraction
    """Seconds a tick of `pts`."""
    rate: float | None
    """Average frames a second."""
    frames: int | None
    duration: float | None
    """Seconds."""


@dataclass(frozen=True)
class Window:
    """Consecutive frames of a video, in the order in which they are shown.

    `pts` are their ticks, `times` (T,) float64 their seconds since the file's start (the earliest of its streams, as players show it).
    """

    pts: tuple[int, ...]
    times: NDArray[np.float64]
    seeks: tuple[int, ...]
    """Ticks of the key frames from which decoding may start, ascending."""

    def __len__(self) -> int:
        return len(self.pts)


@dataclass(frozen=True)
class Frames:
    """`images` (T, H, W, 3) uint8 RGB, `times` (T,) float64 seconds, `indices` (T,) int64 positions in the window that was read."""

    images: Images
    times: NDArray[np.float64]
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.images)


class Video:
    """One video file, open for reading frames.

    Args:
        path: anything FFmpeg reads: MP4, Matroska, WebM, AVI, MPEG-TS, GIF.
        threads: of the decoder; 0 lets FFmpeg choose. Use 1 where many videos are read in parallel.

    Raises MediaError at once if the file is missing, is no video, has no video stream or no frame.
    Not for use from several threads at a time; open one for each.
    """

    def __init__(self, path: str | Path, *, threads: int = 0):
        check_int("threads", threads, minimum=0)
        self.path = Path(path)
        self._threads = threads
        self._av = import_extra("av", _EXTRA)
        self._open()
        stream = self._stream
        context = stream.codec_context
        self.info = VideoInfo(
            width=context.width,
            height=context.height,
            codec=context.name,
            time_base=self._base,
            rate=float(self._rate) if self._rate else None,
            frames=stream.frames or None,
            duration=float(stream.duration * self._base) if stream.duration else None,
        )

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        self._container.close()

    def __enter__(self) -> Video:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """The number of frames that are in the file, counted, whatever the container claims."""
        return len(self.all_frames)

    @property
    def timestamps(self) -> NDArray[np.float64]:
        """Presentation time of every frame, in seconds."""
        return self.all_frames.times

    @property
    def missing(self) -> int:
        """How many of the frames that the container declares are not in the file; > 0 for a file that was cut off."""
        return max(0, (self.info.frames or 0) - len(self))

    @cached_property
    def all_frames(self) -> Window:
        """The window of all frames. Reads the file's packets once, without decoding."""
        window = self._scan(None, None)
        if not len(window):
            raise MediaError(self.path, "no video frame can be read: the file is empty, or cut off before the first")
        return window

    def window(self, start: float = 0.0, end: float | None = None) -> Window:
        """The frames whose presentation time lies in [start, end), seconds; `end=None` is the end of the file.

        An interval that is too short to hold a frame's time gives the frame on screen at `start`. Only this part of the file is
        read. Raises ValueError for an empty interval or NaN, MediaError if nothing is shown there.
        """
        if math.isnan(start) or (end is not None and math.isnan(end)):
            raise ValueError(f"start and end must be numbers of seconds, got {start!r} and {end!r}")
        if end is not None and end <= start:
            raise ValueError(f"end must be after start, got start={start!r} and end={end!r}")
        low = None if start <= 0 else self._ticks(start)
        high = None if end is None or math.isinf(end) else self._ticks(end)
        if low is None and high is None:
            return self.all_frames
        window = self._scan(low, high)
        if not len(window):
            raise MediaError(self.path, f"shows nothing in [{start:g} s, {'end' if end is None else f'{end:g} s'})")
        return window

    def read(
        self,
        indices: Sequence[int] | NDArray[np.integer],
        window: Window | None = None,
        *,
        size: Size | None = None,
        short_side: int | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        max_bytes: int = 4 << 30,
    ) -> Frames:
        """The frames at `indices` of `window` (default: of the whole file), in that order; repeats are allowed.

        Args:
            size: (height, width) of the images; default: as stored.
            short_side: scale so that the shorter side has this many pixels; not together with `size`.
            on_error: what to do when some of the frames cannot be decoded: `"raise"` a MediaError that holds the others, or `"skip"` them.
            max_bytes: the most that the images may take; more raises ValueError before they are made.

        Raises IndexError for an index outside the window, naming how many frames there are.
        """
        check_choice("on_error", on_error, ("raise", "skip"))
        np = import_extra("numpy", _EXTRA)
        window = self.all_frames if window is None else window
        order = [self._checked(index, window) for index in indices]
        _target(size, short_side, (1, 1))  # wrong sizes are refused before any work
        places: dict[int, list[int]] = {}
        for place, index in enumerate(order):
            places.setdefault(window.pts[index], []).append(place)
        images = np.empty((len(order), 0, 0, 3), np.uint8)
        got = np.zeros(len(order), bool)
        for pts, frame in self._decode(sorted(places), window.seeks):
            if not images.size:
                height, width = _target(size, short_side, _upright(frame))
                need = len(order) * height * width * 3
                if need > max_bytes:
                    raise ValueError(
                        f"{len(order)} frames of {height} x {width} take {need} bytes, more than max_bytes={max_bytes}: "
                        "ask for fewer or smaller ones, or iterate over frames()"
                    )
                images = np.empty((len(order), height, width, 3), np.uint8)
            first, *others = places[pts]
            images[first] = self._image(frame, images.shape[1:3])
            images[others] = images[first]
            got[places[pts]] = True
        chosen = np.asarray(order, np.int64)
        if got.all():
            return Frames(images, window.times[chosen], chosen)
        partial = Frames(images[got], window.times[chosen[got]], chosen[got])
        if on_error == "skip":
            return partial
        lost = [float(window.times[i]) for i in sorted({int(i) for i in chosen[~got]})]
        raise MediaError(
            self.path,
            f"{len(lost)} of {len(set(order))} frames cannot be decoded (corrupt or cut off), the first at {lost[0]:.3f} s",
            partial,
        )

    def at(self, times: Iterable[float], **options: Any) -> Frames:
        """The frames on screen at `times` (seconds): for each, the last one whose presentation time has come.

        A time before the first frame gives the first. `options` are those of `read`.
        """
        window = self.all_frames
        ticks = [self._ticks(time, down=True) for time in times]
        return self.read([max(0, bisect.bisect_right(window.pts, t) - 1) for t in ticks], window, **options)

    def frames(
        self, window: Window | None = None, *, size: Size | None = None, short_side: int | None = None
    ) -> Iterator[tuple[float, Images]]:
        """Each frame's time and image, one after the other; one image is held at a time. Undecodable frames are left out."""
        window = self.all_frames if window is None else window
        _target(size, short_side, (1, 1))
        shape: Size | None = None
        seconds = dict(zip(window.pts, window.times.tolist(), strict=True))
        for pts, frame in self._decode(list(window.pts), window.seeks):
            shape = shape or _target(size, short_side, _upright(frame))
            yield seconds[pts], self._image(frame, shape)

    def _open(self) -> None:
        if not self.path.is_file():
            raise MediaError(self.path, "no such file")
        errors = self._av.error.FFmpegError
        try:
            try:
                container = self._av.open(str(self.path))
            except (
                UnicodeDecodeError
            ):  # titles in another encoding: PyAV before 19 has to be told that they do not matter
                container = self._av.open(str(self.path), metadata_errors="replace")
        except (errors, OSError, ValueError) as error:
            raise MediaError(
                self.path, f"not a readable video ({_words(error)}): cut off, or of another kind"
            ) from error
        pictures = [s for s in container.streams.video if not _is_cover(s)]
        if not pictures or pictures[0].codec_context is None:
            kinds = sorted({s.type for s in container.streams})
            container.close()
            raise MediaError(
                self.path, f"has no video stream that can be decoded, only {', '.join(kinds) or 'nothing'}"
            )
        self._container, self._stream = container, pictures[0]
        if self._threads != 1:
            self._stream.thread_type = "AUTO"
        self._stream.codec_context.thread_count = self._threads
        # Without it a decoder patches damaged frames up and says nothing.
        self._stream.codec_context.options = {"err_detect": "explode"}
        self._base = _fraction(self._stream.time_base)
        self._rate = _fraction(self._stream.average_rate) if self._stream.average_rate else None
        starts = [
            s.start_time * _fraction(s.time_base) for s in container.streams if s.start_time is not None and s.time_base
        ]
        self._origin: Fraction = min(starts, default=Fraction(0))
        self._reformatter = self._av.video.reformatter.VideoReformatter()

    def _ticks(self, seconds: float, *, down: bool = False) -> int:
        """The first tick at or after a time; with `down`, the last at or before it."""
        if down:
            return math.floor((Fraction(seconds + _TOLERANCE) + self._origin) / self._base)
        return math.ceil((Fraction(seconds - _TOLERANCE) + self._origin) / self._base)

    def _checked(self, index: Any, window: Window) -> int:
        check_int("index", index)
        if not 0 <= index < len(window):
            declared = ""
            if window is self.__dict__.get("all_frames") and self.missing:
                declared = f" of the {self.info.frames} that it declares: it is cut off"
            raise IndexError(f"{self.path} has {len(window)} frames here{declared}; there is no frame {int(index)}")
        return int(index)

    def _scan(self, low: int | None, high: int | None) -> Window:
        """Find the frames with ticks in [low, high) by reading packets; the one on screen at `low` if there is none."""
        if self._counts_only:
            return self._cut(self._counted, low, high)
        known = self.__dict__.get("all_frames")
        if known is not None:
            return self._cut(known, low, high)
        whole = low is None
        if low is None:
            self._rewind()
        else:
            self._seek(low)
        pts: list[int] = []
        keys: list[int] = []
        partial: int | None = None
        for packet in self._packets():
            if packet.pts is None:
                self._counts_only = True
                return self._cut(self._counted, low, high)
            if packet.is_keyframe:
                keys.append(packet.pts)
            if not _is_hidden(packet):
                pts.append(packet.pts)
            partial = packet.pts if _is_corrupt(packet) else None
            # Nothing that follows is shown before its decoding time.
            if high is not None and packet.dts is not None and packet.dts >= high:
                break
        if partial in pts:  # the file ends within its last packet: that frame is not there
            pts.remove(partial)
        pts.sort()
        if any(a == b for a, b in itertools.pairwise(pts)):
            self._counts_only = True
            return self._cut(self._counted, low, high)
        # Frames shown before the key frame that a seek found need the one before it.
        shown = pts if whole or not keys else pts[bisect.bisect_left(pts, keys[0]) :]
        return self._cut(self._as_window(shown, keys), low, high)

    @property
    def _stride(self) -> int:
        """Ticks from one frame to the next, on average."""
        rate = self._rate or Fraction(25)
        return max(1, round(1 / (rate * self._base)))

    def _cut(self, window: Window, low: int | None, high: int | None) -> Window:
        if low is None and high is None:
            return window
        first = 0 if low is None else bisect.bisect_left(window.pts, low)
        last = len(window) if high is None else bisect.bisect_left(window.pts, high)
        if first >= last:
            # The frame on screen; the last one of the file stays for as long as frames do on average.
            on = low is not None and first > 0 and (first < len(window) or low < window.pts[-1] + self._stride)
            first, last = (first - 1, first) if on else (0, 0)
        return Window(window.pts[first:last], window.times[first:last], window.seeks)

    def _as_window(self, pts: list[int], keys: list[int]) -> Window:
        np = import_extra("numpy", _EXTRA)
        base, origin = self._base, self._origin
        times = np.array([float(p * base - origin) for p in pts], np.float64)
        return Window(tuple(pts), times, tuple(sorted(keys)))

    _counts_only = False
    """The stream has no presentation times of its own: frames are counted by decoding, and read from the start."""

    @cached_property
    def _counted(self) -> Window:
        np = import_extra("numpy", _EXTRA)
        self._rewind()
        count = sum(1 for _ in self._decoded())
        rate = self._rate or Fraction(25)
        # Ticks of the stream's own base, so that windows in seconds mean the same as elsewhere.
        times = [Fraction(i) / rate for i in range(count)]
        ticks = tuple(round((t + self._origin) / self._base) for t in times)
        if len(set(ticks)) < count:
            raise MediaError(self.path, "its frames have no distinct times")
        return Window(ticks, np.array([float(t) for t in times], np.float64), ())

    def _rewind(self) -> None:
        # Not every demuxer can seek to its start, and a decoder that was drained has to be new.
        self._container.close()
        self._open()

    def _seek(self, tick: int) -> None:
        try:
            self._container.seek(tick, stream=self._stream, backward=True, any_frame=False)
        except self._av.error.FFmpegError:
            self._rewind()

    def _packets(self) -> Iterator[Any]:
        """The stream's packets up to the end of what is there; a demuxer that gives up ends them."""
        try:
            for packet in self._container.demux(self._stream):
                if packet.dts is None and packet.pts is None and not packet.size:
                    return
                yield packet
        except (self._av.error.FFmpegError, OSError):
            return

    def _decoded(self, keep: set[int] | None = None) -> Iterator[Any]:
        """Frames from where the container stands. `keep`: ticks wanted; frames nothing depends on are not decoded if not in it."""
        errors = self._av.error.FFmpegError
        context = self._stream.codec_context
        for packet in self._packets():
            if _is_corrupt(packet):
                continue  # what it holds is no whole frame, and its error would take frames that wait in the decoder along
            context.skip_frame = "DEFAULT" if keep is None or packet.pts in keep else "NONREF"
            try:
                yield from packet.decode()
            except (errors, ValueError):
                continue
        context.skip_frame = "DEFAULT"
        try:
            yield from context.decode(None)
        except (errors, ValueError):
            return

    def _decode(self, wanted: list[int], seeks: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
        """The frames with the ticks `wanted` (ascending); those that cannot be decoded are left out."""
        if not wanted:
            return
        if self._counts_only:
            yield from self._decode_by_count(wanted)
            return
        keep, following = set(wanted), 0
        while following < len(wanted):
            begin = self._start(wanted[following], seeks)
            jump = self._jump_after(wanted, following, seeks)
            stop = len(wanted) if jump is None else jump
            last = wanted[stop - 1]
            self._go_to(begin, wanted[following])
            for frame in self._decoded(keep):
                if frame.pts is None or frame.pts < wanted[following]:
                    continue
                if frame.pts in keep and not _is_corrupt(frame):
                    yield frame.pts, frame
                if frame.pts >= last:
                    break
            following = stop

    def _decode_by_count(self, wanted: list[int]) -> Iterator[tuple[int, Any]]:
        numbers = {self._counted.pts.index(pts): pts for pts in wanted}
        self._rewind()
        for number, frame in enumerate(self._decoded()):
            if number in numbers and not _is_corrupt(frame):
                yield numbers[number], frame
            if number >= max(numbers):
                return

    def _start(self, tick: int, seeks: tuple[int, ...]) -> int | None:
        place = bisect.bisect_right(seeks, tick)
        return seeks[place - 1] if place else None

    def _jump_after(self, wanted: list[int], at: int, seeks: tuple[int, ...]) -> int | None:
        """The position in `wanted` to which it is quicker to seek than to decode on, or None."""
        for place in range(at + 1, len(wanted)):
            key = self._start(wanted[place], seeks)
            if key is not None and key - wanted[place - 1] > _SEEK_AHEAD * self._stride:
                return place
        return None

    def _go_to(self, key: int | None, tick: int) -> None:
        """Stand before a key frame from which `tick` can be decoded."""
        if key is None:
            self._rewind()
            return
        self._seek(key)
        # Some demuxers land behind the key frame that was asked for: look, and go back as far as needed.
        first = next((p.pts for p in self._packets() if p.pts is not None), None)
        if first is None or first > key:
            self._rewind()
        else:
            self._seek(key)

    def _image(self, frame: Any, shape: Sequence[int]) -> Images:
        np = import_extra("numpy", _EXTRA)
        height, width = shape
        turns = round(_rotation(frame) / 90) % 4
        if turns % 2:
            height, width = width, height
        smaller = height * width < frame.height * frame.width
        picture = self._reformatter.reformat(
            frame, width=width, height=height, format="rgb24", interpolation="AREA" if smaller else "BICUBIC"
        )
        image: Images = picture.to_ndarray()
        return np.rot90(image, turns) if turns else image


def read_image(source: str | Path | bytes, *, size: Size | None = None, short_side: int | None = None) -> Images:
    """An image file, or its bytes, as upright RGB uint8 (H, W, 3). Transparent parts become white.

    Raises MediaError if it is missing, no image, cut off, or larger than Pillow deems safe.
    """
    np = import_extra("numpy", _EXTRA)
    pil = import_extra("PIL.Image", _EXTRA)
    operations = import_extra("PIL.ImageOps", _EXTRA)
    name = "image" if isinstance(source, bytes) else source
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise MediaError(name, "no such file")
    try:
        with pil.open(io.BytesIO(source) if isinstance(source, bytes) else os.fspath(source)) as image:
            image.load()
            upright = operations.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, EOFError, pil.DecompressionBombError) as error:
        raise MediaError(name, f"not a readable image ({_words(error)})") from error
    if upright.mode == "I;16" or upright.mode.startswith("I"):  # 16-bit grey: the high byte
        upright = pil.fromarray((np.asarray(upright).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if "transparency" in upright.info or upright.mode in ("RGBA", "LA", "PA"):
        upright = upright.convert("RGBA")
        ground = pil.new("RGBA", upright.size, "white")
        upright = pil.alpha_composite(ground, upright)
    array = np.asarray(upright.convert("RGB"))
    if size is None and short_side is None:
        return array.copy()
    return resize(array, size=size, short_side=short_side)


def resize(images: Images, *, size: Size | None = None, short_side: int | None = None) -> Images:
    """Scale images (..., H, W, 3) uint8 to `size` (height, width), or so that the shorter side is `short_side`.

    Antialiased bicubic, one image at a time. The size they have already is a copy.
    """
    np = import_extra("numpy", _EXTRA)
    pil = import_extra("PIL.Image", _EXTRA)
    if images.ndim < 3 or images.shape[-1] != 3 or images.dtype != np.uint8:
        raise ValueError(f"images must be uint8 (..., H, W, 3), got {images.dtype} {images.shape}")
    height, width = _target(size, short_side, images.shape[-3:-1])
    if (height, width) == images.shape[-3:-1]:
        return images.copy()
    flat = images.reshape(-1, *images.shape[-3:])
    out = np.empty((len(flat), height, width, 3), np.uint8)
    for place, image in enumerate(flat):
        out[place] = np.asarray(
            pil.fromarray(np.ascontiguousarray(image)).resize((width, height), pil.Resampling.BICUBIC)
        )
    return out.reshape(*images.shape[:-3], height, width, 3)


def write_video(
    path: str | Path,
    images: Iterable[Images],
    *,
    rate: float = 30,
    times: Sequence[float] | None = None,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
) -> None:
    """Write RGB uint8 images (H, W, 3) of one size as a video; the ending of `path` chooses the container.

    Args:
        rate: frames a second; also the grain of time stamps (1/1000 of a frame).
        times: presentation time of each image in seconds, ascending; default: `rate`.
        options: of the encoder, such as `{"crf": "18"}`.

    Sides must be even for most codecs. Raises ValueError naming what is wrong.
    """
    av = import_extra("av", _EXTRA)
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"rate must be positive and finite, got {rate!r}")
    if times is not None and any(b <= a for a, b in itertools.pairwise(times)):
        raise ValueError("times must ascend strictly")
    exact = Fraction(rate).limit_denominator(100_000)
    base = 1 / (exact * 1000)
    count = 0
    # MP4's table of contents first: a file that is cut off later can still be read up to there.
    layout = {"movflags": "faststart"} if Path(path).suffix in (".mp4", ".mov", ".m4v") else {}
    with av.open(str(path), "w", options=layout) as container:
        stream = container.add_stream(codec, rate=exact, options=options or {})
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = base
        for count, image in enumerate(images, 1):
            if image.ndim != 3 or image.shape[-1] != 3 or image.dtype.name != "uint8":
                raise ValueError(f"images must be uint8 (H, W, 3), got {image.dtype} {image.shape}")
            if count == 1:
                stream.height, stream.width = image.shape[:2]
            elif image.shape[:2] != (stream.height, stream.width):
                raise ValueError(
                    f"image {count - 1} is {image.shape[:2]}, the first was {(stream.height, stream.width)}"
                )
            if times is not None and count > len(times):
                raise ValueError(f"times has {len(times)} entries, but there are more images")
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.time_base = base
            frame.pts = round((count - 1) * 1000 if times is None else Fraction(times[count - 1]) / base)
            container.mux(stream.encode(frame))
        if not count:
            raise ValueError("images must hold at least one image, got none")
        container.mux(stream.encode(None))


def _target(size: Size | None, short_side: int | None, now: Sequence[int]) -> Size:
    if size is not None and short_side is not None:
        raise ValueError("give size or short_side, not both")
    if size is not None:
        check_int("height", size[0], minimum=1)
        check_int("width", size[1], minimum=1)
        return int(size[0]), int(size[1])
    height, width = int(now[0]), int(now[1])
    if short_side is None:
        return height, width
    check_int("short_side", short_side, minimum=1)
    scale = short_side / min(height, width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def _fraction(ratio: Any) -> Fraction:
    """PyAV's ratios, which are fractions of Python's or of its own."""
    return Fraction(ratio.numerator, ratio.denominator)


def _is_cover(stream: Any) -> bool:
    """A still picture that comes with a sound file."""
    disposition = getattr(stream, "disposition", None)
    return disposition is not None and bool(disposition & type(disposition).attached_pic)


def _is_hidden(packet: Any) -> bool:
    """Decoded but not shown: outside the part that an edit list selects."""
    return bool(getattr(packet, "is_discard", False))


def _is_corrupt(part: Any) -> bool:
    """A packet that is not whole, or a frame that the decoder knows to be damaged."""
    return bool(getattr(part, "is_corrupt", False))


def _upright(frame: Any) -> Size:
    """(height, width) of the frame once it is turned."""
    return (frame.width, frame.height) if round(_rotation(frame) / 90) % 2 else (frame.height, frame.width)


def _rotation(frame: Any) -> float:
    """Degrees by which the frame has to be turned anticlockwise to be upright."""
    return float(getattr(frame, "rotation", 0) or 0)


def _words(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0].strip()
