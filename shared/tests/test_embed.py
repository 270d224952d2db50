import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from chapbook_shared.embed import Embedder, OpenAIEmbedder, SentenceEmbedder


class Fake:
    """Counts what it is asked for; the vector of a text is made of its length."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, texts: list[str], **_: Any) -> np.ndarray:
        self.asked += texts
        return np.array([[len(text), 1.0, 0.0] for text in texts], dtype=np.float32)

    def get_embedding_dimension(self) -> int:
        return 3


def test_each_different_text_is_embedded_once_and_rows_keep_their_order():
    model = Fake()
    vectors = SentenceEmbedder(model).embed(["bb", "a", "bb", "bb", "a"])
    assert model.asked == ["bb", "a"]
    assert (vectors.shape, vectors.dtype) == ((5, 3), np.float32)
    assert np.allclose(vectors[0], np.array([2, 1, 0]) / np.sqrt(5))
    assert (vectors[[0, 2, 3]] == vectors[0]).all()
    assert (vectors[[1, 4]] == vectors[1]).all()


def test_no_texts_give_no_rows():
    assert SentenceEmbedder(Fake()).embed([]).shape == (0, 3)


def test_one_string_is_refused():
    with pytest.raises(TypeError, match="put it in a list"):
        SentenceEmbedder(Fake()).embed("abc")


@pytest.mark.parametrize("row", [[0.0, 0.0], [np.nan, 1.0]])
def test_a_vector_without_direction_is_an_error(row, monkeypatch):
    model = Fake()
    monkeypatch.setattr(model, "encode", lambda texts, **_: np.array([row for _ in texts]))
    with pytest.raises(ValueError, match="no direction"):
        SentenceEmbedder(model, name="fake").embed(["a"])


def test_minilm_puts_like_by_like():
    embedder = SentenceEmbedder.minilm()
    assert isinstance(embedder, Embedder)
    vectors = embedder.embed(["a cat on a sofa", "a kitten on a couch", "quarterly revenue fell", "a cat on a sofa"])
    assert (vectors.shape, vectors.dtype) == ((4, 384), np.float32)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert vectors[0] @ vectors[1] > 0.5 > 0.2 > vectors[0] @ vectors[2]
    assert (vectors[0] == vectors[3]).all()


class Endpoint(BaseHTTPRequestHandler):
    """Answers in reverse order, with vectors of the texts' lengths; the first `failures` requests are turned away."""

    requests: list[dict[str, Any]]
    failures: int

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = type(self)
        if kind.failures:
            kind.failures -= 1
            self.reply(429, {"error": {"message": "slow down"}}, {"Retry-After": "0"})
            return
        kind.requests.append(body)
        data = [
            {"object": "embedding", "index": i, "embedding": [float(len(text)), 2.0]}
            for i, text in enumerate(body["input"])
        ]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        self.reply(200, {"object": "list", "data": data[::-1], "model": body["model"], "usage": usage}, {})

    def reply(self, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(payload)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def endpoint():
    Endpoint.requests, Endpoint.failures = [], 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_an_endpoint_is_asked_in_batches_for_different_texts_and_tried_again(endpoint):
    Endpoint.failures = 2
    embedder = OpenAIEmbedder("small", base_url=endpoint, batch_size=2, dimensions=2)
    assert isinstance(embedder, Embedder)
    vectors = embedder.embed(["a", "bb", "a", "ccc"])
    assert [request["input"] for request in Endpoint.requests] == [["a", "bb"], ["ccc"]]
    assert all(request["dimensions"] == 2 for request in Endpoint.requests)
    expected = np.array([[1, 2], [2, 2], [1, 2], [3, 2]])
    assert np.allclose(vectors, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)
    assert vectors.dtype == np.float32


def test_an_endpoint_is_not_asked_for_an_empty_text(endpoint):
    with pytest.raises(ValueError, match="text 1 of 2 is"):
        OpenAIEmbedder("small", base_url=endpoint).embed(["a", ""])
    assert Endpoint.requests == []


def test_without_key_or_server_the_error_says_what_to_set(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValueError, match="OPENAI_API_KEY must be set"):
        OpenAIEmbedder("small")
