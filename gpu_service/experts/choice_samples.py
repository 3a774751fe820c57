"""What decode rows choose in a few layers, now and then, for the host to count what they share.

Layers write what they are about to compute into memory that stays, in captured graphs, too: a copy of some
kilobytes. Most steps' choices are written over unread; those of a sampled step are downloaded with its
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_service.core.step import ForwardInputs

# Layers that are sampled, at most: of one row of 8 experts each 32 choices.
_LAYERS = 4
# Of this number of decode steps two that follow each other are sampled: rows of the same requests in both are
# those of one step with accepted draft tokens.
SAMPLED_EVERY = 8


class ChoiceSamples:
    """Driven by the thread that launches steps."""

    def __init__(
        self, layers: Sequence[int], num_experts: int, top_k: int, max_rows: int, device: torch.device
    ) -> None:
        """`layers`: the rank's with routed experts, ascending; `max_rows`: of steps that are sampled."""
        count = min(_LAYERS, len(layers))
        # In the middle of as many equal parts.
        chosen = [layers[(2 * part + 1) * len(layers) // (2 * count)] for part in range(count)]
        self._rows = {layer: row for row, layer in enumerate(chosen)}
        self._num_experts, self._max_rows = num_experts, max_rows
        # All choices, those that are not resident, and those left to servers; -1: none, or another one's.
        self._noted = torch.full((3, count, max_rows, top_k), -1, dtype=torch.int32, device=device)
        self._steps = 0

    @property
    def layers(self) -> tuple[int, ...]:
        """Returns the layers that are sampled."""
        return tuple(self._rows)

    def note(
        self, layer: int, chosen: torch.Tensor, missing: torch.Tensor | None, served: torch.Tensor | None
    ) -> None:
        """Takes the choices of a layer's rows, int32 `[T, K]` each: all, those that are not resident, and
        those left to servers; None: no choice is. Only launches copies; does nothing for layers that are not
        sampled.
        """
        row, size = self._rows.get(layer), self._noted.shape[3]
        if row is None or chosen.shape[0] > self._max_rows or chosen.shape[1] != size:
            return
        for memory, ids in zip(
            self._noted[:, row, : chosen.shape[0]], (chosen, missing, served), strict=True
        ):
            memory.fill_(-1) if ids is None else memory.copy_(ids)

    def address(self, layer: int, rows: int, top_k: int) -> int | None:
        """Returns where a host kernel may copy int32 `[rows, top_k]` choices of a layer to, before `serve`;
        None: it is not sampled.
        """
        row = self._rows.get(layer)
        if row is None or rows > self._max_rows or top_k != self._noted.shape[3]:
            return None
        return self._noted[0, row].data_ptr()

    def serve(self, layer: int, rows: int) -> None:
        """What was copied to `address` is all left to servers."""
        self._noted[1:, self._rows[layer], :rows] = self._noted[0, self._rows[layer], :rows]

    def take(self, inputs: ForwardInputs) -> torch.Tensor | None:
        """Returns what the rows of a step chose once it was launched, int32 `[3, layers, T, K]`, as a new
        tensor; None: the step is not sampled.
        """
        rows = inputs.query_start_loc[-1]
        if not inputs.is_uniform_decode or rows > self._max_rows:
            return None
        self._steps += 1
        if self._steps % SAMPLED_EVERY > 1:
            return None
        noted = self._noted[:, :, :rows]
        # Choices beyond are of a router's experts without weights.
        return noted.masked_fill(noted >= self._num_experts, -1)
