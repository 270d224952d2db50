"""What is seen in a frame: hands, objects, contact; and detectors that find them.

A detector is anything with `name` and `detect(frames) -> list[FrameDetections]`, one for each frame. Here are a transformers object detector,
MediaPipe's hands, and boxes that another program wrote (100DOH and its successors). Boxes are normalised: 0 to 1 of width and height,
origin top left, x to the right, y down.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from chapbook_shared.validate import check_fraction, import_extra

__all__ = [
    "Box",
    "Contact",
    "Detector",
    "FrameDetections",
    "Hand",
    "MediaPipeHands",
    "Precomputed",
    "Side",
    "Thing",
    "TransformersDetector",
    "touched_object",
]

Side = Literal["left", "right"]
Contact = Literal["none", "self", "other", "portable", "stationary", "unknown"]
CONTACT_LETTERS: Mapping[str, Contact] = {"N": "none", "S": "self", "O": "other", "P": "portable", "F": "stationary"}
"""100DOH's states of a hand: no contact, itself, another person, a portable object, a stationary one (furniture)."""
_SIDES: Mapping[Any, Side] = {0: "left", 1: "right", "left": "left", "right": "right", "L": "left", "R": "right"}
Frames = UInt8[np.ndarray, "frames height width 3"]


@dataclass(frozen=True)
class Box:
    """Corners, normalised."""

    x1: float
    y1: float
    x2: float
    y2: float

    def __post_init__(self) -> None:
        values = (self.x1, self.y1, self.x2, self.y2)
        if not all(math.isfinite(v) for v in values) or self.x2 < self.x1 or self.y2 < self.y1:
            raise ValueError(f"a box is (x1, y1, x2, y2) with x1 <= x2 and y1 <= y2, got {values}")

    @property
    def center(self) -> tuple[float, float]:
        return (self.x1 + self.x2) / 2, (self.y1 + self.y2) / 2

    @property
    def area(self) -> float:
        return (self.x2 - self.x1) * (self.y2 - self.y1)

    def iou(self, other: Box) -> float:
        """Intersection over union; 0 for two empty boxes."""
        width = min(self.x2, other.x2) - max(self.x1, other.x1)
        height = min(self.y2, other.y2) - max(self.y1, other.y1)
        both = max(width, 0) * max(height, 0)
        union = self.area + other.area - both
        return both / union if union > 0 else 0.0


@dataclass(frozen=True)
class Hand:
    """One hand. `offset`: from its centre to that of what it touches, normalised; None: the detector does not say."""

    side: Side
    box: Box
    score: float = 1.0
    contact: Contact = "unknown"
    offset: tuple[float, float] | None = None


@dataclass(frozen=True)
class Thing:
    """One object. `label` is empty where the detector knows none."""

    box: Box
    score: float = 1.0
    label: str = ""


@dataclass(frozen=True)
class FrameDetections:
    hands: tuple[Hand, ...] = ()
    objects: tuple[Thing, ...] = ()


@runtime_checkable
class Detector(Protocol):
    """`name` goes into the record; `detect` takes RGB frames and gives what is in each, in their order."""

    name: str

    def detect(self, frames: Frames) -> list[FrameDetections]: ...


def touched_object(hand: Hand, objects: Sequence[Thing]) -> int | None:
    """The number of the object that the hand touches; None if it touches none.

    With an offset: the object whose centre is nearest to the hand's centre + offset. Without: among those whose box meets the hand's, the
    one with the largest overlap, unless the detector says that the hand touches nothing portable or fixed.
    """
    if not objects or hand.contact in ("none", "self", "other"):
        return None
    if hand.offset is not None:
        x, y = hand.box.center[0] + hand.offset[0], hand.box.center[1] + hand.offset[1]
        return min(range(len(objects)), key=lambda i: math.dist(objects[i].box.center, (x, y)))
    overlaps = [hand.box.iou(thing.box) for thing in objects]
    best = max(range(len(objects)), key=overlaps.__getitem__)
    return best if overlaps[best] > 0 else None


