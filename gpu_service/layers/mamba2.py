"""Mamba-2, a selective state space. Source: arXiv:2405.21060, as in Granite 4."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.linear import CheckpointPart, FusedLinear, RowParallelLinear, empty_parameter
from gpu_service.layers.states import ConvTaps, StateLayer, own_rows
from gpu_service.ops.norm import gated_group_rms_norm
from gpu_service.ops.rope import RopeTable
from gpu_service.ops.state_space import state_space_extend, state_space_update
from moebius.models.layers import recurrent
from moebius.models.layers.layer import Places
from moebius.models.layers.ranks import ShardRange


class Mamba2(StateLayer):
    """Projection, convolution, recurrence, norm of the gated outputs, projection.

    Key heads are the groups of B and C, and value heads the heads.
    """

    checkpoint_name = "mamba"
    head_vectors = ("A_log", "D", "dt_bias")
    A_log: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor

    def __init__(self, spec: recurrent.Mamba2, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        heads, size, dtype = self._heads, made.hidden_size, made.dtype
        # x of all heads, then B and C of all groups: loaded whole, a rank's do not lie together.
        values, xbc = self._values, (self._values, self._keys, self._keys)
        self._widths = (values.size, sum(shard.size for shard in xbc), heads.size)
        stored = {"in_proj": ShardRange.whole(spec.value_size + spec.conv_size + spec.num_value_heads)}
        order = None if heads.is_whole else own_rows(values, *xbc, heads)
        self.in_proj = FusedLinear(size, stored, bias=False, dtype=dtype, order=order)
        channels = {"": ShardRange.whole(spec.conv_size)}
        order = own_rows(*xbc)
        self.conv1d = ConvTaps(channels, spec.conv_width, dtype=dtype, bias=True, order=order)
        self.norm = GatedGroupNorm(values, self._key_heads.size, spec.eps, dtype=dtype)
        self.out_proj = RowParallelLinear(values, size, bias=False, dtype=dtype, parallel=made.parallel)

    def forward(
        self, hidden_states: torch.Tensor, rope: RopeTable | None, context: ForwardContext
    ) -> torch.Tensor:
        """Maps `[T, H]` to a new `[T, H]`; the states after the step are in the slots that it writes."""
        states, norm = self._states(context), self.norm
        gate, xbc, dt = self.in_proj(hidden_states).split(self._widths, dim=1)
        xbc = states.convolve(xbc, self.conv1d)
        scalars = self.A_log, self.dt_bias, self.D
        values = states.recur(state_space_update, state_space_extend, (xbc, dt), *scalars)
        normed = gated_group_rms_norm(values.flatten(1), gate, norm.weight, norm.num_groups, norm.eps)
        output: torch.Tensor = self.out_proj(normed)
        return output


class GatedGroupNorm(nn.Module):
    """The weight of `ops.norm.gated_group_rms_norm`; a rank has whole groups."""

    def __init__(self, channels: ShardRange, num_groups: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(channels.size, dtype=dtype)
        self.num_groups, self.eps = num_groups, eps
        self._channels = channels

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        yield CheckpointPart("", "weight", self._channels, None)
