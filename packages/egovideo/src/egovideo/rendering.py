"""Small videos of hands and objects whose truth is known, drawn by rule: for tests, demos and benchmarks.

A scene is a list of `Actor`s (hands and things) with a way each; `render` draws it over a still background, `truth` gives the boxes. The
detector `ColorDetector` finds what was drawn, from pixels alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, UInt8

from egovideo.detection import Box, FrameDetections, Hand, Thing

__all__ = ["Actor", "ColorDetector", "background", "render", "truth", "way"]

Kind = Literal["left", "right", "object"]
COLORS: dict[Kind, tuple[int, int, int]] = {"left": (232, 64, 48), "right": (48, 208, 72), "object": (64, 96, 240)}
Image = UInt8[np.ndarray, "height width 3"]


@dataclass(frozen=True)
class Actor:
    """A disc (hand) or a square (object) of `size` (share of the picture's shorter side) whose centre follows `centers` (T, 2), normalised."""

    kind: Kind
    centers: Float[np.ndarray, "frames 2"]
    size: float = 0.2

    def box(self, frame: int) -> Box:
        """Where it is, in a square picture, as far as it lies in it."""
        x, y = self.centers[frame]
        half = self.size / 2
        corners = np.clip([x - half, y - half, x + half, y + half], 0, 1)
        return Box(*(float(v) for v in corners))


def way(
    start: tuple[float, float], end: tuple[float, float], frames: int, *, back: bool = False
) -> Float[np.ndarray, "frames 2"]:
    """A straight way with even steps; with `back`, there in the first half and back in the second."""
    t = np.linspace(0, 1, frames) if not back else 1 - np.abs(np.linspace(-1, 1, frames))
    return np.array(start) + t[:, None] * (np.array(end) - np.array(start))


def background(seed: int, side: int) -> Image:
    """Smooth grey noise: the same seed and side give the same picture."""
    rng = np.random.default_rng(seed)
    coarse = rng.uniform(90, 170, (side // 4 + 2, side // 4 + 2))
    at = np.linspace(0, side // 4, side)
    low = at.astype(int)
    part = at - low
    rows = coarse[low] * (1 - part)[:, None] + coarse[low + 1] * part[:, None]
    smooth = rows[:, low] * (1 - part) + rows[:, low + 1] * part
    return np.repeat(smooth[..., None], 3, -1).astype(np.uint8)


def render(actors: Sequence[Actor], ground: Image) -> UInt8[np.ndarray, "frames height width 3"]:
    """Draw the actors, later ones on top, in every frame. Edges are antialiased, so motion of less than a pixel shows."""
    side = ground.shape[0]
    ys, xs = (np.arange(side) + 0.5)[:, None] / side, (np.arange(ground.shape[1]) + 0.5)[None, :] / ground.shape[1]
    frames = np.repeat(ground[None].astype(np.float32), len(actors[0].centers), 0)
    for actor in actors:
        color = np.array(COLORS[actor.kind], np.float32)
        for number, (x, y) in enumerate(actor.centers):
            dx, dy = np.abs(xs - x), np.abs(ys - y)
            distance = np.maximum(dx, dy) if actor.kind == "object" else np.hypot(dx, dy)
            cover = np.clip((actor.size / 2 - distance) * side + 0.5, 0, 1)[..., None]
            frames[number] = frames[number] * (1 - cover) + color * cover
    return frames.round().astype(np.uint8)


def truth(actors: Sequence[Actor]) -> list[FrameDetections]:
    """What a perfect detector sees: hands touch the object that they are nearest to if the boxes meet."""
    return [
        FrameDetections(
            tuple(_hand(actor, actors, number) for actor in actors if actor.kind != "object"),
            tuple(Thing(actor.box(number), 1.0, "block") for actor in actors if actor.kind == "object"),
        )
        for number in range(len(actors[0].centers))
    ]


class ColorDetector:
    """Finds the discs and squares of `render` by their colours: one of each kind a frame.

    A real detector as far as the pipeline can tell: it sees pixels after compression, and says which hand touches the object.
    """

    name = "color"
    parallel = True

    def detect(self, frames: UInt8[np.ndarray, "frames height width 3"]) -> list[FrameDetections]:
        return [self._frame(frame.astype(int)) for frame in frames]

    def _frame(self, frame: np.ndarray) -> FrameDetections:
        found = {kind: _blob(frame, color) for kind, color in COLORS.items()}
        thing = found["object"]
        hands = []
        for side in ("left", "right"):
            box = found[side]
            if box is not None:
                touches = thing is not None and _meet(box, thing)
                hands.append(Hand(side, box, 1.0, "portable" if touches else "none"))  # type: ignore[arg-type]
        return FrameDetections(tuple(hands), (Thing(thing, 1.0, "block"),) if thing is not None else ())


def _hand(actor: Actor, actors: Sequence[Actor], number: int) -> Hand:
    box = actor.box(number)
    touches = any(other.kind == "object" and _meet(box, other.box(number)) for other in actors)
    side: Literal["left", "right"] = "left" if actor.kind == "left" else "right"
    return Hand(side, box, 1.0, "portable" if touches else "none")


def _meet(a: Box, b: Box) -> bool:
    return min(a.x2, b.x2) > max(a.x1, b.x1) and min(a.y2, b.y2) > max(a.y1, b.y1)


def _blob(frame: np.ndarray, color: tuple[int, int, int]) -> Box | None:
    mask = (np.abs(frame - np.array(color)).sum(-1) < 120).nonzero()
    if not len(mask[0]):
        return None
    # Of what was drawn most of the box has the colour; of stray pixels of a real picture it has not.
    filled = len(mask[0]) / ((np.ptp(mask[0]) + 1) * (np.ptp(mask[1]) + 1))
    if len(mask[0]) < max(6, 0.004 * frame.shape[0] * frame.shape[1]) or filled < 0.4:
        return None
    height, width = frame.shape[:2]
    ys, xs = mask
    return Box(
        float(xs.min() / width), float(ys.min() / height), float((xs.max() + 1) / width), float((ys.max() + 1) / height)
    )
