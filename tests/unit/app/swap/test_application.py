"""Guards the port of several models: who may load one, what waits says so, and who leaves holds nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.swap.application import create_models_app
from app.swap.child import ModelProcess
from app.swap.pool import CannotLoad, ModelPool
from app.swap.proxy import model_in
from app.swap.settings import ModelsConfig, read_models
from tests.helpers.sse_server import ScriptedServer, scripted_server

EVENTS = [{"choices": [{"index": 0, "text": "hi"}]}]


class Scripted(ModelProcess):
    """A model whose server is a scripted one, which is loaded when the test says so."""

    def __init__(self, name: str, config: ModelsConfig, server: ScriptedServer, directory: Path) -> None:
        super().__init__(name, config.models[name], config.key, directory)
        self.base_url, self.starts = server.url, 0
        self.may_start, self.started = asyncio.Event(), asyncio.Event()
        self.fails = self.runs = False

    async def start(self) -> None:
        self.starts += 1
        self.progress = "waiting for gpu (loading weights, 40 %)"
        self.started.set()
        await self.may_start.wait()
        if self.fails:
            raise CannotLoad("alpha cannot be loaded: no such file")
        self.runs, self.progress = True, ""

    async def stop(self) -> None:
        self.runs = False

    async def sleep(self) -> None:
        """It holds nothing."""

    @property
    def is_running(self) -> bool:
        """Follows the test."""
        return self.runs

    def fits(self) -> bool:
        """It needs nothing."""
        return True


@asynccontextmanager
async def served(
    tmp_path: Path, keys: str = ""
) -> AsyncIterator[tuple[httpx.AsyncClient, Scripted, ScriptedServer]]:
    """A client of the port, the model alpha and the server behind it."""
    file = tmp_path / "models.yaml"
    file.write_text(
        f"gateway: {{api_key: '{keys}', sse_keepalive_s: 0.01}}\nmodels: {{alpha: {{model: /m}}}}\n"
    )
    config = read_models(str(file), {})
    with scripted_server(EVENTS) as server:
        process = Scripted("alpha", config, server, tmp_path)
        pool = ModelPool({"alpha": process}, 1, 10.0, look_s=0.001)
        app = create_models_app(config, {"alpha": process}, pool)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            yield client, process, server
        await app.state.models.proxy.close()
        await pool.close()


def completion(**fields: Any) -> dict[str, Any]:
    """Returns the body of a request."""
    return {"model": "alpha", "prompt": "hello", **fields}


async def test_a_model_is_loaded_for_who_may(tmp_path: Path) -> None:
    """Without a key, or for a name that is not there, nothing is loaded; then the answer is the model's."""
    async with served(tmp_path, "secret") as (client, process, server):
        process.may_start.set()
        refused = await client.post("/v1/completions", json=completion())
        assert refused.status_code == 401
        for path in (
            "/ping",
            "/health",
            "/v1/health",
            "/ready",
            "/version",
            "/metrics",
            "/openapi.json",
            "/",
        ):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/metrics?model=alpha")).status_code == 503
        assert process.starts == 0
        client.headers["Authorization"] = "Bearer secret"
        unknown = await client.post("/v1/completions", json=completion(model="other"))
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert "there are alpha" in unknown.text
        assert process.starts == 0
        assert (await client.get("/v1/models")).json()["data"][0]["status"] == {"value": "unloaded"}
        answer = await client.post("/v1/completions", json=completion())
        assert '"text": "hi"' in answer.text
        assert server.requests == [completion()]
        assert (await client.get("/v1/models")).json()["data"][0]["status"] == {"value": "loaded"}


async def test_a_stream_says_what_it_waits_for(tmp_path: Path) -> None:
    """Comments tell how far the model is, then comes its answer; a failure is an event of the stream, and of
    a request without a stream the status."""
    async with served(tmp_path) as (client, process, _):
        asking = asyncio.create_task(client.post("/v1/completions", json=completion(stream=True)))
        await process.started.wait()
        assert (await client.get("/v1/models/alpha")).json()["status"]["progress"] == process.progress
        await asyncio.sleep(0.05)
        process.may_start.set()
        lines = (await asking).text.splitlines()
        assert lines[0] == ": alpha: waiting for gpu (loading weights, 40 %)"
        assert json.loads(lines[-4].removeprefix("data: ")) == EVENTS[0]
        process.runs, process.fails = False, True
        process.may_start.clear()
        process.started.clear()
        asking = asyncio.create_task(client.post("/v1/completions", json=completion(stream=True)))
        await process.started.wait()
        await asyncio.sleep(0.05)
        process.may_start.set()
        last = [line for line in (await asking).text.splitlines() if line.startswith("data: ")]
        assert json.loads(last[0][6:])["error"]["message"] == "alpha cannot be loaded: no such file"
        whole = await client.post("/v1/completions", json=completion())
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "model_not_loaded")


async def test_operators_load_and_unload(tmp_path: Path) -> None:
    """A model is loaded, put to sleep and ended by name; a name that is not there is refused."""
    async with served(tmp_path) as (client, process, _):
        process.may_start.set()
        assert (await client.post("/wake_up?model=alpha")).json() == {"success": True, "is_sleeping": False}
        assert (await client.get("/api/ps")).json()["models"][0]["name"] == "alpha:latest"
        assert (await client.post("/sleep?model=alpha")).json()["is_sleeping"]
        assert (await client.get("/ready")).json()["models"] == {"alpha": "sleeping"}
        assert (await client.post("/unload")).status_code == 200
        assert not process.runs
        assert (await client.post("/sleep?model=x")).status_code == 404
        assert "moebius:model_loaded" in (await client.get("/metrics")).text


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"model": "a", "messages": [{"content": "{\\"model\\": \\"x\\"}"}]}', "a"),
        (b'{"metadata": {"model": "x"}, "model": "a"}', "a"),
        (b'{"tools": [{"properties": {"model": {"type": "string"}}}], "model":"a"}', "a"),
        (b'{"model": "\\u0061\\"b"}', 'a"b'),
        (b'{"messages": []}', None),
        (b'{"model": 7}', None),
        (b'{"model": "a", "model2": ', "a"),
        (b"no JSON", None),
    ],
)
def test_the_model_of_a_body(body: bytes, name: str | None) -> None:
    """Texts that look like a model's name are not taken for it, whatever else the body has."""
    assert model_in(body) == name
