"""An expert client that answers zeros: it has the tensors of a real one, and needs no server."""

from __future__ import annotations

import torch

from gpu_service.experts.client import ExpertClient, ExpertClientStats, Ticket, add_to
from moebius.checkpoint.moe_config import MoeGeometry


class NullExpertClient(ExpertClient):
    """For profiling: capturable, never fails, always ready."""

    is_device_driven = True

    def __init__(self, geometry: MoeGeometry) -> None:
        self.geometry = geometry

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        """Holds the tensors as a real client does."""
        return Ticket(layer, hidden_states, topk_ids, topk_weights)

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        """Zeros `[T, H]`, or `partial` unchanged."""
        return add_to(partial, torch.zeros_like(ticket.hidden_states, dtype=torch.float32))

    def wait_ready(self, timeout_s: float) -> None:
        """Ready at once."""

    def recover(self, timeout_s: float) -> None:
        """Nothing was lost."""

    def stats(self) -> ExpertClientStats:
        """Nothing is counted."""
        return ExpertClientStats()

    def close(self) -> None:
        """Nothing is held."""
