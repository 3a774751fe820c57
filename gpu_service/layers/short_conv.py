"""A short convolution between two gates: the mixer of most layers of LFM2.

Source: the model of transformers 5.23 (`Lfm2ShortConv`).
"""

from __future__ import annotations

import torch

from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.host_mixer import HostPlaces
from gpu_service.layers.linear import Linear, RowParallelLinear
from gpu_service.layers.states import ConvTaps, StateLayer
from gpu_service.ops.rope import RopeTable
from moebius import _kernels
from moebius.models.layers import recurrent
from moebius.models.layers.layer import Places


class ShortConv(StateLayer):
    """`out(c * conv(b * x))`, where b, c and x are projected from the hidden states.

    Every channel is a head; all that a request leaves behind are the latest
    inputs of the convolution.
    """

    def __init__(self, spec: recurrent.ShortConv, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        own = made.weights(spec.weights(made.hidden_size))
        self.in_proj, self.conv = Linear(own.under("in_proj")), ConvTaps(own.under("conv"))
        self.out_proj = RowParallelLinear(own.under("out_proj"), made.parallel)
        self._dtype = made.dtype

    def forward(
        self, hidden_states: torch.Tensor, rope: RopeTable | None, context: ForwardContext
    ) -> torch.Tensor:
        """Maps `[T, H]` to a new `[T, H]`; the states after the step are in the slots that it writes."""
        b, c, x = self.in_proj(hidden_states).chunk(3, dim=1)
        convolved = self._states(context).convolve(b * x, self.conv, activates=False)
        output: torch.Tensor = self.out_proj(c * convolved)
        return output

    def host_weights(self, places: HostPlaces) -> _kernels.ShortConvWeights | None:
        """Returns the layer as `_kernels.DecoderLayers` computes it, see `HostMixer`; None: its weights or
        types are others.
        """
        first, last = self.in_proj.projection, self.out_proj.projection
        assert places.states is not None, "a model with short convolutions needs states"
        recent = places.states.of(self._state)[0]
        if first is None or last is None or recent.dtype != self._dtype:
            return None
        return _kernels.ShortConvWeights(
            input=first,
            output=last,
            **self.conv.host_taps(),
            recent=recent.data_ptr(),
            channels=recent.shape[-1],
        )
