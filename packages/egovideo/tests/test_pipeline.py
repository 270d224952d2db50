"""The pipeline over video files: broken files, broken models, kill and resume; and the command."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from chapbook_shared.jobs import SettingsMismatchError, Store
from chapbook_shared.lm import BudgetExceeded, Completion, Faults, OpenAIModel, RequestFailed, ScriptedModel, Server
from chapbook_shared.media import write_video
from egovideo import HODPipeline, LLMCaptioner, load_clip, load_clips, read_clips
from egovideo.cli import app
from egovideo.rendering import Actor, ColorDetector, background, render, way


def write(path, *actors):
    write_video(path, render(actors, background(0, 64)), rate=8, options={"crf": "12"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("clips")
    write(made / "up.mp4", Actor("right", way((0.5, 0.8), (0.5, 0.2), 16)))
    write(made / "left.mp4", Actor("left", way((0.8, 0.5), (0.2, 0.5), 16)))
    write(made / "none.mp4", Actor("object", way((0.8, 0.5), (0.2, 0.5), 16)))
    (made / "broken.mp4").write_bytes(b"no video")
    lines = [
        {"video": f"{name}.mp4", "narration": f"C does {name}", "id": name} for name in ("up", "left", "none", "broken")
    ]
    (made / "clips.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return made


GOOD = {
    "up": "C does up, the right hand moves up.",
    "left": "C does left, the left hand moves to the left.",
}


def said(caption):
    return json.dumps({"caption": caption})


def answer(messages, sampling):
    text = messages[-1].text
    return said(GOOD["up" if "right hand" in text else "left"])


def records_of(path):
    with Store(path, read_only=True) as store:
        return dict(store.items())


def test_a_run_with_a_model(folder, tmp_path):
    model = ScriptedModel(answer)
    result = HODPipeline(ColorDetector(), LLMCaptioner(model)).run(folder / "clips.jsonl", tmp_path / "run.sqlite")
    assert result["captions"] == {"llm": 2, "narration": 2}
    assert result["errors"] == 1
    records = records_of(tmp_path / "run.sqlite")
    assert list(records) == ["up", "left", "none", "broken"]
    assert records["up"]["caption"] == GOOD["up"]
    assert records["none"]["caption"] == "C does none"
    assert records["none"]["reason"] == "no hand in any frame"
    assert "not a readable video" in records["broken"]["error"]
    assert len(model.calls) == 2  # nobody is asked about clips without hands


def test_the_order_of_records_does_not_depend_on_workers(folder, tmp_path):
    for workers in (1, 3):
        HODPipeline(ColorDetector()).run(
            folder / "clips.jsonl", tmp_path / f"{workers}.sqlite", workers=workers, block=3
        )
    one, three = records_of(tmp_path / "1.sqlite"), records_of(tmp_path / "3.sqlite")
    assert list(one) == list(three)
    assert one == three


@pytest.mark.parametrize(("parallel", "most"), [(False, 1), (True, 3)])
def test_a_detector_is_called_in_turns_unless_it_says_otherwise(folder, tmp_path, parallel, most):
    inside, seen = [], []

    class Watched(ColorDetector):
        def detect(self, frames):
            inside.append(1)
            seen.append(len(inside))
            time.sleep(0.05)
            inside.pop()
            return super().detect(frames)

    detector = Watched()
    detector.parallel = parallel
    clips = [{"video": str(folder / "up.mp4"), "id": str(i)} for i in range(6)]
    HODPipeline(detector).run(clips, tmp_path / "run.sqlite", workers=3)
    assert max(seen) <= most
    assert len(seen) == 6


def test_a_second_run_does_nothing_and_other_settings_are_refused(folder, tmp_path):
    model = ScriptedModel(answer)
    pipeline = HODPipeline(ColorDetector(), LLMCaptioner(model))
    first = pipeline.run(folder / "clips.jsonl", tmp_path / "run.sqlite")
    asked = len(model.calls)
    assert pipeline.run(folder / "clips.jsonl", tmp_path / "run.sqlite") == first
    assert len(model.calls) == asked
    with pytest.raises(SettingsMismatchError, match="num_frames: 16 in the store, 8 now"):
        HODPipeline(ColorDetector(), LLMCaptioner(model), num_frames=8).run(
            folder / "clips.jsonl", tmp_path / "run.sqlite"
        )


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("not json", "no caption in the reply"),
        (said(""), "no caption in the reply"),
        (said("I cannot help with that"), "it refuses"),
        (said("the right hand moves down"), "the right hand does not move down"),
        (said("the right hand is at 0.5"), "it holds numbers: 0.5"),
        (Completion(said("the right hand"), "length", "m"), "it was cut off"),
    ],
)
def test_a_bad_reply_is_asked_for_again_and_then_replaced(folder, reply, reason):
    model = ScriptedModel(lambda messages, sampling: reply)
    record = HODPipeline(ColorDetector(), LLMCaptioner(model), retries=2).describe(
        {"video": str(folder / "up.mp4"), "narration": "C lifts"}
    )
    assert record["source"] == "template"
    assert record["caption"] == "C lifts: the right hand moves up."
    assert record["reason"] == reason
    assert len(model.calls) == 3
    assert reason.split(":")[0] in model.calls[-1].request[-1].text  # it was told why


def test_a_mended_caption_is_taken(folder):
    model = ScriptedModel([said("the right hand moves down"), said(GOOD["up"])])
    record = HODPipeline(ColorDetector(), LLMCaptioner(model)).describe({"video": str(folder / "up.mp4")})
    assert (record["source"], record["caption"]) == ("llm", GOOD["up"])


def test_the_check_can_be_switched_off(folder):
    model = ScriptedModel(said("the right hand moves down"))
    record = HODPipeline(ColorDetector(), LLMCaptioner(model), check=False).describe({"video": str(folder / "up.mp4")})
    assert record["caption"] == "the right hand moves down"


def test_a_model_that_fails_never_stops_a_run(folder, tmp_path):
    def fail(messages, sampling):
        raise RequestFailed("500 internal error", status=500)

    result = HODPipeline(ColorDetector(), LLMCaptioner(ScriptedModel(fail))).run(folder / "clips.jsonl", tmp_path / "s")
    assert result["captions"] == {"template": 2, "narration": 2}
    assert records_of(tmp_path / "s")["up"]["reason"] == "the model failed: 500 internal error"


def test_a_used_up_budget_stops_the_run_and_it_goes_on_later(folder, tmp_path):
    def broke(messages, sampling):
        raise BudgetExceeded("out of money")

    with pytest.raises(BudgetExceeded):
        HODPipeline(ColorDetector(), LLMCaptioner(ScriptedModel(broke))).run(
            folder / "clips.jsonl", tmp_path / "s", block=1, workers=1
        )
    result = HODPipeline(ColorDetector(), LLMCaptioner(ScriptedModel(answer))).run(
        folder / "clips.jsonl", tmp_path / "s"
    )
    assert result["captions"] == {"llm": 2, "narration": 2}


def test_a_real_endpoint_that_misbehaves(folder, tmp_path):
    with Server(ScriptedModel(answer), faults=Faults("429:0,500,malformed")) as server:
        model = OpenAIModel("scripted", base_url=server.base_url, api_key_env=None)
        result = HODPipeline(ColorDetector(), LLMCaptioner(model)).run(folder / "clips.jsonl", tmp_path / "run.sqlite")
    assert result["captions"] == {"llm": 2, "narration": 2}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("{", "clips.jsonl:1: not JSON"),
        ("[1]", "a clip is an object with a video"),
        ('{"narration": "x"}', "clip 0 has no video"),
        ('{"video": "a", "id": "x"}\n{"video": "b", "id": "x"}', "ids must differ"),
        ('{"video": "a", "start": "soon"}', "start must be a number of seconds, got 'soon'"),
    ],
)
def test_bad_lists_of_clips(tmp_path, lines, message):
    path = tmp_path / "clips.jsonl"
    path.write_text(lines, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_clips(path)


def test_ids_are_made_of_what_the_clip_is():
    clips = [{"video": "/a/x.mp4", "start": 0.0, "end": 1.0}, {"video": "/a/x.mp4", "start": 1.0, "end": 2.0}]
    pipeline = HODPipeline(ColorDetector())
    first, again = (pipeline.describe(clips[0])["id"] for _ in range(2))
    assert first == again
    assert first != pipeline.describe(clips[1])["id"]


@pytest.mark.parametrize(("start", "end"), [(2.0, 1.0), (50.0, 60.0), (float("nan"), 1.0)])
def test_times_that_are_no_clip_are_recorded(folder, start, end):
    record = HODPipeline(ColorDetector()).describe(
        {"video": str(folder / "up.mp4"), "start": start, "end": end, "narration": "x"}
    )
    assert record["error"]
    assert record["caption"] == "x"


KILLED = """
import sys
from egovideo import HODPipeline
from egovideo.rendering import ColorDetector

