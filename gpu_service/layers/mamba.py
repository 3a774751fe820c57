"""Mamba, a selective state space. Source: arXiv:2312.00752, with the norms of Jamba (arXiv:2403.19887)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.linear import CheckpointPart, FusedLinear, RowParallelLinear, empty_parameter
from gpu_service.layers.norm import RMSNorm
from gpu_service.layers.states import ConvTaps, StateLayer, own_rows
from gpu_service.ops.rope import RopeTable
from gpu_service.ops.selective_scan import selective_scan_extend, selective_scan_update
from moebius.models.layers.layer import Places
from moebius.models.layers.ranks import ShardRange
from moebius.models.layers.recurrent import SelectiveScan


class Mamba(StateLayer):
    """Projection, convolution, what steps and states are made of and its norms, recurrence, projection.

    Every channel is a head. What all channels together say of steps and states
    is summed over ranks.
    """

    checkpoint_name = "mamba"
    head_vectors = ("D",)
    D: torch.Tensor

    def __init__(self, spec: SelectiveScan, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        channels, size, dtype, parallel = self._heads, made.hidden_size, made.dtype, made.parallel
        rank, state_dim, eps = spec.step_rank, spec.key_head_dim, spec.eps
        # x of all channels, then their gates.
        stored = {"in_proj": ShardRange.whole(2 * channels.total)}
        order = None if channels.is_whole else own_rows(channels, channels)
        self.in_proj = FusedLinear(size, stored, bias=False, dtype=dtype, order=order)
        self.conv1d = ConvTaps({"": channels}, spec.conv_width, dtype=dtype, bias=True)
        self._widths = (rank, state_dim, state_dim)
        self.x_proj = RowParallelLinear(
            channels, sum(self._widths), bias=False, dtype=dtype, parallel=parallel
        )
        self.dt_layernorm = RMSNorm(rank, eps, dtype=dtype)
        self.b_layernorm = RMSNorm(state_dim, eps, dtype=dtype)
        self.c_layernorm = RMSNorm(state_dim, eps, dtype=dtype)
        self.steps = FusedLinear(rank, {"dt_proj": channels}, bias=True, dtype=dtype)
        # As trained: decays are sensitive to their last bits.
        self.A_log = empty_parameter(channels.size, state_dim, dtype=torch.float32)
        self.out_proj = RowParallelLinear(channels, size, bias=False, dtype=dtype, parallel=parallel)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """Returns the parts that a rank has of this module's own parameters: those of its channels."""
        yield from super().checkpoint_parts()
        yield CheckpointPart("", "A_log", self._heads, ShardRange.whole(self.A_log.shape[1]))

    def forward(
        self, hidden_states: torch.Tensor, rope: RopeTable | None, context: ForwardContext
    ) -> torch.Tensor:
        """Maps `[T, H]` to a new `[T, H]`; the states after the step are in the slots that it writes."""
        states = self._states(context)
        x, gate = self.in_proj(hidden_states).chunk(2, dim=1)
        x = states.convolve(x, self.conv1d)
        dt, b, c = self.x_proj(x).split(self._widths, dim=1)
        rows = x, self.steps(self.dt_layernorm(dt)), self.b_layernorm(b), self.c_layernorm(c), gate
        values = states.recur(selective_scan_update, selective_scan_extend, rows, self.A_log, self.D)
        output: torch.Tensor = self.out_proj(values)
        return output
