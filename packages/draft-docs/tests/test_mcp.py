import asyncio
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from draft_docs.sources.mcp import McpServerError, McpSource, proxy, read_overlay

SERVER = [sys.executable, str(Path(__file__).parent / "mcp_server.py")]


def with_source(work, target=SERVER, **options):
    async def main():
        source = await McpSource.connect(target, **options)
        try:
            return await work(source)
        finally:
            await source.aclose()

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_tools_hints_calls_and_errors_over_stdio():
    async def work(source):
        good = await source.call("convert", {"value": 2, "unit": "m"})
        bad = await source.call("convert", {"value": 2, "unit": "yd"})
        return source.tools, good, bad

    tools, good, bad = with_source(work)
    convert = tools[0]
    assert (convert.name, convert.hints.read_only, convert.required) == ("convert", True, ("value", "unit"))
    assert tools[1].hints.read_only is None
    assert (good.ok, good.content) == (True, "6.56168")
    assert bad.error_kind == "tool_error"
    assert "must be one of m, ft, got yd" in bad.content


def test_tools_and_calls_over_streamable_http():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def work(source):
        return [tool.name for tool in source.tools], await source.call("convert", {"value": 2, "unit": "m"})

    with subprocess.Popen([*SERVER, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(200):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            names, result = with_source(work, f"http://127.0.0.1:{port}/mcp")
        finally:
            process.terminate()
    assert names == ["convert", "die", "environment"]
    assert (result.ok, result.content) == (True, "6.56168")


def test_a_server_that_dies_is_started_once_more_and_says_what_it_wrote():
    async def work(source):
        first = await source.call("die", {})
        again = await source.call("convert", {"value": 1, "unit": "ft"})
        second = await source.call("die", {})
        return first, again, second

    first, again, second = with_source(work)
    assert first.error_kind == "died"
    assert "the server says goodbye" in first.content
    assert "started again" in first.content
    assert again.content == "0.3048"
    assert second.error_kind == "died"
    assert "started again" not in second.content


def test_a_command_that_is_no_server_gives_one_clear_error():
    noise = [sys.executable, "-c", "import sys; sys.exit('no server here')"]
    with pytest.raises(McpServerError, match=r"did not start: .*no server here"):
        with_source(None, noise)


def test_only_the_named_environment_reaches_the_server(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "canary")

    async def work(source):
        return (await source.call("environment", {})).content.split()

    assert "MY_API_KEY" not in with_source(work)
    assert "MY_API_KEY" in with_source(work, env={"MY_API_KEY": "given"})


def test_the_proxy_republishes_with_the_new_words():
    async def work(source):
        tools = {tool.name: tool for tool in source.tools}
        overlay = source.rewritten({"convert": tools["convert"].with_docs("Metres to feet.", {"unit": "m or ft"})})
        import mcp

        async with proxy(SERVER, read_overlay(overlay)) as server, mcp.Client(server) as client:
            listed = {tool.name: tool for tool in (await client.list_tools()).tools}
            result = await client.call_tool("convert", {"value": 2, "unit": "m"})
        return overlay, listed, result

    overlay, listed, result = with_source(work)
    assert json.loads(overlay)["tools"] == {
        "convert": {"description": "Metres to feet.", "parameters": {"unit": "m or ft"}}
    }
    assert listed["convert"].description == "Metres to feet."
    assert listed["convert"].input_schema["properties"]["unit"]["description"] == "m or ft"
    assert listed["die"].description == "End the server."
    assert result.content[0].text == "6.56168"
    with pytest.raises(ValueError, match="not an overlay"):
        read_overlay("{}")


def test_the_time_server_from_the_package_index():
    async def work(source):
        return source.tools, await source.call("get_current_time", {"timezone": "UTC"})

    tools, result = with_source(work, [sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"])
    assert {tool.name for tool in tools} == {"get_current_time", "convert_time"}
    assert json.loads(result.content)["timezone"] == "UTC"


def test_headers_go_to_a_url_and_reach_no_model():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    seen = []

    class Door(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            return

        def do_POST(self):
            seen.append(self.headers["Authorization"])
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Door) as door:
        threading.Thread(target=door.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{port}/mcp?key=hidden"
        headers = {"Authorization": "Bearer canary-42"}
        with pytest.raises(McpServerError) as caught:
            with_source(None, url, headers=headers)
        door.shutdown()
    assert seen[0] == "Bearer canary-42"
    assert not any(word in str(caught.value) for word in ("canary", "hidden"))
    source = McpSource(url.replace("//", "//user:password@"), {"A": "value-1"}, headers)
    assert source.secrets == ["value-1", "Bearer canary-42", "canary-42"]
    assert source.name == f"http://127.0.0.1:{port}/mcp"


def test_a_server_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr("draft_docs.sources.mcp._START_SECONDS", 1.0)
    monkeypatch.setattr("draft_docs.sources.mcp._STOP_SECONDS", 3.0)
    mute = [sys.executable, "-c", "import sys, time; print('thinking', file=sys.stderr, flush=True); time.sleep(3600)"]
    start = time.monotonic()
    with pytest.raises(McpServerError, match="did not answer within 1 s; it wrote: thinking"):
        with_source(None, mute)
    assert time.monotonic() - start < 20


def test_what_a_server_was_given_is_masked_if_it_sends_it_back(monkeypatch):
    from draft_docs import Policy
    from draft_docs.policy import Guard

    async def work(source):
        guard = Guard(source.tools, source, Policy(allow_unsafe=["environment"]))
        return await guard.call("environment", {})

    # The server lists names only: the value is given as a name.
    assert "[redacted]" in with_source(work, env={"CANARY_NAME": "CANARY_NAME"}).content


@pytest.mark.parametrize(
    "tools",
    ["[]", "null", '{"a": 1}', '{"a": {"description": 1}}', '{"a": {"description": "x", "parameters": {"p": 1}}}'],
)
def test_a_broken_overlay_is_refused(tools):
    with pytest.raises(ValueError, match="not an overlay"):
        read_overlay(f'{{"format": "draft-docs overlay 1", "tools": {tools}}}')
