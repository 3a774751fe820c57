"""Guards that batched histograms are those of single observations."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram

from gateway.telemetry.metrics import GatewayMetrics


def test_gaps_that_are_counted_together_are_those_that_were_seen() -> None:
    """Buckets, count and sum of gaps between tokens are an ordinary histogram's, whenever one looks."""
    metrics, registry = GatewayMetrics(), CollectorRegistry()
    metrics.set_model("m")
    name = "vllm:inter_token_latency_seconds"
    bounds = [
        0.001,
        0.005,
        0.01,
        0.025,
        0.05,
        0.075,
        0.1,
        0.15,
        0.2,
        0.3,
        0.4,
        0.5,
        0.75,
        1.0,
        2.5,
        5.0,
        10.0,
    ]
    bounds += [20.0, 40.0, 80.0]
    plain = Histogram(name, "Each by itself", ["model_name"], buckets=bounds, registry=registry).labels("m")
    dice = random.Random(1)
    for count in (1, 3, 5000):
        for _ in range(count):
            gap = dice.choice([0.005, 80.0, 200.0, dice.random()])
            metrics.tokens(gap, 1)
            plain.observe(gap)
        for bound in [*map(str, bounds), "+Inf"]:
            labels = {"model_name": "m", "le": bound}
            wanted = registry.get_sample_value(f"{name}_bucket", labels)
            assert wanted is not None
            assert metrics.registry.get_sample_value(f"{name}_bucket", labels) == wanted
        for part in ("count", "sum"):
            own = metrics.registry.get_sample_value(f"{name}_{part}", {"model_name": "m"})
            assert own == pytest.approx(registry.get_sample_value(f"{name}_{part}", {"model_name": "m"}))
