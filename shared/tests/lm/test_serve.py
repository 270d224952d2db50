"""The loopback server, as other people's clients see it."""

import base64
import json
import math
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import openai
import pytest

from chapbook_shared.lm import (
    Capabilities,
    Completion,
    Faults,
    Image,
    LocalModel,
    OpenAIModel,
    Sampling,
    ScriptedModel,
    Server,
    TokenLogprob,
    Usage,
)
from chapbook_shared.lm.serve import Fault, _offsets

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(40))
HALF = math.log(0.5)


def scripted():
    return ScriptedModel(
        lambda messages, _: f"I heard {messages[-1].text}",
        complete=lambda prompt, _: " and so on" if isinstance(prompt, str) else " ids",
        name="tiny",
    )


@pytest.fixture
def server():
    with Server(scripted()) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


def post(server, path, body, **headers):
    """Status and JSON of a POST, by the standard library."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.base_url}/{path}", data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


# The official client


def test_official_client_lists_the_model(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")


def test_official_client_chats_with_logprobs_and_usage(client):
    reply = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "you"}], logprobs=True, top_logprobs=1, n=2, seed=3
    )
    assert [choice.message.content for choice in reply.choices] == ["I heard you"] * 2
    assert [choice.index for choice in reply.choices] == [0, 1]
    entries = reply.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["I", " heard", " you"]
    assert entries[1].logprob == pytest.approx(HALF)
    assert entries[1].bytes == list(b" heard")
    assert entries[1].top_logprobs[0].token == " heard"
    assert reply.choices[0].finish_reason == "stop"
    # the prompt counts once, the samples each
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (1, 6, 7)


def test_official_client_streams_the_same_answer_with_usage_last(client):
    request = {"model": "tiny", "messages": [{"role": "user", "content": "you  there\n"}], "logprobs": True}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == whole.choices[0].message.content
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    tokens = [
        entry.token for chunk in pieces if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
    ]
    assert tokens == [entry.token for entry in whole.choices[0].logprobs.content]
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(chunk.usage is None for chunk in pieces)


def test_official_client_completes_prompts_of_every_form(client):
    for prompt, texts in [
        ("once", [" and so on"]),
        (["once", "twice"], [" and so on"] * 2),
        ([1, 2, 3], [" ids"]),
        ([[1, 2], [3]], [" ids"] * 2),
    ]:
        reply = client.completions.create(model="tiny", prompt=prompt)
        assert [choice.text for choice in reply.choices] == texts
    stream = client.completions.create(model="tiny", prompt="once", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == " and so on"


def test_official_client_reads_logprobs_of_an_echoed_prompt(client):
    reply = client.completions.create(model="tiny", prompt="one two three", max_tokens=0, echo=True, logprobs=0)
    (choice,) = reply.choices
    assert choice.text == "one two three"
    assert choice.logprobs.tokens == ["one", " two", " three"]
    assert choice.logprobs.token_logprobs == [None, pytest.approx(HALF), pytest.approx(HALF)]
    assert choice.logprobs.text_offset == [0, 3, 7]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 0)
    (choice,) = client.completions.create(model="tiny", prompt="one two", echo=True, logprobs=1).choices
    assert choice.text == "one two and so on"
    assert choice.logprobs.text_offset == [0, 3, 7, 11, 14]


def test_official_client_sends_an_image_and_a_schema(server, client):
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    client.chat.completions.create(
        model="tiny",
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url}}],
            }
        ],
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    )
    (call,) = server.model.calls
    assert call.request[0].images == (Image(PNG),)
    assert call.schema == {"type": "object"}


def test_official_client_meets_the_faults_it_knows(client, server):
    for fault, error in [
        ("429", openai.RateLimitError),
        ("500", openai.InternalServerError),
        ("drop", openai.APIConnectionError),
    ]:
        server._faults = Faults(fault)
        with pytest.raises(error):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    server._faults = Faults("cut")
    with pytest.raises(Exception, match=r"(?i)incomplete|closed|connection|peer"):
        list(client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x y z"}], stream=True))


# curl


def curl(*arguments):
    return subprocess.run(["curl", "-sS", "--noproxy", "*", *arguments], capture_output=True, text=True, timeout=20)


def test_curl_chats_and_streams(server):
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "curl"}], "max_tokens": 2})
    done = curl(f"{server.base_url}/chat/completions", "-H", "Content-Type: application/json", "-d", body)
    reply = json.loads(done.stdout)
    assert reply["choices"][0]["message"]["content"] == "I heard"
    assert reply["choices"][0]["finish_reason"] == "length"
    done = curl("-i", "-N", f"{server.base_url}/chat/completions", "-d", body[:-1] + ', "stream": true}')
    assert "text/event-stream" in done.stdout
    events = re.findall(r"^data: (.*)$", done.stdout, re.MULTILINE)
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "I heard"


def test_curl_sees_a_reply_cut_short_and_retry_after(server):
    server._faults = Faults("cut,429:7,429:date:7,drop")
    body = json.dumps({"model": "tiny", "prompt": "x"})
    assert curl(f"{server.base_url}/completions", "-d", body).returncode in (18, 56)  # partial file, receive failure
    assert re.search(r"(?m)^Retry-After: 7\r?$", curl("-i", f"{server.base_url}/completions", "-d", body).stdout)
    assert re.search(
        r"(?m)^Retry-After: \w{3}, .* GMT\r?$", curl("-i", f"{server.base_url}/completions", "-d", body).stdout
    )
    assert curl(f"{server.base_url}/completions", "-d", body).returncode in (52, 56)  # empty reply, receive failure


# Another client library: huggingface_hub


HUB = """
import sys
from huggingface_hub import InferenceClient
client = InferenceClient(base_url=sys.argv[1], api_key="none")
request = {"model": "tiny", "messages": [{"role": "user", "content": "hub"}], "max_tokens": 8, "temperature": 0.5}
reply = client.chat.completions.create(**request, logprobs=True)
assert reply.choices[0].message.content == "I heard hub"
assert reply.choices[0].logprobs.content[0].token == "I"
assert reply.usage.total_tokens == 4
stream = client.chat.completions.create(**request, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "I heard hub"
"""


def test_huggingface_hub_chats_and_streams(server):
    # in a process of its own: under HF_HUB_OFFLINE, which tests run with, it speaks to no server at all
    environment = {
        name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    }
    done = subprocess.run([sys.executable, "-c", HUB, server.base_url], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(server.received) == 2


# What it refuses


@pytest.mark.parametrize(
    ("path", "change", "status", "message"),
    [
        ("chat/completions", {"model": "huge"}, 404, "does not exist"),
        ("chat/completions", {"messages": []}, 400, "at least one message"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, 400, "must have a role"),
        ("chat/completions", {"temperature": -1}, 400, "temperature must be"),
        ("chat/completions", {"top_logprobs": 3}, 400, "top_logprobs needs logprobs"),
        ("chat/completions", {"logit_bias": {"1": 500}}, 400, "logit_bias must map token ids to numbers"),
        ("completions", {"prompt": "x", "logit_bias": {"1": True}}, 400, "logit_bias must map token ids to numbers"),
        ("completions", {"prompt": "x", "logit_bias": {"1": "3"}}, 400, "logit_bias must map token ids to numbers"),
        ("completions", {"prompt": "x", "logit_bias": {"1_0": 3}}, 400, "logit_bias must map token ids to numbers"),
        ("completions", {"prompt": "x", "logit_bias": []}, 400, "in [-100, 100], got []"),
        ("chat/completions", {"mirostat": 1}, 400, "unsupported field 'mirostat'"),
        (
            "chat/completions",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}
                ]
            },
            400,
            "nothing is fetched",
        ),
        ("completions", {"prompt": [1, "a"]}, 400, "prompt must be text"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "needs echo"),
        ("chat/completions", {"max_tokens": 0}, 400, "max_tokens must be"),
        ("chat/completions", {"max_completion_tokens": 0}, 400, "max_tokens must be"),
        ("chat/completions", {"max_tokens": "7"}, 400, "max_tokens must be a whole number, got '7'"),
        ("completions", {"prompt": "x", "max_tokens": True}, 400, "max_tokens must be a whole number, got True"),
        ("completions", {"prompt": "x", "stop": 5}, 400, "stop must be text or a list of texts, got 5"),
        ("completions", {"prompt": "x", "stop": ["a", 5]}, 400, "stop must be text or a list of texts"),
        ("completions", {"prompt": "x", "stop_token_ids": 5}, 400, "stop_token_ids must be a list of token ids, got 5"),
        ("completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature must be a number, got 'hot'"),
        ("completions", {"prompt": "x", "n": [2]}, 400, "n must be a whole number, got [2]"),
        ("chat/completions", {"logprobs": True, "top_logprobs": "2"}, 400, "logprobs must be a whole number, got '2'"),
    ],
)
def test_what_it_does_not_do_it_says(server, path, change, status, message):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **change}
    if path == "completions":
        del body["messages"]
    got, reply = post(server, path, body)
    assert (got, message in reply["error"]["message"]) == (status, True), reply
    assert reply["error"]["type"] == "invalid_request_error"
    assert server.asked == 0


def test_a_body_that_is_not_json_is_a_bad_request(server):
    assert post(server, "completions", b"{")[0] == 400
    assert post(server, "completions", [1])[0] == 400


def test_what_the_model_cannot_do_is_a_bad_request():
    model = ScriptedModel("yes", name="tiny", capabilities=Capabilities(chat=True))
    with Server(model) as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        assert post(server, "chat/completions", body)[0] == 200
        for extra in [{"seed": 1}, {"logprobs": True}, {"response_format": {"type": "json_object"}}]:
            status, reply = post(server, "chat/completions", {**body, **extra})
            assert (status, "cannot" in reply["error"]["message"]) == (400, True)
        assert post(server, "completions", {"model": "tiny", "prompt": "x"})[0] == 400


def test_an_error_of_the_model_is_a_server_error():
    with Server(ScriptedModel([], name="tiny")) as server:
        status, reply = post(
            server, "chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        )
    assert status == 500
    assert "used up its 0 chat replies" in reply["error"]["message"]


# Details of the protocol


def test_what_json_cannot_hold_is_written_as_it_usually_is():
    logprobs = (TokenLogprob("a", -math.inf, 5, (("é", -math.inf),)),)
    model = ScriptedModel(complete=[Completion("a", "stop", "tiny", Usage(1, 1), (5,), logprobs)], name="tiny")
    with Server(model) as server:
        body = {"model": "tiny", "prompt": "x", "logprobs": 1, "return_token_ids": True}
        (choice,) = post(server, "completions", body)[1]["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
    assert choice["logprobs"]["top_logprobs"] == [{"é": -9999.0}]
    assert choice["token_ids"] == [5]


@pytest.mark.parametrize(
    ("text", "bytes_", "offsets"),
    [
        ("ab c", [b"ab", b" c"], [0, 2]),
        ("aé日x", [b"a", b"\xc3", b"\xa9", b"\xe6\x97", b"\xa5x"], [0, 1, 1, 2, 2]),
        (" 日本", [b" \xe6", b"\x97\xa5", b"\xe6\x9c", b"\xac"], [0, 1, 2, 2]),
        ("\ufffd!", [b"\xef\xbf\xbd", b"!"], [0, 1]),
    ],
)
def test_tokens_begin_where_their_bytes_do(text, bytes_, offsets):
    assert _offsets(text, [part.decode("utf-8", "replace") for part in bytes_]) == offsets


def test_tokens_that_do_not_spell_the_text_count_by_their_lengths():
    assert _offsets("ab", ["<s>", "a", "b"]) == [0, 3, 4]
    assert _offsets("日" * 200, ["\ufffd"] * 399 + ["x"]) == list(range(400))  # given up after a bounded search


@pytest.mark.slow
def test_a_model_answers_over_http_as_it_does_in_process():
    local = LocalModel.smollm2()
    with Server(local) as server, OpenAIModel(local.name, base_url=server.base_url, dialect="vllm") as remote:
        for prompt, choices in [
            ("The sky is", [" blue", " green and old"]),
            ("Tokyo は", ["日本", "の首都"]),
            ((504, 6376, 314), [(1, 2), (5,)]),
        ]:
            for here, there in zip(local.score(prompt, choices), remote.score(prompt, choices), strict=True):
                assert there.tokens == here.tokens
                assert there.logprob == pytest.approx(here.logprob, abs=1e-3)
        sampling = Sampling(seed=3, n=3, max_tokens=8, logprobs=2)
        for here, there in zip(local.complete("The sky", sampling), remote.complete("The sky", sampling), strict=True):
            assert (there.text, there.token_ids, there.finish_reason) == (here.text, here.token_ids, here.finish_reason)
            assert [lp.token for lp in there.logprobs] == [lp.token for lp in here.logprobs]


def test_the_same_idempotency_key_is_answered_once(server):
    body = {"model": "tiny", "prompt": "x"}
    first = post(server, "completions", body, **{"Idempotency-Key": "k1"})
    assert post(server, "completions", body, **{"Idempotency-Key": "k1"}) == first
    assert post(server, "completions", body, **{"Idempotency-Key": "k2"}) != first
    assert server.asked == 2


def test_an_order_for_duplicates_is_carried_out():
    model = ScriptedModel(complete=[str(i) for i in range(10)], name="tiny")
    with Server(model, faults="ok,duplicate,ok") as server:
        texts = [
            [
                choice["text"]
                for choice in post(server, "completions", {"model": "tiny", "prompt": "x", "n": 3})[1]["choices"]
            ]
            for _ in range(3)
        ]
    assert texts == [["0", "1", "2"], ["0", "0", "0"], ["6", "7", "8"]]


def test_a_script_of_faults_reads_as_it_is_written():
    assert Fault.parse("429:date:2") == Fault("status", status=429, wait=2.0, date=True)
    assert Fault.parse("slow:0.5") == Fault("slow", wait=0.5)
    assert Fault.parse("model:x") == Fault("model", model="x")
    faults = Faults("500,ok", repeat=True)
    assert [faults.next().kind for _ in range(4)] == ["status", "ok", "status", "ok"]
    with pytest.raises(ValueError, match="a fault must be"):
        Faults("explode")


def test_it_listens_on_this_machine_only():
    with pytest.raises(ValueError, match="for one machine"):
        Server(scripted(), host="0.0.0.0")


def test_a_port_in_use_is_an_error_and_not_a_hang(server):
    with pytest.raises(OSError, match="address already in use"):
        Server(scripted(), port=server.port).start()


def test_the_command_serves_until_it_is_interrupted():
    command = [sys.executable, "-m", "chapbook_shared.lm.serve", "--model", "echo", "--faults", "500"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    url = process.stderr.readline().split()[-1]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=1) as client:
        reply = client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "still there?"}])
    assert reply.choices[0].message.content == "still there?"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 0
    bad = subprocess.run([*command[:3], "--model", "nonsense"], capture_output=True, text=True)
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1)
    assert "must be 'echo' or MODULE:NAME" in bad.stderr


def test_a_scripted_model_keeps_the_rules_of_sampling():
    model = ScriptedModel({"a": "one two three"}, complete=["x END y"], score={("p", "q"): -1.5})
    assert model.chat("a", Sampling(max_tokens=2)).text == "one two"
    assert model.complete("p", Sampling(stop=("END",)))[0].text == "x "
    assert model.score("p", ["q"])[0].logprob == -1.5
    with pytest.raises(KeyError, match="no chat reply to 'b'"):
        model.chat("b")
    with pytest.raises(IndexError, match="used up its 1 complete replies"):
        model.complete("p")
