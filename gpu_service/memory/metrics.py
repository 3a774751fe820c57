"""The ledger for Prometheus; the device is asked when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpu_service.memory.ledger import MemoryLedger


class MemoryCollector(Collector):
    """`moebius:gpu_memory_*`, bytes, with the labels of the engine's other metrics."""

    def __init__(self, ledger: MemoryLedger, model_name: str, engine: str = "0") -> None:
        self._ledger = ledger
        self._labels = {"model_name": model_name, "engine": engine}

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        names = [*self._labels, "part"]
        values = list(self._labels.values())
        planned = GaugeMetricFamily(
            "moebius:gpu_memory_planned_bytes", "Planned before loading", labels=names
        )
        for line in self._ledger.plan.lines:
            planned.add_metric([*values, line.part], line.nbytes)
        measured = GaugeMetricFamily("moebius:gpu_memory_bytes", "Measured while loading", labels=names)
        for part, nbytes in self._ledger.measured.items():
            measured.add_metric([*values, part], nbytes)
        late = GaugeMetricFamily(
            "moebius:gpu_memory_late_allocations",
            "Times memory was asked of the device while serving; 0 unless a step exceeded the plan",
            labels=list(self._labels),
        )
        late.add_metric(values, self._ledger.late_allocations())
        yield from (planned, measured, late)


def export(ledger: MemoryLedger, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Adds the ledger to a registry."""
    registry.register(MemoryCollector(ledger, model_name))
