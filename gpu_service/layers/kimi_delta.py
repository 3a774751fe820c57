"""Kimi Delta Attention, a linear attention. Source: Kimi Linear (arXiv:2510.26692)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gpu_service.engine.step import ForwardContext
from gpu_service.layers.gated_delta_net import StepSequences
from gpu_service.layers.linear import CheckpointPart, FusedLinear, RowParallelLinear, empty_parameter
from gpu_service.layers.norm import RMSNorm
from gpu_service.ops.kimi_delta import kimi_delta_extend, kimi_delta_update
from gpu_service.ops.linear_attention import causal_conv_extend, causal_conv_update
from gpu_service.ops.norm import sigmoid_gated_rms_norm
from gpu_service.ops.rope import RopeTable
from gpu_service.parallel.context import SOLO, ParallelContext
from gpu_service.parallel.partition import ShardRange, key_heads
from moebius.models.config import LinearAttentionConfig, ModelConfig


class KimiDeltaAttention(nn.Module):
    """Projections, convolution, recurrence, gated norm, output; reads and writes states instead of a cache.

    Decays and gates come directly, or through a bottleneck of one head's width, which every rank computes
    whole.
    `state_layer` counts the linear-attention layers of the pipeline stage. `config` is the whole model's; a
    rank computes its own heads, and the output projection sums over ranks.
    """

    def __init__(
        self,
        state_layer: int,
        config: ModelConfig,
        sequences: StepSequences,
        *,
        dtype: torch.dtype,
        parallel: ParallelContext = SOLO,
    ) -> None:
        super().__init__()
        linear = config.linear
        assert linear is not None, "the family's reader fills `linear`"
        self._state_layer, self._sequences, self._bound = state_layer, sequences, linear.decay_bound
        size, heads = config.hidden_size, key_heads(linear, parallel)
        keys, values = heads.scaled(linear.key_head_dim), heads.scaled(linear.value_head_dim)
        qkv = {"q_proj": keys, "k_proj": keys, "v_proj": values}
        narrow = ShardRange.whole(linear.value_head_dim)
        gates = {"f_a_proj": narrow, "g_a_proj": narrow}
        if linear.direct_gates:
            gates = {"f_proj": keys, "g_proj": values}
        widths = [shard.size for shard in gates.values()]
        self._widths = (2 * keys.size + values.size, heads.size, *widths)
        self.in_proj = FusedLinear(size, qkv | {"b_proj": heads} | gates, bias=False, dtype=dtype)
        convolved = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}
        self.conv1d = FusedTaps(convolved, linear.conv_width, dtype=dtype)
        self.f_b_proj: nn.Module = nn.Identity()
        self.g_b_proj: nn.Module = nn.Identity()
        if not linear.direct_gates:
            self.f_b_proj = FusedLinear(narrow.size, {"f_b_proj": keys}, bias=False, dtype=dtype)
            self.g_b_proj = FusedLinear(narrow.size, {"g_b_proj": values}, bias=False, dtype=dtype)
        # As published and as trained: decays are sensitive to their last bits.
        self._heads, self._keys = heads, keys
        self.A_log = empty_parameter(*_decay_shape(linear), dtype=torch.float32)
        self.dt_bias = empty_parameter(keys.size, dtype=torch.float32)
        self.o_norm = RMSNorm(linear.value_head_dim, config.rms_norm_eps, dtype=dtype)
        self.o_proj = RowParallelLinear(values, size, bias=False, dtype=dtype, parallel=parallel)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """Of this module's own parameters, a rank has those of its heads, but first all of A_log."""
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
        """`[T, H]` to a new `[T, H]`; the states after the step are in the slots that it writes."""
        qkv, b, decay, gate = self.in_proj(hidden_states).split(self._widths, dim=1)
        values = self._recur(qkv, self.f_b_proj(decay), b, context)
        gate = self.g_b_proj(gate)
        output: torch.Tensor = self.o_proj(
            sigmoid_gated_rms_norm(values, gate, self.o_norm.weight, self.o_norm.eps)
        )
        return output

    def _recur(
        self, qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Convolution and recurrence, `[T, heads, value_head_dim]`."""
        inputs, states = context.inputs, context.states
        assert states is not None, "a model with linear attention needs states"
        assert inputs.state_reads is not None
        assert inputs.state_writes is not None
        slots = inputs.state_reads, inputs.state_writes
        conv, recurrent = states.conv(self._state_layer), states.recurrent(self._state_layer)
        gates = a, b, self.A_log, self.dt_bias, self._bound
        if inputs.is_uniform_decode:
            qkv = causal_conv_update(qkv, conv, self.conv1d.taps, *slots)
            return kimi_delta_update(qkv, *gates, recurrent, *slots)
        sequences = self._sequences.of(inputs)
        qkv = causal_conv_extend(qkv, conv, self.conv1d.taps, *slots, sequences)
        return kimi_delta_extend(qkv, *gates, recurrent, *slots, sequences)


def _decay_shape(linear: LinearAttentionConfig) -> tuple[int, ...]:
    """Of A_log in the checkpoint."""
    heads = linear.num_value_heads
    return (1, 1, heads, 1) if linear.decay_has_axes else (heads,)


class FusedTaps(nn.Module):
    """Weights of a causal convolution that the checkpoint stores in several tensors."""

    def __init__(self, parts: dict[str, ShardRange], width: int, *, dtype: torch.dtype) -> None:
        """`parts`: the checkpoint's names next to this module, and a rank's channels of each."""
        super().__init__()
        self._parts, self._width = parts, width
        self.weight = empty_parameter(sum(part.size for part in parts.values()), 1, width, dtype=dtype)

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        begin, one = 0, ShardRange.whole(1)
        for sibling, channels in self._parts.items():
            yield CheckpointPart(sibling, "weight", channels, one, begin, rest=(self._width,))
            begin += channels.size

    @property
    def taps(self) -> torch.Tensor:
        """View `[channels, width]`, the newest token's last."""
        return self.weight[:, 0]
