"""What a real small model makes of it: SmolLM2-135M-Instruct as a judge of calls, and as the model of the loop.

    python benchmarks/evidence_model.py judge     # 8 minutes on one busy core
    python benchmarks/evidence_model.py loop      # 3 minutes
    python benchmarks/evidence_model.py retrieval # BM25 and MiniLM, a minute

judge: the demo's thirteen tools before and after (refined by the demo's scripted roles from real calls). For each held-out request the
model is shown the documents of two tools, the right one and its neighbour, and four calls: the right one, one with a value in a form
that the tool refuses, one without its last argument, one of the neighbour. The first two were really made while choosing them: the right one
succeeds, the refused one fails. The call of the highest mean log-probability a token is its choice (fixed before the first run; the sum is
printed too). `grade`, whose errors lie, has no request that can be served as meant, and is left out.

loop: SmolLM2 is Explorer, Analyzer and Rewriter at once. It is far too small for that. What is shown is that the run ends cleanly, and
that what could not be read or was refused left the documents as they were.
"""

import asyncio
import json
import sys
import time

import numpy as np

from chapbook_shared.lm import LocalModel
from draft_docs import CallableSource, DraftConfig, Drafter, SentenceEmbedder, prompts
from draft_docs.demo import _text, refine
from draft_docs.demo_world import FUNCTIONS, OPENAPI, REQUESTS, DocReader, Joined, api, stripped
from draft_docs.retrieval import retrieval
from draft_docs.sources.mcp import McpSource
from draft_docs.sources.openapi import OpenApiSource

# What is true of each parameter, in words that the reader knows: for the right calls alone, never shown to the model.
TRUTH = {
    "get_current_time": {"timezone": "IANA"},
    "convert_time": {"source_timezone": "IANA", "target_timezone": "IANA", "time": "Format HH:MM."},
    "month_days": {"month": "From 1 to 12."},
    "weekday": {"date": "Format YYYY-MM-DD."},
    "minutes_between": {"start": "Format HH:MM.", "end": "Format HH:MM."},
    "zone_offset": {"zone": "IANA"},
    "convert_length": {"unit": "One of m, ft, km."},
    "shorten": {"width": "From 8 to 80."},
    "sorted_stock": {"column": "One of item, shelf, amount."},
    "getRate": {"base": "ISO 4217", "quote": "ISO 4217"},
    "listBooks": {"order": "One of asc, desc.", "limit": "From 1 to 50."},
    "getParcel": {"id": "Written as PX-000000."},
}
UNITS = {"metres": "m", "feet": "ft", "kilometres": "km"}


def refused_values(value):
    """The same value in other words, or out of any range."""
    return [f"the {value}", f"{value} please"] if isinstance(value, str) else [10**6, -(10**6)]


async def candidates(source, tools):
    """(tool, neighbour, request, four calls, the right one first)."""
    names, reader = [tool.name for tool in source.tools], DocReader()
    for name, sentence, meant in REQUESTS:
        if name not in TRUTH:
            continue
        plain = tools[name]
        true = plain.with_docs("", TRUTH[name])
        said = {key: UNITS.get(value, value) if key == "unit" else value for key, value in meant.items()}
        right = reader.arguments(true, said)
        if not (await source.call(name, right)).ok:
            print(f"left out, no right call: {name} {right}", file=sys.stderr)
            continue
        wrongs = [reader.arguments(plain, meant)]
        wrongs += [{**right, key: wrong} for key in reversed(right) for wrong in refused_values(right[key])]
        for wrong in wrongs:
            if wrong != right and not (await source.call(name, wrong)).ok:
                break
        else:
            raise AssertionError(f"no refused form of {name} {right}")
        neighbour = names[(names.index(name) + 1) % len(names)]
        shorter = dict(list(right.items())[:-1])
        calls = [(name, right), (name, wrong), (name, shorter), (neighbour, right)]
        yield name, neighbour, sentence, [f"{tool}({json.dumps(arguments)})" for tool, arguments in calls]


