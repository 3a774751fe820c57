"""What a mixer of a layer says of itself so that one call computes it with its neighbours (`host_layers`)."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from gpu_service.cache.kv_cache import PagedCache
from gpu_service.cache.state_cache import StateSlots
from moebius import _kernels

# The window and the chunk of a layer that attends, see `AttentionLayer`.
Sight = tuple[int | None, int | None]
MixerWeights = (
    _kernels.AttentionWeights
    | _kernels.LatentWeights
    | _kernels.DeltaWeights
    | _kernels.ShortConvWeights
    | _kernels.StateSpaceWeights
    | _kernels.SelectiveScanWeights
    | _kernels.LightningWeights
)


class HostPlaces(NamedTuple):
    """Where the mixer of a layer finds what it reads and writes; filled by `HostRuns`."""

    cache: PagedCache
    states: StateSlots | None
    # Indices of the rotary table and of the layer's sight among those of a step; None: it has none.
    rotation: int | None
    sight: int


@runtime_checkable
class HostMixer(Protocol):
    """A mixer that may be computed so."""

    @property
    def sight(self) -> Sight | None:
        """What the layer's rows see; None: the layer keeps a state of each request instead."""

    def host_weights(self, places: HostPlaces) -> MixerWeights | None:
        """Returns the mixer as `_kernels.DecoderLayers` computes it; None: there is more to do than that."""
