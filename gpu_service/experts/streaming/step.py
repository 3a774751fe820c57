"""What the layers of a model see of streaming in one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from gpu_service.experts.costs import LayerCosts
from gpu_service.experts.resident.experts import Share


class ShareChooser(Protocol):
    """Decides how much is streamed; `share.ShareChooser` is the real one."""

    def may_stream(self, rows: int, is_decode: bool) -> bool:
        """Returns whether a step of `rows` token rows may stream; all ranks agree."""

    def share(self, rows: int) -> int:
        """Returns the share in `SHARES`, 0 being none, of a step that may stream; ranks may differ."""

    def predict(self, rows: int, share: int) -> float | None:
        """Returns the seconds of a step that streams such a share; None: nothing was measured."""

    def step_tokens(self, most: int, wait_s: float | None) -> int:
        """Returns the tokens of a step that streams all, at most `most`, where others may wait so long; None:
        not known.
        """

    @property
    def asks_servers(self) -> bool:
        """Returns whether steps of the main lane leave to expert servers what is not worth a copy."""

    def measured(self, layer: LayerCosts, layer_bytes: float) -> None:
        """Takes what a layer costs, and the bytes that all of it has to be copied."""

    def observe(self, rows: int, share: int, seconds: float, copying: float, nbytes: int) -> None:
        """Takes what a step took, how much of it the link was busy, and with how many bytes."""

    def routed(self, left: Sequence[float]) -> None:
        """By share, 0 to SHARES, which part of earlier steps' pairs servers would have had."""

    @property
    def break_even_rows(self) -> int:
        """From which streaming all takes less than streaming nothing."""


class StreamedExperts(ABC):
    """The streamed experts of one step; T = token rows, K = experts per row, H = hidden size.

    In `ForwardContext.streamed` of a step that streams. Layers are asked in the order in which they are
    computed, `forward` once for each that streams. No call waits for the device.
    """

    # Of the whole step, by what was measured before it; None: not known.
    predicted_seconds: float | None = None
    # Whether what is copied was decided before the step, whose time then shows what that costs.
    is_planned = True

    @abstractmethod
    def share(self, layer: int) -> Share:
        """ALL: together with the resident experts nothing is left for expert servers."""

    @abstractmethod
    def cpu_ids(self, layer: int, topk_ids: torch.Tensor) -> torch.Tensor:
        """Returns int32 `[T, K]`: a new tensor with -1 in place of experts that any rank streams;
        -1 stays.
        """

    @abstractmethod
    def forward(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        parts: Sequence[torch.Tensor],
        topk_weights: torch.Tensor,
        partials: Sequence[torch.Tensor | None],
    ) -> Sequence[torch.Tensor]:
        """Returns float32 `[T, H]` each: `partials` (None: zeros) and this rank's part of the streamed
        experts' sums.

        The layer's choices int32 `[T, K]` are in parts that have sums of their own, -1 where another part has
        the choice. Each is computed as by `ResidentKernels.forward`, on the current stream. Raises
        ExpertUnavailable when what was copied is known to be worthless.
        """

    def launched(self) -> None:
        """All of the model's layers were launched; those of multi-token prediction may follow.

        Raises ExpertUnavailable where the host is the device, as `check`.
        """
        return

    def check(self) -> None:
        """The step has ended on the device.

        All ranks call it for the same steps, in the same order. Raises ExpertUnavailable when experts were
        replaced while they were copied, for any rank: the step has to be run again.
        """
        return

    def end(self) -> None:
        """The step has ended, or will never: other steps may stream. Of `ExpertStreamer.begin_whole` only."""
        return
