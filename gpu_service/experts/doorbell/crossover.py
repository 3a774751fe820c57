"""From what size on the copy engine moves rows faster than a kernel does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Crossover:
    """Bytes of rows from which on the copy engine is used; None: never. By the configuration or measured."""

    request_bytes: int | None
    response_bytes: int | None

    def copies_request(self, nbytes: int) -> bool:
        """Returns whether `nbytes` of hidden states are copied by the engine."""
        return self.request_bytes is not None and nbytes >= self.request_bytes

    def copies_response(self, nbytes: int) -> bool:
        """Returns whether `nbytes` of one server's answer are copied by the engine."""
        return self.response_bytes is not None and nbytes >= self.response_bytes


def crossing(sizes: Sequence[int], direct: Sequence[float], copied: Sequence[float]) -> int | None:
    """Returns the smallest size from which on every larger one is faster copied; None: not even the
    largest.
    """
    found: int | None = None
    for size, direct_us, copied_us in sorted(zip(sizes, direct, copied, strict=True), reverse=True):
        if copied_us >= direct_us:
            break
        found = size
    return found
