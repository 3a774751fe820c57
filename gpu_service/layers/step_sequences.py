"""Which requests of a step compute one token and which several: found once, for all layers."""

from __future__ import annotations

import torch

from gpu_service.batch import ForwardInputs


class StepSequences:
    """Shared by the layers of a model; filled by `plan`, valid until it is called for another step."""

    def __init__(self) -> None:
        self._inputs: ForwardInputs | None = None
        # int64 [S] each: row and request of those that compute one token.
        self.single_rows = self.single_requests = torch.empty(0, dtype=torch.int64)
        # The other requests, and where their rows begin and end.
        self.several: list[tuple[int, int, int]] = []

    def plan(self, inputs: ForwardInputs) -> None:
        """For the step of these inputs, unless it was done already."""
        if self._inputs is inputs:
            return
        bounds = list(enumerate(zip(inputs.query_start_loc, inputs.query_start_loc[1:], strict=False)))
        single = [(begin, request) for request, (begin, end) in bounds if end - begin == 1]
        device = inputs.positions.device
        self.single_rows = torch.tensor([row for row, _ in single], dtype=torch.int64, device=device)
        self.single_requests = torch.tensor([index for _, index in single], dtype=torch.int64, device=device)
        self.several = [(request, begin, end) for request, (begin, end) in bounds if end - begin > 1]
        self._inputs = inputs
