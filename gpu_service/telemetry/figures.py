"""Metrics that are read when Prometheus asks: figures that a part of the engine keeps in any case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Figure(NamedTuple):
    """One metric, `moebius:` before its name; filled at each scrape by the part that keeps it."""

    name: str
    text: str
    # A mapping has a value for each value of the label `by`.
    value: float | Mapping[str, float]
    is_counter: bool = True
    by: str = ""


class FigureCollector(Collector):
    """Figures with the labels of the engine's other metrics."""

    def __init__(self, figures: Callable[[], Iterable[Figure]], model_name: str, engine: str) -> None:
        self._figures = figures
        self._labels = {"model_name": model_name, "engine": engine}

    def collect(self) -> Iterator[Metric]:
        """Yields one scrape."""
        names, labels = list(self._labels), list(self._labels.values())
        for figure in self._figures():
            family = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
            if isinstance(figure.value, Mapping):
                metric = family(f"moebius:{figure.name}", figure.text, labels=[*names, figure.by])
                for key, value in figure.value.items():
                    metric.add_metric([*labels, key], value)
            else:
                metric = family(f"moebius:{figure.name}", figure.text, labels=names)
                metric.add_metric(labels, figure.value)
            yield metric


def export_figures(
    figures: Callable[[], Iterable[Figure]], model_name: str, registry: CollectorRegistry, engine: str = "0"
) -> None:
    """Adds figures to a registry."""
    registry.register(FigureCollector(figures, model_name, engine))
