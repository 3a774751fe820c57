"""Which requests of a step compute one token and which several: found once, for all layers."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from gpu_service.batch import ForwardInputs


class Neighbours(NamedTuple):
    """Consecutive requests of one token each, or one request of several tokens."""

    requests: slice
    rows: slice
    # Whether each request computes one token.
    is_single_token: bool


class StepSequences:
    """Shared by the layers of a model, which all ask about the same step.

    In slices, because a list of rows would have to travel to the device while the host waits.
    """

    def __init__(self) -> None:
        self._inputs: ForwardInputs | None = None
        self._found: list[Neighbours] = []

    def of(self, inputs: ForwardInputs) -> list[Neighbours]:
        """All requests of the step, in order."""
        if self._inputs is not inputs:
            self._inputs, self._found = inputs, _neighbours(inputs.query_start_loc)
        return self._found


def _neighbours(starts: list[int]) -> list[Neighbours]:
    found: list[Neighbours] = []
    for request, (begin, end) in enumerate(itertools.pairwise(starts)):
        first, row, single = request, begin, end - begin == 1
        if single and found and found[-1].is_single_token:
            last = found.pop()
            first, row = last.requests.start, last.rows.start
        found.append(Neighbours(slice(first, request + 1), slice(row, end), single))
    return found
