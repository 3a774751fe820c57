"""Guards the log while an engine is away: what all requests meet is said now and then, with a count."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from gateway.schemas.errors import from_grpc
from gateway.telemetry.repeated import RepeatedWarnings


class Lines:
    """Stands for a logger."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def warning(self, event: str, **fields: Any) -> None:
        """Keeps the line."""
        self.lines.append({"event": event, **fields})


async def test_a_reason_is_said_once_and_then_counted() -> None:
    """48 failures in a moment are two lines; another reason has its own; the next one after a quiet interval
    is said at once again."""
    log, warnings = Lines(), RepeatedWarnings(0.2)
    for number in range(48):
        warnings.warn(log, "generation failed", (503, "engine_unavailable"), number=number)
    warnings.warn(log, "generation failed", (429, "queue_full"), number=-1)
    assert [line["number"] for line in log.lines] == [0, -1]
    await asyncio.sleep(0.5)
    assert log.lines[2:] == [{"event": "generation failed", "more": 47, "within_s": 0.2, "number": 47}]
    await asyncio.sleep(0.5)
    warnings.warn(log, "generation failed", (503, "engine_unavailable"), number=48)
    assert log.lines[3:] == [{"event": "generation failed", "number": 48}]


async def test_what_was_only_counted_is_said_at_the_end() -> None:
    """A process that ends within an interval loses none."""
    log, warnings = Lines(), RepeatedWarnings(60)
    for number in range(3):
        warnings.warn(log, "generation failed", 503, number=number)
    warnings.close()
    assert [line.get("more") for line in log.lines] == [None, 2]


@pytest.mark.parametrize(
    ("code", "details"),
    [
        ("UNKNOWN", "Stream removed (Socket closed)"),
        ("UNAVAILABLE", "Socket closed"),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer"),
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: unix:/run/x.sock: No such file",
        ),
        ("UNAVAILABLE", "GOAWAY received; Error code: 2; Debug Text: Cancelling all calls"),
        ("UNAVAILABLE", "keepalive watchdog timeout"),
        ("INTERNAL", "Received RST_STREAM with error code 2"),
        ("CANCELLED", "Locally cancelled by application!"),
    ],
)
def test_words_of_the_transport_are_not_for_clients(code: str, details: str) -> None:
    """A lost engine is one plain sentence and worth another try, whatever gRPC calls it."""
    error = grpc.aio.AioRpcError(
        grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata(), details=details
    )
    answer = from_grpc(error)
    assert (answer.status, answer.code, answer.retry_after_s) == (503, "engine_unavailable", 2)
    assert answer.message == "the engine is not available: it is starting, or was lost"


def test_words_of_the_engine_are_for_clients() -> None:
    """What it says of itself is passed on; what it did not expect is in its log."""

    def message(code: grpc.StatusCode, details: str) -> str:
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
        return from_grpc(error).message

    own = "the engine is shutting down"
    assert message(grpc.StatusCode.UNAVAILABLE, own) == f"the engine is not available: {own}"
    assert "numbers" in message(grpc.StatusCode.INTERNAL, "the step failed: numbers are not finite")
    assert "Unexpected" not in message(grpc.StatusCode.UNKNOWN, "Unexpected <class 'KeyError'>: 3")
