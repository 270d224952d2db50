"""Facts about several endpoints used as one."""

import time
from collections import Counter
from contextlib import ExitStack
from itertools import islice

import pytest

from chapbook_shared.lm import Capabilities, ModelPool, OpenAIModel, RequestFailed, Sampling, ScriptedModel, Server


def echo(prompt, sampling):
    return f"{prompt} {sampling.seed}"


@pytest.fixture
def pool_of():
    with ExitStack() as stack:

        def make(*faults, **options):
            servers = [
                stack.enter_context(Server(ScriptedModel("hi", complete=echo, name="m"), faults=fault))
                for fault in faults
            ]
            models = [
                OpenAIModel("m", base_url=server.base_url, retries=0, concurrency=4, **options) for server in servers
            ]
            pool = stack.enter_context(ModelPool(models))
            return pool, servers

        yield make


def test_requests_are_spread_evenly(pool_of):
    pool, servers = pool_of(None, None, None)
    answers = pool.complete_many([f"p{i}" for i in range(30)], [Sampling(seed=i) for i in range(30)])
    assert [answer.text for (answer,) in answers] == [f"p{i} {i}" for i in range(30)]
    assert all(5 <= server.asked <= 15 for server in servers)
    assert pool.concurrency == 12


def test_a_failing_endpoint_is_passed_over(pool_of):
    pool, servers = pool_of("500," * 200, None)
    answers = pool.complete_many([f"p{i}" for i in range(20)], Sampling(seed=1))
    assert [answer.text for (answer,) in answers] == [f"p{i} 1" for i in range(20)]
    assert servers[1].asked == 20
    assert len(servers[0].received) <= 8  # those that were under way when it failed first, at most twice


def test_when_none_answers_the_failure_is_told(pool_of):
    pool, _ = pool_of("500," * 9, "503," * 9)
    with pytest.raises(RequestFailed) as caught:
        pool.complete("p", Sampling(seed=1))
    assert "none of the 2 endpoints answered" in caught.value.__notes__


def test_a_wrong_request_is_not_tried_elsewhere(pool_of):
    pool, servers = pool_of("400", "400")
    with pytest.raises(RequestFailed, match="HTTP 400"):
        pool.chat("p")
    assert Counter(len(server.received) for server in servers) == {1: 1, 0: 1}


def test_it_can_what_every_member_can():
    models = [
        OpenAIModel("m", base_url="http://127.0.0.1:9/v1", capabilities=can)
        for can in (
            Capabilities(chat=True, complete=True, logprobs=5),
            Capabilities(complete=True, unsupported=frozenset({"top_k"})),
        )
    ]
    pool = ModelPool(models)
    assert pool.capabilities == Capabilities(complete=True, unsupported=frozenset({"top_k"}))


def test_members_must_serve_one_model():
    models = [OpenAIModel(name, base_url="http://127.0.0.1:9/v1") for name in "ab"]
    with pytest.raises(ValueError, match="must all serve one model"):
        ModelPool(models)
    with pytest.raises(ValueError, match="at least one"):
        ModelPool([])


def test_retry_after_is_obeyed_across_requests(pool_of):
    pool, _ = pool_of("429:1", "429:1")
    began = time.monotonic()
    with pytest.raises(RequestFailed, match="HTTP 429"):
        pool.complete("a", Sampling(seed=1))
    assert pool.complete("b", Sampling(seed=1))[0].text == "b 1"
    assert time.monotonic() - began >= 1


def test_a_sample_that_is_answered_is_not_asked_of_the_next_endpoint(pool_of):
    pool, servers = pool_of("ok,ok,500", None)
    single, _ = pool_of(None)
    sampling = Sampling(n=8, seed=3)
    assert [a.text for a in pool.complete("p", sampling)] == [a.text for a in single.complete("p", sampling)]
    assert sum(server.asked for server in servers) == 8


def test_an_endpoint_that_dies_and_then_all_of_them(pool_of):
    pool, servers = pool_of(None, None)
    stream = pool.complete_each((f"p{i}", Sampling(seed=i)) for i in range(10_000))
    seen = dict(islice(stream, 20))
    servers[0].stop()
    seen |= islice(stream, 180)
    servers[1].stop()
    with pytest.raises(RequestFailed, match="gave no answer"):
        seen.update(stream)  # what came before the failure is in it
    seen = {place: answer.text for place, (answer,) in seen.items()}
    assert 200 <= len(seen) <= 200 + pool.concurrency
    assert seen == {i: f"p{i} {i}" for i in seen}
    assert sorted(seen) == list(range(len(seen)))


def test_a_prompt_has_logprobs_and_bad_arguments_are_named(pool_of):
    pool, _ = pool_of(None)
    assert [entry.token for entry in pool.prompt_logprobs("a b")] == ["a", " b"]
    members = [OpenAIModel("m", base_url="http://127.0.0.1:9/v1")]
    with pytest.raises(ValueError, match="concurrency must be >= 1, got 0"):
        ModelPool(members, concurrency=0)
    with pytest.raises(ValueError, match="pause must be"):
        ModelPool(members, pause=float("nan"))
