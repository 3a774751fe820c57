"""Guards that gRPC gets the options we mean: every option exists, and a silent engine keeps its
connection.
"""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

from grpc._cython import cygrpc  # type: ignore[attr-defined]

from gateway.replicas.engine_client import KEEPALIVE_MS, EngineClient
from gpu_service.main import MIN_PING_INTERVAL_MS
from protos import engine_pb2 as pb
from tests.service.test_engine_grpc import message, served

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "gpu_service", "expert_service", "moebius", "app", "lab")


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
    assert KEEPALIVE_MS > MIN_PING_INTERVAL_MS
    async with served(min_ping_interval_ms=20) as service:
        client = EngineClient(f"127.0.0.1:{service.port}", keepalive_ms=60)
        try:
            service.harness.model.gate.clear()
            calls = [
                asyncio.create_task(_all(client, message(name, stream=False))) for name in ("silent", "other")
            ]
            # A client sends at most one ping a second; the fourth would be one too many.
            await asyncio.sleep(5.5)
            service.harness.model.gate.set()
            answers = await asyncio.wait_for(asyncio.gather(*calls), 60)
        finally:
            await client.close()
    assert [len(answer[-1].complete.output_ids) for answer in answers] == [12, 12]


async def _all(client: EngineClient, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in client.generate(request)]
