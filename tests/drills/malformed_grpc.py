"""Malformed messages to the engine and to expert servers: changed fields and changed bytes."""

from __future__ import annotations

import asyncio
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from google.protobuf.message import Message

from protos import engine_pb2, expert_pb2
from tests.drills import mutations
from tests.drills.load import Fate, Outcome

CALLS_AT_ONCE = 8
DEADLINE_S = 90.0
# Of the checkpoint that drills serve: hidden_size and experts per token.
_HIDDEN, _TOP_K = 48, 6

ENGINE, EXPERT = "moebius.engine.v1.Engine", "moebius.expert.v1.Expert"


def _generate() -> Message:
    params = engine_pb2.SamplingParams(temperature=0.5, max_tokens=3, n=2, stop_token_ids=[5], seed=3)
    params.logit_bias[7] = 1.0
    return engine_pb2.GenerateRequest(
        request_id="drill",
        tokenized=engine_pb2.TokenizedInput(original_text="a", input_ids=[5, 6, 7]),
        sampling_params=params,
        stream=True,
        trace_context={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    )


def _compute() -> Message:
    return expert_pb2.ComputeRequest(
        epoch=1,
        layer=1,
        rows=2,
        dtype=expert_pb2.DTYPE_FLOAT32,
        hidden_states=struct.pack(f"<{2 * _HIDDEN}f", *[0.5] * (2 * _HIDDEN)),
        topk_ids=struct.pack(f"<{2 * _TOP_K}i", *list(range(_TOP_K)) * 2),
        topk_weights=struct.pack(f"<{2 * _TOP_K}f", *[0.1] * (2 * _TOP_K)),
    )


# (service, method, a message that is right, how often). Drain is left out: it ends the service, as it should.
CALLS: tuple[tuple[str, str, Callable[[], Message], int], ...] = (
    (ENGINE, "Generate", _generate, 12),
    (ENGINE, "Abort", lambda: engine_pb2.AbortRequest(request_ids=["x"], reason="drill"), 1),
    (ENGINE, "GetLoad", engine_pb2.GetLoadRequest, 1),
    (ENGINE, "GetModelInfo", engine_pb2.GetModelInfoRequest, 1),
    (ENGINE, "StartExpertRecorder", lambda: engine_pb2.StartExpertRecorderRequest(mode="stat"), 1),
    (ENGINE, "DumpExpertRecorder", lambda: engine_pb2.DumpExpertRecorderRequest(file_format="json"), 1),
    (EXPERT, "Compute", _compute, 12),
    (EXPERT, "Load", lambda: expert_pb2.LoadRequest(model_path="/", split_count=2), 1),
    (EXPERT, "Info", expert_pb2.InfoRequest, 1),
    (EXPERT, "Stats", expert_pb2.StatsRequest, 1),
)


async def _call(channel: grpc.aio.Channel, service: str, method: str, request: bytes) -> Outcome:
    started = time.monotonic()
    fate: Fate = "right"
    detail = ""
    path = f"/{service}/{method}"
    try:
        if method == "Generate":
            stream = channel.unary_stream(path)(request, timeout=DEADLINE_S)
            async for _ in stream:
                pass
        elif method == "Compute":
            answers = channel.stream_stream(path)(iter([request]), timeout=DEADLINE_S)
            async for _ in answers:
                pass
        else:
            await channel.unary_unary(path)(request, timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        fate, detail = _judged(error)
    seen = "" if fate == "right" else f"{detail} [{method} {request[:300]!r}]"
    return Outcome(fate, started, time.monotonic() - started, seen)


def _judged(error: grpc.aio.AioRpcError) -> tuple[Fate, str]:
    """Codes that say "your fault" are right; those of a server that failed or died are not."""
    code, detail = error.code(), error.details() or ""
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return "late", f"no answer in {DEADLINE_S:g} s"
    failed = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)
    if code in failed:
        return "broken", f"{code.name}: {detail}"
    return "right", ""


async def send(socket: Path, service: str, count: int, seed: int) -> list[Outcome]:
    """`count` malformed messages to the service at a socket, CALLS_AT_ONCE at a time."""
    calls = [call for call in CALLS if call[0] == service]
    weights = [call[3] for call in calls]
    outcomes: list[Outcome] = []
    numbers = iter(range(count))
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:

        async def one_client() -> None:
            for number in numbers:
                rng = random.Random(f"{seed}/{service}/{number}")
                _, method, valid, _ = rng.choices(calls, weights)[0]
                request = mutations.message_bytes(rng, valid())
                outcomes.append(await _call(channel, service, method, request))

        await asyncio.gather(*(one_client() for _ in range(CALLS_AT_ONCE)))
    return outcomes
