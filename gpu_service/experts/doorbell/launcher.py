"""What the doorbell client needs of a device: work queued in the order of launches, and words it can set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class DoorbellLauncher(ABC):
    """Queues the client's kernels on the device's current stream, where a graph may capture them.

    Tensors must live until the work has run, or as long as a graph that holds it.
    """

    @abstractmethod
    def pack(
        self,
        slot: int,
        layer: int,
        rows: int,
        begin: int,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> None:
        """Writes own rows `[begin, begin + n)` of a request of `rows` rows into `slot`, and rings.

        Contiguous `[n, H]` float32 or bfloat16, int32 `[n, K]`, float32 `[n, K]`; n may be 0.
        """

    @abstractmethod
    def add(self, slot: int, layer: int, begin: int, partial: torch.Tensor) -> None:
        """Waits for the slot's answers; adds own rows `[begin, begin + n)` to float32 `[n, H]` in place."""

    @abstractmethod
    def set_words(self, first: int, values: Sequence[int]) -> None:
        """Sets words of `State`; not to be captured."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when all work queued so far has ended."""

    @abstractmethod
    def close(self) -> None:
        """Ends the work and gives up the device's hold on the mailbox. Graphs must be gone."""
