"""OpenAIModel against the loopback server, over real HTTP."""

import asyncio
import gc
import json
import logging
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from chapbook_shared.lm import (
    Budget,
    BudgetExceeded,
    CapabilityError,
    Completion,
    Faults,
    Image,
    Message,
    OpenAIModel,
    RequestFailed,
    ResponseCache,
    Sampling,
    Score,
    ScriptedModel,
    Server,
    Usage,
)
from chapbook_shared.lm._base import BatchModel, sample_seed
from chapbook_shared.lm.protocol import Capabilities, TokenLogprob

QUICK = (0.005, 0.05)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(40))


def echo(**options):
    """Replies with the last message, or with `text/seed` for a prompt."""
    return ScriptedModel(
        lambda messages, _: messages[-1].text,
        complete=lambda prompt, sampling: f"{prompt}/{sampling.seed}",
        name="echo",
        **options,
    )


class Letters(BatchModel):
    """Tokens are letters (or ids), token t has probability (1 + code of t) / 1000, whatever comes before."""

    name = "letters"
    capabilities = Capabilities(score=True, complete=True, token_prompts=True)

    @staticmethod
    def logprob(token):
        return math.log((1 + (token if isinstance(token, int) else ord(token))) / 1000)

    def _score_batch(self, requests):
        return [[Score(sum(map(self.logprob, c)), len(c)) for c in choices] for _, choices in requests]

    def _prompt_logprobs_batch(self, prompts):
        return [
            tuple(TokenLogprob(str(t), math.nan if i == 0 else self.logprob(t)) for i, t in enumerate(prompt))
            for prompt in prompts
        ]


def test_a_chat_carries_what_the_server_said():
    with Server(echo()) as server, OpenAIModel("echo", base_url=server.base_url) as model:
        answer = model.chat("four words are here", Sampling(max_tokens=3, logprobs=1))
    assert (answer.text, answer.finish_reason, answer.model) == ("four words are", "length", "echo")
    assert answer.usage == Usage(4, 3)
    assert [lp.token for lp in answer.logprobs] == ["four", " words", " are"]
    assert answer.logprobs[1].logprob == pytest.approx(math.log(0.5))
    assert answer.logprobs[1].top == ((" words", pytest.approx(math.log(0.5))),)
    assert answer.details["id"].startswith("chatcmpl-")


def test_every_setting_is_sent_explicitly():
    with Server(echo()) as server, OpenAIModel("echo", base_url=server.base_url, dialect="vllm") as model:
        model.chat("a")
        model.complete("a", Sampling(seed=5, top_k=3, stop=("x",), stop_token_ids=(7,)))
        chat, complete = (received.body for received in server.received)
    for body, top_k in [(chat, -1), (complete, 3)]:
        assert body["top_k"] == top_k
        assert (body["temperature"], body["top_p"], body["min_p"], body["repetition_penalty"]) == (1.0, 1.0, 0.0, 1.0)
        assert (body["presence_penalty"], body["frequency_penalty"], body["n"]) == (0.0, 0.0, 1)
        assert body["max_tokens"] == 256
    assert (complete["seed"], complete["stop"], complete["stop_token_ids"]) == (5, ["x"], [7])
    assert "seed" not in chat