class Precomputed:
    """Boxes that another program wrote, for each video and each frame number or time.

    The file is JSON Lines; a line has `video` (its file name or stem), `time` (seconds), and what is there then:
    `hands`: `[{"side": "left" | "right" (or 100DOH's 0 | 1), "box": [x1, y1, x2, y2], "score": 0.9, "contact": "portable" (or a letter of
    N S O P F, or 0-4 in that order), "offset": [dx, dy]}]`, `objects`: `[{"box": ..., "score": ..., "label": ...}]`. Boxes are normalised, or
    in pixels if the line has `size: [width, height]`. 100DOH's own vector (magnitude, x, y) may be given as an `offset` of three
    numbers, with `size`: it is multiplied out as its demo does, 10,000 x magnitude x direction pixels.

    A frame gets the line whose time is nearest, if that is at most `tolerance` seconds away; otherwise nothing is seen in it. Hands and
    objects with a score below `threshold` are left out.
    """

    def __init__(self, path: str | Path, *, tolerance: float = 0.1, threshold: float = 0.0):
        check_fraction("threshold", threshold)
        self.path, self.tolerance, self.threshold = Path(path), tolerance, threshold
        self.name = f"precomputed:tolerance-{tolerance:g}:threshold-{threshold:g}"
        self._videos: dict[str, list[tuple[float, FrameDetections]]] = {}
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        entry = json.loads(line)
                        found = float(entry["time"]), _detections(entry, threshold)
                        self._videos.setdefault(Path(str(entry["video"])).stem, []).append(found)
                    except (ValueError, KeyError, TypeError, IndexError) as error:
                        raise ValueError(f"{self.path}:{number}: not a line of detections: {_said(error)}") from error
        for lines in self._videos.values():
            lines.sort(key=lambda found: found[0])

    def detect(self, frames: Frames) -> list[FrameDetections]:
        raise ValueError("precomputed boxes belong to a video and times: call detect_at, as the pipeline does")

    def detect_at(self, video: str | Path, times: Iterable[float]) -> list[FrameDetections]:
        """What was seen in this video at these times (seconds)."""
        lines = self._videos.get(Path(video).stem)
        if lines is None:
            raise ValueError(f"{self.path} has no line for the video {Path(video).stem!r}")
        known = np.array([time for time, _ in lines])
        found = []
        for time in times:
            nearest = int(np.abs(known - time).argmin())
            found.append(lines[nearest][1] if abs(known[nearest] - time) <= self.tolerance else FrameDetections())
        return found


