"""The page's files with an API that answers from a script, below a path prefix as behind a reverse proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response, StreamingResponse

from gateway.web.pages import page_router
from tests.helpers.served_app import served_app

PREFIX = "/some/prefix"
MODEL = "scripted-model"


@dataclass
class Script:
    """What the API does and what it was asked; set and read by tests."""

    answers: list[list[dict[str, Any]]] = field(
        default_factory=list
    )  # deltas of the answers to come, in order
    pause: threading.Event | None = None  # before an answer's last delta it waits for this
    key: str = ""
    vision: bool = True
    live: dict[str, Any] = field(default_factory=dict)
    mcp: list[dict[str, Any]] = field(default_factory=list)  # servers of /v1/mcp/tools
    mcp_calls: list[dict[str, Any]] = field(default_factory=list)  # bodies of /v1/mcp/calls
    is_away: bool = False  # no model is known
    breaks: bool = False  # the connection of an answer breaks before its last delta
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of chat requests
    paths: list[str] = field(default_factory=list)  # of all requests
    queries: list[str] = field(default_factory=list)  # of all requests
    left: threading.Event = field(default_factory=threading.Event)  # a client went away within an answer


def _event(choice: dict[str, Any], **more: Any) -> str:
    return f"data: {json.dumps({'id': 'c', 'choices': [choice] if choice else [], **more})}\n\n"


async def _stream(script: Script, deltas: list[dict[str, Any]]) -> AsyncIterator[str]:
    ended = False
    try:
        for number, delta in enumerate(deltas):
            if number == len(deltas) - 1 and script.pause is not None:
                await asyncio.to_thread(script.pause.wait, 120)
            if number == len(deltas) - 1 and script.breaks:
                raise ConnectionError("as if the server had been killed")
            yield _event({"index": 0, "delta": delta, "finish_reason": None})
        reason = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
        yield _event({"index": 0, "delta": {}, "finish_reason": reason})
        yield _event({}, usage={"prompt_tokens": 11, "completion_tokens": len(deltas), "total_tokens": 12})
        yield "data: [DONE]\n\n"
        ended = True
    finally:
        if not ended:
            script.left.set()


def _api(script: Script) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None)
    router = APIRouter(prefix=PREFIX)

    def refused(request: Request) -> JSONResponse | None:
        script.paths.append(request.url.path)
        script.queries.append(request.url.query)
        if script.key and request.headers.get("authorization") != f"Bearer {script.key}":
            return JSONResponse({"error": {"message": "missing or wrong API key"}}, 401)
        return None

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        if script.is_away:
            return JSONResponse({"error": {"message": "the engine is loading"}}, 503)
        card = {"id": MODEL, "capabilities": {"vision": script.vision}}
        return refused(request) or JSONResponse({"data": [card]})

    @router.get("/v1/live")
    async def live(request: Request) -> Response:
        script.live["time"] = time.time()
        return refused(request) or JSONResponse(script.live)

    @router.get("/v1/mcp/tools")
    async def mcp_tools(request: Request) -> Response:
        return refused(request) or JSONResponse({"data": script.mcp})

    @router.post("/v1/mcp/calls")
    async def mcp_calls(request: Request) -> Response:
        refusal = refused(request)
        if refusal is not None:
            return refusal
        body = await request.json()
        script.mcp_calls.append(body)
        is_error = body["arguments"] == {}
        return JSONResponse({"text": f"result of {body['tool']}", "is_error": is_error})

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        refusal = refused(request)
        if refusal is not None:
            return refusal
        script.bodies.append(await request.json())
        if not script.answers:
            return JSONResponse({"error": {"message": "'temperature' <b>is</b> wrong"}}, 400)
        return StreamingResponse(_stream(script, script.answers.pop(0)), media_type="text/event-stream")

    app.include_router(router)
    app.include_router(page_router(True), prefix=PREFIX)
    app.openapi_url = f"{PREFIX}/openapi.json"
    app.setup()
    return app


@contextlib.contextmanager
def running_api(script: Script) -> Iterator[str]:
    """Yields the page's address."""
    with served_app(_api(script)) as address:
        yield f"{address}{PREFIX}/"
