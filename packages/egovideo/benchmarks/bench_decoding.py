"""Sixteen frames of a clip: ours against decord, and against decoding everything; imageio and torchcodec where they run."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from chapbook_shared.bench import Comparison, compare, main
from chapbook_shared.media import Video, write_video
from chapbook_shared.validate import import_extra
from egovideo import load_clip, segment_ids
from egovideo.demo import real_clips


def decord_clip(path: str, ids: list[int], threads: int) -> Any:
    decord = import_extra("decord", "decord")
    return decord.VideoReader(path, num_threads=threads).get_batch(ids).asnumpy()


def torchcodec_clip(path: str, ids: list[int], threads: int) -> Any:
    decoders = import_extra("torchcodec.decoders", "torchcodec")
    return decoders.VideoDecoder(path, num_ffmpeg_threads=threads).get_frames_at(ids).data


def all_frames(path: str) -> int:
    with Video(path, threads=1) as video:
        return sum(1 for _ in video.frames())


def run() -> Iterator[Comparison]:
    with TemporaryDirectory() as scratch:
        long = Path(scratch) / "two-minutes.mp4"
        rng = np.random.default_rng(0)
        ground = rng.integers(0, 255, (360, 1280, 3), dtype=np.uint8)
        images = (np.ascontiguousarray(np.roll(ground, 2 * i, 1)[:, :640]) for i in range(1800))
        write_video(long, images, rate=15, options={"preset": "ultrafast", "g": "30", "bf": "2", "b-pyramid": "none"})
        for path in [*(str(p) for p in real_clips() if "distorted" not in p.name), str(long)]:
            with Video(path) as video:
                count = len(video)
            ids = segment_ids(0, count, 16).tolist()
            name = Path(path).stem
            for threads in (1, 2):
                row = compare(
                    f"16 frames of {name} ({count}), {threads} thread(s)",
                    lambda path=path, threads=threads: load_clip(path, num_frames=16, threads=threads),
                    lambda path=path, ids=ids, threads=threads: decord_clip(path, ids, threads),
                    peer_name="decord",
                    goal=1.0,
                    repeats=5,
                )
                yield row
            if path != str(long):
                yield compare(
                    f"16 frames of {name}, 1 thread",
                    lambda path=path: load_clip(path, num_frames=16, threads=1),
                    lambda path=path: all_frames(path),
                    peer_name="decoding all",
                    repeats=3,
                )
            try:
                torchcodec_clip(path, ids, 1)
            except Exception as error:
                import sys

                print(f"torchcodec does not run here: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            yield compare(
                f"16 frames of {name}, 1 thread",
                lambda path=path: load_clip(path, num_frames=16, threads=1),
                lambda path=path, ids=ids: torchcodec_clip(path, ids, 1),
                peer_name="torchcodec",
                repeats=5,
            )


if __name__ == "__main__":
    main(run)
