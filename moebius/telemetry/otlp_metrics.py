"""Metrics over OTLP: what a process counts for Prometheus, and OpenTelemetry's own instruments.

Prometheus names have colons, which OpenTelemetry's may not: `vllm:num_requests_running` is sent as
`vllm.num_requests_running`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from opentelemetry import metrics
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    PeriodicExportingMetricReader,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

from moebius import __version__
from moebius.config import TelemetryConfig
from moebius.telemetry import process_resource

_CUMULATIVE = AggregationTemporality.CUMULATIVE
_TIMEOUT_S = 5
_SCOPE = InstrumentationScope("moebius.prometheus", __version__)
Collect = Callable[[], Iterable[Family]]


def configure_metrics(
    settings: TelemetryConfig, service_name: str, collect: Collect, attributes: Mapping[str, Any]
) -> MeterProvider:
    """Sends metrics to `otlp_endpoint` every `otlp_metrics_interval_s`; see `telemetry.export_metrics`."""
    exporter = _Exporter(settings.otlp_endpoint, collect)
    reader = PeriodicExportingMetricReader(
        exporter,
        export_interval_millis=settings.otlp_metrics_interval_s * 1000,
        export_timeout_millis=_TIMEOUT_S * 1000,
    )
    provider = MeterProvider([reader], resource=process_resource(service_name, attributes))
    began = time.monotonic()

    def uptime(_options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(time.monotonic() - began)

    provider.get_meter("moebius", __version__).create_observable_gauge(
        "process.uptime", [uptime], unit="s", description="Since the process was set up"
    )
    if not isinstance(metrics.get_meter_provider(), MeterProvider):
        metrics.set_meter_provider(provider)
    return provider


class _Exporter(OTLPMetricExporter):
    """Adds the registry's families to what OpenTelemetry has collected."""

    def __init__(self, endpoint: str, collect: Collect) -> None:
        super().__init__(endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=_TIMEOUT_S)
        self._collect = collect
        self._began_ns = time.time_ns()

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Sends all of it."""
        first, *others = metrics_data.resource_metrics
        found = [converted(family, self._began_ns, time.time_ns()) for family in self._collect()]
        scope = ScopeMetrics(_SCOPE, [metric for metric in found if metric is not None], "")
        with_ours = replace(first, scope_metrics=[*first.scope_metrics, scope])
        return super().export(MetricsData([with_ours, *others]), timeout_millis, **kwargs)


def converted(family: Family, began_ns: int, now_ns: int) -> Metric | None:
    """Returns a family of Prometheus as a metric of OpenTelemetry; None: it has no samples, or is of no such
    kind.
    """
    samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    if not samples or family.type not in ("counter", "gauge", "info", "unknown", "histogram"):
        return None
    name = family.name.replace(":", ".")
    data: Sum | Gauge | Histogram
    if family.type == "histogram":
        data = Histogram(_histograms(samples, began_ns, now_ns), _CUMULATIVE)
    else:
        points = [
            NumberDataPoint(dict(sample.labels), began_ns, now_ns, float(sample.value)) for sample in samples
        ]
        data = Sum(points, _CUMULATIVE, is_monotonic=True) if family.type == "counter" else Gauge(points)
    return Metric(name, family.documentation, "", data)


def _histograms(samples: Iterable[Sample], began_ns: int, now_ns: int) -> list[HistogramDataPoint]:
    """Returns one point per set of labels; Prometheus' buckets add up, those of OpenTelemetry do not."""
    by_labels: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for sample in samples:
        labels = tuple(sorted(item for item in sample.labels.items() if item[0] != "le"))
        point = by_labels.setdefault(labels, {"buckets": [], "sum": 0.0, "count": 0})
        if sample.name.endswith("_bucket"):
            point["buckets"].append((float(sample.labels["le"]), int(sample.value)))
        elif sample.name.endswith("_sum"):
            point["sum"] = float(sample.value)
        elif sample.name.endswith("_count"):
            point["count"] = int(sample.value)
    points = []
    for labels, point in by_labels.items():
        buckets = sorted(point["buckets"])
        counts = [
            upto - before for (_, upto), before in zip(buckets, [0, *(n for _, n in buckets)], strict=False)
        ]
        bounds = [bound for bound, _ in buckets if bound != float("inf")]
        points.append(
            HistogramDataPoint(
                attributes=dict(labels),
                start_time_unix_nano=began_ns,
                time_unix_nano=now_ns,
                count=point["count"],
                sum=point["sum"],
                bucket_counts=counts,
                explicit_bounds=bounds,
                min=None,  # type: ignore[arg-type]  # not known, and left out
                max=None,  # type: ignore[arg-type]
            )
        )
    return points
