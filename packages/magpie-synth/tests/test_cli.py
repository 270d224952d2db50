"""The command, against real servers on this machine."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chapbook_shared.lm import ScriptedModel, Server
from chapbook_shared.local_models import smollm2
from magpie_synth.cli import app

ASSISTANT = "<|im_start|>assistant\n"


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2())


@pytest.fixture
def model(tokenizer):
    def say(prompt, sampling):
        text = tokenizer.decode(list(prompt))
        if text.endswith(ASSISTANT):
            return f"Answer {len(text)} {(sampling.seed or 0) % 9}."
        return ["", "Same?", f"Question {sampling.seed}?"][min(sampling.seed % 6, 2)]

    return ScriptedModel(complete=say, name="smollm2")


@pytest.fixture
def servers(model):
    with Server(model) as first, Server(model) as second:
        yield first, second


@pytest.fixture
def one_fails(model):
    with Server(model) as first, Server(model, faults="500,drop,503," * 20) as second:
        yield first, second


def generate(out, *more, servers, code=0):
    addresses = [part for server in servers for part in ("--server", server.base_url)]
    common = ["--model", "smollm2", "--engine", "server", *addresses, "--max-instruction-tokens", 20]
    return call("generate", out, *common, *more, code=code)


def test_a_run_from_the_first_row_to_the_card(tmp_path, one_fails):
    out = tmp_path / "run"
    found = json.loads(generate(out, "--rows", 24, "--responses", 5, "--json", servers=one_fails).stdout)
    assert found["instructions"] == 24
    assert found["rows"] == 5
    assert one_fails[0].asked > 24  # the other server fails for a while and is passed over
    assert json.loads(call("respond", out, "--json").stdout)["rows"] == found["kept_instructions"]
    call("extend", out, "--turns", 2)
    assert "rows: " in call("stats", out).stdout
    assert json.loads(call("tag", out, "--kind", "language", "--languages", "en,de", "--json").stdout) == {
        "tagged": found["kept_instructions"],
        "failed": 0,
        "had_it": 0,
    }
    assert json.loads(call("tag", out, "--kind", "language", "--languages", "en,de", "--json").stdout)["tagged"] == 0
    call("export", out, "--format", "sharegpt", "-o", tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == found["kept_instructions"]
    assert len(json.loads(lines[0])["conversations"]) == 4
    call("export", out, "--format", "official", "--shard", 7, "-o", tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.parquet"))) == -(-found["kept_instructions"] // 7)
    card = call("card", out, "--licence", "apache-2.0").stdout.strip()
    assert "license: apache-2.0" in Path(card).read_text(encoding="utf-8")


def test_neighbours_filter_and_export(tmp_path, servers):
    out = tmp_path / "run"
    generate(out, "--rows", 12, servers=servers)
    result = call("filter", out, "-o", tmp_path / "no.jsonl", code=2)
    assert "the rows have no min_similar_id" in result.stderr
    found = json.loads(call("neighbors", out, "--json").stdout)
    kept = json.loads(call("filter", out, "--top", 3, "--format", "trl", "-o", tmp_path / "k.jsonl", "--json").stdout)
    assert kept["kept"] == min(3, found["rows"] - found["repeating_an_earlier_row"])
    assert set(json.loads((tmp_path / "k.jsonl").read_text().splitlines()[0])) == {"id", "messages"}


def test_a_judge_behind_a_server_tags(tmp_path, servers):
    out = tmp_path / "run"
    generate(out, "--rows", 6, servers=servers)
    judge = ScriptedModel('{"quality_explanation": "ok", "input_quality": "Good"}', name="judge")
    with Server(judge) as server:
        options = ["--kind", "quality", "--model", "judge", "--engine", "server", "--server", server.base_url]
        found = json.loads(call("tag", out, *options, "--json").stdout)
        assert (found["tagged"] > 0, found["failed"]) == (True, 0)
    kept = call("filter", out, "--preset", "qwen2-pro-300k", "--missing", "skip-filter", "-o", tmp_path / "k.jsonl")
    assert "kept" in kept.stdout


def test_preferences_are_written_for_trl(tmp_path, servers, tokenizer):
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    tokenizer.save_pretrained(tmp_path / "reward")
    out = tmp_path / "run"
    generate(out, "--rows", 4, servers=servers)
    found = json.loads(
        call("prefer", out, "--reward", tmp_path / "reward", "--k", 3, "-o", tmp_path / "p.jsonl", "--json").stdout
    )
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()]
    assert found["pairs"] == len(rows) > 0
    assert all(row["score_chosen"] > row["score_rejected"] for row in rows)


def test_the_template_is_shown():
    text = call("template", "smollm2").stdout
    assert "as tokens        [1, 9690, 198" in text
    found = json.loads(call("template", "smollm2", "--system", "none", "--json").stdout)
    assert found["pre_query"] == "<|im_start|>user\n"


def test_a_dry_run_draws_nothing(tmp_path, servers):
    result = generate(
        tmp_path / "run", "--schedule", "1.0:1.0:5,1.2:0.995:3", "--suppress-first", "#", "--dry-run", servers=servers
    )
    found = json.loads(result.stdout)
    assert found["instructions"] == 8
    assert found["suppressed_first_tokens"] > 3
    assert not (tmp_path / "run").exists()
    assert servers[0].asked == servers[1].asked == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "give --rows or --schedule"),
        (["--rows", 3, "--schedule", "pro"], "give --rows or --schedule"),
        (["--schedule", "1.0:5"], "--schedule must be TEMPERATURE:TOP_P:ROWS"),
        (["--rows", 3, "--language", "tlh"], "language must be one of"),
        (["--rows", 3, "--dialect", "ollama"], "dialect must be one of"),
        (["--rows", 3, "--template-arg", "x"], "--template-arg must be NAME=VALUE"),
        (["--rows", 3, "--engine", "gpu"], "engine must be one of"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(tmp_path, servers, more, message):
    result = generate(tmp_path / "run", *more, servers=servers, code=2)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_another_configuration_is_refused_and_can_be_put_aside(tmp_path, servers):
    generate(tmp_path / "run", "--rows", 2, servers=servers)
    result = generate(tmp_path / "run", "--rows", 2, "--seed", 1, servers=servers, code=2)
    assert "seed: 0 in the store, 1 now" in result.stderr
    generate(tmp_path / "run", "--rows", 2, "--seed", 1, "--force-new", servers=servers)


def test_a_folder_without_a_run_and_a_chat_endpoint_are_told(tmp_path):
    assert "no run at" in call("stats", tmp_path, code=2).stderr
    assert "no run.json" in call("extend", tmp_path, code=2).stderr
    with Server(ScriptedModel("hi", name="smollm2")) as server:
        result = generate(tmp_path / "run", "--rows", 2, servers=[server], code=2)
    assert "cannot complete" in result.stderr


def test_help_explains_itself_and_importing_is_light():
    assert "goes on" in call("--help").stdout
    heavy = [
        "torch",
        "transformers",
        "datasets",
        "ray",
        "faiss",
        "lingua",
        "sentence_transformers",
        "openvino",
        "typer",
        "aiohttp",
        "matplotlib",
    ]
    code = f"import sys, magpie_synth; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.slow
def test_ctrl_c_exits_130_and_the_same_command_goes_on(tmp_path, model):
    with Server(model, latency=0.2) as server:
        arguments = ["generate", str(tmp_path / "run"), "--model", "smollm2", "--engine", "server"]
        arguments += [
            "--server",
            server.base_url,
            "--rows",
            "200",
            "--concurrency",
            "4",
            "--max-instruction-tokens",
            "20",
        ]
        code = f"import sys; sys.argv[1:] = {arguments!r}; from magpie_synth.cli import main; main()"
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        while server.asked < 20:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, words = process.communicate()
        assert process.returncode == 130
        assert "the same command goes on where it was" in words
        assert "Traceback" not in words
    done = json.loads(call("stats", tmp_path / "run", "--json").stdout)["instructions"]
    assert 8 <= done < 200
    with Server(model) as server:
        arguments[arguments.index("--server") + 1] = server.base_url
        call(*arguments, "--responses", 1)
        assert server.asked == 200 - done + 1
