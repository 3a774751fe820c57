"""Invariant: bytes that are no message cost their sender a clear status and the server nothing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from moebius.network.grpc_refusal import RefuseUndecodable, RefuseUndecodableAsync
from protos import engine_pb2, engine_pb2_grpc, expert_pb2, expert_pb2_grpc

BROKEN = b"\xff\xff\xff"


class Experts(expert_pb2_grpc.ExpertServicer):
    """Answers every record."""

    def Compute(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:
        """Yields one answer a record."""
        for request in request_iterator:
            yield expert_pb2.ComputeResponse(epoch=request.epoch)

    def Info(self, request: Any, context: Any) -> Any:
        """Returns a fact."""
        return expert_pb2.InfoResponse(pid=1)


class Engine(engine_pb2_grpc.EngineServicer):
    """Answers every request once."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Nothing, once."""
        yield engine_pb2.GenerateResponse()

    async def GetLoad(self, request: Any, context: Any) -> Any:
        """Nothing."""
        return engine_pb2.GetLoadResponse()


def _live_calls() -> int:
    gc.collect()
    return sum(type(one).__name__ == "_RPCState" for one in gc.get_objects())


def test_a_server_of_threads_keeps_nothing_of_what_it_refuses(tmp_path: Path) -> None:
    """gRPC's own refusal in the middle of a stream leaves the call in its books for good."""
    server = grpc.server(futures.ThreadPoolExecutor(4), interceptors=[RefuseUndecodable()])
    expert_pb2_grpc.add_ExpertServicer_to_server(Experts(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    server.start()
    try:
        with grpc.insecure_channel(f"unix:{tmp_path}/socket") as found:
            channel: Any = found
            compute = channel.stream_stream("/moebius.expert.v1.Expert/Compute")
            right = expert_pb2.ComputeRequest(epoch=3).SerializeToString()
            assert len(list(compute(iter([right, right])))) == 2
            before = _live_calls()
            for _ in range(20):
                with pytest.raises(grpc.RpcError) as caught:
                    list(compute(iter([right, BROKEN])))
                assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/moebius.expert.v1.Expert/Info")(BROKEN)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert _live_calls() <= before + 4  # the last ones may not be cleaned up yet
    finally:
        server.stop(0).wait()


def test_an_asyncio_server_says_whose_fault_it_is(tmp_path: Path) -> None:
    """INVALID_ARGUMENT instead of UNKNOWN; what can be decoded is answered as before."""

    async def run() -> list[Any]:
        server = grpc.aio.server(interceptors=[RefuseUndecodableAsync()])
        engine_pb2_grpc.add_EngineServicer_to_server(Engine(), server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(f"unix:{tmp_path}/socket")
        await server.start()
        codes: list[Any] = []
        try:
            async with grpc.aio.insecure_channel(f"unix:{tmp_path}/socket") as found:
                channel: Any = found
                generate = channel.unary_stream("/moebius.engine.v1.Engine/Generate")
                right = engine_pb2.GenerateRequest(request_id="a").SerializeToString()
                assert len([one async for one in generate(right)]) == 1
                for call in (
                    generate(BROKEN).read(),
                    channel.unary_unary("/moebius.engine.v1.Engine/GetLoad")(BROKEN),
                ):
                    try:
                        await call
                    except grpc.aio.AioRpcError as error:
                        codes.append(error.code())
        finally:
            await server.stop(0)
        return codes

    assert asyncio.run(run()) == [grpc.StatusCode.INVALID_ARGUMENT] * 2
