"""Prometheus's figure of the certificates that a process shows: when they expire."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moebius.network.tls import certificate_ends


class CertificateCollector(Collector):
    """Collects `moebius:certificate_expiry_timestamp_seconds`, by the use of a certificate, grpc or http."""

    def describe(self) -> Iterable[Metric]:
        """Yields nothing: several registries of a process may have this collector."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yields the metric, in Unix seconds; without samples where no certificate is shown."""
        family = GaugeMetricFamily(
            "moebius:certificate_expiry_timestamp_seconds",
            "When the certificate that this process shows, or one of its chain, expires",
            labels=["use"],
        )
        for use, end in sorted(certificate_ends().items()):
            family.add_metric([use], end.timestamp())
        yield family
