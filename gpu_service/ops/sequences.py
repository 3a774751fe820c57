"""Which rows of a mixed step are whose, for ops that go along each request's tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Neighbours(NamedTuple):
    """Consecutive requests of one token each, or one request of several tokens."""

    requests: slice
    rows: slice
    # Whether each request computes one token.
    is_single_token: bool


class Sequences(NamedTuple):
    """R requests' consecutive rows, on the host and on the device.

    In slices, because a list of rows would have to travel to the device while the host waits.
    """

    neighbours: list[Neighbours]  # all requests, in order
    starts: torch.Tensor  # int32 [R + 1], first row of each request


def make_sequences(starts: Sequence[int], starts_tensor: torch.Tensor) -> Sequences:
    """From the first row of each request and the number of rows, `[R + 1]`, twice the same."""
    found: list[Neighbours] = []
    for request, (begin, end) in enumerate(itertools.pairwise(starts)):
        first, row, single = request, begin, end - begin == 1
        if single and found and found[-1].is_single_token:
            last = found.pop()
            first, row = last.requests.start, last.rows.start
        found.append(Neighbours(slice(first, request + 1), slice(row, end), single))
    return Sequences(found, starts_tensor)
