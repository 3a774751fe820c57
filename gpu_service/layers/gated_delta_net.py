"""Linear attention by the gated delta rule. Source: Gated DeltaNet (arXiv:2412.06464), as in Qwen3-Next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from gpu_service.cache.state_cache import StateCache
from gpu_service.engine.step import ForwardContext, ForwardInputs
from gpu_service.layers.linear import (
    CheckpointPart,
    FusedLinear,
    RowParallelLinear,
    channels_of,
    empty_parameter,
    linear_attention_order,
)
from gpu_service.layers.norm import RMSNorm
from gpu_service.ops.linear_attention import (
    Sequences,
    causal_conv_extend,
    causal_conv_update,
    gated_delta_extend,
    gated_delta_update,
    make_sequences,
)
from gpu_service.ops.norm import gated_rms_norm
from gpu_service.ops.rope import RopeTable
from gpu_service.parallel.context import SOLO, ParallelContext
from gpu_service.parallel.partition import ShardRange, key_heads, own_heads
from moebius.models.config import LinearAttentionConfig, ModelConfig


class StepSequences:
    """Shared by the layers of a model, which all ask about the same step."""

    def __init__(self) -> None:
        self._latest: tuple[ForwardInputs, Sequences] | None = None

    def of(self, inputs: ForwardInputs) -> Sequences:
        """The requests of a step, in order; found by the first layer that asks and kept for the others."""
        if self._latest is None or self._latest[0] is not inputs:
            self._latest = inputs, make_sequences(inputs.query_start_loc, inputs.query_start_loc_tensor)
        return self._latest[1]


class Projected(NamedTuple):
    """One GEMM's columns, views of it; T = tokens, H = value heads."""

    qkv: torch.Tensor  # [T, conv_size]
    gate: torch.Tensor  # [T, value_size]
    b: torch.Tensor  # [T, H]
    a: torch.Tensor  # [T, H]


class GatedDeltaNet(nn.Module):
    """Projection, convolution, recurrence, gated norm, output; reads and writes states instead of a cache.

    `state_layer` counts the linear-attention layers of the pipeline stage.
    `config` is the whole model's; a rank computes its own heads, and the output projection sums over ranks.
    """

    checkpoint_name = "linear_attn"

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
        whole = config.linear
        assert whole is not None, "the family's reader fills `linear`"
        self._sizes = own = own_heads(whole, parallel)
        self._state_layer, self._sequences = state_layer, sequences
        keys = key_heads(whole, parallel)
        self._heads = keys.scaled(whole.num_value_heads // whole.num_key_heads)
        values = self._heads.scaled(whole.value_head_dim)
        parts, order = _projections(whole, keys)
        self.in_proj = FusedLinear(config.hidden_size, parts, bias=False, dtype=dtype, order=order)
        self.conv1d = ConvWeight(whole, keys, dtype=dtype)
        # As published and as trained: decays are sensitive to their last bits.
        self.A_log = empty_parameter(self._heads.size, dtype=torch.float32)
        self.dt_bias = empty_parameter(self._heads.size, dtype=torch.float32)
        self.norm = RMSNorm(own.value_head_dim, config.rms_norm_eps, dtype=dtype)
        self.out_proj = RowParallelLinear(
            values, config.hidden_size, bias=False, dtype=dtype, parallel=parallel
        )

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """Of the parameters that are this module's own, a rank has those of its heads."""
        for name in ("A_log", "dt_bias"):
            yield CheckpointPart("", name, self._heads, None)

    def forward(
        self, hidden_states: torch.Tensor, rope: RopeTable | None, context: ForwardContext
    ) -> torch.Tensor:
        """`[T, H]` to a new `[T, H]`; the states after the step are in the slots that it writes."""
        inputs, states = context.inputs, context.states
        assert states is not None, "a model with linear attention needs states"
        sizes = (self._sizes.conv_size, self._sizes.value_size, *(2 * [self._sizes.num_value_heads]))
        projected = Projected(*self.in_proj(hidden_states).split(sizes, dim=1))
        assert inputs.state_reads is not None
        assert inputs.state_writes is not None
        values = self._recur(projected, states, inputs, (inputs.state_reads, inputs.state_writes))
        output: torch.Tensor = self.out_proj(
            gated_rms_norm(values, projected.gate, self.norm.weight, self.norm.eps)
        )
        return output

    def _recur(
        self,
        projected: Projected,
        states: StateCache,
        inputs: ForwardInputs,
        slots: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Convolution and recurrence, `[T, num_value_heads, value_head_dim]`; slots: read, and written."""
        conv, recurrent = states.conv(self._state_layer), states.recurrent(self._state_layer)
        taps, gates = self.conv1d.taps, (projected.a, projected.b, self.A_log, self.dt_bias)
        if inputs.is_uniform_decode:
            qkv = causal_conv_update(projected.qkv, conv, taps, *slots)
            return gated_delta_update(qkv, *gates, recurrent, *slots)
        sequences = self._sequences.of(inputs)
        qkv = causal_conv_extend(projected.qkv, conv, taps, *slots, sequences)
        return gated_delta_extend(qkv, *gates, recurrent, *slots, sequences)


class ConvWeight(nn.Module):
    """Weights of a causal convolution; loaded whole, because a rank's channels do not lie together."""

    def __init__(self, linear: LinearAttentionConfig, keys: ShardRange, *, dtype: torch.dtype) -> None:
        """`keys`: the rank's key heads, whose channels `pack` keeps."""
        super().__init__()
        self.weight = empty_parameter(linear.conv_size, 1, linear.conv_width, dtype=dtype)
        self._channels = channels_of(linear, keys)

    def pack(self) -> None:
        """Keeps this rank's channels."""
        self.weight = nn.Parameter(self.weight[self._channels], requires_grad=False)

    @property
    def taps(self) -> torch.Tensor:
        """View `[channels, width]`, the newest token's last."""
        return self.weight[:, 0]


def _projections(
    linear: LinearAttentionConfig, keys: ShardRange
) -> tuple[dict[str, ShardRange], list[int] | None]:
    """What a rank with these key heads loads, and which rows of it, in which order, it keeps."""
    repeats = linear.num_value_heads // linear.num_key_heads
    if linear.interleaved:
        own = replace(linear, num_key_heads=keys.size, num_value_heads=keys.size * repeats)
        width = 2 * linear.key_head_dim + 2 * repeats * linear.value_head_dim
        parts = {"in_proj_qkvz": keys.scaled(width), "in_proj_ba": keys.scaled(2 * repeats)}
        return parts, linear_attention_order(own)
    heads = keys.scaled(repeats)
    apart = {"in_proj_z": heads.scaled(linear.value_head_dim), "in_proj_b": heads, "in_proj_a": heads}
    parts = {"in_proj_qkv": ShardRange.whole(linear.conv_size)} | apart
    if keys.is_whole:
        return parts, None
    rest = range(linear.conv_size, linear.conv_size + sum(shard.size for shard in apart.values()))
    return parts, [*channels_of(linear, keys), *rest]