class Slow(ColorDetector):
    def detect(self, frames):
        import time
        time.sleep(0.2)
        return super().detect(frames)

HODPipeline(Slow()).run(sys.argv[1], sys.argv[2], workers=1, block=1)
"""


def test_kill_and_resume(folder, tmp_path):
    lines = [{"video": str(folder / "up.mp4"), "narration": f"n{i}"} for i in range(30)]
    clips, store = tmp_path / "clips.jsonl", tmp_path / "run.sqlite"
    clips.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(clips), str(store)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if len(records_of(store)) >= 3:
                break
        except (FileNotFoundError, ValueError, OSError):
            pass
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = records_of(store)
    assert 3 <= len(done) < 30
    HODPipeline(ColorDetector()).run(clips, store)
    records = records_of(store)
    assert len(records) == 30
    assert [r["narration"] for r in records.values()] == [f"n{i}" for i in range(30)]
    assert {key: records[key] for key in done} == done


# Clips


def test_clips_repeat_evenly_when_they_are_short(folder):
    clip = load_clip(folder / "up.mp4", 0.0, 0.25, num_frames=8)  # two frames at 8 a second
    assert clip.repeated
    assert len(clip) == 8
    assert np.unique(clip.times).tolist() == [0.0, 0.125]
    assert not load_clip(folder / "up.mp4", num_frames=8).repeated


def test_two_rates_come_from_one_reading(folder):
    slow, fast = load_clips(folder / "up.mp4", num_frames=(4, 16))
    assert np.array_equal(slow.frames, load_clip(folder / "up.mp4", num_frames=4).frames)
    assert np.array_equal(fast.frames, load_clip(folder / "up.mp4", num_frames=16).frames)


def test_an_end_beyond_the_file_is_a_warning(folder):
    clip = load_clip(folder / "up.mp4", 0.0, 30.0)
    assert clip.warnings == ("end 30 s is beyond the file's 2 s",)
    with pytest.raises(ValueError, match="start must be a number of seconds >= 0"):
        load_clip(folder / "up.mp4", -1.0)


# The command


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_describe(folder, tmp_path):
    store, lines = tmp_path / "run.sqlite", tmp_path / "out.jsonl"
    plan = run("describe", folder / "clips.jsonl", "--store", store, "--dry-run", "--json", "--model", "m")
    assert json.loads(plan.stdout) == {"clips": 4, "done": 0, "to_do": 4, "model_requests_at_most": 8}
    assert not store.exists()
    result = run(
        "describe",
        folder / "clips.jsonl",
        "--store",
        store,
        "--jsonl",
        lines,
        "--sheets",
        tmp_path / "sheets",
        "--json",
    )
    assert result.exit_code == 1  # one file cannot be read
    assert json.loads(result.stdout)["captions"] == {"template": 2, "narration": 2}
    assert len(lines.read_text(encoding="utf-8").splitlines()) == 4
    assert sorted(p.name for p in (tmp_path / "sheets").iterdir()) == ["left.png", "up.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--detector", "magic"], "--detector must be precomputed:FILE"),
        (["--detector", "mediapipe:nowhere.task"], "MediaPipe ships no models"),
        (["--frames", "0"], "num_frames must be >= 1"),
    ],
)
def test_wrong_use_is_one_line(folder, tmp_path, arguments, message):
    result = run("describe", folder / "clips.jsonl", "--store", tmp_path / "s", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_eval(tmp_path):
    path = tmp_path / "arrays.npz"
    np.savez(path, similarity=np.eye(3), relevancy=np.eye(3))
    assert json.loads(run("eval", "mir", path, "--json").stdout)["mAP"]["avg"] == 1.0
    assert "mAP: v2t 1.0000" in run("eval", "mir", path).stdout
    np.savez(path, embeddings=np.eye(3), text=np.eye(3))
    assert json.loads(run("eval", "mir", path, "--json").stdout)["nDCG"]["avg"] == 1.0
    np.savez(path, scores=np.eye(3), labels=np.array([0, 1, 1]))
    result = json.loads(run("eval", "cls", path, "--json").stdout)
    assert (result["top1"], result["top5"], result["mean_class"]) == (pytest.approx(2 / 3), 1.0, 0.75)
    np.savez(path, similarity=np.eye(5), answers=np.arange(5), types=np.array([1, 1, 2, 2, 2]))
    assert json.loads(run("eval", "mcq", path, "--json").stdout) == {"inter": 1.0, "intra": 1.0}
    wrong = run("eval", "cls", path)
    assert wrong.exit_code == 2
    assert "must hold scores, labels; it holds similarity, answers, types" in wrong.stderr
    assert run("eval", "mir", tmp_path / "absent.npz").exit_code == 2


def test_train_embed_search(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    words = ["<pad>", "<end>", "C", "does", "up", "left", "none"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    start = tmp_path / "clip"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(start)
    config = transformers.CLIPConfig(
        text_config={**small, "vocab_size": 7, "eos_token_id": 1},
        vision_config={**small, "image_size": 32, "patch_size": 16},
    )
    transformers.CLIPModel(config).save_pretrained(start)
    out = tmp_path / "model"
    trained = run(
        "train", folder / "clips.jsonl", "--clip", start, "--output", out, "--slow-frames", 2, "--fast-frames", 4,
        "--epochs", 1, "--batch-size", 4, "--on-error", "skip", "--flip", "none",
    )  # fmt: skip
    assert trained.exit_code == 0, trained.output
    embedded = run("embed", folder / "clips.jsonl", "--model", out, "--output", tmp_path / "e.npz", "--json")
    assert embedded.exit_code == 1
    assert json.loads(embedded.stdout)["clips"] == 3
    assert "broken" in embedded.stderr
    found = run("search", tmp_path / "e.npz", "C does up", "--model", out, "--top", 2, "--json")
    assert len(json.loads(found.stdout)["hits"]) == 2
    assert json.loads(run("eval", "mir", tmp_path / "e.npz", "--json").stdout)["excluded_mAP"] == {"v2t": 0, "t2v": 0}
    assert run("train", folder / "clips.jsonl", "--output", out).exit_code == 2


def test_help_explains_every_command():
    for name in ("describe", "train", "embed", "search", "eval"):
        assert run(name, "--help").exit_code == 0
        assert name in run("--help").stdout


def test_a_file_that_is_cut_off_is_noted(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "cut.mp4"
    write_video(path, rng.integers(0, 255, (60, 48, 64, 3), dtype=np.uint8), rate=10, options={"g": "5"})
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (warning,) = load_clip(path).warnings
    assert warning.startswith("the file is cut off: frames end at 2.")
    assert load_clip(path, 0.0, 1.5).warnings == ()
    record = HODPipeline(ColorDetector()).describe({"video": str(path), "start": 4.0, "end": 5.0, "narration": "x"})
    assert "shows nothing in [4 s, 5 s)" in record["error"]
