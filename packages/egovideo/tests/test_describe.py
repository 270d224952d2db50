"""Boxes, trajectories, sentences, and the check of sentences against trajectories."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook_shared.lm import Capabilities, Completion, ScriptedModel
from egovideo import (
    Box,
    FrameDetections,
    Hand,
    LLMCaptioner,
    MediaPipeHands,
    Precomputed,
    TemplateCaptioner,
    Thing,
    Trajectory,
    check_caption,
    motion,
    prompt,
    swap_sides,
    track,
)
from egovideo.describe import motion_claims
from egovideo.detection import as_record, touched_object
from egovideo.rendering import Actor, background, render, truth, way
from egovideo.sheets import contact_sheet
from egovideo.trajectory import excursion


def box(x, y, size=0.1):
    return Box(x - size / 2, y - size / 2, x + size / 2, y + size / 2)


def scene(*actors):
    return track(truth(actors), [i / 8 for i in range(len(actors[0].centers))])


LIFT = (Actor("object", way((0.6, 0.7), (0.6, 0.3), 9)), Actor("right", way((0.65, 0.8), (0.65, 0.4), 9)))
REACH = (Actor("object", way((0.5, 0.5), (0.5, 0.5), 9)), Actor("left", way((0.1, 0.8), (0.42, 0.55), 9)))
MEET = (Actor("left", way((0.2, 0.5), (0.42, 0.5), 9)), Actor("right", way((0.8, 0.5), (0.58, 0.5), 9)))


# Boxes and the touched object


def test_iou_by_hand():
    assert Box(0, 0, 0.2, 0.2).iou(Box(0.1, 0, 0.3, 0.2)) == pytest.approx(1 / 3)
    assert Box(0, 0, 0.1, 0.1).iou(Box(0.5, 0.5, 0.6, 0.6)) == 0
    assert Box(0, 0, 0, 0).iou(Box(0, 0, 0, 0)) == 0


@pytest.mark.parametrize("corners", [(0.2, 0, 0.1, 1), (float("nan"), 0, 1, 1)])
def test_a_box_is_one(corners):
    with pytest.raises(ValueError, match="a box is"):
        Box(*corners)


def test_the_offset_decides_which_object_is_touched():
    things = (Thing(box(0.3, 0.5)), Thing(box(0.7, 0.5)))
    assert touched_object(Hand("left", box(0.5, 0.5), offset=(0.15, 0.0)), things) == 1
    assert touched_object(Hand("left", box(0.5, 0.5), offset=(-0.15, 0.0)), things) == 0
    assert touched_object(Hand("left", box(0.5, 0.5), offset=(0.15, 0.0), contact="none"), things) is None
    assert touched_object(Hand("left", box(0.5, 0.5)), things) is None  # no box meets
    assert touched_object(Hand("left", box(0.62, 0.5, 0.2)), things) == 1
    assert touched_object(Hand("left", box(0.5, 0.5)), ()) is None


# Trajectories


def test_the_better_of_two_left_hands_is_kept_and_the_other_counted():
    frame = FrameDetections((Hand("left", box(0.2, 0.2), 0.5), Hand("left", box(0.6, 0.6), 0.9)))
    found = track([frame], [0.0])
    assert found.boxes["left_hand"] == (box(0.6, 0.6),)
    assert found.dropped_hands == 1
    assert found.hands == "left"


def test_unseen_is_none_and_never_a_repeated_box():
    found = track([FrameDetections((Hand("left", box(0.2, 0.2)),)), FrameDetections()], [0.0, 1.0])
    assert found.boxes["left_hand"] == (box(0.2, 0.2), None)
    assert found.boxes["right_hand"] == (None, None)
    assert track([FrameDetections()], [0.0]).hands == "none"
    with pytest.raises(ValueError, match="1 frames of detections but 2 times"):
        track([FrameDetections()], [0.0, 1.0])


def test_an_object_is_followed_before_and_after_it_is_touched():
    found = scene(*REACH)
    assert all(found.boxes["left_object"])
    assert found.touching["left"][0] is False
    assert found.touching["left"][-1] is True
    start, end = found.contact("left")
    assert 0 < start <= end == 1.0


def test_another_object_that_passes_is_not_taken_for_the_touched_one():
    still = Thing(box(0.3, 0.5), label="cup")
    frames = [
        FrameDetections((Hand("left", box(0.3, 0.55, 0.2)),), (still, Thing(box(0.9 - 0.1 * i, 0.5), label="cup")))
        for i in range(5)
    ]
    found = track(frames, [float(i) for i in range(5)])
    assert {b.center for b in found.boxes["left_object"]} == {still.box.center}


@pytest.mark.parametrize(
    ("end", "directions"),
    [
        ((0.9, 0.5), ("right",)),
        ((0.1, 0.5), ("left",)),
        ((0.5, 0.1), ("up",)),
        ((0.5, 0.9), ("down",)),
        ((0.8, 0.3), ("right", "up")),
        ((0.52, 0.51), ()),
    ],
)
def test_directions(end, directions):
    moved = motion([box(*c) for c in way((0.5, 0.5), end, 5)])
    assert moved.directions == directions
    assert not moved.returns
    assert moved.displacement == pytest.approx((end[0] - 0.5, end[1] - 0.5))
    assert moved.path == pytest.approx(np.hypot(*moved.displacement))


def test_there_and_back_is_a_motion():
    moved = motion([box(*c) for c in way((0.3, 0.5), (0.7, 0.5), 9, back=True)])
    assert moved.returns
    assert not moved.still
    assert moved.path == pytest.approx(0.8)


@given(st.lists(st.floats(0.1, 0.9), min_size=1, max_size=6))
def test_excursion_is_the_longest_way_forward(xs):
    boxes = [box(x, 0.5) for x in xs]
    slow = max(xs[j] - xs[i] for i in range(len(xs)) for j in range(i, len(xs)))
    assert excursion([None, *boxes], "right") == pytest.approx(slow, abs=1e-9)
    assert excursion(boxes[::-1], "left") == pytest.approx(slow, abs=1e-9)


def test_a_trajectory_survives_json():
    found = scene(*LIFT)
    again = Trajectory.from_record(json.loads(json.dumps(found.to_record())))
    assert again.to_record() == found.to_record()
    assert again.motion("right_hand").directions == ("up",)


# Sentences


@pytest.mark.parametrize(
    ("actors", "caption"),
    [
        (LIFT, "C lifts it: the right hand moves up and moves the block along."),
        (REACH, "C lifts it: the left hand moves to the right and up, reaches the block."),
        (
            MEET,
            "C lifts it: the left hand moves to the right; the right hand moves to the left; the hands come together.",
        ),
    ],
)
def test_template(actors, caption):
    assert TemplateCaptioner().caption("#C C lifts it.", scene(*actors)) == caption


def test_template_without_a_narration():
    assert TemplateCaptioner().caption("", scene(*LIFT)).startswith("The right hand moves up")


@given(st.tuples(*[st.floats(0.15, 0.85)] * 4), st.sampled_from(["left", "right"]))
def test_the_template_never_contradicts_its_trajectory(ends, side):
    trajectory = scene(Actor("object", way((0.5, 0.5), (0.5, 0.5), 6)), Actor(side, way(ends[:2], ends[2:], 6)))
    assert check_caption(TemplateCaptioner().caption("C works", trajectory), trajectory) == []


@pytest.mark.parametrize(
    ("caption", "problem"),
    [
        ("C lifts the block; the right hand moves down.", "the right hand does not move down"),
        (
            "C lifts the block with the right hand, moving it upward and to the left.",
            "the right hand does not move to the left",
        ),
        ("The left hand holds the block.", "the left hand is never visible"),
        ("Both hands move up.", "the left hand is never visible"),
        ("The right hand goes from 0.6 to 0.3.", "it holds numbers: 0.3, 0.6"),
        ("", "it is empty"),
        ("I'm sorry, I cannot describe this.", "it refuses"),
        ("up " * 81, "it has 81 words"),
        ("The right hand is lowering.", "the right hand does not move down"),
    ],
)
def test_a_wrong_caption_is_found(caption, problem):
    assert any(problem in found for found in check_caption(caption, scene(*LIFT)))


@pytest.mark.parametrize(
    "caption",
    [
        "C lifts the block: the right hand moves up.",
        "C picks up the block with the right hand, rising smoothly.",
        "C's right hand, on the left of the picture, moves upwards.",
        "The right hand sets down nothing and does not move to the left.",
    ],
)
def test_a_right_caption_passes(caption):
    assert check_caption(caption, scene(*LIFT)) == []


def test_numbers_of_the_narration_may_stay():
    assert check_caption("C lifts 2 blocks.", scene(*LIFT), narration="C lifts 2 blocks") == []


def test_claims_belong_to_the_hand_named_last():
    text = "The left hand moves up, to the right; the right hand goes down. Both hands move leftwards."
    assert motion_claims(text) == [
        ("left_hand", "up"),
        ("left_hand", "right"),
        ("right_hand", "down"),
        ("left_hand", "left"),
        ("right_hand", "left"),
    ]


def test_mirrored_text():
    assert swap_sides("Left hand; RIGHT-hand leftwards, rightmost, bright, cleft") == (
        "Right hand; LEFT-hand rightwards, leftmost, bright, cleft"
    )
    assert swap_sides(swap_sides("the left of the Right")) == "the left of the Right"


def test_the_prompt_holds_every_frame_and_says_what_is_not_visible():
    trajectory = track([FrameDetections((Hand("left", box(0.25, 0.5)),)), FrameDetections()], [0.0, 1.0])
    text = prompt("#C C waits", trajectory)[-1].text
    assert text == "Narration: C waits\nFrame 1: left hand 0.25, 0.50\nFrame 2: left hand not visible"


def test_models_without_schemas_are_read_as_text():
    plain = ScriptedModel("x", capabilities=Capabilities(chat=True))
    assert LLMCaptioner(plain).read(Completion(' "C lifts." \nmore', "stop", "m")) == "C lifts."
    schema = LLMCaptioner(ScriptedModel("x"))
    assert schema.read(Completion('{"caption": " C \\n lifts "}', "stop", "m")) == "C lifts"
    for broken in ("C lifts", "[1]", '{"text": "C"}', ""):
        assert schema.read(Completion(broken, "stop", "m")) == ""
    with pytest.raises(ValueError, match="cannot chat"):
        LLMCaptioner(ScriptedModel(complete="x"))


# Detectors


def test_precomputed_boxes(tmp_path):
    path = tmp_path / "boxes.jsonl"
    hand = {"side": 0, "box": [10, 20, 30, 40], "score": 0.8, "contact": "P", "offset": [0.001, 1.0, 0.0]}
    lines = [
        {"video": "a.mp4", "time": 0.0, "size": [100, 200], "hands": [hand], "objects": [{"box": [50, 20, 90, 40]}]},
        {"video": "a.mp4", "time": 1.0, "hands": [{"side": "right", "box": [0.5, 0.5, 1.2, 0.75], "contact": 0}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    found = Precomputed(path).detect_at("/elsewhere/a.mp4", [0.04, 0.5, 1.0])
    (left,) = found[0].hands
    assert left == Hand("left", Box(0.1, 0.1, 0.3, 0.2), 0.8, "portable", (0.1, 0.0))
    assert found[1] == FrameDetections()
    assert found[2].hands == (Hand("right", Box(0.5, 0.5, 1.0, 0.75), 1.0, "none"),)
    with pytest.raises(ValueError, match="no line for the video 'b'"):
        Precomputed(path).detect_at("b.mp4", [0.0])
    path.write_text(json.dumps({"video": "c", "time": 0, **as_record(found[0])}), encoding="utf-8")
    assert Precomputed(path).detect_at("c", [0.0]) == found[:1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "boxes.jsonl:1: not a line of detections"),
        ('{"video": "a"}', "'time' is missing"),
        ('{"video": "a", "time": 0, "hands": [{"side": "middle", "box": [0, 0, 1, 1]}]}', "'middle' is missing"),
        ('{"video": "a", "time": 0, "objects": [{"box": [0, 0, 1]}]}', "not a line of detections"),
        ('{"video": "a", "time": 0, "objects": [{"box": [0, 0, 1, NaN]}]}', "four finite numbers"),
        (
            '{"video": "a", "time": 0, "hands": [{"side": 0, "box": [0,0,1,1], "contact": "X"}]}',
            "contact must be one of",
        ),
        ('{"video": "a", "time": 0, "hands": [{"side": 0, "box": [0,0,1,1], "offset": [1,1,1]}]}', "needs its size"),
    ],
)
def test_broken_lines_of_boxes(tmp_path, line, message):
    path = tmp_path / "boxes.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Precomputed(path)


def test_mediapipe_says_that_it_has_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"download hand_landmarker\.task"):
        MediaPipeHands(tmp_path / "hand_landmarker.task")


def test_mediapipe_results_become_boxes_and_sides():
    from types import SimpleNamespace as Simple

    reader = object.__new__(MediaPipeHands)
    reader.mirrored, reader.margin = False, 0.0
    marks = [Simple(x=0.2, y=0.3), Simple(x=0.4, y=0.7)]
    said = [Simple(category_name="Left", score=0.9)]
    (hand,) = reader._read(Simple(hand_landmarks=[marks], handedness=[said]))
    assert hand == Hand("right", Box(0.2, 0.3, 0.4, 0.7), 0.9)  # MediaPipe takes pictures for mirrored
    reader.mirrored = True
    assert reader._read(Simple(hand_landmarks=[marks], handedness=[said]))[0].side == "left"


def test_a_transformers_detector_gives_hands_and_objects():
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from egovideo import TransformersDetector

    torch.manual_seed(0)
    config = transformers.YolosConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=[32, 32],
        patch_size=16,
        num_detection_tokens=5,
        id2label={0: "hand", 1: "cup"},
        label2id={"hand": 0, "cup": 1},
    )
    processor = transformers.YolosImageProcessor(size={"height": 32, "width": 32})
    detector = TransformersDetector(
        transformers.YolosForObjectDetection(config), processor, threshold=0.0, batch_size=2
    )
    found = detector.detect(np.zeros((3, 40, 60, 3), np.uint8))
    assert len(found) == 3
    for frame in found:
        assert len(frame.hands) + len(frame.objects) == 5
        assert all(0 <= h.box.x1 <= h.box.x2 <= 1 for h in frame.hands)
        assert all((h.side == "left") == (h.box.center[0] < 0.5) for h in frame.hands)


# Pictures


def test_a_contact_sheet_has_every_frame_and_its_boxes():
    trajectory = scene(*LIFT)
    frames = render(LIFT, background(0, 64))
    sheet = contact_sheet(frames, trajectory, caption="C lifts ümlaut 漢字 " * 6, columns=4, tile=64)
    assert sheet.shape[1] == 4 * 68
    assert sheet.shape[0] > 3 * 68
    assert (sheet == (64, 220, 96)).all(-1).sum() > 100  # the right hand's colour
    with pytest.raises(ValueError, match="there are 2 frames but the trajectory has 9"):
        contact_sheet(frames[:2], trajectory)
