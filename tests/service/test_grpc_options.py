"""Guards that gRPC gets the options we mean: every option exists, and a silent engine keeps its
connection.
"""

from __future__ import annotations

import ast
import asyncio
import re
import signal
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc

from gateway.engine_client import LOST_AFTER_S, EngineClient
from gpu_service.main import MIN_PING_INTERVAL_MS
from moebius.app.bench.gateway.engine import write_tokenizer
from moebius.app.bench.gateway.processes import running
from moebius.config import GatewayConfig
from protos import engine_pb2 as pb
from tests.service.test_engine_grpc import message, served

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "gpu_service", "expert_service", "moebius")


def used_options() -> dict[str, str]:
    """Every option that our code gives to a server or channel, and the file it is in."""
    found = {}
    for path in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Tuple) or len(node.elts) != 2:
                continue
            name = node.elts[0]
            if isinstance(name, ast.Constant) and str(name.value).startswith("grpc."):
                found[str(name.value)] = str(path.relative_to(ROOT))
    return found


def test_every_option_is_one_of_grpcs() -> None:
    """gRPC ignores an option that it does not know: each of ours is a name inside its library."""
    known = set(re.findall(rb"(grpc\.[a-z0-9_.]+)(?=\0)", Path(cygrpc.__file__).read_bytes()))
    used = used_options()
    assert "grpc.http2.min_ping_interval_without_data_ms" in used
    assert "grpc.keepalive_time_ms" in used
    assert {name: path for name, path in used.items() if name.encode() not in known} == {}


async def test_a_silent_engine_keeps_its_connection() -> None:
    """Pings through a long silence are allowed: neither that request nor another one on the channel dies."""
    shortest = GatewayConfig.model_fields["engine_timeout_s"].metadata[0].ge
    assert min(LOST_AFTER_S, shortest) * 500 > MIN_PING_INTERVAL_MS
    async with served(min_ping_interval_ms=20) as service:
        client = EngineClient(f"127.0.0.1:{service.port}", lost_after_s=4)
        try:
            service.harness.model.gate.clear()
            calls = [
                asyncio.create_task(_all(client, message(name, stream=False))) for name in ("silent", "other")
            ]
            # A client sends at most one ping a second; the fourth would be one too many.
            await asyncio.sleep(9)
            service.harness.model.gate.set()
            answers = await asyncio.wait_for(asyncio.gather(*calls), 20)
        finally:
            await client.close()
    assert [len(answer[-1].complete.output_ids) for answer in answers] == [12, 12]


async def _all(client: EngineClient, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in client.generate(request)]


async def test_a_frozen_engine_is_noticed_with_a_call_in_flight(tmp_path: Path) -> None:
    """SIGSTOP of the process, whose socket stays open: its calls end as those of a lost one."""
    write_tokenizer(tmp_path)
    address = f"unix:{tmp_path}/engine.sock"
    command = ["-m", "moebius.app.bench.gateway.engine", address, str(tmp_path), "600000"]
    with running(command, tmp_path / "log") as process:
        client = EngineClient(address, lost_after_s=2)
        await asyncio.to_thread(_wait_for, tmp_path / "engine.sock")
        request = pb.GenerateRequest(request_id="a", stream=True)
        request.sampling_params.max_tokens = 10  # of which the second or third comes in ten minutes
        call = client.generate(request)
        await anext(call)
        process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(_rest(call), 30)
        finally:
            process.send_signal(signal.SIGCONT)
            await client.close()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def _rest(call: AsyncGenerator[pb.GenerateResponse, None]) -> None:
    async for _ in call:
        pass


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)
