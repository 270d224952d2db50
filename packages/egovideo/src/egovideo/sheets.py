"""Contact sheets: the frames of a clip in a grid, with the boxes of hands and objects and the ways of their centres."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from chapbook_shared.media import resize
from chapbook_shared.validate import check_int
from egovideo.trajectory import SLOTS, Slot, Trajectory

__all__ = ["SLOT_COLORS", "contact_sheet", "save_contact_sheet"]

SLOT_COLORS: dict[Slot, tuple[int, int, int]] = {
    "left_hand": (255, 96, 64),
    "right_hand": (64, 220, 96),
    "left_object": (255, 190, 60),
    "right_object": (80, 170, 255),
}
_LINE = 14  # pixels of a line of text


def contact_sheet(
    frames: UInt8[np.ndarray, "frames height width 3"],
    trajectory: Trajectory,
    *,
    caption: str = "",
    columns: int = 4,
    tile: int = 160,
) -> UInt8[np.ndarray, "sheet_height sheet_width 3"]:
    """Draw a sheet. `tile` is the shorter side of a frame in pixels. A hand's box is thick while it touches its object."""
    check_int("columns", columns, minimum=1)
    if len(frames) != len(trajectory.times):
        raise ValueError(f"there are {len(frames)} frames but the trajectory has {len(trajectory.times)}")
    small = resize(frames, short_side=tile)
    height, width = small.shape[1:3]
    rows = -(-len(small) // columns)
    lines = _wrapped(caption, columns * (width + 4) // 6)
    legend = _LINE + 4
    sheet = Image.new("RGB", (columns * (width + 4), rows * (height + 4) + legend + _LINE * len(lines)), "white")
    for number, frame in enumerate(small):
        picture = Image.fromarray(frame)
        _draw(ImageDraw.Draw(picture), trajectory, number, width, height)
        sheet.paste(picture, ((number % columns) * (width + 4) + 2, (number // columns) * (height + 4) + 2))
    draw = ImageDraw.Draw(sheet)
    left, top = 4, rows * (height + 4) + 2
    for slot in SLOTS:
        if trajectory.motion(slot):
            name = slot.replace("_", " ")
            draw.rectangle((left, top + 2, left + 9, top + 11), fill=SLOT_COLORS[slot])
            draw.text((left + 13, top), name, fill="black")
            left += 26 + 6 * len(name)
    for place, line in enumerate(lines):
        draw.text((4, top + legend + place * _LINE - 2), line, fill="black")
    return np.asarray(sheet).copy()


def save_contact_sheet(
    path: str | Path, frames: UInt8[np.ndarray, "frames height width 3"], trajectory: Trajectory, *, caption: str = ""
) -> None:
    """Write a sheet; the ending of `path` chooses the format."""
    Image.fromarray(contact_sheet(frames, trajectory, caption=caption)).save(path)


def _draw(draw: ImageDraw.ImageDraw, trajectory: Trajectory, number: int, width: int, height: int) -> None:
    for slot in SLOTS:
        trail = [
            (b.center[0] * width, b.center[1] * height) for b in trajectory.boxes[slot][: number + 1] if b is not None
        ]
        if len(trail) > 1:
            draw.line(trail, fill=SLOT_COLORS[slot], width=2)
        box = trajectory.boxes[slot][number]
        if box is None:
            continue
        side = "left" if slot.startswith("left") else "right"
        touches = slot.endswith("hand") and trajectory.touching[side][number]  # type: ignore[index]
        corners = (box.x1 * (width - 1), box.y1 * (height - 1), box.x2 * (width - 1), box.y2 * (height - 1))
        draw.rectangle(corners, outline=SLOT_COLORS[slot], width=3 if touches else 1)
    draw.text((3, 1), f"{trajectory.times[number]:.2f} s", fill="white", stroke_width=1, stroke_fill="black")


def _wrapped(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.encode("latin-1", "replace").decode("latin-1").split():  # what the built-in font can draw
        if lines and len(lines[-1]) + len(word) < width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
