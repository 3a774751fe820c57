"""Combines the Prometheus metrics of several processes on one page: added up, or side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from protos import engine_pb2


@dataclass
class MetricFamily:
    """One metric's samples by name and labels; filled by `samples_of` and `added`."""

    documentation: str
    kind: str
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)


Samples = dict[str, MetricFamily]


def samples_of(registry: CollectorRegistry) -> Samples:
    """Returns all of this process's metrics in a form that can be sent."""
    found: Samples = {}
    for metric in registry.collect():
        family = found.setdefault(metric.name, MetricFamily(metric.documentation, metric.type))
        for sample in metric.samples:
            family.values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def added(parts: Iterable[Samples], kinds: Sequence[str] | None = None) -> Samples:
    """Returns the sum of all parts, of these kinds of metrics if given; of points in time the earliest."""
    total: Samples = {}
    for part in parts:
        for name, family in part.items():
            if kinds is not None and family.kind not in kinds:
                continue
            into = total.setdefault(name, MetricFamily(family.documentation, family.kind)).values
            for key, value in family.values.items():
                if key[0].endswith(("_created", "_timestamp_seconds")) and key in into:
                    into[key] = min(into[key], value)
                else:
                    into[key] = into.get(key, 0.0) + value
    return total


class _Collected(CollectorRegistry):
    """A registry of given samples."""

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        """Yields them as metrics."""
        for name, family in self._samples.items():
            metric = Metric(name, family.documentation, family.kind)
            metric.samples = [
                Sample(sample, dict(labels), value) for (sample, labels), value in family.values.items()
            ]
            yield metric


# Kinds of metrics about the process, not its work, which the gateway has of itself: they are on its own port.
_OF_PROCESSES = ("python_", "process_", "moebius:certificate_")


def engine_metrics(pages: Mapping[str, engine_pb2.GetMetricsResponse]) -> bytes:
    """Returns engines' metrics as exposition text, by the label `engine`; expert servers' also by `server`.

    Names are those on the engines' own ports; none of them is one of the gateway's.
    """
    total: Samples = {}
    for engine, page in pages.items():
        _merge(total, page.text, {"engine": engine})
        for server in page.servers:
            _merge(total, server.text, {"engine": engine, "server": str(server.index)})
    return rendered(total)


def _merge(total: Samples, text: bytes, labels: Mapping[str, str]) -> None:
    """Adds the samples of an exposition text; `labels` replace its own of these names."""
    for metric in text_string_to_metric_families(text.decode()):
        if metric.name.startswith(_OF_PROCESSES):
            continue
        family = total.setdefault(metric.name, MetricFamily(metric.documentation, metric.type))
        for sample in metric.samples:
            family.values[sample.name, tuple(sorted({**sample.labels, **labels}.items()))] = sample.value


def rendered(samples: Samples) -> bytes:
    """Returns the exposition text."""
    return generate_latest(_Collected(samples))
