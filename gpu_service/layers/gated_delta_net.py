"""Linear attention by the gated delta rule. Source: Gated DeltaNet (arXiv:2412.06464), as in Qwen3-Next."""

from __future__ import annotations

from dataclasses import replace

import torch

from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.linear import FusedLinear, RowParallelLinear, linear_attention_order
from gpu_service.layers.norm import RMSNorm
from gpu_service.layers.states import ConvTaps, StateLayer, own_rows
from gpu_service.ops.linear_attention import gated_delta_extend, gated_delta_update
from gpu_service.ops.norm import gated_rms_norm, sigmoid_gated_rms_norm
from gpu_service.ops.rope import RopeTable
from moebius.models.layers import recurrent
from moebius.models.layers.layer import Places
from moebius.models.layers.ranks import ShardRange


class GatedDeltaNet(StateLayer):
    """Projection, convolution, recurrence, gated norm, output."""

    checkpoint_name = "linear_attn"
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def __init__(self, spec: recurrent.GatedDeltaNet, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        self._spec, keys, values, dtype = spec, self._keys, self._values, made.dtype
        self._widths = (2 * keys.size + values.size, values.size, self._heads.size, self._heads.size)
        parts, order = self._projections()
        self.in_proj = FusedLinear(made.hidden_size, parts, bias=False, dtype=dtype, order=order)
        channels = {"": ShardRange.whole(spec.conv_size)}
        self.conv1d = ConvTaps(channels, spec.conv_width, dtype=dtype, order=own_rows(keys, keys, values))
        self.norm = RMSNorm(spec.value_head_dim, spec.eps, dtype=dtype)
        self.out_proj = RowParallelLinear(
            values, made.hidden_size, bias=False, dtype=dtype, parallel=made.parallel
        )

    def _projections(self) -> tuple[dict[str, ShardRange], list[int] | None]:
        """Returns what the rank loads, and which rows of it, in which order, it keeps."""
        spec, own, heads = self._spec, self._key_heads, self._heads
        repeats = spec.num_value_heads // spec.num_key_heads
        if spec.interleaved:
            width = 2 * spec.key_head_dim + 2 * repeats * spec.value_head_dim
            parts = {"in_proj_qkvz": own.scaled(width), "in_proj_ba": own.scaled(2 * repeats)}
            sizes = replace(spec, num_key_heads=own.size, num_value_heads=heads.size)
            return parts, linear_attention_order(sizes)
        apart = {"in_proj_z": self._values, "in_proj_b": heads, "in_proj_a": heads}
        parts = {"in_proj_qkv": ShardRange.whole(spec.conv_size)} | apart
        if own.is_whole:
            return parts, None
        rest = ShardRange.whole(sum(shard.size for shard in apart.values()))
        return parts, own_rows(self._keys, self._keys, self._values, rest)

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
