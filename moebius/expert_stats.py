"""Reads the counters of a running expert server over gRPC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moebius.errors import UserError

TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ExpertStats:
    """Sums over all layers since the server started; filled by `read_expert_stats`."""

    # MoE forwards: one per layer and step.
    calls: int
    # Token rows in them.
    rows: int
    # Wall time spent computing, seconds.
    busy_seconds: float


def read_expert_stats(address: str) -> ExpertStats:
    """Asks `Expert.Stats` at a gRPC address (host:port or unix:path). Raises UserError."""
    import grpc

    from protos import expert_pb2, expert_pb2_grpc

    make_stub: Callable[[grpc.Channel], Any] = expert_pb2_grpc.ExpertStub
    with grpc.insecure_channel(address) as channel:
        try:
            answer = make_stub(channel).Stats(expert_pb2.StatsRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise UserError(f"expert server at {address} does not answer: {error.details()}") from None
    return ExpertStats(int(answer.calls), int(answer.rows), float(answer.busy_seconds))
