"""The command, with a scripted model behind a real HTTP endpoint on loopback."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chapbook_shared.lm import ScriptedModel, Server
from draft_docs.cli import app

SERVER = f"{sys.executable} {Path(__file__).parent / 'mcp_server.py'}"

TOOLS = """\
def area(side: float) -> float:
    \"\"\"Area.\"\"\"
    return side * side


def wipe(path: str) -> str:
    \"\"\"Wipe.\"\"\"
    raise AssertionError("it was called")
"""


def reply(messages, sampling):
    system, asked = messages[0].text, messages[-1].text
    if "find out" in system:
        number = asked.count("\n- ") + 1
        arguments = {"value": number, "unit": "m"} if "unit" in asked else {"side": number}
        return json.dumps({"query": "abcdefgh"[number % 8] * 9, "arguments": arguments})
    if "check" in system:
        return '{"suggestions": "say more"}'
    fact = {"claim": "It squares.", "evidence": 1}
    return json.dumps({"description": "Area of a square from its side.", "facts": [fact], "next_direction": "zero"})


def run(*arguments, **options):
    return CliRunner(**options).invoke(app, [str(a) for a in arguments])


@pytest.fixture
def tools(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_tools", raising=False)
    (tmp_path / "my_tools.py").write_text(TOOLS, encoding="utf-8")
    return ["--callables", "my_tools:area,wipe"]


@pytest.fixture
def endpoint():
    with Server(ScriptedModel(reply)) as server:
        yield server


def refine(tools, endpoint, *more):
    return run(
        "refine", *tools, "--read-only", "area", "--model", "scripted", "--base-url", endpoint.base_url,
        "--store", "run.sqlite", "--embed", "ngrams", *more,
    )  # fmt: skip


def test_lint_says_no_with_status_1(tools, tmp_path):
    result = run("lint", *tools)
    assert result.exit_code == 1
    assert "area: description: 'Area.' says no more than the name [placeholder]" in result.stdout
    found = json.loads(run("lint", *tools, "--json").stdout)
    assert found["tools"] == 2
    good = {"name": "get_day", "description": "Gets one day of a calendar."}
    (tmp_path / "good.json").write_text(json.dumps([good]), encoding="utf-8")
    assert run("lint", "--openai", "good.json").exit_code == 0


def test_plan_and_dry_run_call_nothing(tools, endpoint):
    for result in (
        run("plan", *tools, "--read-only", "area", "--prices", "1,2", "--json"),
        refine(tools, endpoint, "--prices", "1,2", "--dry-run", "--json"),
    ):
        assert result.exit_code == 0, result.output
        shown = json.loads(result.stdout)
        assert [bool(tool["refusal"]) for tool in shown["tools"]] == [False, True]
        assert shown["at_most"]["chat_calls"] == 23
        assert shown["at_most"]["money"] > 0
    assert endpoint.asked == 0
    assert not Path("run.sqlite").exists()


def test_refine_diff_apply_and_eval(tools, endpoint):
    result = refine(tools, endpoint, "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["tools"]["area"]["after"]["description"] == "Area of a square from its side."
    assert shown["tools"]["wipe"]["stopped"] == "no_calls"
    asked = endpoint.asked
    assert refine(tools, endpoint).exit_code == 0
    assert endpoint.asked == asked, "a finished run asked again"

    text = run("diff", "run.sqlite", "--evidence").stdout
    assert "-Area.\n+Area of a square from its side." in text
    assert '+ It squares. [call 1 with {"side": 1}]' in text
    assert json.loads(run("diff", "run.sqlite", "--json").stdout)["tools"]["area"]["changed"]

    assert '+    """Area of a square from its side."""' in run("apply", "run.sqlite", *tools).stdout
    assert Path("my_tools.py").read_text(encoding="utf-8") == TOOLS
    assert run("apply", "run.sqlite", *tools, "--write").exit_code == 0
    assert Path("my_tools.py").read_text(encoding="utf-8") == TOOLS.replace(
        '"""Area."""', '"""Area of a square from its side."""'
    )
    assert json.loads(run("apply", "run.sqlite").stdout)["tools"]["area"]["description"].startswith("Area of")

    Path("q.jsonl").write_text('{"query": "size of a square", "tools": ["area"]}\n', encoding="utf-8")
    found = json.loads(run("eval", "run.sqlite", "--queries", "q.jsonl", "--k", "1", "--json").stdout)
    assert found["after"] == {"1": 1.0}
    assert "NDCG@1  before 1.000  after 1.000" in run("eval", "run.sqlite", "--queries", "q.jsonl", "--k", "1").stdout


def test_a_file_comes_back_with_only_its_words_changed(endpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schema = {"type": "object", "properties": {"side": {"type": "number"}}}
    text = json.dumps({"tools": [{"type": "function", "function": {"name": "area", "parameters": schema}}]}, indent=3)
    Path("tools.json").write_text(text, encoding="utf-8")
    # Without a function behind it the tool is not called, and nothing is learnt or paid for.
    result = run(
        "refine", "--openai", "tools.json", "--model", "scripted", "--base-url", endpoint.base_url, "--store", "s", "--embed",
        "ngrams", "--output", "new.json", "--allow-unsafe", "area",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert Path("new.json").read_text(encoding="utf-8") == text
    assert endpoint.asked == 0
    monkeypatch.delitem(sys.modules, "my_tools", raising=False)
    Path("my_tools.py").write_text(TOOLS, encoding="utf-8")
    result = run(
        "refine", "--openai", "tools.json", "--model", "scripted", "--base-url", endpoint.base_url, "--store", "s", "--embed",
        "ngrams", "--output", "new.json", "--allow-unsafe", "area", "--dispatch", "my_tools:area",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert '"description": "Area of a square from its side."' in Path("new.json").read_text(encoding="utf-8")


def test_no_key_header_or_secret_is_printed_or_kept(endpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "leaky", raising=False)
    monkeypatch.setenv("CHAT_KEY", "chat-key-canary")
    monkeypatch.setenv("TOOL_KEY", "tool-key-canary")
    code = "import os\ndef area(side: float, key: str) -> str:\n    'Area.'\n    return f\"{key} {os.environ['CHAT_KEY']}\"\n"
    (tmp_path / "leaky.py").write_text(code, encoding="utf-8")
    result = refine(
        ["--callables", "leaky:area"], endpoint, "--secret", "key=env:TOOL_KEY", "--api-key-env", "CHAT_KEY", "--json"
    )
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)["tools"]["area"]["evidence"][0]["result"]["content"]
    assert shown == "[redacted] [redacted]"
    assert "canary" not in result.output
    assert all(b"canary" not in file.read_bytes() for file in tmp_path.iterdir() if file.name.startswith("run.sqlite"))


def test_probes_batches_and_held_out_requests_by_command(tools, endpoint):
    Path("held.jsonl").write_text('{"query": "size of 3", "tools": ["area"]}\n', encoding="utf-8")
    options = ["--probes", "--batch", "2", "--window", "4000", "--gate", "replay", "--held-out", "held.jsonl"]
    plan = json.loads(refine(tools, endpoint, *options, "--dry-run", "--json").stdout)["at_most"]
    result = refine(tools, endpoint, *options, "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert [call["probe"] for call in shown["tools"]["area"]["evidence"][:4]] == [
        "", "", "side is missing", "side has another type"
    ]  # fmt: skip
    assert shown["counts"]["chat_calls"] <= plan["chat_calls"]
    assert shown["counts"]["tool_calls"] <= plan["tool_calls"]
    assert shown["tools"]["area"]["example"]["arguments"] == {"side": 1}


def test_what_tools_are_called_cannot_steer_the_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tool = {"name": "a\x1b[2J\u202eb", "description": "\ud800 half a character, and a bell\x07"}
    Path("t.json").write_text(json.dumps([tool]), encoding="utf-8")
    for command in ("lint", "plan"):
        shown = run(command, "--openai", "t.json")
        assert shown.exit_code in (0, 1), shown.output
        assert not set("\x1b\u202e\x07") & set(shown.output)
        assert json.loads(run(command, "--openai", "t.json", "--json").stdout)["tools"]


def test_vectors_can_come_from_the_endpoint(tools, endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    result = refine(tools, endpoint, "--embed", "endpoint:letters")
    # The test's endpoint has no vectors: the run ends cleanly, and says so.
    assert result.exit_code == 1, result.output
    assert "the embedder letters failed" in result.stderr


def test_an_mcp_server_gets_an_overlay_and_serve_republishes_it(endpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = refine(["--mcp", SERVER], endpoint, "--output", "overlay.json")
    assert result.exit_code == 0, result.output
    import mcp
    from mcp.client.stdio import stdio_client

    command = ["-m", "draft_docs", "serve", "overlay.json", "--", *SERVER.split()]

    async def main(quiet):
        server = stdio_client(mcp.StdioServerParameters(command=sys.executable, args=command), errlog=quiet)
        async with mcp.Client(server) as client:
            listed = {tool.name: tool.description for tool in (await client.list_tools()).tools}
            answer = await client.call_tool("convert", {"value": 2, "unit": "m"})
            return listed, answer.content[0].text

    with open(os.devnull, "w", encoding="utf-8") as quiet:
        listed, answer = asyncio.run(asyncio.wait_for(main(quiet), 60))
    assert listed["convert"] == "Area of a square from its side."
    assert listed["die"] == "End the server."
    assert answer == "6.56168"


def test_a_budget_ends_with_status_1_and_the_same_command_goes_on(tools, endpoint):
    result = refine(tools, endpoint, "--max-chat-calls", "2")
    assert result.exit_code == 1
    assert "the budget of 2 requests is used up" in result.stderr
    assert "goes on from run.sqlite" in result.stderr
    assert refine(tools, endpoint).exit_code == 0


def test_ctrl_c_leaves_a_run_that_goes_on(tools):
    with Server(ScriptedModel(reply), latency=0.3) as slow:
        command = [
            sys.executable, "-m", "draft_docs", "refine", *tools, "--read-only", "area", "--model", "scripted", "--base-url",
            slow.base_url, "--store", "run.sqlite", "--embed", "ngrams", "--tau", "1",
        ]  # fmt: skip
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ}) as process:
            deadline = time.monotonic() + 30
            while slow.asked < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
        assert process.returncode == 130, said
        assert "interrupted; the same command goes on" in said
        assert "Traceback" not in said
        asked = slow.asked
    with Server(ScriptedModel(reply)) as fast:
        more = refine(tools, fast, "--tau", "1")
        assert more.exit_code == 0, more.output
        # 23 is what an undisturbed run would ask at most; what was answered before is not asked again.
        whole = json.loads(run("diff", "run.sqlite", "--json").stdout)["counts"]["chat_calls"]
        assert fast.asked <= whole - (asked - 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lint"], "exactly one of --openai, --openapi, --mcp, --callables, got 0"),
        (["lint", "--openai", "none.json"], "none.json"),
        (["lint", "--callables", "my_tools"], "MODULE:NAME"),
        (["lint", "--callables", "my_tools:nothing"], "nothing, which is no function"),
        (["lint", "--callables", "my_tools:area", "--ignore", "x"], "--ignore must be one of"),
        (["plan", "--callables", "my_tools:area", "--prices", "1"], "--prices must be two numbers"),
        (["refine", "--callables", "my_tools:area"], "--store is needed"),
        (["refine", "--callables", "my_tools:area", "--store", "s"], "either --model or --local"),
        (["refine", "--callables", "my_tools:area", "--secret", "key=hunter2"], "values are never given"),
        (["refine", "--callables", "my_tools:area", "--gate", "x", "--dry-run"], "gate must be"),
        (["diff", "none.sqlite"], "no store at none.sqlite"),
        (["apply", "none.sqlite", "--write"], "no store"),
        (["eval", "none.sqlite", "--queries", "q"], "no store"),
        (["serve", "my_tools.py", "--", "x"], "draft-docs: "),
    ],
)
def test_wrong_use_is_one_line_and_status_2(tools, arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert "hunter2" not in result.output
