"""What every model gets from its base class."""

import asyncio
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from chapbook_shared.lm import Budget, Capabilities, CapabilityError, Completion, ResponseCache, Sampling, ScriptedModel
from chapbook_shared.lm._base import BatchModel, sample_seed


class Upper(BatchModel):
    """Answers in capitals, notes its batches, and cannot stand the word "bad"."""

    name = "upper"
    capabilities = Capabilities(chat=True, complete=True, score=True)

    def __init__(self):
        super().__init__()
        self.batches = []
        self.gate = threading.Event()

    def _chat_batch(self, requests, schema):
        texts = [messages[-1].text for messages, _ in requests]
        self.batches.append(texts)
        self.gate.wait(5)
        if "bad" in texts:
            raise ArithmeticError("bad word")
        return [Completion(text.upper(), "stop", self.name) for text in texts]


def test_coroutines_that_wait_together_share_a_batch():
    model = Upper()

    async def run():
        first = asyncio.ensure_future(model.achat("first"))
        while not model.batches:
            await asyncio.sleep(0.001)
        others = [asyncio.ensure_future(model.achat(word)) for word in "abcde"]
        await asyncio.sleep(0.05)
        model.gate.set()
        return [answer.text for answer in await asyncio.gather(first, *others)]

    assert asyncio.run(run()) == ["FIRST", *"ABCDE"]
    assert model.batches == [["first"], list("abcde")]


def test_an_error_reaches_only_the_request_it_belongs_to():
    model = Upper()
    model.gate.set()

    async def run():
        return await asyncio.gather(*(model.achat(word) for word in ["a", "bad", "b"]), return_exceptions=True)

    good, bad, fine = asyncio.run(run())
    assert (good.text, fine.text) == ("A", "B")
    assert isinstance(bad, ArithmeticError)


def test_a_request_that_cannot_be_done_stops_all_before_any_work():
    model = Upper()
    with pytest.raises(CapabilityError, match="be seeded"):
        model.chat_many(["a", "b"], [Sampling(), Sampling(seed=1)])
    assert model.batches == []


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.chat_many(["a", "b"], [Sampling()]), ValueError, "1 entries for 2 requests"),
        (lambda m: m.chat([]), ValueError, "at least one turn"),
        (lambda m: m.score("a", "bc"), TypeError, "put it in a list"),
        (lambda m: m.score("a", [""]), ValueError, "choice 0 of 1 is"),
        (lambda m: m.chat_many("one"), TypeError, "use chat for one"),
        (lambda m: m.complete_many("one"), TypeError, "use complete for one"),
    ],
)
def test_wrong_use_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(Upper())


def test_no_requests_are_no_work():
    model = ScriptedModel([], complete=[], score={})
    assert model.chat_many([]) == model.complete_many([]) == model.score_many([]) == model.score("a", []) == []


def test_seeds_of_samples_are_stable_and_distinct():
    seeds = [sample_seed(3, i) for i in range(1000)]
    assert seeds[0] == 3
    assert len(set(seeds)) == 1000
    assert seeds[1] == sample_seed(3, 1) != sample_seed(4, 1)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sample_seed(None, 5) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": -1}, "tokens must be >= 0"),
        ({"money": 1.0}, "money needs prices"),
        ({"money": 1.0, "prices": (-1.0, 0.0)}, "prices must be"),
        ({"requests_per_minute": 0.0}, "requests_per_minute must be positive"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Budget(**options)


def test_a_file_that_is_no_cache_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes, and they are longer than a header of SQLite: " * 20, encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="cannot be used as a response cache"):
        ResponseCache(path)
    assert path.read_bytes() == before


def test_a_cache_keeps_the_first_answer_and_forgets_when_told(tmp_path):
    cache = ResponseCache(tmp_path / "c.sqlite")
    cache.put("k", {"text": "naïve 日本"})
    cache.put("k", "another")
    cache.close()
    assert ResponseCache(tmp_path / "c.sqlite").get("k") == {"text": "naïve 日本"}
    assert ResponseCache(tmp_path / "c.sqlite", namespace="other").get("k") is None
    cache.clear()
    assert len(cache) == 0


def test_completions_come_as_they_are_ready_and_no_request_is_taken_too_early():
    model = ScriptedModel(complete=lambda prompt, sampling: f"{prompt}/{sampling.seed}")
    taken = []

    def requests():
        for i in range(200):
            taken.append(i)
            yield f"p{i}", Sampling(seed=i)

    stream = model.complete_each(requests())
    place, (first,) = next(stream)
    assert (place, first.text) == (0, "p0/0")
    assert len(taken) == 64  # one batch
    rest = dict(stream)
    assert {place: answer.text for place, (answer,) in rest.items()} == {i: f"p{i}/{i}" for i in range(1, 200)}


def test_a_stream_may_be_left():
    model = ScriptedModel(complete=lambda prompt, sampling: "x")
    stream = model.complete_each((f"p{i}", Sampling()) for i in range(200))
    next(stream)
    stream.close()
    assert model.complete("p")[0].text == "x"


def test_between_two_answers_of_a_stream_the_model_is_free():
    model = ScriptedModel("hi", complete=lambda prompt, sampling: "x")
    stream = model.complete_each((f"p{i}", Sampling()) for i in range(200))
    next(stream)
    with ThreadPoolExecutor() as others:
        assert others.submit(model.complete, "p").result(timeout=5)[0].text == "x"
        assert asyncio.run(asyncio.wait_for(model.achat("p"), timeout=5)).text == "hi"
        others.submit(stream.close).result(timeout=5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_coroutines_go_on_in_a_forked_child():
    model = ScriptedModel("hi")
    asyncio.run(model.achat("in the parent"))
    child = os.fork()
    if child == 0:
        try:
            answer = asyncio.run(asyncio.wait_for(model.achat("in the child"), timeout=5))
            os._exit(0 if answer.text == "hi" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def unchecked(**values):
    """Sampling as plain Python makes it: in these tests the types of its arguments are checked before it is reached."""
    sampling = Sampling()
    for name, value in values.items():
        object.__setattr__(sampling, name, value)
    sampling.__post_init__()
    return sampling


@pytest.mark.parametrize("name", ["top_k", "seed", "max_tokens", "n", "logprobs"])
def test_whole_numbers_are_whole(name):
    with pytest.raises(ValueError, match=f"{name} must be a whole number, got 1.5"):
        unchecked(**{name: 1.5})
    json.dumps(vars(unchecked(**{name: np.int64(2)})))


@pytest.mark.parametrize(
    "bias",
    [{3: -100}, ((-1, 1.0),), ((1.5, 1.0),), ((3, "x"),), ((3,),), ((3, float("nan")),), ((3, float("inf")),), 3],
)
def test_a_logit_bias_that_makes_no_sense_is_refused(bias):
    with pytest.raises(ValueError, match="logit_bias must be pairs of a token id"):
        unchecked(logit_bias=bias)
