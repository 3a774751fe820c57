"""What the placement that follows traffic has done, for Prometheus."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry

from gpu_service.experts.adaptive.placement import AdaptivePlacement
from gpu_service.telemetry.figures import Figure, export_figures


def export(placement: AdaptivePlacement, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Adds the placement's figures to a registry."""

    def figures() -> list[Figure]:
        found = placement.figures()
        half_lives = {str(layer): tokens for layer, tokens in found.half_lives.items()}
        budget = placement.budget
        return [
            Figure("expert_exchanges", "Experts that took another's slot on the GPU", found.exchanges),
            Figure("expert_exchange_bytes", "Bytes copied for that", found.copied_bytes),
            Figure(
                "expert_exchange_link_share",
                "Of a step's time, what its exchanges may take of the link",
                budget.share,
                is_counter=False,
            ),
            Figure(
                "expert_exchange_slowdown",
                "By how much exchanges lengthened the latest decode steps, as measured; 0 before",
                budget.slowdown or 0.0,
                is_counter=False,
            ),
            Figure("expert_choices", "Experts that decoding rows chose, in layers with slots", found.chosen),
            Figure("expert_hits", "Of these, experts that were in a slot", found.hits),
            Figure(
                "expert_forecast_half_life_tokens",
                "Tokens after which a layer's forecast has forgotten half of what it saw",
                half_lives,
                is_counter=False,
                by="layer",
            ),
        ]

    export_figures(figures, model_name, registry)
