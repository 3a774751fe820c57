"""Mamba, a selective state space. Source: arXiv:2312.00752, with the norms of Jamba (arXiv:2403.19887)."""

from __future__ import annotations

import torch

from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.host_mixer import HostPlaces
from gpu_service.layers.linear import Linear, RowParallelLinear
from gpu_service.layers.norm import RMSNorm
from gpu_service.layers.states import ConvTaps, StateLayer
from gpu_service.ops.rope import RopeTable
from gpu_service.ops.selective_scan import selective_scan_extend, selective_scan_update
from moebius import _kernels
from moebius.models.layers.layer import Places
from moebius.models.layers.recurrent import SelectiveScan


class Mamba(StateLayer):
    """Projection, convolution, what steps and states are made of and its norms, recurrence, projection.

    Every channel is a head. What all channels together say of steps and states
    is summed over ranks.
    """

    def __init__(self, spec: SelectiveScan, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        own, eps = made.weights(spec.weights(made.hidden_size)), spec.eps
        self._widths, self._dtype, self._channels = spec.widths, made.dtype, made.own(spec).value_size
        self.in_proj, self.conv1d = Linear(own.under("in_proj")), ConvTaps(own.under("conv1d"))
        self.x_proj = RowParallelLinear(own.under("x_proj"), made.parallel)
        self.dt_layernorm = RMSNorm(own.under("dt_layernorm"), eps)
        self.b_layernorm = RMSNorm(own.under("b_layernorm"), eps)
        self.c_layernorm = RMSNorm(own.under("c_layernorm"), eps)
        self.steps = Linear(own.under("steps"))
        self.A_log, self.D = own.parameter("A_log"), own.parameter("D")
        self.out_proj = RowParallelLinear(own.under("out_proj"), made.parallel)

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

    def host_weights(self, places: HostPlaces) -> _kernels.SelectiveScanWeights | None:
        """Returns the layer as `_kernels.DecoderLayers` computes it, see `HostMixer`; None: its types are
        others.
        """
        first, last = self.in_proj.projection, self.out_proj.projection
        narrow, steps = self.x_proj.projection, self.steps.projection
        assert places.states is not None, "a model with state spaces needs states"
        recent, recurrent = places.states.of(self._state)
        if first is None or narrow is None or steps is None or last is None or recent.dtype != self._dtype:
            return None
        return _kernels.SelectiveScanWeights(
            input=first,
            narrow=narrow,
            steps=steps,
            output=last,
            step_norm=self.dt_layernorm.host_weights(),
            write_norm=self.b_layernorm.host_weights(),
            read_norm=self.c_layernorm.host_weights(),
            **self.conv1d.host_taps(),
            a_log=self.A_log.data_ptr(),
            skip=self.D.data_ptr(),
            recent=recent.data_ptr(),
            states=recurrent.data_ptr(),
            channels=self._channels,
            state_dim=self._widths[1],
        )
