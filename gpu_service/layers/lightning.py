"""Lightning attention: linear attention whose heads forget at fixed rates. Source: MiniMax-01
(arXiv:2501.08313).

Its recurrence, `S_t = exp(-rate) S_{t-1} + k_t v_t^T; o_t = S_t^T q_t`, is that of Mamba-2 with steps of one
and no term that skips the state: `ops.state_space` computes it.
"""

from __future__ import annotations

import math

import structlog
import torch

from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.host_mixer import HostPlaces
from gpu_service.layers.linear import Linear, RowParallelLinear, lightning_order
from gpu_service.layers.norm import FullWidthNorm
from gpu_service.layers.states import StateLayer
from gpu_service.ops.activation import apply_gate, silu
from gpu_service.ops.host_recurrent import VALUE_MULTIPLE
from gpu_service.ops.norm import rms_norm
from gpu_service.ops.rope import RopeTable
from gpu_service.ops.state_space import state_space_extend, state_space_update
from moebius import _kernels
from moebius.checkpoint.errors import CheckpointError
from moebius.models.layers.layer import Places
from moebius.models.layers.recurrent import Lightning

# Softplus of it is 1: the bias of steps that nothing is projected for.
_UNIT_STEP = math.log(math.e - 1)
# Rates that are stored differ from computed ones by less where they were only rounded, to 16 bits or not.
_ROUNDED_TO_16_BITS, _ROUNDED = 2**-7, 1e-5

log = structlog.get_logger(__name__)
# Of the norm, whatever `rms_norm_eps` says.
_EPS = 1e-6


class LightningAttention(StateLayer):
    """Projections through SiLU, recurrence, norm over all heads, gate, output."""

    def __init__(self, spec: Lightning, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        own, rank, parallel = made.weights(spec.weights(made.hidden_size)), made.own(spec), made.parallel
        rates = decay_rates(spec.num_value_heads, spec.layer, spec.num_layers)
        self.slope_rate = own.parameter("slope_rate")
        self._rank = rank
        self._layer, self._rates = spec.layer, rates[own.rows("slope_rate").slice]
        order = lightning_order(rank.num_value_heads, spec.value_head_dim)
        self._widths, self._group = (rank.conv_size, rank.value_size), parallel.tensor_group
        self.in_proj = Linear(own.under("in_proj"), [*order, *range(len(order), sum(self._widths))])
        self.norm = FullWidthNorm(own.under("norm"), parallel.tp_size, _EPS)
        self.out_proj = RowParallelLinear(own.under("out_proj"), parallel)
        # Logarithms of rates, biases of steps and factors of what skips the state, float32 `[3, heads]`;
        # made by `pack`.
        self._scalars: torch.Tensor | None = None

    def pack(self) -> None:
        """Makes what is used but not loaded; the loader calls it once.

        Raises CheckpointError for rates below 0.
        """
        rates = self._used_rates(self.slope_rate.flatten().tolist())
        count = len(rates)
        rows = [[math.log(rate) for rate in rates], [_UNIT_STEP] * count, [0.0] * count]
        self._scalars = torch.tensor(rows, dtype=torch.float32, device=self.norm.weight.device)

    def _used_rates(self, stored: list[float]) -> list[float]:
        """Returns computed rates, unless the checkpoint has others (of another number of layers, say)."""
        if not any(stored):
            return self._rates
        if min(stored) <= 0:
            raise CheckpointError(f"layer {self._layer}: slope_rate has {min(stored)}; allowed: above 0")
        apart = max(abs(a / b - 1) for a, b in zip(stored, self._rates, strict=True))
        if apart > _ROUNDED_TO_16_BITS:
            log.warning("stored slope_rate is not the layer's: it is used", layer=self._layer, apart=apart)
            return stored
        if apart > _ROUNDED:
            log.warning(
                "stored slope_rate is rounded: computed ones are used", layer=self._layer, apart=apart
            )
        return self._rates

    def forward(
        self, hidden_states: torch.Tensor, rope: RopeTable | None, context: ForwardContext
    ) -> torch.Tensor:
        """Maps `[T, H]` to a new `[T, H]`; the states after the step are in the slots that it writes."""
        assert self._scalars is not None, "the loader calls `pack`"
        states = self._states(context)
        vkq, gate = self.in_proj(hidden_states).split(self._widths, dim=1)
        steps = hidden_states.new_zeros((hidden_states.shape[0], len(self._rates)))
        rows = silu(vkq), steps
        values = states.recur(state_space_update, state_space_extend, rows, *self._scalars).flatten(1)
        normed = self._normed(values.to(hidden_states.dtype))
        output: torch.Tensor = self.out_proj(apply_gate(normed, gate))
        return output

    def host_weights(self, places: HostPlaces) -> _kernels.LightningWeights | None:
        """Returns the layer as `_kernels.DecoderLayers` computes it, see `HostMixer`; None: its sizes or
        ranks are others.
        """
        assert self._scalars is not None, "the loader calls `pack`"
        rank, norm = self._rank, self.norm
        first, last = self.in_proj.projection, self.out_proj.projection
        assert places.states is not None, "a model with linear attention needs states"
        _, recurrent = places.states.of(self._state)
        fits = rank.value_head_dim % VALUE_MULTIPLE == 0 and norm.rows.is_whole
        if first is None or last is None or not fits:
            return None
        return _kernels.LightningWeights(
            input=first,
            output=last,
            step=_kernels.StepRule(*(row.data_ptr() for row in self._scalars)),
            norm=_kernels.NormWeights(norm.weight.data_ptr(), norm.weight.dtype == torch.bfloat16, norm.eps),
            states=recurrent.data_ptr(),
            num_heads=rank.num_value_heads,
            key_dim=rank.key_head_dim,
            value_dim=rank.value_head_dim,
        )

    def _normed(self, values: torch.Tensor) -> torch.Tensor:
        """Over the heads of all ranks."""
        norm = self.norm
        if norm.rows.is_whole:
            return rms_norm(values, norm.weight, norm.eps)
        floats = values.float()
        squares = self._group.all_reduce(floats.square().sum(dim=-1, keepdim=True))
        return norm.apply_statistics(floats, squares)


def decay_rates(num_heads: int, layer: int, num_layers: int) -> list[float]:
    """Returns the rate of each head: a power of two to start with, and less in later layers."""
    factor = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return [2.0 ** (-8 * (head + 1) / num_heads) * factor for head in range(num_heads)]
