"""Prometheus metrics of several processes as those of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.samples import Sample


@dataclass
class Family:
    """One metric's samples by name and labels; filled by `samples_of` and `added`."""

    documentation: str
    kind: str
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)


Samples = dict[str, Family]


def samples_of(registry: CollectorRegistry) -> Samples:
    """All that is counted in this process, as it can be sent to another."""
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


def rendered(samples: Samples) -> bytes:
    """The exposition text."""
    return generate_latest(_Collected(samples))
