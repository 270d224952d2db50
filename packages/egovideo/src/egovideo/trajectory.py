"""Detections of single frames become trajectories, and trajectories become facts that can be checked.

A clip has four slots: each hand, and the object that it touches. A slot that is not seen in a frame is None there: never a repeated box.
Coordinates are normalised (0 to 1), origin top left, x to the right, y down; directions are those of the picture.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from egovideo.detection import Box, FrameDetections, Hand, Side, Thing, touched_object

__all__ = ["Direction", "Motion", "Slot", "Trajectory", "excursion", "motion", "track"]

Slot = Literal["left_hand", "right_hand", "left_object", "right_object"]
Direction = Literal["up", "down", "left", "right"]
SLOTS: tuple[Slot, ...] = ("left_hand", "right_hand", "left_object", "right_object")
STILL = 0.05
"""Less than this share of the picture is no motion: detectors shake."""
_LINK = 0.15
"""An object is the same from one frame to the next if the boxes meet, or the centres are nearer than this."""
_GAP = 3
"""Frames for which an object may be out of sight and still be the same."""


@dataclass(frozen=True)
class Motion:
    """How one slot moves over the clip, from its first to its last visible frame."""

    visible: int
    """In how many frames it is seen."""
    start: tuple[float, float]
    end: tuple[float, float]
    path: float
    """Length of the way of the centre, in shares of the picture."""
    directions: tuple[Direction, ...]
    """Of the net displacement: none, one or two, the larger first."""
    returns: bool
    """It moved, and came back to where it was."""

    @property
    def still(self) -> bool:
        return not self.directions and not self.returns

    @property
    def displacement(self) -> tuple[float, float]:
        return self.end[0] - self.start[0], self.end[1] - self.start[1]


@dataclass(frozen=True)
class Trajectory:
    """`times` (seconds) of the frames, the boxes of each slot, and in which frames each hand touches its object."""

    times: tuple[float, ...]
    boxes: dict[Slot, tuple[Box | None, ...]]
    touching: dict[Side, tuple[bool, ...]]
    labels: dict[Side, str]
    """What the detector calls each hand's object; empty if it has no name, or there is none."""
    dropped_hands: int = 0
    """Hands left out because a frame had a better one of the same side."""

    @property
    def hands(self) -> Literal["none", "left", "right", "both"]:
        """Which hands are seen in any frame."""
        seen = [side for side in ("left", "right") if self.motion(f"{side}_hand")]  # type: ignore[arg-type]
        return "both" if len(seen) == 2 else seen[0] if seen else "none"  # type: ignore[return-value]

    def motion(self, slot: Slot) -> Motion | None:
        """How a slot moves; None if it is never seen."""
        return motion(self.boxes[slot])

    def contact(self, side: Side) -> tuple[float, float] | None:
        """First and last time (seconds) at which the hand touches its object; None if it never does."""
        times = [time for time, touches in zip(self.times, self.touching[side], strict=True) if touches]
        return (times[0], times[-1]) if times else None

    def to_record(self) -> dict[str, Any]:
        """Plain data for JSON: boxes as [x1, y1, x2, y2] rounded to 1/10,000, or null."""
        return {
            "times": [round(time, 4) for time in self.times],
            "boxes": {slot: [_corners(box) for box in self.boxes[slot]] for slot in SLOTS},
            "touching": {side: list(flags) for side, flags in self.touching.items()},
            "labels": dict(self.labels),
            "dropped_hands": self.dropped_hands,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Trajectory:
        """What `to_record` made."""
        boxes = {slot: tuple(None if b is None else Box(*b) for b in record["boxes"][slot]) for slot in SLOTS}
        touching: dict[Side, tuple[bool, ...]] = {side: tuple(record["touching"][side]) for side in ("left", "right")}
        labels: dict[Side, str] = {side: record["labels"][side] for side in ("left", "right")}
        return cls(tuple(record["times"]), boxes, touching, labels, record["dropped_hands"])


def track(detections: Sequence[FrameDetections], times: Sequence[float]) -> Trajectory:
    """Join the detections of a clip's frames.

    Each frame keeps the best left and the best right hand. Objects are followed from frame to frame (the nearest whose boxes meet or nearly
    meet); a hand's object is the one that it touches in most frames, and is followed also while it is not touched.
    """
    if len(detections) != len(times):
        raise ValueError(f"there are {len(detections)} frames of detections but {len(times)} times")
    hands: dict[Side, list[Hand | None]] = {"left": [], "right": []}
    dropped = 0
    for frame in detections:
        for side, found in hands.items():
            own = sorted((hand for hand in frame.hands if hand.side == side), key=lambda hand: -hand.score)
            found.append(own[0] if own else None)
            dropped += max(0, len(own) - 1)
    names = _follow(detections)
    boxes: dict[Slot, tuple[Box | None, ...]] = {}
    touching: dict[Side, tuple[bool, ...]] = {}
    labels: dict[Side, str] = {}
    for side, found in hands.items():
        touches = [
            None if hand is None or (i := touched_object(hand, frame.objects)) is None else ids[i]
            for hand, frame, ids in zip(found, detections, names, strict=True)
        ]
        counts = Counter(name for name in touches if name is not None)
        target = counts.most_common(1)[0][0] if counts else None
        things = [
            frame.objects[ids.index(target)] if target in ids else None
            for frame, ids in zip(detections, names, strict=True)
        ]
        boxes[f"{side}_hand"] = tuple(None if hand is None else hand.box for hand in found)  # type: ignore[index]
        boxes[f"{side}_object"] = tuple(None if thing is None else thing.box for thing in things)  # type: ignore[index]
        touching[side] = tuple(name is not None and name == target for name in touches)
        named = Counter(thing.label for thing in things if thing is not None and thing.label)
        labels[side] = named.most_common(1)[0][0] if named else ""
    return Trajectory(tuple(map(float, times)), boxes, touching, labels, dropped)


def motion(boxes: Sequence[Box | None]) -> Motion | None:
    """How a box moves over its visible frames; None if there is none."""
    centers = [box.center for box in boxes if box is not None]
    if not centers:
        return None
    path = sum(math.dist(a, b) for a, b in itertools.pairwise(centers))
    dx, dy = centers[-1][0] - centers[0][0], centers[-1][1] - centers[0][1]
    found: list[tuple[float, Direction]] = []
    # The smaller component is named too unless the motion is nearly along the other axis.
    if abs(dx) >= STILL and abs(dx) >= abs(dy) / 2.5:
        found.append((abs(dx), "right" if dx > 0 else "left"))
    if abs(dy) >= STILL and abs(dy) >= abs(dx) / 2.5:
        found.append((abs(dy), "down" if dy > 0 else "up"))
    directions = tuple(name for _, name in sorted(found, reverse=True))
    farthest = max(math.dist(centers[0], center) for center in centers)
    returns = not directions and farthest >= 2 * STILL
    return Motion(len(centers), centers[0], centers[-1], path, directions, returns)


def excursion(boxes: Sequence[Box | None], direction: Direction) -> float:
    """The longest way in one direction between any two moments, the earlier first: what a sentence about a part of the clip may speak of."""
    axis, sign = {"right": (0, 1), "left": (0, -1), "down": (1, 1), "up": (1, -1)}[direction]
    lowest, most = math.inf, 0.0
    for box in boxes:
        if box is not None:
            value = sign * box.center[axis]
            lowest = min(lowest, value)
            most = max(most, value - lowest)
    return most


def _follow(detections: Sequence[FrameDetections]) -> list[list[int]]:
    """A number for each object of each frame; the same object has the same number."""
    names: list[list[int]] = []
    last: dict[int, tuple[int, Thing]] = {}
    for place, frame in enumerate(detections):
        alive = {name: thing for name, (seen, thing) in last.items() if place - seen <= _GAP}
        pairs = sorted(
            (-thing.box.iou(old.box), math.dist(thing.box.center, old.box.center), i, name)
            for i, thing in enumerate(frame.objects)
            for name, old in alive.items()
            if thing.label == old.label
        )
        ids: dict[int, int] = {}
        for overlap, distance, i, name in pairs:
            if i not in ids and name not in ids.values() and (overlap < 0 or distance < _LINK):
                ids[i] = name
        for i, thing in enumerate(frame.objects):
            ids.setdefault(i, len(last))
            last[ids[i]] = (place, thing)
        names.append([ids[i] for i in range(len(frame.objects))])
    return names


def _corners(box: Box | None) -> list[float] | None:
    return None if box is None else [round(v, 4) for v in (box.x1, box.y1, box.x2, box.y2)]
