"""Guards the page's tools: MCP servers of the settings are listed and called, with a key, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response, StreamingResponse

from gateway.web.mcp import McpServers
from moebius.config.loader import load_config
from moebius.errors import ConfigError
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.served_app import served_app

KEY = "a-secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@dataclass
class McpScript:
    """What the MCP server does, and what it was sent."""

    streams: bool = False  # answers are streams of events
    result: dict[str, Any] = field(default_factory=lambda: {"content": [{"type": "text", "text": "Cold"}]})
    status: int = 200
    hangs: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    sessions: set[str] = field(default_factory=set)  # open ones


def _answer(script: McpScript, message: dict[str, Any]) -> dict[str, Any]:
    name, params = message["method"], message.get("params") or {}
    if name == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {}, "serverInfo": {}}
    if name == "tools/list":
        first = {"name": "weather.today", "description": "The weather", "inputSchema": SCHEMA}
        second = {"name": "weather today", "inputSchema": {"type": "object"}}
        return {"tools": [second]} if params.get("cursor") else {"tools": [first], "nextCursor": "2"}
    return script.result


def _events(answer: dict[str, Any]) -> Iterator[bytes]:
    other = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}
    text = "".join(f"event: message\r\ndata: {json.dumps(one)}\r\n\r\n" for one in (other, answer))
    for at in range(0, len(text), 7):
        yield text[at : at + 7].encode()


def _mcp_app(script: McpScript) -> FastAPI:
    app = FastAPI()

    @app.delete("/mcp")
    async def end(request: Request) -> Response:
        script.sessions.discard(request.headers["mcp-session-id"])
        return Response(status_code=200)

    @app.post("/mcp")
    async def post(request: Request) -> Response:
        message = await request.json()
        script.messages.append(message)
        assert "text/event-stream" in request.headers["accept"]
        if script.hangs:
            await asyncio.sleep(600)
        if script.status != 200:
            return Response(status_code=script.status, headers={"Location": "/mcp"})
        if message["method"] == "initialize":
            session = f"session-{len(script.messages)}"
            script.sessions.add(session)
        else:
            session = request.headers["mcp-session-id"]
            assert session in script.sessions
            assert request.headers["mcp-protocol-version"] == "2025-06-18"
        if "id" not in message:
            return Response(status_code=202)
        answer = {"jsonrpc": "2.0", "id": message["id"], "result": _answer(script, message)}
        headers = {"Mcp-Session-Id": session}
        if script.streams:
            return StreamingResponse(_events(answer), media_type="text/event-stream", headers=headers)
        return JSONResponse(answer, headers=headers)

    return app


@contextlib.contextmanager
def running(script: McpScript) -> Iterator[str]:
    """Yields the address of an MCP server."""
    with served_app(_mcp_app(script)) as address:
        yield f"{address}/mcp"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[McpScript, str, str]]:
    """Yields an MCP server's script and address, and the address of a gateway with two servers, one of which
    is not there."""
    script = McpScript()
    engine = f"unix:{tmp_path_factory.mktemp('none')}/engine.sock"
    with running(script) as address:
        servers = (address.replace("//", "//user:password@"), "http://127.0.0.1:9/mcp")
        config = gateway_config(engine, api_key=KEY, web_mcp_servers=servers, web_mcp_result_kib=4)
        with running_gateway(config, wait=False) as url:
            yield script, address, url


@pytest.fixture
def tools(served: tuple[McpScript, str, str]) -> Iterator[tuple[McpScript, httpx.Client]]:
    """Yields the script as it was made, and a client with a key."""
    script, _, url = served
    script.__init__()  # type: ignore[misc]
    with httpx.Client(base_url=url, headers=HEADERS, timeout=120) as client:
        yield script, client


@pytest.mark.parametrize("streams", [False, True])
def test_tools_are_listed_and_called(tools: tuple[McpScript, httpx.Client], streams: bool) -> None:
    """All pages of tools have ids fit for functions; a call gives its text; no session stays open."""
    script, client = tools
    script.streams = streams
    first, second = client.get("/v1/mcp/tools").json()["data"]
    assert "password" not in json.dumps(first)
    assert [tool["id"] for tool in first["tools"]] == ["mcp1_weather_today", "mcp1_weather_today_2"]
    assert first["tools"][0]["name"] == "weather.today"
    assert first["tools"][0]["input_schema"] == SCHEMA
    assert second["tools"] == []
    assert "cannot be reached" in second["error"]
    call = {"tool": "mcp1_weather_today", "arguments": {"city": "Oslo"}}
    answer = client.post("/v1/mcp/calls", json=call)
    assert (answer.status_code, answer.json()["text"], answer.json()["is_error"]) == (200, "Cold", False)
    assert script.messages[-1]["params"] == {"name": "weather.today", "arguments": {"city": "Oslo"}}
    assert script.sessions == set()


def test_results_of_all_kinds_become_text(tools: tuple[McpScript, httpx.Client]) -> None:
    """A part that is no text is named by its kind; failures are marked; structured results are JSON."""
    script, client = tools
    call = {"tool": "mcp1_weather_today", "arguments": {}}
    image = {"type": "image", "mimeType": "image/png", "data": "AAAA"}
    file = {"type": "resource", "resource": {"uri": "file:///a.txt", "text": "in it"}}
    link = {"type": "resource_link", "uri": "https://x.org/a"}
    script.result = {"content": [image, file, link], "isError": True}
    answer = client.post("/v1/mcp/calls", json=call).json()
    assert answer["text"] == "[image image/png]\nin it\n[resource_link https://x.org/a]"
    assert answer["is_error"] is True
    script.result = {"structuredContent": {"degrees": -3}}
    assert client.post("/v1/mcp/calls", json=call).json()["text"] == '{"degrees": -3}'


def test_servers_that_fail(tools: tuple[McpScript, httpx.Client]) -> None:
    """Answers that are too large, redirects and errors are 502 with a reason, which names no address."""
    script, client = tools
    call = {"tool": "mcp1_weather_today", "arguments": {}}
    client.get("/v1/mcp/tools")
    script.result = {"content": [{"type": "text", "text": "x" * 5000}]}
    for streams in (False, True):
        script.streams = streams
        answer = client.post("/v1/mcp/calls", json=call)
        assert answer.status_code == 502
        assert "more than 4 KiB (web_mcp_result_kib)" in answer.json()["error"]["message"]
    for status in (307, 401, 500):
        script.status = status
        answer = client.post("/v1/mcp/calls", json=call)
        assert (answer.status_code, f"status {status}" in answer.text) == (502, True)
        assert "127.0.0.1" not in answer.text


def test_a_server_that_hangs_is_not_awaited(served: tuple[McpScript, str, str]) -> None:
    """A listing ends after the setting's time, and says so."""
    script, address, _ = served
    script.__init__(hangs=True)  # type: ignore[misc]
    [listed] = asyncio.run(McpServers([address], timeout_s=0.5, max_bytes=4096).listing())
    assert listed["tools"] == []
    assert "within 0.5 s (web_mcp_timeout_s)" in listed["error"]


