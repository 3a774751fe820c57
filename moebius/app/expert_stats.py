"""Reads the counters of a running expert server over gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moebius.errors import UserError

TIMEOUT_S = 5.0
SETTLE_S = 0.1


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


def read_settled_stats(addresses: Sequence[str], timeout_s: float = 2.0) -> list[ExpertStats]:
    """The counters of all servers once two reads agree, or after `timeout_s` seconds.

    An engine that schedules ahead still computes one step when the last token has reached the client;
    read meanwhile, the servers would seem to have been called unequally often.
    """
    end = time.monotonic() + timeout_s
    before = [read_expert_stats(address) for address in addresses]
    while time.monotonic() < end:
        time.sleep(SETTLE_S)
        now = [read_expert_stats(address) for address in addresses]
        if now == before:
            break
        before = now
    return before
