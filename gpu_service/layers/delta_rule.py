"""What layers with a delta rule share (`gated_delta_net`, `kimi_delta`): weights for a call on a CPU."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from gpu_service.layers.composition import Composition
from gpu_service.layers.host_mixer import HostPlaces
from gpu_service.layers.linear import Linear, Projection
from gpu_service.layers.norm import RMSNorm
from gpu_service.layers.states import ConvTaps, StateLayer
from gpu_service.ops.host_recurrent import VALUE_MULTIPLE
from moebius import _kernels
from moebius.models.layers.layer import Places
from moebius.models.layers.recurrent import Recurrent


class DeltaProducts(NamedTuple):
    """The products of a layer; an `nn.Identity` where columns of the first one are used as they are."""

    first: Linear  # Queries, keys and values of all heads come first.
    decays: nn.Module
    gates: nn.Module
    last: Linear


class DeltaColumns(NamedTuple):
    """Where the first product's columns begin that the rule and the gates are made of."""

    b: int
    a: int
    gate: int


class DeltaLayer(StateLayer):
    """Base of these layers."""

    def __init__(self, spec: Recurrent, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        self._rank, self._dtype = made.own(spec), made.dtype

    def _delta_weights(
        self,
        places: HostPlaces,
        products: DeltaProducts,
        columns: DeltaColumns,
        decay: _kernels.DecayRule,
        conv: ConvTaps,
        norm: RMSNorm,
        *,
        gates_are_sigmoid: bool,
    ) -> _kernels.DeltaWeights | None:
        """Returns the layer as `_kernels.DecoderLayers` computes it; None: its sizes or types are others."""
        rank = self._rank
        assert places.states is not None, "a model with linear attention needs states"
        recent, recurrent = places.states.of(self._state)
        fits = rank.value_head_dim % VALUE_MULTIPLE == 0 and norm.weight.dtype == self._dtype
        first, last = products.first.projection, products.last.projection
        between = [_projection(one) for one in (products.decays, products.gates) if isinstance(one, Linear)]
        if first is None or last is None or None in between or not fits or recent.dtype != self._dtype:
            return None
        return _kernels.DeltaWeights(
            input=first,
            decays=_projection(products.decays),
            gates=_projection(products.gates),
            output=last,
            b_column=columns.b,
            a_column=columns.a,
            gate_column=columns.gate,
            **conv.host_taps(),
            decay=decay,
            norm=norm.weight.data_ptr(),
            norm_eps=norm.eps,
            gates_are_sigmoid=gates_are_sigmoid,
            recent=recent.data_ptr(),
            states=recurrent.data_ptr(),
            num_key_heads=rank.num_key_heads,
            num_value_heads=rank.num_value_heads,
            key_dim=rank.key_head_dim,
            value_dim=rank.value_head_dim,
        )


def _projection(product: nn.Module) -> Projection | None:
    return product.projection if isinstance(product, Linear) else None
