"""Linear attention by the gated delta rule. Source: Gated DeltaNet (arXiv:2412.06464), as in Qwen3-Next."""

from __future__ import annotations

from dataclasses import replace

import torch

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.core.partition import ShardRange
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.linear import FusedLinear, RowParallelLinear, linear_attention_order
from gpu_service.layers.norm import RMSNorm
from gpu_service.layers.states import ConvTaps, StateLayer, StepSequences, own_rows
from gpu_service.ops.linear_attention import gated_delta_extend, gated_delta_update
from gpu_service.ops.norm import gated_rms_norm, sigmoid_gated_rms_norm
from gpu_service.ops.rope import RopeTable
from moebius.models.config import ModelConfig


class GatedDeltaNet(StateLayer):
    """Projection, convolution, recurrence, gated norm, output."""

    checkpoint_name = "linear_attn"
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def __init__(
        self,
        state_layer: int,
        config: ModelConfig,
        sequences: StepSequences,
        *,
        dtype: torch.dtype,
        parallel: ParallelContext = SOLO,
    ) -> None:
        super().__init__(state_layer, config, sequences, parallel)
        linear, keys, values = self._linear, self._keys, self._values
        self._widths = (2 * keys.size + values.size, values.size, self._heads.size, self._heads.size)
        parts, order = self._projections()
        self.in_proj = FusedLinear(config.hidden_size, parts, bias=False, dtype=dtype, order=order)
        channels = {"": ShardRange.whole(linear.conv_size)}
        self.conv1d = ConvTaps(channels, linear.conv_width, dtype=dtype, order=own_rows(keys, keys, values))
        self.norm = RMSNorm(linear.value_head_dim, config.rms_norm_eps, dtype=dtype)
        self.out_proj = RowParallelLinear(
            values, config.hidden_size, bias=False, dtype=dtype, parallel=parallel
        )

    def _projections(self) -> tuple[dict[str, ShardRange], list[int] | None]:
        """What the rank loads, and which rows of it, in which order, it keeps."""
        linear, own, heads = self._linear, self._key_heads, self._heads
        repeats = linear.num_value_heads // linear.num_key_heads
        if linear.interleaved:
            width = 2 * linear.key_head_dim + 2 * repeats * linear.value_head_dim
            parts = {"in_proj_qkvz": own.scaled(width), "in_proj_ba": own.scaled(2 * repeats)}
            sizes = replace(linear, num_key_heads=own.size, num_value_heads=heads.size)
            return parts, linear_attention_order(sizes)
        apart = {"in_proj_z": self._values, "in_proj_b": heads, "in_proj_a": heads}
        parts = {"in_proj_qkv": ShardRange.whole(linear.conv_size)} | apart
        if own.is_whole:
            return parts, None
        rest = ShardRange.whole(sum(shard.size for shard in apart.values()))
        return parts, own_rows(self._keys, self._keys, self._values, rest)

    def forward(
        self, hidden_states: torch.Tensor, rope: RopeTable | None, context: ForwardContext
    ) -> torch.Tensor:
        """`[T, H]` to a new `[T, H]`; the states after the step are in the slots that it writes."""
        states = self._states(context)
        qkv, gate, b, a = self.in_proj(hidden_states).split(self._widths, dim=1)
        qkv = states.convolve(qkv, self.conv1d)
        values = states.recur(gated_delta_update, gated_delta_extend, qkv, a, b, self.A_log, self.dt_bias)
        gated = sigmoid_gated_rms_norm if self._linear.sigmoid_gates else gated_rms_norm
        output: torch.Tensor = self.out_proj(gated(values, gate, self.norm.weight, self.norm.eps))
        return output
