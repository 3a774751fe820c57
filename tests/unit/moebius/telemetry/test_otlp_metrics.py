"""Guards metrics over OTLP: counters, gauges and histograms of Prometheus arrive as what they are."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from moebius.config import TelemetryConfig
from moebius.telemetry import export_metrics
from tests.helpers.otlp_collector import running_collector


def test_a_registry_arrives_as_it_is() -> None:
    """Values, labels and buckets of every kind, under names that OpenTelemetry allows, with the process's
    resource."""
    registry = CollectorRegistry()
    Counter("vllm:generation_tokens", "Output tokens", ["model_name"], registry=registry).labels("m").inc(7)
    Gauge("vllm:num_requests_running", "Outputs", registry=registry).set(2)
    times = Histogram("vllm:e2e_seconds", "Times", buckets=(1, 2, 5), registry=registry)
    for seconds in (0.5, 1.5, 1.6, 9):
        times.observe(seconds)
    with running_collector() as collector:
        settings = TelemetryConfig(otlp_endpoint=collector.endpoint, otlp_metrics_interval_s=60)
        end = export_metrics(settings, "moebius-test", registry.collect, {"moebius.rank": 3})
        end()  # sends what there is
        found = {metric.name: metric for metric in collector.metrics}
        resources = collector.metric_services
    assert "moebius-test" in resources
    (count,) = found["vllm.generation_tokens"].sum.data_points
    assert (count.as_double, found["vllm.generation_tokens"].sum.is_monotonic) == (7.0, True)
    assert [(item.key, item.value.string_value) for item in count.attributes] == [("model_name", "m")]
    (gauge,) = found["vllm.num_requests_running"].gauge.data_points
    assert gauge.as_double == 2.0
    (point,) = found["vllm.e2e_seconds"].histogram.data_points
    assert list(point.explicit_bounds) == [1.0, 2.0, 5.0]
    assert list(point.bucket_counts) == [1, 2, 0, 1]
    assert (point.count, round(point.sum, 3)) == (4, 12.6)
    assert not point.HasField("min")
    (uptime,) = found["process.uptime"].gauge.data_points
    assert uptime.as_double >= 0


def test_nothing_is_sent_unless_configured() -> None:
    """Without an endpoint, or with an interval of 0, nothing of it is even imported."""
    for settings in (TelemetryConfig(), TelemetryConfig(otlp_endpoint="http://x", otlp_metrics_interval_s=0)):
        export_metrics(settings, "moebius-test", list)()
