"""One decode step that fetches: what its layers see of the fetch slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from gpu_service.experts.client import ExpertUnavailable
from gpu_service.experts.fetching.agreement import FetchAgreement
from gpu_service.experts.fetching.kernels import FetchKernels
from gpu_service.experts.fetching.slots import FetchLayer
from gpu_service.experts.resident.experts import ResidentKernels, Share
from gpu_service.experts.streaming.segments import ExpertSegments
from gpu_service.experts.streaming.step import StreamedExperts


class FetchedExperts(StreamedExperts):
    """The layers' side, which captured graphs hold: nothing in it differs from step to step."""

    is_planned = False

    def __init__(
        self,
        layers: Mapping[int, FetchLayer],
        fetching: FetchKernels,
        products: ResidentKernels,
        agreement: FetchAgreement | None = None,
    ) -> None:
        """`layers`: those with fetch slots, in the order of the model; `agreement`: of several ranks."""
        self._layers, self._fetching, self._products = layers, fetching, products
        self._first, self._agreement = next(iter(layers), -1), agreement
        # By layer its choices that are computed in fetch slots, from `cpu_ids` until `forward`.
        self._fetched: dict[int, torch.Tensor] = {}

    def share(self, layer: int) -> Share:
        return Share.SOME if layer in self._layers else Share.NONE

    def cpu_ids(self, layer: int, topk_ids: torch.Tensor) -> torch.Tensor:
        """Also begins the layer's copies: to be called before servers are asked."""
        if self._agreement is not None and layer == self._first:
            self._agreement.agree()
        found = self._layers[layer]
        served, self._fetched[layer] = self._fetching.choose(found, topk_ids)
        self._fetching.copy(found)
        return served

    def forward(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        parts: Sequence[torch.Tensor],
        topk_weights: torch.Tensor,
        partials: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        fetched, sums = self._fetched.pop(layer), list[torch.Tensor]()
        self._fetching.join()
        for ids, partial in zip(parts, partials, strict=True):
            own = fetched if len(parts) == 1 else fetched.masked_fill(ids < 0, -1)
            for slots in self._layers[layer].groups:
                partial = self._products.forward(slots, hidden_states, own, topk_weights, partial)
            assert partial is not None, "a layer has a group of parts at least"
            sums.append(partial)
        return sums


class FetchedStep(FetchedExperts):
    """The same for one step, whose copies are checked when it has ended. Made by `ExpertFetcher.begin`."""

    def __init__(
        self,
        layers: Mapping[int, FetchLayer],
        fetching: FetchKernels,
        products: ResidentKernels,
        segments: ExpertSegments | None,
        on_launched: Callable[[], None],
        agreement: FetchAgreement | None = None,
        is_any: Callable[[bool], bool] = bool,
    ) -> None:
        """`segments`: what is copied from; None: nothing is. `on_launched`: as `launched`. `is_any`: whether
        something is so on any rank; all ask at once.
        """
        super().__init__(layers, fetching, products, agreement)
        self._segments, self._on_launched, self._is_any = segments, on_launched, is_any

    def launched(self) -> None:
        self._on_launched()

    def check(self) -> None:
        problem = "" if self._segments is None else self._segments.problem()
        if self._is_any(bool(problem)):
            text = problem or "another rank's expert server has replaced experts"
            raise ExpertUnavailable(-1, f"{text} while a step fetched them")
