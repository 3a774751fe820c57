"""Linear attention by the gated delta rule. Source: Gated DeltaNet (arXiv:2412.06464), as in Qwen3-Next."""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.delta_rule import DeltaColumns, DeltaLayer, DeltaProducts
from gpu_service.layers.host_mixer import HostPlaces
from gpu_service.layers.linear import Linear, RowParallelLinear, linear_attention_order
from gpu_service.layers.norm import RMSNorm
from gpu_service.layers.states import ConvTaps
from gpu_service.ops.linear_attention import gated_delta_extend, gated_delta_update
from gpu_service.ops.norm import gated_rms_norm, sigmoid_gated_rms_norm
from gpu_service.ops.rope import RopeTable
from moebius import _kernels
from moebius.models.layers import recurrent
from moebius.models.layers.layer import Places


class GatedDeltaNet(DeltaLayer):
    """Projection, convolution, recurrence, gated norm, output."""

    def __init__(self, spec: recurrent.GatedDeltaNet, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        own, rank = made.weights(spec.weights(made.hidden_size)), self._rank
        self._spec, heads = spec, rank.num_value_heads
        self._widths = rank.conv_size, rank.value_size, heads, heads
        order = linear_attention_order(made.own(spec)) if spec.interleaved else None
        self.in_proj = Linear(own.under("in_proj"), order)
        self.conv1d = ConvTaps(own.under("conv1d"))
        self.A_log, self.dt_bias = own.parameter("A_log"), own.parameter("dt_bias")
        self.norm = RMSNorm(own.under("norm"), spec.eps)
        self.out_proj = RowParallelLinear(own.under("out_proj"), made.parallel)

    def forward(
        self, hidden_states: torch.Tensor, rope: RopeTable | None, context: ForwardContext
    ) -> torch.Tensor:
        """Maps `[T, H]` to a new `[T, H]`; the states after the step are in the slots that it writes."""
        states = self._states(context)
        qkv, gate, b, a = self.in_proj(hidden_states).split(self._widths, dim=1)
        qkv = states.convolve(qkv, self.conv1d)
        values = states.recur(gated_delta_update, gated_delta_extend, (qkv, a, b), self.A_log, self.dt_bias)
        gated = sigmoid_gated_rms_norm if self._spec.sigmoid_gates else gated_rms_norm
        output: torch.Tensor = self.out_proj(gated(values, gate, self.norm.weight, self.norm.eps))
        return output

    def host_weights(self, places: HostPlaces) -> _kernels.DeltaWeights | None:
        """Returns the layer for `_kernels.DecoderLayers`, see `HostMixer`."""
        rank, none = self._rank, nn.Identity()
        b = rank.conv_size + rank.value_size
        return self._delta_weights(
            places,
            DeltaProducts(self.in_proj, none, none, self.out_proj),
            DeltaColumns(b=b, a=b + rank.num_value_heads, gate=rank.conv_size),
            _kernels.DecayRule(self.A_log.data_ptr(), self.dt_bias.data_ptr()),
            self.conv1d,
            self.norm,
            gates_are_sigmoid=self._spec.sigmoid_gates,
        )
