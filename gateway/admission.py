"""A bound on requests in flight: beyond it clients are told to come back, so that latency stays bounded."""

from __future__ import annotations

from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics

RETRY_AFTER_S = 1


class Admission:
    """Counts requests between `enter` and `leave`. Used on the event loop only, so it needs no lock."""

    def __init__(self, limit: int, metrics: GatewayMetrics) -> None:
        self._limit = limit
        self._metrics = metrics
        self.in_flight = 0

    def enter(self) -> None:
        """Takes a place; ApiError 429 with Retry-After when all are taken."""
        if self.in_flight >= self._limit:
            self._metrics.rejected("gateway_queue_full")
            raise ApiError(
                429,
                f"the gateway already serves its limit of {self._limit} requests: try again later",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
        self.in_flight += 1

    def leave(self) -> None:
        """Gives the place back."""
        self.in_flight -= 1
