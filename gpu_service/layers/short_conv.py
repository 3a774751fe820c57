"""A short convolution between two gates: the mixer of most layers of LFM2.

Source: the model of transformers 5.23 (`Lfm2ShortConv`).
"""

from __future__ import annotations

import torch

from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.linear import FusedLinear, RowParallelLinear
from gpu_service.layers.states import ConvTaps, StateLayer, own_rows
from gpu_service.ops.rope import RopeTable
from moebius.models.layers import recurrent
from moebius.models.layers.layer import Places
from moebius.models.layers.ranks import ShardRange


class ShortConv(StateLayer):
    """`out(c * conv(b * x))`, where b, c and x are projected from the hidden states.

    Every channel is a head; all that a request leaves behind are the latest
    inputs of the convolution.
    """

    checkpoint_name = "conv"
    head_vectors = ()

    def __init__(self, spec: recurrent.ShortConv, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        channels, size, dtype = self._heads, made.hidden_size, made.dtype
        # b of all channels, then c, then x.
        stored = {"in_proj": ShardRange.whole(3 * channels.total)}
        order = None if channels.is_whole else own_rows(channels, channels, channels)
        self.in_proj = FusedLinear(size, stored, bias=False, dtype=dtype, order=order)
        self.conv = ConvTaps({"": channels}, spec.conv_width, dtype=dtype)
        self.out_proj = RowParallelLinear(channels, size, bias=False, dtype=dtype, parallel=made.parallel)

    def forward(
        self, hidden_states: torch.Tensor, rope: RopeTable | None, context: ForwardContext
    ) -> torch.Tensor:
        """Maps `[T, H]` to a new `[T, H]`; the states after the step are in the slots that it writes."""
        b, c, x = self.in_proj(hidden_states).chunk(3, dim=1)
        convolved = self._states(context).convolve(b * x, self.conv, activates=False)
        output: torch.Tensor = self.out_proj(c * convolved)
        return output
