"""Which requests of a step compute one token and which several: found once, for all layers."""

from __future__ import annotations

from gpu_service.engine.step import ForwardInputs
from gpu_service.ops.sequences import Sequences, make_sequences


class StepSequences:
    """Shared by the layers of a model, which all ask about the same step."""

    def __init__(self) -> None:
        self._latest: tuple[ForwardInputs, Sequences] | None = None

    def of(self, inputs: ForwardInputs) -> Sequences:
        """All requests of the step, in order."""
        if self._latest is None or self._latest[0] is not inputs:
            self._latest = inputs, make_sequences(inputs.query_start_loc, inputs.query_start_loc_tensor)
        return self._latest[1]
