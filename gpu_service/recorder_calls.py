"""The expert recorder's gRPC calls: its answers as messages, its refusals as statuses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, get_args

import grpc

from gpu_service.placement.recorder import ExpertRecorder
from moebius.errors import UserError
from moebius.placement.statistics import FileFormat
from protos import engine_pb2 as pb

START, STOP = "start recorder", "stop recorder"


def recorder_operations(recorder: ExpertRecorder) -> dict[str, Callable[[str], None]]:
    """For `Engine.call`: recording may make steps run eagerly, which all ranks must do alike."""
    return {START: recorder.start, STOP: lambda argument: recorder.stop()}


def dumped(recorder: ExpertRecorder, file_format: str) -> pb.DumpExpertRecorderResponse:
    """What was recorded, as a file of that format. Raises UserError."""
    chosen: FileFormat = "safetensors"
    if file_format and file_format not in get_args(FileFormat):
        allowed = ", ".join(get_args(FileFormat))
        raise UserError(f"file_format {file_format!r} is not allowed; allowed: {allowed}")
    if file_format == "json":
        chosen = "json"
    statistics = recorder.dump()
    layers = [
        pb.LayerExperts(layer=layer, distinct_per_step=distinct)
        for layer, distinct in statistics.distinct_per_step().items()
    ]
    return pb.DumpExpertRecorderResponse(
        content=statistics.encode(chosen),
        mode=statistics.mode,
        steps=statistics.steps,
        tokens=statistics.tokens,
        layers=layers,
    )


@asynccontextmanager
async def recorder_errors(
    context: grpc.aio.ServicerContext[Any, Any], status: grpc.StatusCode
) -> AsyncIterator[None]:
    """What the caller did wrong ends the call with `status` and the message."""
    try:
        yield
    except UserError as error:
        await context.abort(status, str(error))