@pytest.mark.parametrize(
    "setting", [{"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"stop_token_ids": (1,)}]
)
def test_what_the_plain_protocol_has_no_word_for_is_refused_before_any_request(setting):
    with Server(echo()) as server, OpenAIModel("echo", base_url=server.base_url) as model:
        with pytest.raises(CapabilityError, match=f"cannot sample with {next(iter(setting))}"):
            model.chat_many(["fine", "fine"], [Sampling(), Sampling(**setting)])
        assert not server.received


def test_n_samples_are_n_requests_with_seeds_of_their_own():
    with Server(echo()) as server, OpenAIModel("echo", base_url=server.base_url) as model:
        texts = [answer.text for answer in model.complete("p", Sampling(n=3, seed=11))]
        assert texts == [f"p/{sample_seed(11, i)}" for i in range(3)]
        assert len(set(texts)) == 3
        assert len(server.received) == 3
        assert [answer.text for answer in model.complete("p", Sampling(n=2, seed=11))] == texts[:2]


def test_llama_cpp_is_sent_its_own_words_for_every_setting():
    with Server(echo()) as server, OpenAIModel("echo", base_url=server.base_url, dialect="llama.cpp") as model:
        with pytest.raises(RequestFailed, match="unsupported field"):  # our server refuses what it does not know
            model.complete("a", Sampling(min_p=0.1, repetition_penalty=1.2, logprobs=0))
        (body,) = (received.body for received in server.received)
    assert (body["top_k"], body["min_p"], body["repeat_penalty"], body["logprobs"]) == (0, 0.1, 1.2, 1)
    assert body["samplers"][:2] == ["penalties", "temperature"]


def test_n_samples_can_be_asked_for_together():
    with Server(echo()) as server, OpenAIModel("echo", base_url=server.base_url, together=True) as model:
        assert len(model.complete("p", Sampling(n=3))) == 3
        assert [received.body["n"] for received in server.received] == [3]


def test_images_arrive_as_they_are_and_the_schema_too():
    scripted = echo()
    with Server(scripted) as server, OpenAIModel("echo", base_url=server.base_url) as model:
        model.chat([Message("user", ["look", Image(PNG)])], schema={"type": "object"})
    (call,) = scripted.calls
    assert call.request[0].images == (Image(PNG),)
    assert call.request[0].text == "look"
    assert call.schema == {"type": "object"}


@pytest.mark.parametrize(
    ("prompt", "choices"), [("ab", ["c", "de", "ffff"]), ((1, 2), [(3,), (4, 5)]), ("é", ["ü", "日本"])]
)
def test_scores_over_http_equal_those_of_the_model_behind_it(prompt, choices):
    letters = Letters()
    with Server(letters) as server, OpenAIModel("letters", base_url=server.base_url) as model:
        assert model.score(prompt, choices) == pytest.approx(letters.score(prompt, choices))
        assert model.score(prompt, []) == []
        assert len(server.received) == 1


def test_a_choice_without_anything_before_it_has_no_score():
    with (
        Server(Letters()) as server,
        OpenAIModel("letters", base_url=server.base_url) as model,
        pytest.raises(RequestFailed, match="non-empty prompt"),
    ):
        model.score("", ["abc"])


FAULTS = ["429", "429:0.05", "500", "503", "drop", "lose", "cut", "malformed", "empty"]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_outlived_and_nothing_is_billed_twice(fault):
    with (
        Server(echo(), faults=f"{fault},{fault}") as server,
        OpenAIModel("echo", base_url=server.base_url, backoff=QUICK) as model,
    ):
        assert model.chat("hello").text == "hello"
        assert len(server.received) == 3
        assert server.asked == 1
        assert server.billed_tokens == model.budget.spent.tokens == 2
        assert model.budget.spent.requests == 1


def test_under_a_storm_of_faults_every_request_is_answered_once_and_in_order():
    storm = Faults.at_random([*FAULTS, "slow:0.02"], rate=0.4, seed=1)
    questions = [f"question {i}" for i in range(200)]
    with (
        Server(echo(), faults=storm) as server,
        OpenAIModel("echo", base_url=server.base_url, backoff=QUICK, retries=30, concurrency=32) as model,
    ):
        assert [answer.text for answer in model.chat_many(questions)] == questions
        assert server.asked == 200
        assert server.billed_tokens == model.budget.spent.tokens == 200 * 4
        assert len(server.received) > 260


def test_a_slow_answer_is_given_up_and_asked_for_again():
    with (
        Server(echo(), faults="slow:5") as server,
        OpenAIModel("echo", base_url=server.base_url, backoff=QUICK, timeout=0.3) as model,
    ):
        began = time.monotonic()
        assert model.chat("hello").text == "hello"
        assert time.monotonic() - began < 3


def test_nobody_listening_is_said_after_the_tries():
    model = OpenAIModel("m", base_url="http://127.0.0.1:9/v1", backoff=QUICK, retries=2)
    with pytest.raises(RequestFailed, match=r"no answer in 3 tries; the last: no connection"):
        model.chat("hello")


@pytest.mark.parametrize(("fault", "least"), [("429:0.6", 0.6), ("503:0.6", 0.6), ("429:date:1", 0.9)])
def test_retry_after_is_obeyed_in_seconds_and_as_a_date(fault, least):
    with Server(echo(), faults=fault) as server, OpenAIModel("echo", base_url=server.base_url, backoff=QUICK) as model:
        model.chat("hello")
        first, second = server.received
        assert least <= second.time - first.time < least + 2.5


def test_retry_after_holds_back_every_request():
    with (
        Server(echo(), faults="429:0.5") as server,
        OpenAIModel("echo", base_url=server.base_url, backoff=QUICK, concurrency=1) as model,
    ):
        worker = threading.Thread(target=model.chat, args=["first"])
        worker.start()
        while not server.received:
            time.sleep(0.005)
        time.sleep(0.1)
        model.chat("second")
        worker.join()
        first, *others = server.received
        assert len(others) == 2
        assert min(other.time for other in others) - first.time >= 0.5


def test_a_retry_after_beyond_patience_fails_at_once():
    with (
        Server(echo(), faults="429:3600") as server,
        OpenAIModel("echo", base_url=server.base_url) as model,
        pytest.raises(RequestFailed, match="asks to wait 3600 s, longer than max_wait=120") as caught,
    ):
        model.chat("hello")
    assert caught.value.status == 429


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_refusal_is_not_tried_again(status):
    with Server(echo(), faults=str(status)) as server, OpenAIModel("echo", base_url=server.base_url) as model:
        with pytest.raises(RequestFailed, match=f"HTTP {status}: fault {status} on order") as caught:
            model.chat("hello")
        assert caught.value.status == status
        assert len(server.received) == 1


def test_the_name_that_the_server_gives_is_kept_and_can_be_required():
    with Server(echo(), faults="model:other,model:other") as server:
        assert OpenAIModel("echo", base_url=server.base_url).chat("hello").model == "other"
        strict = OpenAIModel("echo", base_url=server.base_url, require_model="echo")
        with pytest.raises(RequestFailed, match="answered as model 'other'"):
            strict.chat("hello")
        assert strict.chat("hello").model == "echo"


def test_after_a_failure_what_was_answered_is_at_hand():
    with (
        Server(echo(), faults="ok,ok,400") as server,
        OpenAIModel("echo", base_url=server.base_url, concurrency=1) as model,
    ):
        with pytest.raises(RequestFailed) as caught:
            model.chat_many(["a", "b", "c", "d"])
        assert caught.value.index == 2
        assert [answer and answer.text for answer in caught.value.partial] == ["a", "b", None, None]
        assert "at request 2 of 4 (counted from 0), with 2 answered" in caught.value.__notes__
        assert len(server.received) == 3


# Budgets


def test_a_budget_of_requests_stops_before_the_next_and_says_where():
    with Server(echo()) as server:
        model = OpenAIModel("echo", base_url=server.base_url, budget=Budget(requests=5))
        with pytest.raises(
            BudgetExceeded, match=r"budget of 5 requests is used up; spent so far: 5 requests"
        ) as caught:
            model.chat_many(["hi"] * 20)
        assert len(server.received) == 5
        assert sum(answer is not None for answer in caught.value.partial) == 5
        assert "with 5 answered" in caught.value.__notes__[0]


def test_money_is_never_overspent_and_not_left_lying():
    # a reply costs 2 * 1 + 2 * 10 = 22 millionths; its worst case is far above (max_tokens = 20)
    with Server(echo(), latency=0.01) as server:
        budget = Budget(money=0.001, prices=(1.0, 10.0))
        model = OpenAIModel("echo", base_url=server.base_url, budget=budget)
        with pytest.raises(BudgetExceeded, match=r"beyond the budget of 0\.001"):
            model.chat_many(["two words"] * 200, Sampling(max_tokens=20))
    assert budget.spent.money <= 0.001
    assert budget.spent.money > 0.001 - 0.00025
    assert budget.spent.money == pytest.approx(budget.spent.requests * 22e-6)


def test_a_rate_is_kept():
    with Server(echo()) as server:
        budget = Budget(requests_per_minute=60 * 40)  # 40 a second, one second's worth at once
        OpenAIModel("echo", base_url=server.base_url, budget=budget).chat_many(["hi"] * 60)
        times = sorted(received.time for received in server.received)
    assert times[-1] - times[0] >= 0.35  # (60 - 1 - 40) / 40 = 0.475 from the first request's booking, not its arrival


# Cache


def test_an_answer_from_the_cache_costs_nothing_and_is_the_same(tmp_path):
    sampling = Sampling(temperature=0, logprobs=2)
    with Server(echo()) as server:
        first = OpenAIModel("echo", base_url=server.base_url, cache=tmp_path / "cache.sqlite")
        again = OpenAIModel("echo", base_url=server.base_url, cache=tmp_path / "cache.sqlite")
        assert first.chat("hello", sampling) == again.chat("hello", sampling)
        assert len(server.received) == 1
        assert again.budget.spent.requests == 0
        assert again.cache.hits == 1


def test_everything_that_shapes_an_answer_is_part_of_its_key(tmp_path):
    greedy = Sampling(temperature=0)
    with Server(echo()) as server:
        cache = ResponseCache(tmp_path / "cache.sqlite")
        model = OpenAIModel("echo", base_url=server.base_url, cache=cache)
        requests = [
            lambda: model.chat("a", greedy),
            lambda: model.chat("b", greedy),
            lambda: model.chat([Message("system", "a")], greedy),
            lambda: model.chat([Message("user", ["a", Image(PNG)])], greedy),
            lambda: model.chat([Message("user", ["a", Image(PNG + b"!")])], greedy),
            lambda: model.chat("a", greedy, schema={"type": "object"}),
            lambda: model.chat("a", Sampling(temperature=0, top_p=0.5)),
            lambda: model.chat("a", Sampling(temperature=0, max_tokens=5)),
            lambda: model.chat("a", Sampling(temperature=0, seed=1)),
            lambda: model.chat("a", Sampling(temperature=0, stop=("x",))),
            lambda: model.chat("a", Sampling(temperature=0, logit_bias=((3, 1.0),))),
            lambda: model.chat("a", Sampling(temperature=0, logit_bias=((3, 2.0),))),
            lambda: model.chat("a", Sampling(temperature=0, logprobs=0)),
            lambda: model.complete("a", greedy),
            lambda: model.complete((1, 2), greedy),
            lambda: OpenAIModel("echo", base_url=server.base_url, cache=cache, dialect="vllm").chat("a", greedy),
        ]
        for request in requests * 2:
            request()
        assert len(server.received) == len(requests) == len(cache)
    with Server(echo()) as elsewhere:
        OpenAIModel("echo", base_url=elsewhere.base_url, cache=cache).chat("a", greedy)
        assert len(elsewhere.received) == 1


def test_unseeded_samples_stay_distinct_and_a_run_that_is_repeated_finds_them_again(tmp_path):
    count = iter(range(1000))
    counter = ScriptedModel(complete=lambda *_: str(next(count)), name="counter")
    with Server(counter) as server:

        def run(namespace=""):
            cache = ResponseCache(tmp_path / "cache.sqlite", namespace=namespace)
            model = OpenAIModel("counter", base_url=server.base_url, cache=cache)
            return [[a.text for a in samples] for samples in model.complete_many(["p", "p"], Sampling(n=4))]

        first = run()
        assert len({text for samples in first for text in samples}) == 8
        assert run() == first
        assert len(server.received) == 8
        assert not {t for s in run("second") for t in s} & {t for s in first for t in s}


def test_the_same_request_at_the_same_time_is_sent_once(tmp_path):
    with Server(echo(), latency=0.1) as server:
        model = OpenAIModel("echo", base_url=server.base_url, cache=tmp_path / "cache.sqlite")
        assert [a.text for a in model.chat_many(["same"] * 10, Sampling(temperature=0))] == ["same"] * 10
        assert len(server.received) == 1


def test_offline_only_the_cache_answers(tmp_path):
    greedy = Sampling(temperature=0)
    with Server(echo()) as server:
        url = server.base_url
        OpenAIModel("echo", base_url=url, cache=tmp_path / "cache.sqlite").chat("hello", greedy)
    offline = OpenAIModel("echo", base_url=url, cache=tmp_path / "cache.sqlite", offline=True)
    assert offline.chat("hello", greedy).text == "hello"
    with pytest.raises(RequestFailed, match="offline"):
        offline.chat("something else", greedy)


WORKER = """
import sys
from chapbook_shared.lm import OpenAIModel, Sampling
url, cache, count = sys.argv[1:]
model = OpenAIModel("echo", base_url=url, cache=cache, concurrency=8)
print("begun", flush=True)
answers = model.chat_many([f"question {i}" for i in range(int(count))], Sampling(temperature=0))
assert [a.text for a in answers] == [f"question {i}" for i in range(int(count))]
"""


def test_ctrl_c_leaves_the_cache_whole_and_the_next_run_goes_on_from_there(tmp_path):
    cache = tmp_path / "cache.sqlite"
    with Server(echo(), latency=0.02) as server:
        command = [sys.executable, "-c", WORKER, server.base_url, str(cache), "200"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.readline()
        while server.asked < 60:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode != 0
        assert "KeyboardInterrupt" in errors
        assert "Unclosed" not in errors
        assert "never retrieved" not in errors
        with sqlite3.connect(cache) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        kept = len(ResponseCache(cache))
        before = server.asked
        assert 40 <= kept <= before
        subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
        assert server.asked - before == 200 - kept


def test_several_processes_share_one_cache(tmp_path):
    cache = tmp_path / "new" / "cache.sqlite"
    with Server(echo()) as server:
        command = [sys.executable, "-c", WORKER, server.base_url, str(cache), "60"]
        processes = [
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(3)
        ]
        for process in processes:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
        assert len(ResponseCache(cache)) == 60


# Secrets

CANARY = "sk-canary-5f1d0c9e"


def test_the_key_is_sent_and_is_nowhere_else(tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("CANARY_KEY", CANARY)
    caplog.set_level(logging.DEBUG)
    gossip = ScriptedModel(lambda *_: f"your key is {CANARY}", name="echo")
    with Server(gossip, api_key=CANARY, faults="ok,401,500,cut,malformed,429:999") as server:
        options = {"base_url": server.base_url, "cache": tmp_path / "cache.sqlite", "backoff": QUICK, "retries": 0}
        model = OpenAIModel("echo", api_key_env="CANARY_KEY", **options)
        assert CANARY in model.chat("hello").text
        shown = [repr(model), repr(vars(model)), repr(model.cache), repr(model.budget)]
        for _ in range(5):
            with pytest.raises(RequestFailed) as caught:
                model.chat("hello")
            shown += ["".join(traceback.format_exception(caught.value)), repr(caught.value.__dict__)]
        with pytest.raises(RequestFailed, match="key is missing or wrong"):
            OpenAIModel("echo", **options).chat("hello")
        assert [r.headers.get("Authorization") for r in server.received][:2] == [f"Bearer {CANARY}"] * 2
        model.close()
    shown += [caplog.text, *capfd.readouterr()]
    assert not [text for text in shown if CANARY in text]
    for path in tmp_path.iterdir():
        assert CANARY.encode() not in path.read_bytes()


def test_a_key_in_the_wrong_place_is_not_repeated():
    with pytest.raises(ValueError, match="environment variable") as caught:
        OpenAIModel("m", api_key_env=CANARY)
    assert CANARY not in str(caught.value)
    with pytest.raises(ValueError, match="no credentials") as caught:
        OpenAIModel("m", base_url=f"https://user:{CANARY}@example.org/v1")
    assert CANARY not in str(caught.value)


# Loops, threads, forks


def test_plain_calls_work_inside_a_running_loop_and_coroutines_on_any():
    with Server(echo()) as server, OpenAIModel("echo", base_url=server.base_url) as model:

        async def both():
            return model.chat("plain").text, (await model.achat("awaited")).text

        assert asyncio.run(both()) == asyncio.run(both()) == ("plain", "awaited")

        async def many():
            return await asyncio.gather(*(model.achat(str(i)) for i in range(100)))

        assert [answer.text for answer in asyncio.run(many())] == [str(i) for i in range(100)]


def test_concurrency_is_a_bound_for_coroutines_too():
    lock, running, most = threading.Lock(), 0, 0

    class Slow(Letters):
        capabilities = Capabilities(chat=True)
        name = "slow"

        async def achat(self, messages, sampling=None, *, schema=None):
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            await asyncio.sleep(0.02)
            with lock:
                running -= 1
            return Completion("x", "stop", "slow", Usage(1, 1))

    with Server(Slow()) as server, OpenAIModel("slow", base_url=server.base_url, concurrency=4) as model:

        async def many():
            await asyncio.gather(*(model.achat("x") for _ in range(20)))

        asyncio.run(many())
    assert most == 4


def test_a_cancelled_coroutine_ends_its_request():
    with Server(echo(), latency=5) as server, OpenAIModel("echo", base_url=server.base_url) as model:

        async def give_up():
            await asyncio.wait_for(model.achat("x"), timeout=0.2)

        with pytest.raises(TimeoutError):
            asyncio.run(give_up())
        assert model.budget.spent.requests == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_goes_on_with_connections_of_its_own(tmp_path):
    script = """
import os, sys
from chapbook_shared.lm import OpenAIModel, Sampling
model = OpenAIModel("echo", base_url=sys.argv[1], cache=sys.argv[2])
model.chat("before", Sampling(temperature=0))
child = os.fork()
text = model.chat(f"in {child == 0}", Sampling(temperature=0)).text
if child == 0:
    os._exit(0 if text == "in True" else 1)
assert os.waitpid(child, 0)[1] == 0 and text == "in False"
"""
    with Server(echo()) as server:
        command = [sys.executable, "-W", "ignore", "-c", script, server.base_url, str(tmp_path / "cache.sqlite")]
        subprocess.run(command, check=True, timeout=30)
        assert Counter(r.body["messages"][0]["content"] for r in server.received) == {
            "before": 1,
            "in True": 1,
            "in False": 1,
        }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "ftp://x/v1"}, "http or https"),
        ({"backoff": (-1, 1)}, "backoff must be"),
        ({"timeout": 0}, "timeout must be positive"),
        ({"retries": -1}, "retries must be >= 0"),
        ({"concurrency": 0}, "concurrency must be >= 1"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE is not set"),
        ({"offline": True}, "offline needs a cache"),
        ({"backoff": (2, 1)}, "backoff must be"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        OpenAIModel("m", **options)


def test_without_its_library_the_install_line_is_named():
    code = "import sys; sys.modules['aiohttp'] = None\nfrom chapbook_shared.lm import OpenAIModel\nOpenAIModel('m')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.search(r"ImportError: .*pip install 'chapbook-shared\[openai\]'", done.stderr)


def test_importing_the_package_is_light():
    code = "import chapbook_shared.lm, sys, json; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout))
    assert not loaded & {"aiohttp", "torch", "numpy", "transformers", "openai", "sqlite3", "jinja2", "rich"}


@pytest.fixture
def answering():
    """A server that answers with what it is given: (status, headers, body), the last one for ever."""
    answers, times = [], []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            times.append(time.monotonic())
            status, headers, body = answers[min(len(times), len(answers)) - 1]
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()

        def model(*given, **options):
            answers[:], times[:] = given, []
            url = f"http://127.0.0.1:{server.server_port}/v1"
            return OpenAIModel("m", base_url=url, **{"retries": 2, "backoff": (0.05, 0.1), **options})

        model.times = times
        yield model
        server.shutdown()


def said(text="yes", **more):
    return (200, {}, {"model": "m", "choices": [{"index": 0, "message": {"content": text}}], **more})


@pytest.mark.parametrize(
    "usage",
    [None, {}, [1], {"prompt_tokens": None}, {"prompt_tokens": -5, "completion_tokens": -5}, {"prompt_tokens": "x"}],
)
def test_an_answer_whose_usage_cannot_be_read_is_charged_at_the_estimate(answering, usage):
    with answering(said(usage=usage)) as model:
        assert model.chat("hi", Sampling(max_tokens=7)).text == "yes"
        assert model.budget.spent.requests == len(answering.times) == 1
        assert model.budget.spent.completion_tokens == 7
        assert model.budget.spent.prompt_tokens > 0


@pytest.mark.parametrize("wait", ["0", "-5", "soon", "nan", "1e400", "Mon, 01 Jan 2001 00:00:00 GMT"])
def test_a_retry_after_that_says_nothing_leaves_the_usual_pause(answering, wait):
    with answering((429, {"Retry-After": wait}, {}), said()) as model:
        assert model.chat("hi").text == "yes"
        assert answering.times[1] - answering.times[0] >= 0.025


def test_no_part_of_the_key_is_in_a_message_cut_short(answering, monkeypatch):
    monkeypatch.setenv("THE_KEY", "sk-abcdefghijklmnop")
    for body in (b"x" * 490 + b"sk-abcdefghijklmnop", {"error": {"message": "x" * 490 + "sk-abcdefghijklmnop"}}):
        with answering((400, {}, body), api_key_env="THE_KEY") as model, pytest.raises(RequestFailed) as caught:
            model.chat("hi")
        assert "sk-" not in str(caught.value)
        assert len(str(caught.value)) < 700
    with (
        answering(
            (200, {}, {"model": "sk-abcdefghijklmnop", "choices": [{"message": {"content": ""}}]}),
            api_key_env="THE_KEY",
            require_model="m",
        ) as model,
        pytest.raises(RequestFailed, match=r"answered as model '\[THE_KEY\]'"),
    ):
        model.chat("hi")


def test_a_line_break_at_the_end_of_a_key_is_not_sent(answering, monkeypatch):
    monkeypatch.setenv("THE_KEY", "sk-abc\n")
    with answering(said(), api_key_env="THE_KEY") as model:
        assert model.chat("hi").text == "yes"


def test_a_reply_nested_without_end_is_asked_for_again(answering):
    with answering((200, {}, b"[" * 200_000), said()) as model:
        assert model.chat("hi").text == "yes"


def test_a_lone_surrogate_goes_there_and_back():
    with Server(echo()) as server, OpenAIModel("echo", base_url=server.base_url, retries=0) as model:
        assert model.chat("a \ud800 b").text == "a \ud800 b"


def test_an_echo_of_nothing_is_no_score(answering):
    empty = {"tokens": [], "token_logprobs": [], "text_offset": []}
    reply = (200, {}, {"model": "m", "choices": [{"text": "", "logprobs": empty}]})
    with answering(reply) as model, pytest.raises(RequestFailed, match="echoed no token"):
        model.score("a", ["b"])


@pytest.mark.parametrize("offsets", [None, [0, 3, 6, 9], [0, 0, 3, 6]], ids=["none", "with the mark", "of the text"])
def test_a_mark_that_the_endpoint_puts_in_front_does_not_move_the_choice(answering, offsets):
    logprobs = {"tokens": ["<s>", "The", " ca", "t"], "token_logprobs": [None, -1.0, -2.0, -4.0]}
    if offsets is not None:
        logprobs["text_offset"] = offsets
    with answering((200, {}, {"model": "m", "choices": [{"text": "The cat", "logprobs": logprobs}]})) as model:
        assert model.score("The", [" cat"]) == [Score(-6.0, 2)]


def test_an_answer_that_the_disk_cannot_take_is_given_all_the_same(answering, tmp_path, monkeypatch):
    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(ResponseCache, "put", full)
    with answering(said(), cache=tmp_path / "c.sqlite") as model, pytest.warns(RuntimeWarning, match="disk is full"):
        assert model.chat("hi").text == "yes"
    assert len(answering.times) == 1


def test_an_answer_without_what_was_asked_for_says_which_request_it_was(answering):
    reply = {"model": "m", "choices": [{"text": "a"}]}
    good = {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"a": -1}]}
    first = {"model": "m", "choices": [{"text": "a", "logprobs": good}]}
    with (
        answering((200, {}, first), (200, {}, reply), concurrency=1) as model,
        pytest.raises(CapabilityError, match="no log-probabilities") as caught,
    ):
        model.complete_many(["x", "y"], Sampling(logprobs=0))
    assert caught.value.index == 1
    assert caught.value.partial[0][0].text == "a"
    assert caught.value.partial[1] is None


@pytest.mark.parametrize(("asked", "kept"), [(0, ()), (1, (("x", -0.5),)), (2, (("x", -0.5), ("a", -1.0)))])
def test_no_more_alternatives_are_kept_than_were_asked_for(answering, asked, kept):
    logprobs = {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"a": -1, "x": -0.5}]}
    with answering((200, {}, {"model": "m", "choices": [{"text": "a", "logprobs": logprobs}]})) as model:
        (completion,) = model.complete("q", Sampling(logprobs=asked))
    assert completion.logprobs[0].top == kept


