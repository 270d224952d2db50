"""What the guard lets through, and what it does not."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_docs import Hints, Policy, ToolResult, ToolSpec
from draft_docs.policy import Guard

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}, "key": {"type": "string"}}, "required": ["x"]}


class Runner:
    def __init__(self, *results, secrets=()):
        self.results, self.secrets, self.calls = list(results), secrets, []

    async def call(self, name, arguments):
        self.calls.append((name, dict(arguments)))
        result = self.results.pop(0) if self.results else ToolResult("fine")
        if isinstance(result, Exception):
            raise result
        return result


READS = Hints(read_only=True)


def guard(runner, *, name="look", hints=READS, made=None, **policy):
    return Guard([ToolSpec(name, "", SCHEMA, hints)], runner, Policy(**policy), made=made)


def call(guarded, name="look", **arguments):
    return asyncio.run(guarded.call(name, {"x": 1, **arguments}))


@pytest.mark.parametrize(
    ("hints", "policy", "is_made"),
    [
        (Hints(), {}, False),
        (Hints(read_only=False), {}, False),
        (Hints(idempotent=True), {}, False),
        (Hints(read_only=True), {}, True),
        (Hints(read_only=True, destructive=True), {}, False),  # it says two things
        (Hints(read_only=True), {"allow": ["get_*"]}, False),
        (Hints(read_only=True), {"allow": ["Look"]}, False),
        (Hints(read_only=True), {"allow": []}, False),
        (Hints(), {"allow_unsafe": ["l*"]}, False),  # names, not patterns
        (Hints(), {"allow_unsafe": ["look"]}, True),
        (Hints(), {"allow_unsafe": ["look"], "allow": ["get_*"]}, False),
        (Hints(read_only=True), {"dry_run": True, "allow_unsafe": ["look"]}, False),
    ],
)
def test_only_what_is_allowed_and_harmless_or_named_is_called(hints, policy, is_made):
    runner = Runner()
    result = call(guard(runner, hints=hints, **policy))
    assert (len(runner.calls) == 1, result.error_kind) == (is_made, None if is_made else "not_executed")


def test_a_call_that_may_have_done_its_work_is_not_made_again():
    unsafe = Runner(ToolResult("503", "transient"))
    assert call(guard(unsafe, hints=Hints(), allow_unsafe=["look"])).error_kind == "transient"
    assert len(unsafe.calls) == 1
    safe = Runner(ToolResult("503", "transient"))
    assert call(guard(safe)).ok
    assert len(safe.calls) == 2


def test_limits_count_what_earlier_runs_have_done():
    runner = Runner()
    guarded = guard(runner, max_calls=3, made={"look": 1, "gone": 1})
    assert [call(guarded).ok for _ in range(3)] == [True, False, False]
    guarded = guard(runner, max_calls_per_tool=2, made={"look": 2})
    assert "has had its 2 calls" in call(guarded).content


def test_a_model_cannot_set_a_secret_parameter_and_what_comes_back_is_masked(monkeypatch):
    monkeypatch.setenv("A_KEY", "swordfish-1")
    runner = Runner(
        ToolResult("key swordfish-1, header Bearer-value-9, {'k': 'swordfish-1'}"), secrets=["Bearer-value-9"]
    )
    guarded = guard(runner, secrets={"key": "env:A_KEY"})
    result = call(guarded, key="mine")
    assert runner.calls == [("look", {"x": 1, "key": "swordfish-1"})]
    assert "swordfish" not in result.content
    assert "Bearer-value" not in result.content


def test_an_adapter_that_raises_gives_a_result():
    result = call(guard(Runner(RuntimeError("adapter broke"))))
    assert result.error_kind == "died"
    assert "RuntimeError: adapter broke" in result.content


def test_a_secret_across_the_cut_leaves_no_half(monkeypatch):
    monkeypatch.setenv("A_KEY", "swordfish-1")
    result = call(guard(Runner(ToolResult("12345swordfish-1")), max_result_chars=10, secrets={"key": "env:A_KEY"}))
    assert result.truncated
    assert "sword" not in result.content


def test_calls_are_spread_over_time():
    async def main():
        guarded = guard(Runner(), rate=100)
        start = asyncio.get_running_loop().time()
        await asyncio.gather(*(guarded.call("look", {"x": i}) for i in range(6)))
        return asyncio.get_running_loop().time() - start

    assert asyncio.run(main()) >= 0.049


@settings(max_examples=60, deadline=None)
@given(st.text(), st.integers(1, 50))
def test_a_result_is_never_longer_than_the_limit_nor_invisible(text, limit):
    result = call(guard(Runner(ToolResult(text)), max_result_chars=limit))
    assert len(result.content) <= limit
    assert "\u200b" not in result.content
    assert result.content.encode("utf-8") is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:1/never.json"},
        {"$ref": "#/nowhere"},
        {"$ref": "#/properties/x"},
        {"type": "objekt"},
        {"pattern": "("},
    ],
)
def test_a_schema_that_cannot_be_used_is_not_asked_and_leads_nowhere(schema):
    runner = Runner()
    tool = ToolSpec("look", "", {"type": "object", "properties": {"x": schema}}, READS)
    assert asyncio.run(Guard([tool], runner, Policy()).call("look", {"x": "a"})).ok
    assert runner.calls
