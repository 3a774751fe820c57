"""Mamba-2, a selective state space. Source: arXiv:2405.21060, as in Granite 4."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gpu_service.engine.step import ForwardContext
from gpu_service.layers.gated_delta_net import StepSequences
from gpu_service.layers.linear import CheckpointPart, FusedLinear, RowParallelLinear, empty_parameter
from gpu_service.ops.linear_attention import causal_conv_extend, causal_conv_update
from gpu_service.ops.norm import gated_group_rms_norm
from gpu_service.ops.rope import RopeTable
from gpu_service.ops.state_space import state_space_extend, state_space_update
from gpu_service.parallel.context import SOLO, ParallelContext
from gpu_service.parallel.partition import ShardRange, key_heads, own_heads
from moebius.models.config import LinearAttentionConfig, ModelConfig


class Mamba2(nn.Module):
    """Projection, convolution, recurrence, norm of the gated outputs, projection; reads and writes states.

    Of a `LinearAttentionConfig`, key heads are the groups of B and C, and value heads the heads.
    `state_layer` counts the linear-attention layers of the pipeline stage. `config` is the whole model's; a
    rank computes its own groups, and the output projection sums over ranks.
    """

    checkpoint_name = "mamba"

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
        self._sizes, groups = own_heads(whole, parallel), key_heads(whole, parallel)
        self._state_layer, self._sequences = state_layer, sequences
        self._heads = groups.scaled(whole.num_value_heads // whole.num_key_heads)
        values, channels = self._heads.scaled(whole.value_head_dim), channels_of(whole, groups)
        begin, end = whole.value_size, whole.value_size + whole.conv_size
        rows = [*values.indices, *(begin + channel for channel in channels)]
        rows += [end + head for head in self._heads.indices]
        stored = {"in_proj": ShardRange.whole(end + whole.num_value_heads)}
        order = None if groups.is_whole else rows
        self.in_proj = FusedLinear(config.hidden_size, stored, bias=False, dtype=dtype, order=order)
        self.conv1d = BiasedTaps(whole, channels, dtype=dtype)
        # As trained: decays are sensitive to their last bits.
        self.A_log = empty_parameter(self._heads.size, dtype=torch.float32)
        self.D = empty_parameter(self._heads.size, dtype=torch.float32)
        self.dt_bias = empty_parameter(self._heads.size, dtype=torch.float32)
        self.norm = GatedGroupNorm(values, groups.size, config.rms_norm_eps, dtype=dtype)
        self.out_proj = RowParallelLinear(
            values, config.hidden_size, bias=False, dtype=dtype, parallel=parallel
        )

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        """Of the parameters that are this module's own, a rank has those of its heads."""
        for name in ("A_log", "D", "dt_bias"):
            yield CheckpointPart("", name, self._heads, None)

    def forward(
        self, hidden_states: torch.Tensor, rope: RopeTable | None, context: ForwardContext
    ) -> torch.Tensor:
        """`[T, H]` to a new `[T, H]`; the states after the step are in the slots that it writes."""
        inputs, states, sizes = context.inputs, context.states, self._sizes
        assert states is not None, "a model with linear attention needs states"
        assert inputs.state_reads is not None
        assert inputs.state_writes is not None
        slots = inputs.state_reads, inputs.state_writes
        widths = (sizes.value_size, sizes.conv_size, sizes.num_value_heads)
        gate, xbc, dt = self.in_proj(hidden_states).split(widths, dim=1)
        conv, recurrent = states.conv(self._state_layer), states.recurrent(self._state_layer)
        taps, bias, scalars = self.conv1d.taps, self.conv1d.bias, (self.A_log, self.dt_bias, self.D)
        if inputs.is_uniform_decode:
            xbc = causal_conv_update(xbc, conv, taps, *slots, bias)
            values = state_space_update(xbc, dt, *scalars, recurrent, *slots)
        else:
            sequences = self._sequences.of(inputs)
            xbc = causal_conv_extend(xbc, conv, taps, *slots, sequences, bias)
            values = state_space_extend(xbc, dt, *scalars, recurrent, *slots, sequences)
        norm = self.norm
        normed = gated_group_rms_norm(values.flatten(1), gate, norm.weight, norm.num_groups, norm.eps)
        output: torch.Tensor = self.out_proj(normed)
        return output


class BiasedTaps(nn.Module):
    """Weights and bias of a causal convolution; loaded whole: a rank's channels do not lie together."""

    def __init__(self, linear: LinearAttentionConfig, channels: list[int], *, dtype: torch.dtype) -> None:
        """`channels`: the rank's, which `pack` keeps."""
        super().__init__()
        self.weight = empty_parameter(linear.conv_size, 1, linear.conv_width, dtype=dtype)
        self.bias = empty_parameter(linear.conv_size, dtype=dtype)
        self._channels = channels

    def pack(self) -> None:
        """Keeps this rank's channels."""
        for name, rows in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(rows[self._channels], requires_grad=False))

    @property
    def taps(self) -> torch.Tensor:
        """View `[channels, width]`, the newest token's last."""
        return self.weight[:, 0]


class GatedGroupNorm(nn.Module):
    """The weight of `ops.norm.gated_group_rms_norm`; a rank has whole groups."""

    def __init__(self, channels: ShardRange, num_groups: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(channels.size, dtype=dtype)
        self.num_groups, self.eps = num_groups, eps
        self._channels = channels

    def checkpoint_parts(self) -> Iterator[CheckpointPart]:
        yield CheckpointPart("", "weight", self._channels, None)


def channels_of(linear: LinearAttentionConfig, groups: ShardRange) -> list[int]:
    """Of x of all heads, B and C of all groups, in this order, what belongs to some groups."""
    values = groups.scaled(linear.num_value_heads // linear.num_key_heads * linear.value_head_dim)
    at_b, at_c = linear.value_size, linear.value_size + linear.key_size
    own = groups.scaled(linear.key_head_dim).indices
    return [*values.indices, *(at_b + index for index in own), *(at_c + index for index in own)]
