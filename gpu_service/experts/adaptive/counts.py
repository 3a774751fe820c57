"""How often each expert was chosen, added up on the device by the kernel that looks up slots anyhow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_service.experts.streaming.ring import TransferDevice

# Token rows up to which a step counts as decoding: what captured graphs have at most.
DECODE_ROWS = 64


@dataclass(frozen=True, eq=False, slots=True)
class Observation:
    """What was chosen since the one before; filled by `RoutingCounts.poll`. int64 `[layers, experts]`."""

    decode: NDArray[np.int64]
    prefill: NDArray[np.int64]


class RoutingCounts:
    """The counts of one rank's layers with slots. Driven by the thread that launches steps."""

    def __init__(self, layers: Sequence[int], num_experts: int, device: TransferDevice) -> None:
        self._device = device
        self._rows = {layer: row for row, layer in enumerate(layers)}
        # Decode's and prefill's; sums since the start, which wrap around. int32 [2, L, E].
        self._totals = torch.zeros((2, len(self._rows), num_experts), dtype=torch.int32, device=device.device)
        self._before = np.zeros(self._totals.shape, np.uint32)
        self._on_the_way: tuple[torch.Tensor, Any] | None = None
        # Where the last counts came, which the next ones may take.
        self._place: torch.Tensor | None = None

    def of(self, layer: int, rows: int) -> torch.Tensor:
        """Returns int32 `[num_experts]`, which a step of `rows` token rows adds to; the same tensor every
        time.
        """
        return self._totals[int(rows > DECODE_ROWS), self._rows[layer]]

    def fetch(self) -> None:
        """Launches a copy to the host, unless one is on the way; on the current stream, without waiting."""
        if self._on_the_way is None:
            self._place = self._device.download(self._totals, self._place)
            self._on_the_way = self._place, self._device.record_read()

    def poll(self) -> Observation | None:
        """Returns what `fetch` brought; None: it has not come yet, or nothing was chosen."""
        if self._on_the_way is None or not self._device.has_ended(self._on_the_way[1]):
            return None
        now = self._on_the_way[0].numpy().view(np.uint32).copy()
        self._on_the_way = None
        new = (now - self._before).astype(np.int64)
        self._before = now
        return Observation(new[0], new[1]) if new.any() else None