class TransformersDetector:
    """Any object detector of transformers (DETR, RT-DETR, YOLOS, Grounding DINO in fixed-vocabulary use ...).

    Args:
        model, processor: as `AutoModelForObjectDetection` and `AutoImageProcessor` give them.
        hands: label -> side of the labels that mean hands, for example `{"left hand": "left", "right hand": "right"}`; a side of None is told
            from the place: the left half of the picture is the left hand.
        threshold: least score.
        batch_size: frames at a time.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        hands: Mapping[str, Side | None] | None = None,
        threshold: float = 0.5,
        batch_size: int = 8,
    ):
        check_fraction("threshold", threshold)
        import_extra("torch", "egovideo[hf]")
        self.model, self.processor = model.eval(), processor
        default: dict[str, Side | None] = {"left hand": "left", "right hand": "right", "hand": None}
        self.hands: dict[str, Side | None] = default if hands is None else dict(hands)
        self.threshold, self.batch_size = threshold, batch_size
        self.name = f"transformers:{getattr(model.config, 'name_or_path', '') or type(model).__name__}"

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> TransformersDetector:
        """From a hub id or a folder."""
        transformers = import_extra("transformers", "egovideo[hf]")
        model = transformers.AutoModelForObjectDetection.from_pretrained(name)
        return cls(model, transformers.AutoImageProcessor.from_pretrained(name), **options)

    def detect(self, frames: Frames) -> list[FrameDetections]:
        torch = import_extra("torch", "egovideo[hf]")
        found = []
        for start in range(0, len(frames), self.batch_size):
            part = list(frames[start : start + self.batch_size])
            inputs = self.processor(images=part, return_tensors="pt").to(self.model.device)
            with torch.no_grad():
                outputs = self.model(**inputs)
            sizes = [(1, 1)] * len(part)  # so that boxes come normalised
            results = self.processor.post_process_object_detection(
                outputs, threshold=self.threshold, target_sizes=sizes
            )
            found += [self._read(result) for result in results]
        return found

    def _read(self, result: Mapping[str, Any]) -> FrameDetections:
        hands, objects = [], []
        for score, label, corners in zip(result["scores"], result["labels"], result["boxes"], strict=True):
            box = _clipped(corners.tolist())
            name = str(self.model.config.id2label[int(label)])
            if name in self.hands:
                known: Side | None = self.hands[name]
                place: Side = "left" if box.center[0] < 0.5 else "right"
                hands.append(Hand(known or place, box, float(score)))
            else:
                objects.append(Thing(box, float(score), name))
        return FrameDetections(tuple(hands), tuple(objects))


class MediaPipeHands:
    """MediaPipe's hand landmarker: boxes around the 21 landmarks, and the side. It finds no objects and no contact.

    Args:
        model_path: a `hand_landmarker.task` file. MediaPipe's wheels ship none; it is found at
            https://ai.google.dev/edge/mediapipe/solutions/vision/hand_landmarker.
        mirrored: the pictures are mirrored (a front camera). MediaPipe takes them for mirrored by itself, which head cameras are not.
        margin: added to each side of the box, as a share of it; landmarks lie inside the skin.
    """

    name = "mediapipe-hands"

    def __init__(self, model_path: str | Path, *, threshold: float = 0.5, mirrored: bool = False, margin: float = 0.1):
        check_fraction("threshold", threshold)
        if not Path(model_path).is_file():
            raise FileNotFoundError(
                f"{model_path} is not there: download hand_landmarker.task, MediaPipe ships no models"
            )
        self._mediapipe = import_extra("mediapipe", "egovideo[mediapipe]")
        tasks = import_extra("mediapipe.tasks.python", "egovideo[mediapipe]")
        vision = import_extra("mediapipe.tasks.python.vision", "egovideo[mediapipe]")
        options = vision.HandLandmarkerOptions(
            base_options=tasks.BaseOptions(model_asset_path=str(model_path)),
            num_hands=4,
            min_hand_detection_confidence=threshold,
        )
        self._landmarker = vision.HandLandmarker.create_from_options(options)
        self.mirrored, self.margin = mirrored, margin

    def detect(self, frames: Frames) -> list[FrameDetections]:
        found = []
        for frame in frames:
            image = self._mediapipe.Image(
                image_format=self._mediapipe.ImageFormat.SRGB, data=np.ascontiguousarray(frame)
            )
            found.append(FrameDetections(self._read(self._landmarker.detect(image))))
        return found

    def _read(self, result: Any) -> tuple[Hand, ...]:
        hands = []
        for landmarks, sides in zip(result.hand_landmarks, result.handedness, strict=True):
            xs, ys = [point.x for point in landmarks], [point.y for point in landmarks]
            dx, dy = self.margin * (max(xs) - min(xs)), self.margin * (max(ys) - min(ys))
            box = _clipped([min(xs) - dx, min(ys) - dy, max(xs) + dx, max(ys) + dy])
            said_left = sides[0].category_name.lower() == "left"
            side: Side = "left" if said_left == self.mirrored else "right"
            hands.append(Hand(side, box, float(sides[0].score)))
        return tuple(hands)


def _detections(entry: Mapping[str, Any], threshold: float) -> FrameDetections:
    width, height = entry.get("size") or (1, 1)

    def box(values: Sequence[float]) -> Box:
        x1, y1, x2, y2 = (float(v) for v in values)
        return _clipped([x1 / width, y1 / height, x2 / width, y2 / height])

    hands = []
    for hand in entry.get("hands") or []:
        side = _SIDES[hand["side"]]
        offset = hand.get("offset")
        if offset is not None and len(offset) == 3:
            if not entry.get("size"):
                raise ValueError("an offset of three numbers is in pixels: the line needs its size, [width, height]")
            offset = [10_000 * offset[0] * offset[1], 10_000 * offset[0] * offset[2]]
        if offset is not None:
            offset = (float(offset[0]) / width, float(offset[1]) / height)
        hands.append(Hand(side, box(hand["box"]), float(hand.get("score", 1)), _contact(hand.get("contact")), offset))
    things = [
        Thing(box(t["box"]), float(t.get("score", 1)), str(t.get("label", ""))) for t in entry.get("objects") or []
    ]
    return FrameDetections(
        tuple(hand for hand in hands if hand.score >= threshold),
        tuple(thing for thing in things if thing.score >= threshold),
    )


def _contact(value: Any) -> Contact:
    if value is None:
        return "unknown"
    if isinstance(value, int):
        return list(CONTACT_LETTERS.values())[value]
    if value in CONTACT_LETTERS:
        return CONTACT_LETTERS[value]
    if value in (*CONTACT_LETTERS.values(), "unknown"):
        known: Contact = value
        return known
    raise ValueError(
        f"contact must be one of {', '.join(CONTACT_LETTERS.values())} or a letter of N S O P F, got {value!r}"
    )


def _clipped(corners: Sequence[float]) -> Box:
    """A box as far as it lies in the picture."""
    if not all(math.isfinite(v) for v in corners):
        raise ValueError(f"a box must have four finite numbers, got {list(corners)}")
    x1, y1, x2, y2 = (min(max(float(v), 0.0), 1.0) for v in corners)
    return Box(x1, y1, x2, y2)


def _said(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def as_record(detections: FrameDetections) -> dict[str, Any]:
    """Plain data, in the form that `Precomputed` reads."""
    return {
        "hands": [asdict_hand(h) for h in detections.hands],
        "objects": [asdict_thing(t) for t in detections.objects],
    }


def asdict_hand(hand: Hand) -> dict[str, Any]:
    made = asdict(hand)
    made["box"] = _corners(hand.box)
    made["offset"] = None if hand.offset is None else list(hand.offset)
    return made


def asdict_thing(thing: Thing) -> dict[str, Any]:
    return {**asdict(thing), "box": _corners(thing.box)}


def _corners(box: Box) -> list[float]:
    return [round(v, 4) for v in (box.x1, box.y1, box.x2, box.y2)]
