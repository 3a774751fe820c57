"""What layers share that read and write a state of each request instead of a cache of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn

from gpu_service.core.step import DepthRows, ForwardInputs
from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.rank_weights import RankWeights
from gpu_service.ops.linear_attention import (
    Sequences,
    causal_conv_extend,
    causal_conv_update,
    make_sequences,
)
from moebius.models.layers.layer import Places
from moebius.models.layers.recurrent import Recurrent


class StepSequences:
    """Shared by the layers of a model, which all ask about the same step."""

    def __init__(self) -> None:
        self._latest: tuple[ForwardInputs, Sequences] | None = None

    def of(self, inputs: ForwardInputs) -> Sequences:
        """Returns the requests of a step, in order; found by the first layer that asks and kept for the
        others.
        """
        if self._latest is None or self._latest[0] is not inputs:
            self._latest = inputs, make_sequences(inputs.query_start_loc, inputs.query_start_loc_tensor)
        return self._latest[1]


class HostTaps(TypedDict):
    """Arguments of a mixer's weights for `_kernels.DecoderLayers`; addresses are 0 where there is none."""

    taps: int
    bias: int
    width: int


class ConvTaps(nn.Module):
    """Weights of a causal convolution, and its bias where it has one."""

    def __init__(self, own: RankWeights) -> None:
        super().__init__()
        self.weight, self.bias, self._kept = own.parameter("weight"), own.optional("bias"), own.kept("weight")
        # As `host_taps` gives them away: kept for as long as a call may read them.
        self._host: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def pack(self) -> None:
        """Keeps this rank's channels."""
        if self._kept is not None:
            for name, rows in list(self.named_parameters()):
                setattr(self, name, nn.Parameter(rows[self._kept], requires_grad=False))

    def host_taps(self) -> HostTaps:
        """Returns taps float32 `[width, channels]` and the bias float32 `[channels]`, if there is one, as
        `_kernels.DecoderLayers` reads them.
        """
        bias = None if self.bias is None else self.bias.float().contiguous()
        self._host = taps, bias = self.taps.t().float().contiguous(), bias
        return {
            "taps": taps.data_ptr(),
            "bias": 0 if bias is None else bias.data_ptr(),
            "width": taps.shape[0],
        }

    @property
    def taps(self) -> torch.Tensor:
        """View `[channels, width]`, the newest token's last."""
        return self.weight[:, 0]


class LayerStates(NamedTuple):
    """What a layer reads and writes in a step."""

    recent: torch.Tensor  # [slots, width - 1, channels], inputs of the convolution
    recurrent: torch.Tensor  # float32 [slots, heads, key_head_dim, value_head_dim]
    slots: tuple[torch.Tensor, torch.Tensor]  # int64 [R], before the step and after it
    sequences: Sequences | None  # None: one token of each request
    depths: Sequence[DepthRows] = ()  # As in `ForwardInputs`.

    def convolve(self, rows: torch.Tensor, conv: ConvTaps, *, activates: bool = True) -> torch.Tensor:
        """`[T, channels]` to the same; leaves the latest inputs for the next step. `activates`: by SiLU."""
        if self.depths:
            return self._by_depth(
                lambda own, reads, writes: causal_conv_update(
                    own, self.recent, conv.taps, reads, writes, conv.bias, activates
                ),
                rows,
            )
        own = rows, self.recent, conv.taps, *self.slots
        if self.sequences is None:
            return causal_conv_update(*own, conv.bias, activates)
        return causal_conv_extend(*own, self.sequences, conv.bias, activates)

    def recur(
        self,
        update: Callable[..., torch.Tensor],
        extend: Callable[..., torch.Tensor],
        rows: Sequence[torch.Tensor],
        *constants: Any,
    ) -> torch.Tensor:
        """By either op of a recurrence, both of which begin with the arguments `rows`, a row for each token,
        and `constants`."""
        if self.depths:
            return self._by_depth(
                lambda *own: update(*own[:-2], *constants, self.recurrent, *own[-2:]), *rows
            )
        own = *rows, *constants, self.recurrent, *self.slots
        return update(*own) if self.sequences is None else extend(*own, self.sequences)

    def _by_depth(self, update: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
        """What `update` of rows, and of slots to read and to write, says of one depth after the other."""
        parts = [
            (depth.index, update(*(part[depth.index] for part in (*rows, *self.slots))))
            for depth in self.depths
        ]
        output = parts[0][1].new_empty((rows[0].shape[0], *parts[0][1].shape[1:]))
        for index, part in parts:
            output[index] = part
        return output


class StateLayer(nn.Module):
    """Base of these layers: a rank computes its own heads, and the output projection sums over ranks."""

    def __init__(self, spec: Recurrent, places: Places, made: Composition) -> None:
        super().__init__()
        assert places.state is not None
        self._state, self._sequences = places.state, made.shared(StepSequences)

    @property
    def sight(self) -> None:
        """None: the layer keeps a state, see `HostMixer`."""
        return None

    def _states(self, context: ForwardContext) -> LayerStates:
        inputs, states = context.inputs, context.states
        assert states is not None, "a model with linear attention needs states"
        assert inputs.state_reads is not None
        assert inputs.state_writes is not None
        recent, recurrent = states.of(self._state)
        return LayerStates(
            recent,
            recurrent,
            (inputs.state_reads, inputs.state_writes),
            None if inputs.is_uniform_decode else self._sequences.of(inputs),
            inputs.depths,
        )