async def documents():
    with api() as address:
        mcp = await McpSource.connect([sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"])
        web = OpenApiSource(json.dumps(OPENAPI), base_url=address)
        source = Joined(CallableSource(FUNCTIONS, read_only=True), web, mcp)
        try:
            before = {tool.name: tool for tool in source.tools}
            after = (await refine(source)).specs
            return before, after, [entry async for entry in candidates(source, before)]
        finally:
            await mcp.aclose()
            await web.aclose()


def judge():
    before, after, entries = asyncio.run(documents())
    choices = {}
    with LocalModel.smollm2() as model:
        for when, tools in (("before", before), ("after", after)):
            start, picks = time.perf_counter(), []
            for name, neighbour, sentence, calls in entries:
                shown = "\n\n".join(prompts.record(tools[tool]) for tool in sorted((name, neighbour)))
                scores = model.score(f"{shown}\n\nA user asks: {sentence}\nThe right call of a tool: ", calls)
                means, sums = [s.logprob / s.tokens for s in scores], [s.logprob for s in scores]
                picks.append((name, int(np.argmax(means)), int(np.argmax(sums))))
            choices[when] = picks
            print(f"{when}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    names = sorted({name for name, *_ in choices["before"]})
    for rank, how in ((1, "mean a token"), (2, "sum")):
        right = {
            when: np.array([np.mean([pick[rank] == 0 for pick in picks if pick[0] == name]) for name in names])
            for when, picks in choices.items()
        }
        rises = right["after"] - right["before"]
        draws = np.random.default_rng(0).choice(rises, (4000, len(rises))).mean(axis=1)
        low, high = np.quantile(draws, [0.025, 0.975])
        print(
            f"right call of four, {len(entries)} requests, {how}: {right['before'].mean():.1%} -> {right['after'].mean():.1%}, "
            f"rise {rises.mean():.1%} ({low:.1%} to {high:.1%}, tools resampled)"
        )
        for when, picks in choices.items():
            taken = np.bincount([pick[rank] for pick in picks], minlength=4)
            print(
                f"  {when}: right {taken[0]}, refused form {taken[1]}, missing argument {taken[2]}, wrong tool {taken[3]}"
            )


def loop():
    functions = FUNCTIONS[:2]
    source = CallableSource(functions, read_only=True)
    source.tools = [stripped(tool) for tool in source.tools]
    config = DraftConfig(max_iterations=1, max_tokens=160, seed=0, concurrency=len(functions))
    start = time.perf_counter()
    with LocalModel.smollm2() as model:
        result = Drafter(model, SentenceEmbedder(), config=config).run(source)
    print(f"{time.perf_counter() - start:.0f} s, {result.counts}, stops {dict(result.stops)}, {result.stopped_by!r}")
    for name, draft in result.items():
        print(
            f"{name}: {draft.refined.stopped}, changed {draft.changed}: {draft.after.description!r} {draft.after.parameter_docs}"
        )
        for iteration in draft.iterations:
            called = iteration.result and (iteration.result.error_kind or "ok")
            print(f"  {iteration.number}: call {called}, accepted {iteration.accepted}, {iteration.reason!r}")


def found():
    before, after, _ = asyncio.run(documents())
    queries = [(sentence, [name]) for name, sentence, _ in REQUESTS]
    for how, embedder in (("BM25", None), ("MiniLM", SentenceEmbedder())):
        for when, tools in (("before", before), ("after", after)):
            scores = retrieval({name: _text(tool) for name, tool in tools.items()}, queries, embedder=embedder)
            print(f"{how} {when}: " + ", ".join(f"NDCG@{k} {score:.3f}" for k, score in scores.items()))


if __name__ == "__main__":
    {"judge": judge, "loop": loop, "retrieval": found}[sys.argv[1]]()
