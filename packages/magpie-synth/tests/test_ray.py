"""A real Ray of two workers on this machine."""

import os

import pytest

from chapbook_shared.lm import ScriptedModel
from magpie_synth import Magpie, Run
from magpie_synth.exports import read_rows, write_shards

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def factory():
    """Built on the workers; says which process it is in."""
    import time

    from chapbook_shared.lm import ScriptedModel

    def say(prompt, sampling):
        time.sleep(0.02)
        text = bytes(id for id in prompt if id < 256)
        return f"Answer by {os.getpid()}." if text.endswith(b"[assistant]\n") else f"Question {sampling.seed}?"

    return ScriptedModel(complete=say, name="tiny")


@pytest.fixture(scope="module")
def model():
    from magpie_synth.ray_engine import RayModel

    environment = {"env_vars": {"PYTHONPATH": os.path.dirname(__file__)}}
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False, runtime_env=environment,
        object_store_memory=80_000_000,
    )  # fmt: skip
    yield RayModel(factory, workers=2, block=4)
    ray.shutdown()


@pytest.fixture(scope="module")
def letters(request):
    import importlib.util

    spec = importlib.util.spec_from_file_location("job", os.path.join(os.path.dirname(__file__), "job.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Letters()


def test_two_workers_do_a_run_and_its_shards_share_no_row(model, letters, tmp_path):
    run = Magpie(model, tokenizer=letters).run(tmp_path / "ray", rows=24)
    alone = Magpie(factory(), tokenizer=letters).run(tmp_path / "alone", rows=24)
    assert [row.instruction for row in run.rows()] == [row.instruction for row in alone.rows()]
    assert len({row.response for row in run.rows()}) == 2  # both workers answered
    assert str(os.getpid()) not in "".join(row.response for row in run.rows())
    ids = [row["id"] for path in write_shards(run, tmp_path / "shards", size=5) for row in read_rows(path)]
    assert ids == [row.id for row in run.rows()]
    assert len(set(ids)) == 24


def test_a_run_goes_on_with_what_the_store_lacks(model, letters, tmp_path):
    first = Magpie(factory(), tokenizer=letters).run(tmp_path, rows=6)
    before = {row.id: row.response for row in first.rows()}
    Magpie(model, tokenizer=letters).run(tmp_path, rows=12)
    after = {row.id: row.response for row in Run(tmp_path).rows()}
    assert len(after) == 12
    assert {id: after[id] for id in before} == before


def test_it_has_the_workers_name_and_capabilities(model):
    assert model.name == "tiny"
    assert model.capabilities == ScriptedModel(complete=lambda p, s: "").capabilities
    with pytest.raises(ValueError, match="workers must be >= 1"):
        type(model)(factory, workers=0)


def test_a_block_whose_worker_is_killed_is_done_by_another(model, letters, tmp_path):
    def mortal():
        built = factory()
        say = built._complete_script

        def say_or_die(prompt, sampling):
            if not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                os.kill(os.getpid(), 9)
            return say(prompt, sampling)

        built._complete_script = say_or_die
        return built

    run = Magpie(type(model)(mortal, workers=2, block=4), tokenizer=letters).run(tmp_path / "run", rows=12)
    assert (tmp_path / "killed").exists()
    alone = Magpie(factory(), tokenizer=letters).instructions(12)
    assert [record["instruction"] for record in run.instructions()] == [record["instruction"] for record in alone]


def test_the_command_runs_on_two_workers(model, chatml, tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from typer.testing import CliRunner

    from magpie_synth.cli import app

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(chatml), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    chatml.save_pretrained(tmp_path / "model")
    options = ["--model", tmp_path / "model", "--engine", "ray", "--workers", 2, "--rows", 6]
    short = ["--max-instruction-tokens", 5, "--max-response-tokens", 5, "--json"]
    call = ["generate", tmp_path / "out", *options, *short]
    result = CliRunner().invoke(app, [str(part) for part in call])
    assert result.exit_code == 0, result.output
    assert len(Run(tmp_path / "out").instructions()) == 6
