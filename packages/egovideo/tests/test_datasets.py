import pytest

from egovideo import read_egoclip, read_epic_kitchens

EPIC = (
    "narration_id,participant_id,video_id,start_timestamp,stop_timestamp,narration,verb_class,all_noun_classes\n"
    'P01_01_0,P01,P01_01,00:01:00.14,01:00:03.37,"open door, slowly",3,"[3, 12]"\n'
)


def test_epic_kitchens(tmp_path):
    (tmp_path / "P01" / "videos").mkdir(parents=True)
    video = tmp_path / "P01" / "videos" / "P01_01.MP4"
    video.touch()
    path = tmp_path / "test.csv"
    path.write_text(EPIC, encoding="utf-8")
    (record,) = read_epic_kitchens(path, tmp_path)
    assert record == {
        "id": "P01_01_0",
        "video": str(video),
        "start": pytest.approx(60.14),
        "end": pytest.approx(3603.37),
        "narration": "open door, slowly",
        "verbs": [3],
        "nouns": [3, 12],
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("P01_01_0,P01,P01_01,soon,01:00:03.37,x,3,[1]", r"test\.csv:2: "),
        ("P01_01_0,P01,P01_01,00:00:00.0,00:00:01.0,x,three,[1]", r"test\.csv:2: invalid literal"),
        ("P01_01_0,P01,P01_01,00:00:00.0,00:00:01.0,x,3,__import__('os')", r"test\.csv:2: malformed node"),
    ],
)
def test_lines_that_are_none(tmp_path, line, message):
    path = tmp_path / "test.csv"
    path.write_text(EPIC.splitlines()[0] + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_epic_kitchens(path, tmp_path)


def test_a_missing_column_is_named(tmp_path):
    path = tmp_path / "test.csv"
    path.write_text("narration_id,narration\na,b\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"test\.csv:2: there is no column 'verb_class'"):
        read_epic_kitchens(path, tmp_path)


def test_egoclip(tmp_path):
    path = tmp_path / "egoclip.csv"
    path.write_text(
        "video_uid\tnarration_ind\tclip_start\tclip_end\tclip_text\ttag_verb\ttag_noun\n"
        "abc\t4\t-0.1\t1.9\t#C C picks ümlaut\t[93]\t[115, 235]\n",
        encoding="utf-8",
    )
    (record,) = read_egoclip(path, "/videos")
    assert (record["video"], record["start"], record["end"]) == ("/videos/abc.mp4", 0.0, 1.9)
    assert (record["verbs"], record["nouns"], record["narration"]) == ([93], [115, 235], "#C C picks ümlaut")