def test_after_a_failed_sample_no_further_one_is_begun_and_no_error_is_left_behind(answering, caplog):
    with answering((400, {}, {}), concurrency=2) as model:
        with pytest.raises(RequestFailed) as caught:
            model.complete("a", Sampling(n=50))
        assert len(answering.times) <= 4
        assert "sample 0 of 50" in caught.value.__notes__[0]
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_money_is_spent_to_the_last(answering):
    budget = Budget(money=0.3, prices=(1.0, 0.0))
    usage = {"prompt_tokens": 100_000, "completion_tokens": 0}
    with answering((200, {}, {"model": "m", "choices": [{"text": "a"}], "usage": usage}), budget=budget) as model:
        for _ in range(3):
            model.complete([1] * 100_000, Sampling(max_tokens=1))
        with pytest.raises(BudgetExceeded):
            model.complete([1] * 100_000, Sampling(max_tokens=1))


def test_processes_that_begin_one_cache_together_all_get_it(tmp_path):
    script = (
        "import sys, time; from chapbook_shared.lm.cache import ResponseCache\n"
        "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        "for i in range(40): ResponseCache(f'{sys.argv[1]}/{i}.sqlite').put(sys.argv[3], 1)"
    )
    begin = str(time.time() + 1.5)
    command = [sys.executable, "-c", script, str(tmp_path), begin]
    processes = [subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE) for i in range(6)]
    assert [process.communicate()[1] for process in processes] == [b""] * 6
    assert len(ResponseCache(tmp_path / "39.sqlite")) == 6


