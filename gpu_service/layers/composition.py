"""What the modules of a rank's model are made with, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.layers.rank_weights import RankWeights
from moebius.models.layers.layer import Places
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.weights import Weight

T = TypeVar("T")
M = TypeVar("M", bound=Mixer)


@dataclass(frozen=True, eq=False)
class LayerParts:
    """The modules of a layer's halves; filled by `models.compose`."""

    mixers: list[nn.Module]
    ffn: nn.Module | None
    places: list[Places]  # Of what its parts keep, as `layer.places`.

    def both(self) -> tuple[nn.Module, nn.Module]:
        """Returns the mixer and the feed-forward block of a layer that has one of each."""
        assert self.ffn is not None
        (mixer,) = self.mixers
        return mixer, self.ffn

    def single(self) -> nn.Module:
        """Returns the one half of a layer that has no other."""
        (half,) = (*self.mixers, *([] if self.ffn is None else [self.ffn]))
        return half


@dataclass(frozen=True, eq=False)
class Composition:
    """Sizes of the whole model; a module divides what it is given over the ranks of `parallel`."""

    hidden_size: int
    dtype: torch.dtype
    parallel: ParallelContext = SOLO
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    vocab_size: int = 0
    max_model_len: int = 0
    _shared: dict[Any, Any] = field(default_factory=dict)

    def weights(self, declared: Iterable[Weight]) -> RankWeights:
        """Returns what this rank has of declared weights."""
        return RankWeights(declared, self.dtype, self.parallel)

    def own(self, mixer: M) -> M:
        """Returns what this rank computes of a mixer."""
        return mixer.on_rank(self.parallel.tp_rank, self.parallel.tp_size)

    def shared(self, make: Callable[..., T], *of: Any) -> T:
        """Returns what `make(*of)` returned for the first of the model's modules that asked for it."""
        key = make, of
        if key not in self._shared:
            self._shared[key] = make(*of)
        found: T = self._shared[key]
        return found
