"""Boxes of hands for `egovideo.Precomputed`, by the last MediaPipe wheel that holds its models (Python 3.11):

    uv run --no-project --python 3.11 --with mediapipe==0.10.21 --with 'numpy<2' --with av \
        python benchmarks/mediapipe_boxes.py every=8 a.mp4 b.mp4 > boxes.jsonl
"""

import json
import sys

import av
import mediapipe as mp


def main(every: int, paths: list[str]) -> None:
    hands = mp.solutions.hands.Hands(static_image_mode=True, max_num_hands=2, min_detection_confidence=0.5)
    for path in paths:
        with av.open(path) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number % every == 0:
                    result = hands.process(frame.to_ndarray(format="rgb24"))
                    line = {"video": path, "time": float(frame.pts * frame.time_base), "hands": read(result)}
                    print(json.dumps(line))


def read(result) -> list[dict]:
    found = []
    for marks, sides in zip(result.multi_hand_landmarks or [], result.multi_handedness or [], strict=True):
        xs, ys = [p.x for p in marks.landmark], [p.y for p in marks.landmark]
        side = sides.classification[0]
        # It takes pictures for mirrored.
        name = {"Left": "right", "Right": "left"}[side.label]
        found.append({"side": name, "box": [min(xs), min(ys), max(xs), max(ys)], "score": side.score})
    return found


if __name__ == "__main__":
    main(int(sys.argv[1].removeprefix("every=")), sys.argv[2:])