def test_completions_are_streamed_and_what_was_under_way_comes_before_the_failure():
    scripted = ScriptedModel(complete=lambda prompt, sampling: str(prompt), name="m")
    with (
        Server(scripted, faults=",".join(["ok"] * 6 + ["400"])) as server,
        OpenAIModel("m", base_url=server.base_url, concurrency=3, retries=0) as model,
    ):
        seen = []
        with pytest.raises(RequestFailed, match="400"):
            seen.extend(
                answer.text for _, (answer,) in model.complete_each((f"p{i}", Sampling(seed=i)) for i in range(50))
            )
        assert 6 <= len(seen) <= 8
        assert len(set(seen)) == len(seen)


def test_a_logit_bias_is_sent_within_the_protocols_bounds():
    scripted = ScriptedModel(complete=lambda prompt, sampling: repr(sampling.logit_bias), name="m")
    with Server(scripted) as server, OpenAIModel("m", base_url=server.base_url) as model:
        (answer,) = model.complete("p", Sampling(logit_bias=((3, float("-inf")), (4, 1.5))))
        assert answer.text == "((3, -100.0), (4, 1.5))"
        assert server.received[-1].body["logit_bias"] == {"3": -100.0, "4": 1.5}


def test_a_stream_takes_and_pays_for_no_more_than_it_can_have_under_way():
    taken = []

    def endless():
        while True:
            taken.append(len(taken))
            yield f"p{len(taken)}", Sampling(seed=1)

    scripted = ScriptedModel(complete=lambda prompt, sampling: str(prompt), name="m")
    with Server(scripted) as server, OpenAIModel("m", base_url=server.base_url, concurrency=4) as model:
        stream = model.complete_each(endless())
        next(stream)
        time.sleep(0.3)
        assert len(taken) == 4
        stream.close()
        assert server.asked == 4
        assert model.complete("p", Sampling(seed=1))[0].text == "p"


