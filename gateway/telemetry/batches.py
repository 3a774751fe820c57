"""Metrics of the batches that this process runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge


class BatchMetrics:
    """Metrics of one application that keeps batches; their sum over processes is the directory's."""

    def __init__(self, registry: CollectorRegistry, results: Sequence[str]) -> None:
        """`results`: how a batch's request may end."""
        self._batches = Gauge(
            "moebius:gateway_batches", "Batches that are run, by status", ["status"], registry=registry
        )
        self._waiting = Gauge(
            "moebius:gateway_batch_requests_waiting",
            "Requests of batches that have no result and do not run",
            registry=registry,
        )
        self._running = Gauge(
            "moebius:gateway_batch_requests_running",
            "Requests of batches that are being answered",
            registry=registry,
        )
        self._ended = Counter(
            "moebius:gateway_batch_requests",
            "Requests of batches that got a result",
            ["result"],
            registry=registry,
        )
        for result in results:
            self._ended.labels(result)  # shows 0, for rates to start from

    def watch(
        self,
        statuses: Sequence[str],
        batches: Callable[[str], int],
        waiting: Callable[[], int],
        running: Callable[[], int],
    ) -> None:
        """Sets the functions that return the numbers: of batches with a status, of requests without a result
        that wait and that run."""
        for status in statuses:
            self._batches.labels(status).set_function(partial(batches, status))
        self._waiting.set_function(waiting)
        self._running.set_function(running)

    def ended(self, result: str) -> None:
        """Counts a request whose result is on disk."""
        self._ended.labels(result).inc()
