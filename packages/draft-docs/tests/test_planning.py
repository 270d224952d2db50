import pytest

from draft_docs import CallableSource, DraftConfig, Policy, plan


def look(name: str) -> str:
    """Look."""
    return name


def now() -> str:
    """Now."""
    return ""


def wipe(name: str) -> str:
    """Wipe."""
    return name


TOOLS = CallableSource([look, now, wipe], read_only=["look", "now"]).tools


def test_the_most_that_each_tool_can_take():
    made = plan(TOOLS)
    look_, now_, wipe_ = made.tools
    # One iteration of 1 + 2 chats, then four of 3 + 2.
    assert (look_.iterations, look_.chat_calls, look_.chat_calls_with_repairs) == (5, 23, 69)
    assert (now_.iterations, now_.chat_calls) == (2, 6)
    assert wipe_.chat_calls == 0
    assert "allow_unsafe" in wipe_.refusal
    assert (made.chat_calls, made.tool_calls, made.money) == (29, 7, None)


def test_prices_and_limits_bound_it():
    made = plan(TOOLS, config=DraftConfig(max_iterations=1), policy=Policy(max_calls=1), prices=(1e6, 0.0))
    assert made.tool_calls == 1
    assert made.money == made.prompt_tokens
    with pytest.raises(ValueError, match="prices must be two numbers"):
        plan(TOOLS, prices=(1.0, -1.0))


def test_batches_probes_and_held_out_requests_are_counted_and_a_run_stays_within():
    config = DraftConfig(max_iterations=2, batch=2, probes=True, gate="replay", held_out={"look": ["a", "b"]})
    look_, *_ = plan(TOOLS, config=config).tools
    # (1 + 3 + 2) chats and (2 * 3 + 2) more, and 2 requests with three documents; 2 * 2 calls, 4 probes, 6 for the requests.
    assert (look_.chat_calls, look_.tool_calls) == (6 + 8 + 6, 4 + 4 + 6)
    now_ = plan(TOOLS, config=config).tools[1]
    assert (now_.chat_calls, now_.tool_calls) == (6, 2)
