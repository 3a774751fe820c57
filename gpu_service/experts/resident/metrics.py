"""What the watch over experts on the device has found, for Prometheus: names as of the expert servers."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry

from gpu_service.experts.resident.watch import ResidentWatch
from gpu_service.telemetry.figures import Figure, export_figures


def export(watch: ResidentWatch, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Adds the watch's figures to a registry."""

    def figures() -> list[Figure]:
        refused = 1.0 if watch.problem else 0.0
        return [
            Figure("expert_damaged", "Packed experts found to differ from their checksum", watch.damages),
            Figure("expert_repaired", "Of these, experts whose slots were filled again", watch.repairs),
            Figure(
                "expert_verified_bytes",
                "Bytes of packed experts compared with checksums",
                watch.compared_bytes,
            ),
            Figure(
                "expert_refused",
                "1 while a damaged expert cannot be filled again, and steps fail",
                refused,
                is_counter=False,
            ),
            Figure(
                "expert_verify_pass_seconds",
                "Of the latest comparison of all experts",
                watch.pass_seconds,
                is_counter=False,
            ),
        ]

    export_figures(figures, model_name, registry)
