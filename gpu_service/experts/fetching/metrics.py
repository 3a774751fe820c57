"""What decode steps have fetched, for Prometheus."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry

from gpu_service.experts.fetching.fetcher import ExpertFetcher
from gpu_service.telemetry.figures import Figure, export_figures


def export(fetcher: ExpertFetcher, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Adds the fetcher's figures to a registry."""

    def figures() -> list[Figure]:
        found = fetcher.figures
        return [
            Figure("expert_fetches", "Experts that decode steps copied to the GPU", found.experts),
            Figure("expert_fetched_bytes", "Bytes copied for that", found.nbytes),
            Figure("expert_fetch_hits", "Choices that were computed in fetch slots", found.in_slots),
            Figure("expert_fetch_misses", "Choices that decode steps left to expert servers", found.left),
        ]

    export_figures(figures, model_name, registry)
