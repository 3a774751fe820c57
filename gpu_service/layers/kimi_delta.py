"""Kimi Delta Attention, a linear attention. Source: Kimi Linear (arXiv:2510.26692)."""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.delta_rule import DeltaColumns, DeltaLayer, DeltaProducts
from gpu_service.layers.host_mixer import HostPlaces
from gpu_service.layers.linear import Linear, RowParallelLinear
from gpu_service.layers.norm import RMSNorm
from gpu_service.layers.states import ConvTaps
from gpu_service.ops.kimi_delta import kimi_delta_extend, kimi_delta_update
from gpu_service.ops.norm import sigmoid_gated_rms_norm
from gpu_service.ops.rope import RopeTable
from moebius import _kernels
from moebius.models.layers.layer import Places
from moebius.models.layers.recurrent import KDA


class KimiDeltaAttention(DeltaLayer):
    """Projections, convolution, recurrence, gated norm, output.

    Decays and gates come directly, or through a bottleneck of one head's width, which every rank computes
    whole.
    """

    def __init__(self, spec: KDA, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        own, rank = made.weights(spec.weights(made.hidden_size)), self._rank
        self._decay_bound, narrow = spec.decay_bound, spec.value_head_dim
        widths = (rank.key_size, rank.value_size) if spec.direct_gates else (narrow, narrow)
        self._widths = (rank.conv_size, rank.num_value_heads, *widths)
        self.in_proj, self.conv1d = Linear(own.under("in_proj")), ConvTaps(own.under("conv1d"))
        self.f_b_proj, self.g_b_proj = (
            Linear(gates) if (gates := own.under(name)) else nn.Identity()
            for name in ("f_b_proj", "g_b_proj")
        )
        self.A_log, self._kept = own.parameter("A_log"), own.kept("A_log")
        self.dt_bias = own.parameter("dt_bias")
        self.o_norm = RMSNorm(own.under("o_norm"), spec.eps)
        self.o_proj = RowParallelLinear(own.under("o_proj"), made.parallel)

    def pack(self) -> None:
        """Keeps this rank's heads."""
        decays = self.A_log.flatten()
        self.A_log = nn.Parameter(decays if self._kept is None else decays[self._kept], requires_grad=False)

    def forward(
        self, hidden_states: torch.Tensor, rope: RopeTable | None, context: ForwardContext
    ) -> torch.Tensor:
        """Maps `[T, H]` to a new `[T, H]`; the states after the step are in the slots that it writes."""
        states = self._states(context)
        qkv, b, decay, gate = self.in_proj(hidden_states).split(self._widths, dim=1)
        qkv = states.convolve(qkv, self.conv1d)
        rows, constants = (qkv, self.f_b_proj(decay), b), (self.A_log, self.dt_bias, self._decay_bound)
        values = states.recur(kimi_delta_update, kimi_delta_extend, rows, *constants)
        gate = self.g_b_proj(gate)
        output: torch.Tensor = self.o_proj(
            sigmoid_gated_rms_norm(values, gate, self.o_norm.weight, self.o_norm.eps)
        )
        return output

    def host_weights(self, places: HostPlaces) -> _kernels.DeltaWeights | None:
        """Returns the layer for `_kernels.DecoderLayers`, see `HostMixer`."""
        qkv, b, decays, _ = self._widths
        a_log, dt_bias = self.A_log.data_ptr(), self.dt_bias.data_ptr()
        return self._delta_weights(
            places,
            DeltaProducts(self.in_proj, self.f_b_proj, self.g_b_proj, self.o_proj),
            DeltaColumns(b=qkv, a=qkv + b, gate=qkv + b + decays),
            _kernels.DecayRule(a_log, dt_bias, is_by_element=True, bound=self._decay_bound),
            self.conv1d,
            self.o_norm,
            gates_are_sigmoid=True,
        )