def test_what_is_refused(tools: tuple[McpScript, httpx.Client], served: tuple[McpScript, str, str]) -> None:
    """Nothing without a key; unknown tools and bodies of another shape reach no server's tool."""
    script, client = tools
    assert httpx.get(f"{served[2]}/v1/mcp/tools").status_code == 401
    assert httpx.post(f"{served[2]}/v1/mcp/calls", json={}).status_code == 401
    assert client.post("/v1/mcp/calls", json={"tool": "other", "arguments": {}}).status_code == 404
    for body in ({"tool": "x"}, {"tool": 1, "arguments": {}}, {"tool": "x", "arguments": []}, [], "x"):
        assert client.post("/v1/mcp/calls", json=body).status_code == 400, body
    assert client.post("/v1/mcp/calls", content=b"{").status_code == 400
    large = {"tool": "x", "arguments": {"a": "x" * 2**20}}
    assert client.post("/v1/mcp/calls", json=large).status_code == 413
    assert not any(message["method"] == "tools/call" for message in script.messages)


def test_none_are_offered_by_default(tmp_path: Path) -> None:
    """Without the setting the list is empty, and no tool can be called."""
    with running_gateway(gateway_config(f"unix:{tmp_path}/none.sock"), wait=False) as url:
        assert httpx.get(f"{url}/v1/mcp/tools").json() == {"object": "list", "data": []}
        body = {"tool": "mcp1_x", "arguments": {}}
        assert httpx.post(f"{url}/v1/mcp/calls", json=body).status_code == 404
        foreign = {"Origin": "https://elsewhere.example"}
        assert httpx.post(f"{url}/v1/mcp/calls", json=body, headers=foreign).status_code == 403


@pytest.mark.parametrize(
    "value", ["tools.example/mcp", "file:///etc/passwd", "http://", "http://x:0/", "http://[x/"]
)
def test_only_urls_of_http_are_settings(value: str) -> None:
    """Anything else is an error at the start, which shows a right one."""
    with pytest.raises(ConfigError, match=r"https://tools\.example/mcp"):
        load_config(None, {"web_mcp_servers": (value,)})
