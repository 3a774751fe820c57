"""The reference's experts: read, dequantised to float32, computed by torch; one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpu_service.experts.client import Ticket, add_to
from gpu_service.experts.local_client import LocalExpertClient
from moebius.checkpoint.moe_config import MoeGeometry


class ReferenceExperts(LocalExpertClient):
    """Within `recording`, keeps the last answer of each layer until it is taken."""

    def __init__(self, model_path: str, geometry: MoeGeometry, dtype: torch.dtype) -> None:
        """`dtype` of the rows, see `LocalExpertClient`."""
        super().__init__(model_path, geometry, dtype, keeps=False)
        self._answers: dict[int, torch.Tensor] = {}
        self._records = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Answers are kept."""
        self._records = True
        try:
            yield
        finally:
            self._records = False

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        """See `ExpertClient.collect`."""
        answer = super().collect(ticket)
        if self._records:
            self._answers[ticket.layer] = answer.clone()
        return add_to(partial, answer)

    def take(self, layer: int) -> torch.Tensor:
        """float32 `[T, H]`; forgets it."""
        return self._answers.pop(layer)
