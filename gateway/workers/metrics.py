"""Prometheus metrics of several processes on one page: added up, or next to one another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from protos import engine_pb2


@dataclass
class Family:
    """One metric's samples by name and labels; filled by `samples_of` and `added`."""

    documentation: str
    kind: str
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)


Samples = dict[str, Family]


def samples_of(registry: CollectorRegistry) -> Samples:
    """Returns all that is counted in this process, as it can be sent to another."""
    found: Samples = {}
    for metric in registry.collect():
        family = found.setdefault(metric.name, Family(metric.documentation, metric.type))
        for sample in metric.samples:
            family.values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def added(parts: Iterable[Samples], kinds: Sequence[str] | None = None) -> Samples:
    """The sum of all parts, of metrics of these kinds alone if given; when a count began is the earliest."""
    total: Samples = {}
    for part in parts:
        for name, family in part.items():
            if kinds is not None and family.kind not in kinds:
                continue
            into = total.setdefault(name, Family(family.documentation, family.kind)).values
            for key, value in family.values.items():
                if key[0].endswith("_created") and key in into:
                    into[key] = min(into[key], value)
                else:
                    into[key] = into.get(key, 0.0) + value
    return total


class _Collected(CollectorRegistry):
    """A registry of samples that are there already."""

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        """As metrics."""
        for name, family in self._samples.items():
            metric = Metric(name, family.documentation, family.kind)
            metric.samples = [
                Sample(sample, dict(labels), value) for (sample, labels), value in family.values.items()
            ]
            yield metric


# Of the process that counts, not of what it does: on that process's own port.
_OF_PROCESSES = ("python_", "process_")


def engine_metrics(pages: Mapping[str, engine_pb2.GetMetricsResponse]) -> bytes:
    """Exposition text of what engines count, by the label `engine`, and of their expert servers, by `server`.

    Names are those of the engines' own ports; none of them is one of the gateway's.
    """
    total: Samples = {}
    for engine, page in pages.items():
        _merge(total, page.text, {"engine": engine})
        for server in page.servers:
            _merge(total, server.text, {"engine": engine, "server": str(server.index)})
    return rendered(total)


def _merge(total: Samples, text: bytes, labels: Mapping[str, str]) -> None:
    """Adds the samples of an exposition text, with `labels` in place of their own of these names."""
    for metric in text_string_to_metric_families(text.decode()):
        if metric.name.startswith(_OF_PROCESSES):
            continue
        family = total.setdefault(metric.name, Family(metric.documentation, metric.type))
        for sample in metric.samples:
            family.values[sample.name, tuple(sorted({**sample.labels, **labels}.items()))] = sample.value


def rendered(samples: Samples) -> bytes:
    """Returns the exposition text."""
    return generate_latest(_Collected(samples))
