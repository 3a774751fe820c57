"""Kimi Delta Attention, a linear attention. Source: Kimi Linear (arXiv:2510.26692)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.linear import CheckpointPart, FusedLinear, RowParallelLinear, empty_parameter
from gpu_service.layers.norm import RMSNorm
from gpu_service.layers.states import ConvTaps, StateLayer
from gpu_service.ops.kimi_delta import kimi_delta_extend, kimi_delta_update
from gpu_service.ops.norm import sigmoid_gated_rms_norm
from gpu_service.ops.rope import RopeTable
from moebius.models.layers.layer import Places
from moebius.models.layers.ranks import ShardRange
from moebius.models.layers.recurrent import KDA


class KimiDeltaAttention(StateLayer):
    """Projections, convolution, recurrence, gated norm, output.

    Decays and gates come directly, or through a bottleneck of one head's width, which every rank computes
    whole.
    """

    head_vectors = ()

    def __init__(self, spec: KDA, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        size, dtype, keys, values = made.hidden_size, made.dtype, self._keys, self._values
        self._decay_bound = spec.decay_bound
        qkv = {"q_proj": keys, "k_proj": keys, "v_proj": values}
        narrow = ShardRange.whole(spec.value_head_dim)
        gates = {"f_a_proj": narrow, "g_a_proj": narrow}
        if spec.direct_gates:
            gates = {"f_proj": keys, "g_proj": values}
        widths = [shard.size for shard in gates.values()]
        self._widths = (2 * keys.size + values.size, self._heads.size, *widths)
        self.in_proj = FusedLinear(size, qkv | {"b_proj": self._heads} | gates, bias=False, dtype=dtype)
        convolved = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}
        self.conv1d = ConvTaps(convolved, spec.conv_width, dtype=dtype)
        self.f_b_proj: nn.Module = nn.Identity()
        self.g_b_proj: nn.Module = nn.Identity()
        if not spec.direct_gates:
            self.f_b_proj = FusedLinear(narrow.size, {"f_b_proj": keys}, bias=False, dtype=dtype)
            self.g_b_proj = FusedLinear(narrow.size, {"g_b_proj": values}, bias=False, dtype=dtype)
        # As published and as trained: decays are sensitive to their last bits.
        heads = spec.num_value_heads
        shape = (1, 1, heads, 1) if spec.decay_has_axes else (heads,)
        self.A_log = empty_parameter(*shape, dtype=torch.float32)
        self.dt_bias = empty_parameter(keys.size, dtype=torch.float32)
        self.o_norm = RMSNorm(spec.value_head_dim, spec.eps, dtype=dtype)
        self.o_proj = RowParallelLinear(values, size, bias=False, dtype=dtype, parallel=made.parallel)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """Returns the parts that a rank has of this module's own parameters: those of its heads, but first
        all of A_log.
        """
        rows, *rest = self.A_log.shape
        cols = ShardRange.whole(rest[0]) if rest else None
        yield CheckpointPart("", "A_log", ShardRange.whole(rows), cols, rest=tuple(rest[1:]))
        yield CheckpointPart("", "dt_bias", self._keys, None)

    def pack(self) -> None:
        """Keeps this rank's heads."""
        self.A_log = nn.Parameter(self.A_log.flatten()[self._heads.slice].clone(), requires_grad=False)

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
