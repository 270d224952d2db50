"""Own overhead, many tools at once, embeddings, and resuming, next to the official loop's order of work written anew.

The peer does what the official script does, without its network code: one tool after the other, each step after the last, a query
embedded for the test and again for the record, both documents embedded for each Δ. Both are given the same replies.
"""

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from chapbook_shared.bench import Comparison, main
from chapbook_shared.lm import Completion, ScriptedModel
from draft_docs import CallableSource, DraftConfig, Drafter, Policy, stability

TOOLS, ITERATIONS, LATENCY, CONCURRENCY = 64, 2, 0.05, 16
CONFIG = DraftConfig(max_iterations=ITERATIONS, tau=1.0, concurrency=CONCURRENCY)
POLICY = Policy(max_calls=100_000)


def reply(messages, sampling=None):
    """Ever new queries, ever longer documents; no tool but the asked one comes into it."""
    system, asked = messages[0].text, messages[-1].text
    number = asked.partition("Arguments tried so far:")[0].count("\n- ")
    if "find out" in system:
        word = "abcdefghijklmnop"[number % 16] * 12
        return json.dumps({"query": word, "arguments": {"value": float(number)}})
    if "check" in system:
        return json.dumps({"suggestions": "say what comes back"})
    call = int(re.search(r"Call (\d+)", asked).group(1))
    name = json.JSONDecoder().raw_decode(asked, asked.index("{"))[0]["name"]
    return json.dumps({"description": f"{name} doubles a number. " * call, "next_direction": "limits"})


class Slow(ScriptedModel):
    """Answers after 50 ms, any number of requests at once, as an endpoint does."""

    async def achat(self, messages, sampling, *, schema=None):
        await asyncio.sleep(LATENCY)
        return Completion(reply(messages), "stop", self.name)


class Instant(ScriptedModel):
    async def achat(self, messages, sampling, *, schema=None):
        return Completion(reply(messages), "stop", self.name)


class Letters:
    name = "letters"

    def __init__(self):
        self.texts = []

    def embed(self, texts):
        self.texts += texts
        return np.array([[text.count(chr(97 + i)) + 1e-3 for i in range(26)] for text in texts], np.float32)


def source(count):
    def make(i):
        def tool(value: float) -> float:
            """Double."""
            return value * 2

        tool.__name__ = f"tool_{i}"
        return tool

    return CallableSource([make(i) for i in range(count)], read_only=True)


def seconds(work):
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def processor_seconds(work):
    start = time.process_time()
    work()
    return time.process_time() - start


def official(tools, letters, latency):
    """The peer: the official order of work, with the same replies."""
    from chapbook_shared.lm import Message
    from draft_docs import prompts

    def chat(messages):
        time.sleep(latency)
        return json.loads(reply(messages))

    def embed(text):
        return letters.embed([text])[0]

    for tool in tools.tools:
        document, queries, vectors = tool, [], []
        for number in range(1, ITERATIONS + 1):
            tried = [{"value": 0.0}] * len(queries)
            explored = chat(prompts.explore(document, queries=queries, tried=tried, direction="", rejected=[]))
            if queries:
                embed(explored["query"])
            vectors.append(embed(explored["query"]))
            queries.append(explored["query"])
            value = tools.functions[tool.name](**explored["arguments"])
            chat((Message("system", "You check"), Message("user", str(value))))
            record = prompts.record(document)
            rewrite = chat((Message("system", "You write"), Message("user", f"{record}\nCall {number}")))
            old, new = document.description, rewrite["description"]
            stability(old, new, embed(old), embed(new))
            document = document.with_docs(new)


def refine(tools, model, letters, store=None, config=CONFIG):
    return Drafter(model, letters, config=config, policy=POLICY, store=store).run(tools)


def run() -> Iterator[Comparison]:
    # Reading signatures is no part of an iteration: the sources are made before the clock starts.
    iterations = TOOLS * ITERATIONS
    refine(source(2), Instant("x"), Letters())
    for count in (16, 64, 256):
        tools = source(count)
        took = min(processor_seconds(lambda tools=tools: refine(tools, Instant("x"), Letters())) for _ in range(5))
        yield Comparison(
            f"own processor time an iteration, {count} tools, no store", took * 1e3 / (count * ITERATIONS), goal=3.0
        )
    tools = source(TOOLS)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "run.sqlite"
        took, _ = seconds(lambda: refine(tools, Instant("x"), Letters(), store))
        yield Comparison(f"own wall time an iteration, {TOOLS} tools, with a store", took * 1e3 / iterations, goal=3.0)
        alone = replace(CONFIG, concurrency=1)
        took, _ = seconds(lambda: refine(tools, Instant("x"), Letters(), Path(folder) / "alone.sqlite", alone))
        yield Comparison(
            "own wall time an iteration, one tool at a time, with a store", took * 1e3 / iterations, goal=3.0
        )
        took, again = seconds(lambda: refine(tools, Instant("x"), Letters(), store))
        assert again.counts.chat_calls == again.counts.tool_calls == again.counts.embeddings == 0
        yield Comparison(f"resuming a finished run of {TOOLS} tools, no calls", took * 1e3, goal=1000.0)

    ours_letters, their_letters = Letters(), Letters()
    ours, _ = seconds(lambda: refine(tools, Slow("x"), ours_letters))
    ideal = iterations * 3 * LATENCY / CONCURRENCY
    what = f"{TOOLS} tools x {ITERATIONS} iterations, 50 ms a chat, 16 at once"
    yield Comparison(what, ours * 1e3, ideal * 1e3, "ideal", ideal / ours, 1 / 1.15)
    with tempfile.TemporaryDirectory() as folder:
        stored, _ = seconds(lambda: refine(tools, Slow("x"), Letters(), Path(folder) / "run.sqlite"))
    yield Comparison(f"{what}, with a store", stored * 1e3, ideal * 1e3, "ideal", ideal / stored, 1 / 1.15)
    theirs, _ = seconds(lambda: official(tools, their_letters, LATENCY))
    yield Comparison(what, ours * 1e3, theirs * 1e3, "official order", theirs / ours, 14.0)
    distinct = len(set(ours_letters.texts))
    made, peer = len(ours_letters.texts), len(their_letters.texts)
    yield Comparison("texts embedded", made, distinct, "distinct texts", distinct / made, 1.0, unit="texts")
    yield Comparison("texts embedded", made, peer, "official order", peer / made, unit="texts")


if __name__ == "__main__":
    main(run)
