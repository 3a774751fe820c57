"""Mamba-2, a selective state space. Source: arXiv:2405.21060, as in Granite 4."""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.host_mixer import HostPlaces
from gpu_service.layers.linear import Linear, RowParallelLinear
from gpu_service.layers.rank_weights import RankWeights
from gpu_service.layers.states import ConvTaps, StateLayer
from gpu_service.ops.host_recurrent import VALUE_MULTIPLE
from gpu_service.ops.norm import gated_group_rms_norm
from gpu_service.ops.rope import RopeTable
from gpu_service.ops.state_space import state_space_extend, state_space_update
from moebius import _kernels
from moebius.models.layers import recurrent
from moebius.models.layers.layer import Places


class Mamba2(StateLayer):
    """Projection, convolution, recurrence, norm of the gated outputs, projection.

    Key heads are the groups of B and C, and value heads the heads.
    """

    def __init__(self, spec: recurrent.Mamba2, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        own, rank = made.weights(spec.weights(made.hidden_size)), made.own(spec)
        self._rank, self._dtype = rank, made.dtype
        self._widths = rank.value_size, rank.conv_size, rank.num_value_heads
        self.in_proj, self.conv1d = Linear(own.under("in_proj")), ConvTaps(own.under("conv1d"))
        self.A_log, self.D, self.dt_bias = (own.parameter(name) for name in ("A_log", "D", "dt_bias"))
        self.norm = GatedGroupNorm(own.under("norm"), rank.num_key_heads, spec.eps)
        self.out_proj = RowParallelLinear(own.under("out_proj"), made.parallel)

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

    def host_weights(self, places: HostPlaces) -> _kernels.StateSpaceWeights | None:
        """Returns the layer as `_kernels.DecoderLayers` computes it, see `HostMixer`; None: its sizes or
        types are others.
        """
        rank, first, last = self._rank, self.in_proj.projection, self.out_proj.projection
        assert places.states is not None, "a model with state spaces needs states"
        recent, recurrent = places.states.of(self._state)
        fits = rank.value_head_dim % VALUE_MULTIPLE == 0 and self.norm.weight.dtype == self._dtype
        if first is None or last is None or not fits or recent.dtype != self._dtype:
            return None
        return _kernels.StateSpaceWeights(
            input=first,
            output=last,
            **self.conv1d.host_taps(),
            step=_kernels.StepRule(self.A_log.data_ptr(), self.dt_bias.data_ptr(), self.D.data_ptr()),
            norm=self.norm.weight.data_ptr(),
            norm_eps=self.norm.eps,
            recent=recent.data_ptr(),
            states=recurrent.data_ptr(),
            num_groups=rank.num_key_heads,
            num_heads=rank.num_value_heads,
            state_dim=rank.key_head_dim,
            head_dim=rank.value_head_dim,
        )


class GatedGroupNorm(nn.Module):
    """The weight of `ops.norm.gated_group_rms_norm`; a rank has whole groups."""

    def __init__(self, own: RankWeights, num_groups: int, eps: float) -> None:
        super().__init__()
        self.weight, self.num_groups, self.eps = own.parameter("weight"), num_groups, eps