def test_a_stream_whose_model_is_closed_says_so_and_does_not_just_end():
    scripted = ScriptedModel(complete=lambda prompt, sampling: str(prompt), name="m")
    with Server(scripted, latency=0.05) as server:
        for _ in range(5):
            model = OpenAIModel("m", base_url=server.base_url, concurrency=4)
            stream = model.complete_each((f"p{i}", Sampling(seed=i)) for i in range(1000))
            next(stream)
            threading.Timer(0.02, model.close).start()
            with pytest.raises(RuntimeError, match="was closed while a request was under way"):
                list(stream)


def test_a_stream_says_at_which_request_the_budget_or_the_requests_ended():
    def requests():
        yield from ((f"p{i}", Sampling(seed=i)) for i in range(5))
        raise KeyError("mine")

    scripted = ScriptedModel(complete=lambda prompt, sampling: str(prompt), name="m")
    budget = Budget(requests=7)
    with Server(scripted) as server, OpenAIModel("m", base_url=server.base_url, concurrency=4, budget=budget) as model:
        seen = []
        with pytest.raises(KeyError, match="mine"):
            seen.extend(place for place, _ in model.complete_each(requests()))
        assert sorted(seen) == [0, 1, 2, 3, 4]
        with pytest.raises(BudgetExceeded, match="7 requests") as caught:
            seen.extend(place for place, _ in model.complete_each((f"p{i}", Sampling(seed=i)) for i in range(9)))
        assert caught.value.index == 2
        assert sorted(seen) == [0, 0, 1, 1, 2, 3, 4]


def test_the_requests_of_a_stream_may_come_from_the_model_itself():
    scripted = ScriptedModel("q", complete=lambda prompt, sampling: f"{prompt}!", name="m")
    with Server(scripted) as server, OpenAIModel("m", base_url=server.base_url) as model:
        stream = model.complete_each((model.chat("ask").text, Sampling()) for _ in range(3))
        assert [answer.text for _, (answer,) in stream] == ["q!"] * 3


def test_retry_after_holds_back_the_next_request_too():
    with (
        Server(ScriptedModel("x", name="m"), faults="429:0.6") as server,
        OpenAIModel("m", base_url=server.base_url, retries=0) as model,
    ):
        began = time.monotonic()
        with pytest.raises(RequestFailed, match="429"):
            model.chat("p")
        assert model.chat("p").text == "x"
        assert time.monotonic() - began >= 0.6
