"""What the placement that follows traffic has done, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpu_service.experts.adaptive.placement import AdaptivePlacement


class PlacementCollector(Collector):
    """`moebius:expert_*`, with the labels of the engine's other metrics."""

    def __init__(self, placement: AdaptivePlacement, model_name: str, engine: str = "0") -> None:
        self._placement = placement
        self._labels = {"model_name": model_name, "engine": engine}

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        names, values = list(self._labels), list(self._labels.values())
        found = self._placement.figures()
        counters = {
            "expert_exchanges": ("Experts that took another's slot on the GPU", found.exchanges),
            "expert_exchange_bytes": ("Bytes copied for that", found.copied_bytes),
            "expert_choices": ("Experts that decoding rows chose, in layers with slots", found.chosen),
            "expert_hits": ("Of these, experts that were in a slot", found.hits),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"moebius:{name}", text, labels=names)
            counter.add_metric(values, value)
            yield counter
        half_life = GaugeMetricFamily(
            "moebius:expert_forecast_half_life_tokens",
            "Tokens after which a layer's forecast has forgotten half of what it saw",
            labels=[*names, "layer"],
        )
        for layer, tokens in found.half_lives.items():
            half_life.add_metric([*values, str(layer)], tokens)
        yield half_life


def export(placement: AdaptivePlacement, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Adds the placement's figures to a registry."""
    registry.register(PlacementCollector(placement, model_name))
