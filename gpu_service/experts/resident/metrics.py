"""What the watch over experts on the device has found, for Prometheus: names as of the expert servers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpu_service.experts.resident.watch import ResidentWatch


class WatchCollector(Collector):
    """`moebius:expert_*`, with the labels of the engine's other metrics."""

    def __init__(self, watch: ResidentWatch, model_name: str, engine: str = "0") -> None:
        self._watch = watch
        self._labels = {"model_name": model_name, "engine": engine}

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        names, values = list(self._labels), list(self._labels.values())
        watch = self._watch
        counters = {
            "damaged": ("Packed experts found to differ from their checksum", watch.damages),
            "repaired": ("Of these, experts whose slots were filled again", watch.repairs),
            "verified_bytes": ("Bytes of packed experts compared with checksums", watch.compared_bytes),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"moebius:expert_{name}", text, labels=names)
            counter.add_metric(values, value)
            yield counter
        gauges = {
            "refused": (
                "1 while a damaged expert cannot be filled again, and steps fail",
                1.0 if watch.problem else 0.0,
            ),
            "verify_pass_seconds": ("Of the latest comparison of all experts", watch.pass_seconds),
        }
        for name, (text, seconds) in gauges.items():
            gauge = GaugeMetricFamily(f"moebius:expert_{name}", text, labels=names)
            gauge.add_metric(values, seconds)
            yield gauge


def export(watch: ResidentWatch, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Adds the watch's figures to a registry."""
    registry.register(WatchCollector(watch, model_name))
