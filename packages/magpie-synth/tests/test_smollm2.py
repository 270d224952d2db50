"""Facts about a real model, SmolLM2-135M-Instruct, by three engines."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from chapbook_shared.jobs import Store
from chapbook_shared.lm import LocalModel, OpenAIModel, OpenVINOModel, Sampling
from chapbook_shared.local_models import smollm2, smollm2_gguf
from magpie_synth import InstructionSettings, Magpie, ResponseSettings, derive_template

# prompts, ten likeliest first tokens and greedy texts by transformers 5.24 in float32
GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2.json").read_text(encoding="utf-8"))

SHORT = {"instruction": InstructionSettings(max_tokens=24), "response": ResponseSettings(max_tokens=8)}


@pytest.fixture(scope="module")
def local():
    return LocalModel.smollm2()


def test_the_prompt_makes_the_model_write_as_a_user(local):
    found = derive_template(local.text.tokenizer)
    (greedy,) = local.complete(found.prompt_ids, Sampling(temperature=0, max_tokens=8, logprobs=10))
    assert list(greedy.token_ids) == GOLDEN["greedy_ids"][:8]
    likeliest = dict(zip(GOLDEN["next_token_top10"]["ids"], GOLDEN["next_token_top10"]["logprobs"], strict=True))
    scores = local.score(found.prompt_ids, [[id] for id in likeliest])
    assert [score.logprob for score in scores] == pytest.approx(list(likeliest.values()), abs=2e-3)


def test_without_its_default_system_block_it_writes_code(local):
    found = derive_template(local.text.tokenizer, system="none")
    (greedy,) = local.complete(found.prompt_ids, Sampling(temperature=0, max_tokens=8))
    assert list(greedy.token_ids) == GOLDEN["no_system_greedy_ids"][:8]


def test_a_run_that_was_cut_anywhere_ends_with_the_same_rows_to_the_last_bit(local, tmp_path):
    model = LocalModel(local.model, local.text.tokenizer, name=local.name, batch_size=3)
    short = {"instruction": InstructionSettings(max_tokens=12), "response": ResponseSettings(max_tokens=4)}
    whole = Magpie(model, **short).run(tmp_path / "whole", rows=7, responses=2)
    with Store(tmp_path / "whole" / "run.sqlite", read_only=True) as store:
        everything, settings = dict(store.items()), store.settings
    there = [key for place, key in enumerate(everything) if place < 4 or place == 6]  # one batch done, two begun
    (tmp_path / "cut").mkdir()
    with Store(tmp_path / "cut" / "run.sqlite", settings=settings) as store:
        store.put_many([(key, everything[key]) for key in there])
    resumed = Magpie(model, **short).run(tmp_path / "cut", rows=7, responses=2)
    texts = [
        [(r["id"], r["raw_instruction"]) for r in run.instructions()] + [(r.id, r.response) for r in run.rows()]
        for run in (whole, resumed)
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_no_heading_comes_first_when_it_is_suppressed(local):
    settings = InstructionSettings(max_tokens=2, suppress_first=("I", "Can"))
    records = Magpie(local, instruction=settings).instructions(40)
    assert not [r for r in records if r["raw_instruction"].lstrip().startswith(("I", "Can"))]
    free = Magpie(local, instruction=InstructionSettings(max_tokens=2)).instructions(40)
    assert [r for r in free if r["raw_instruction"].startswith(("I", "Can"))]  # 66 % of the first tokens


@pytest.mark.slow
def test_openvino_draws_like_users_too_and_goes_on_where_it_was(tmp_path):
    model = OpenVINOModel.smollm2(batch_size=8)
    made = Magpie(model, **SHORT)
    first = made.run(tmp_path / "a", rows=8)
    before = {row.id: row.to_dict() for row in first.rows()}
    whole = made.run(tmp_path / "a", rows=24, turns=2)
    assert {id: row.instruction for id, row in ((r.id, r) for r in whole.rows()) if id in before} == {
        id: row["instruction"] for id, row in before.items()
    }
    unbroken = made.run(tmp_path / "b", rows=24, turns=2)
    texts = [{r["id"]: r["raw_instruction"] for r in run.instructions()} for run in (whole, unbroken)]
    assert texts[0] == texts[1]
    assert max(row.turns for row in whole.rows()) == 2


SERVER = """
import sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.model_alias = "smollm2"
params.n_ctx, params.n_parallel, params.warmup = 4096, 4, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.hostnames, params.port = ["127.0.0.1"], 0
server = xllamacpp.Server(params)
print("at", server.listening_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def llama_cpp():
    if find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(smollm2_gguf())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        line = next(line for line in process.stdout if line.startswith("at "))
        yield line.split()[1] + "/v1"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_llama_cpp_server_takes_the_tokens_and_its_rows_end_at_the_turn(llama_cpp, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    with OpenAIModel("smollm2", base_url=llama_cpp, dialect="llama.cpp", concurrency=4) as model:
        settings = InstructionSettings(max_tokens=48, suppress_first=("I",))
        made = Magpie(model, tokenizer=tokenizer, instruction=settings, response=ResponseSettings(max_tokens=12))
        run = made.run(tmp_path, rows=12, responses=3)
        again = made.instructions(2)
    records = run.instructions()
    assert not [r for r in records if r["raw_instruction"].startswith("I")]
    assert any(record["finish_reason"] == "stop" for record in records)
    assert not [r for r in records if "<|im_" in r["raw_instruction"]]
    assert len(run.rows()) == 3
    assert [r["raw_instruction"] for r in again] == [r["raw_instruction"] for r in records[:2]]
