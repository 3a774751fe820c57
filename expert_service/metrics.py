"""Prometheus metrics, read from the engine's counters at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from expert_service.host import ExpertHost
from moebius.kernels import EngineStats
from moebius.telemetry.certificates import CertificateCollector


class ExpertCollector(Collector):
    """Collects metrics under `moebius:expert_`; per-expert counts are in gRPC `Stats`, too many to scrape."""

    def __init__(self, host: ExpertHost) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of one scrape."""
        yield GaugeMetricFamily(
            "moebius:expert_serving",
            "1 when weights are loaded and work is accepted",
            int(self._host.is_serving),
        )
        node = self._host.placement.numa_node
        yield GaugeMetricFamily("moebius:expert_numa_node", "NUMA node it is bound to; -1: none", node)
        loaded = self._host.loaded
        if loaded is None:
            return
        engine = loaded.engine
        yield GaugeMetricFamily("moebius:expert_packed_bytes", "Bytes of packed weights", engine.packed_bytes)
        yield GaugeMetricFamily("moebius:expert_threads", "Compute threads", engine.num_threads)
        yield GaugeMetricFamily("moebius:expert_load_seconds", "Wall time of the load", loaded.seconds)
        errors = GaugeMetricFamily(
            "moebius:expert_requantise_error",
            "Relative error that requantising made, 0 for layers packed exactly",
            labels=["layer"],
        )
        for layer, error in loaded.relative_errors.items():
            errors.add_metric([str(layer)], error)
        yield errors
        yield GaugeMetricFamily(
            "moebius:expert_refused",
            "1 while a damaged expert cannot be repacked, and requests that need it are refused",
            int(bool(self._host.problem)),
        )
        yield GaugeMetricFamily(
            "moebius:expert_verify_pass_seconds",
            "Time of the latest comparison of all packed experts with their checksums; 0: none yet",
            self._host.verify_pass_seconds,
        )
        yield from _counters(engine.stats())


def _counters(stats: EngineStats) -> Iterator[Metric]:
    for name, meaning, value in (
        ("busy_seconds", "Wall time spent computing", stats.busy_seconds),
        ("nonfinite_inputs", "Input values that were NaN or infinite", stats.nonfinite_inputs),
        ("nonfinite_outputs", "Output values that were NaN or infinite", stats.nonfinite_outputs),
        ("damaged", "Packed experts found to differ from their checksum", stats.damaged_experts),
        ("repaired", "Damaged experts that were repacked", stats.repaired_experts),
        ("verified_bytes", "Packed weights compared with their checksums", stats.verified_bytes),
        ("cold_used", "Experts that calls needed, where some are on disk", stats.cold_used),
        ("cold_missed", "Of them, those that were read from disk", stats.cold_missed),
        ("cold_read_bytes", "Bytes of experts read from disk", stats.cold_read_bytes),
        (
            "cold_wait_seconds",
            "Time that computing threads waited for the disk, over their number",
            stats.cold_waited_seconds,
        ),
    ):
        yield CounterMetricFamily(f"moebius:expert_{name}", meaning, value)
    calls = CounterMetricFamily("moebius:expert_calls", "Forward passes", labels=["layer"])
    rows = CounterMetricFamily("moebius:expert_rows", "Token rows in them", labels=["layer"])
    computed = CounterMetricFamily(
        "moebius:expert_computed_rows", "(row, expert) pairs computed here", labels=["layer"]
    )
    for layer in stats.layer_calls.nonzero()[0].tolist():
        label = [str(layer)]
        calls.add_metric(label, int(stats.layer_calls[layer]))
        rows.add_metric(label, int(stats.layer_rows[layer]))
        computed.add_metric(label, int(stats.expert_rows[layer].sum()))
    yield from (calls, rows, computed)


def make_registry(host: ExpertHost) -> CollectorRegistry:
    """Returns a registry with only this process's metrics."""
    registry = CollectorRegistry()
    registry.register(ExpertCollector(host))
    registry.register(CertificateCollector())
    return registry
