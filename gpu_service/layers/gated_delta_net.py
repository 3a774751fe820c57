"""Linear attention by the gated delta rule. Source: Gated DeltaNet (arXiv:2412.06464), as in Qwen3-Next."""

from __future__ import annotations

import torch

from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.host_mixer import HostPlaces
from gpu_service.layers.linear import Linear, RowParallelLinear, linear_attention_order
from gpu_service.layers.norm import RMSNorm
from gpu_service.layers.states import ConvTaps, StateLayer
from gpu_service.ops.host_recurrent import VALUE_MULTIPLE
from gpu_service.ops.linear_attention import gated_delta_extend, gated_delta_update
from gpu_service.ops.norm import gated_rms_norm, sigmoid_gated_rms_norm
from gpu_service.ops.rope import RopeTable
from moebius import _kernels
from moebius.models.layers import recurrent
from moebius.models.layers.layer import Places


class GatedDeltaNet(StateLayer):
    """Projection, convolution, recurrence, gated norm, output."""

    def __init__(self, spec: recurrent.GatedDeltaNet, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        own, rank = made.weights(spec.weights(made.hidden_size)), made.own(spec)
        self._spec, self._rank, heads = spec, rank, rank.num_value_heads
        self._widths = rank.conv_size, rank.value_size, heads, heads
        order = linear_attention_order(rank) if spec.interleaved else None
        self.in_proj = Linear(own.under("in_proj"), order)
        self.conv1d = ConvTaps(own.under("conv1d"))
        self.A_log, self.dt_bias = own.parameter("A_log"), own.parameter("dt_bias")
        self.norm = RMSNorm(own.under("norm"), spec.eps)
        self.out_proj = RowParallelLinear(own.under("out_proj"), made.parallel)
        self._dtype = made.dtype
        # As `host_weights` gives them away.
        self._host_taps: tuple[torch.Tensor, torch.Tensor | None] | None = None

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

    @property
    def sight(self) -> None:
        """None: the layer keeps a state, see `HostMixer`."""
        return None

    def host_weights(self, places: HostPlaces) -> _kernels.DeltaWeights | None:
        """Returns the layer as `_kernels.DecoderLayers` computes it; None: its sizes or types are other ones.

        See `HostMixer`.
        """
        rank, projections = self._rank, (self.in_proj.projection, self.out_proj.projection)
        assert places.states is not None, "a model with linear attention needs states"
        recent, recurrent = places.states.of(self._state)
        fits = rank.value_head_dim % VALUE_MULTIPLE == 0 and self.norm.weight.dtype == self._dtype
        if projections[0] is None or projections[1] is None or not fits or recent.dtype != self._dtype:
            return None
        self._host_taps = taps, bias = self.conv1d.host_taps()
        return _kernels.DeltaWeights(
            input=projections[0],
            output=projections[1],
            taps=taps.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            width=taps.shape[0],
            a_log=self.A_log.data_ptr(),
            dt_bias=self.dt_bias.data_ptr(),
            norm=self.norm.weight.data_ptr(),
            norm_eps=self.norm.eps,
            gates_are_sigmoid=self._spec.sigmoid_gates,
            recent=recent.data_ptr(),
            states=recurrent.data_ptr(),
            num_key_heads=rank.num_key_heads,
            num_value_heads=rank.num_value_heads,
            key_dim=rank.key_head_dim,
            value_dim=rank.value_head_dim,
        )
