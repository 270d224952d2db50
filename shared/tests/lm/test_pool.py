"""Facts about several endpoints used as one."""

from collections import Counter
from contextlib import ExitStack

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
