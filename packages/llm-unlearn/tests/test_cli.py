import json
import sys

import pytest

from llm_unlearn import cli


@pytest.fixture
def run(tmp_path, tiny, forget, retain, monkeypatch, capsys):
    """Runs the command in this process: exit status and stdout's JSON lines."""
    folder = tmp_path / "model"
    tiny.make_model().save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    for name, rows in (("forget", forget), ("retain", retain)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        f"model: {folder}\nforget: forget.jsonl\nretain: retain.jsonl\noutput_dir: out\nmethod: ME+GD\nuse_cpu: true\n"
        "num_train_epochs: 1\nper_device_train_batch_size: 4\nsave_strategy: 'no'\n"
        "sets: {forget: forget.jsonl, retain: retain.jsonl}\nevaluate: {max_new_tokens: 4}\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["llm-unlearn", *arguments])
        capsys.readouterr()
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = stop.code or 0
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()] if status == 0 else out, err

    return run


def test_train_then_eval(run, tmp_path):
    status, (record,), _ = run("train", "--config", "run.yaml", "method=IDK+AP", "learning_rate=1e-3", "--seed", "3")
    assert status == 0
    assert record["method"] == "IDK+AP"
    assert record["report"]["partial"]
    assert record["before"]["forget_efficacy"] != record["report"]["forget_efficacy"]
    status, lines, _ = run("eval", "-c", "run.yaml", "model=out")
    assert status == 0
    assert [line.get("set") for line in lines] == ["forget", "retain", None]
    assert lines[-1]["forget_efficacy"] == pytest.approx(record["report"]["forget_efficacy"])


def test_an_adapter_is_trained_saved_and_evaluated(run):
    status, (record,), _ = run("train", "-c", "run.yaml", "method=NPO+KL", "lora.r=2")
    assert status == 0
    status, lines, _ = run("eval", "-c", "run.yaml", "model=out")
    assert status == 0
    assert lines[-1]["model_utility"] == pytest.approx(record["report"]["model_utility"], rel=1e-3)


def test_a_folder_with_another_run_is_refused_and_its_own_run_goes_on(run, tmp_path):
    """Otherwise a second method would find the first one's last checkpoint, train nothing and report the first one's model as its own."""
    first = ["train", "-c", "run.yaml", "save_strategy=epoch"]
    status, lines, _ = run(*first)
    assert status == 0
    assert run(*first)[1] == lines
    status, _, err = run(*first, "method=IDK+AP")
    assert status == 2
    assert "checkpoints of a run with other settings (method)" in err
    (tmp_path / "forget.jsonl").write_text('{"question": "who is Gus", "answer": "Gus"}\n', encoding="utf-8")
    status, _, err = run(*first)
    assert status == 2
    assert "other settings (data)" in err


def test_continual(run, tmp_path):
    tasks = "tasks=[{name: a, forget: forget.jsonl}, {name: b, forget: [{question: who is Gus, answer: Gus}]}]"
    status, lines, _ = run("continual", "-c", "run.yaml", tasks)
    assert status == 0
    assert [line["task"] for line in lines] == ["a", "b"]
    assert (tmp_path / "out" / "b" / "model.safetensors").exists()
    assert run("continual", "-c", "run.yaml", tasks)[1] == lines


def test_sweep_skips_what_is_done_unless_the_data_changed(run, monkeypatch, tmp_path):
    grid = "grid={method: [ME+GD, IDK+AP], seed: [0, 1]}"
    status, lines, _ = run("sweep", "-c", "run.yaml", grid)
    assert status == 0
    assert [(line["method"], line["seed"]) for line in lines] == [
        ("ME+GD", 0), ("ME+GD", 1), ("IDK+AP", 0), ("IDK+AP", 1),
    ]  # fmt: skip
    monkeypatch.setattr(cli, "_cell", lambda settings: pytest.fail("done already"))
    assert run("sweep", "-c", "run.yaml", grid)[1] == lines
    (tmp_path / "retain.jsonl").write_text('{"question": "who is Gus", "answer": "Gus"}\n', encoding="utf-8")
    assert run("sweep", "-c", "run.yaml", grid)[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "method=NPQ+GD"], "Did you mean 'NPO'"),
        (["train", "methd=ME"], "unknown settings: methd"),
        (["train", "method"], "given as key=value"),
        (["train", "forget=none.jsonl"], "no file none.jsonl"),
        (["train", "learning_rate=fast"], "error: "),
        (["train", "seed=one"], "error: "),
        (["train", "num_train_epochs=0"], "num_train_epochs must be positive"),
        (["train", "lora=5"], "lora must be true or a group of settings"),
        (["train", "forget=[]"], "forget set is empty"),
        (["train", "model="], "model must name a model"),
        (["eval", "sets={}"], "sets must map names to files"),
        (["eval", "evaluate.foo=1"], "unknown settings in evaluate: foo"),
        (["continual", "tasks=3"], "tasks must be a list"),
        (["sweep"], "grid must map settings"),
        (["sweep", "grid.method=[ME+GD,XX+GD]"], "unknown forget loss 'XX'"),
        (["train", "--config", "absent.yaml"], "absent.yaml"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(run, arguments, message):
    command, *rest = arguments
    config = [] if "--config" in rest else ["--config", "run.yaml"]
    status, out, err = run(command, *config, *rest)
    assert status == 2
    assert out == ""
    assert message in err.strip().splitlines()[-1]


def test_divergence_is_exit_1(run):
    status, _, err = run(
        "train",
        "-c",
        "run.yaml",
        "method=GA",
        "learning_rate=0.5",
        "num_train_epochs=40",
        "max_forget_loss=8",
        "warmup_epochs=0",
    )
    assert status == 1
    assert "passed max_forget_loss" in err


def test_dry_run_prints_the_settings(run):
    status, (record,), _ = run("train", "-c", "run.yaml", "--dry-run", "--json", "lora.r=4")
    assert status == 0
    assert record["settings"]["lora"] == {"r": 4}


def test_broken_files_are_named(run, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "x", "answer": "y"}\nnot json\n', encoding="utf-8")
    assert "line 2 of bad.jsonl is not JSON" in run("train", "-c", "run.yaml", "forget=bad.jsonl")[2]
    (tmp_path / "bad.yaml").write_text("a: [", encoding="utf-8")
    assert "bad.yaml is not YAML" in run("train", "-c", "bad.yaml")[2]


def test_help_names_the_commands(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["llm-unlearn", "--help"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("train", "eval", "continual", "sweep"))
