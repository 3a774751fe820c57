"""The gated MLP: dense layers and shared experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from gpu_service.context import ForwardContext
from gpu_service.layers.linear import FusedLinear, RowParallelLinear
from gpu_service.ops.activation import CLAMPED_ACTIVATIONS, GATED_ACTIVATIONS
from gpu_service.parallel.context import SOLO, ParallelContext
from gpu_service.parallel.partition import even_span


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`; every rank holds a part of the intermediate dimension."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        limit: float = math.inf,
        dtype: torch.dtype,
        parallel: ParallelContext = SOLO,
        reduce: bool = True,
    ) -> None:
        """`intermediate_size` is the model's. `reduce=False` leaves the sum over ranks to the caller.

        `limit`: where the activated gate is cut off above, and `up` on both sides.
        """
        super().__init__()
        neurons = even_span(intermediate_size, parallel.tp_rank, parallel.tp_size)
        parts = {"gate_proj": neurons, "up_proj": neurons}
        self.gate_up_proj = FusedLinear(hidden_size, parts, bias=False, dtype=dtype)
        self.down_proj = RowParallelLinear(
            neurons, hidden_size, bias=False, dtype=dtype, parallel=parallel, reduce=reduce
        )
        self._activation: Callable[[torch.Tensor], torch.Tensor] = GATED_ACTIVATIONS[activation]
        if limit != math.inf:
            self._activation = partial(CLAMPED_ACTIVATIONS[activation], limit=limit)

    def forward(self, hidden_states: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """`[T, H]` to a new `[T, H]`; the context is part of the signature that MLP and MoE share."""
        output: torch.Tensor = self.down_proj(self._activation(self.gate_up_proj(hidden_states)))
        return output
