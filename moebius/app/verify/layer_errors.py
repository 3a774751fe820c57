"""One layer's experts against the reference's: their sums for the text's tokens, then each expert alone.

A sum says what a layer costs, but hides one wrong expert of many among the right ones, and blames it on
all that its tokens chose. So every expert is also asked alone, with rows of tokens that chose it; one that
no token chose gets rows of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gpu_service.experts.client import ExpertClient
from gpu_service.experts.resident.experts import ResidentExperts, Share
from gpu_service.verify.errors import relative_error
from gpu_service.verify.probe import spread
from moebius.app.verify.result import ExpertError
from moebius.app.verify.watch import Routed

# Rows that an expert is asked about alone.
ROWS_EACH = 8
# Of them in one call.
_ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class ExpertsFound:
    """Filled by `compare_experts`; None: no expert of the kind is in the layer."""

    cpu_error: float | None
    gpu_error: float | None
    experts: tuple[ExpertError, ...]


@dataclass(frozen=True)
class LayerExperts:
    """Who computes one layer: the reference, servers' experts in this process, those on the GPU."""

    layer: int
    num_experts: int
    reference: ExpertClient
    ours: ExpertClient
    resident: ResidentExperts | None

    @property
    def share(self) -> Share:
        """What of the layer is on the GPU."""
        return Share.NONE if self.resident is None else self.resident.share(self.layer)

    def cpu_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """int32 `[T, K]`, -1 where an expert on the GPU was chosen."""
        if self.share is Share.ALL:
            return torch.full_like(ids, -1)
        return (
            ids
            if self.share is Share.NONE or self.resident is None
            else self.resident.cpu_ids(self.layer, ids)
        )

    def wanted(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The reference's answer, float32 `[T, H]` on the CPU."""
        return _answer(self.reference, self.layer, rows, ids, weights)

    def on_servers(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Of our servers' experts among those chosen; as `wanted`."""
        if self.share is Share.ALL:
            return torch.zeros(rows.shape, dtype=torch.float32)
        return _answer(self.ours, self.layer, rows, self.cpu_ids(ids), weights)

    def on_device(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Of our experts on the GPU among those chosen; as `wanted`."""
        if self.resident is None or self.share is Share.NONE:
            return torch.zeros(rows.shape, dtype=torch.float32)
        return self.resident.forward(self.layer, rows, ids, weights).cpu()


def compare_experts(experts: LayerExperts, routed: Routed, wanted: torch.Tensor) -> ExpertsFound:
    """`wanted` float32 `[T, H]` is the reference's answer to `routed`; those on the GPU are told apart."""
    rows, ids, weights = routed.hidden_states, routed.topk_ids, routed.topk_weights
    cpu_error = gpu_error = None
    wanted_here = wanted
    if experts.share is not Share.NONE:
        gpu_ids = torch.where(experts.cpu_ids(ids) < 0, ids, torch.full_like(ids, -1))
        wanted_there = experts.wanted(rows, gpu_ids, weights)
        gpu_error = relative_error(experts.on_device(rows, ids, weights), wanted_there)
        wanted_here = wanted - wanted_there
    if experts.share is not Share.ALL:
        cpu_error = relative_error(experts.on_servers(rows, ids, weights), wanted_here)
    return ExpertsFound(cpu_error, gpu_error, tuple(_each_alone(experts, routed)))


def _each_alone(experts: LayerExperts, routed: Routed) -> Iterator[ExpertError]:
    """Every expert of the layer, ascending."""
    ids = routed.topk_ids.cpu()
    at_once = max(1, _ROWS_AT_ONCE // ROWS_EACH)
    for begin in range(0, experts.num_experts, at_once):
        chosen = range(begin, min(begin + at_once, experts.num_experts))
        counts = [int((ids == expert).any(1).sum()) for expert in chosen]
        tokens = [_tokens_of(ids, expert) for expert in chosen]
        rows = routed.hidden_states[torch.cat(tokens).to(routed.hidden_states.device)]
        single, weights = _alone(chosen, tokens, ids.shape[1], rows.device)
        wanted = experts.wanted(rows, single, weights)
        found = experts.on_servers(rows, single, weights) + experts.on_device(rows, single, weights)
        sizes = [len(part) for part in tokens]
        parts = zip(chosen, counts, torch.split(found, sizes), torch.split(wanted, sizes), strict=True)
        for expert, count, ours, theirs in parts:
            yield ExpertError(expert, count, relative_error(ours, theirs), gain(ours, theirs))


def _tokens_of(ids: torch.Tensor, expert: int) -> torch.Tensor:
    """Rows of tokens that chose the expert, spread over the text; of any tokens where none did."""
    own = (ids == expert).any(1).nonzero().flatten().tolist() or range(ids.shape[0])
    return torch.tensor(spread(own, ROWS_EACH))


def _alone(
    chosen: range, tokens: list[torch.Tensor], top_k: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices int32 `[T, K]` of one expert each, in whichever column, and weights float32 `[T, K]`."""
    of_row = torch.tensor([expert for expert, part in zip(chosen, tokens, strict=True) for _ in part])
    row = torch.arange(len(of_row))
    ids = torch.full((len(of_row), top_k), -1, dtype=torch.int32)
    weights = torch.zeros(len(of_row), top_k)
    ids[row, row % top_k] = of_row.int()
    weights[row, row % top_k] = 1.0
    return ids.to(device), weights.to(device)


def gain(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How much of what is wanted is found: the factor on `wanted` that comes nearest to `found`.

    1 when both are zero; infinite when only what is wanted is, or where anything is NaN.
    """
    size = float(wanted.double().square().sum())
    product = float((found.double() * wanted.double()).sum())
    if not math.isfinite(product) or not math.isfinite(size):
        return math.inf
    if size == 0.0:
        return 1.0 if not found.any() else math.inf
    return product / size


def _answer(
    client: ExpertClient, layer: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return client.collect(client.submit(layer, rows, ids, weights)).cpu()


def routing_agreement(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Share of the reference's choices int32 `[T, K]` that ours made, too, in whatever order."""
    return float((reference.unsqueeze(2) == ours.unsqueeze(1)).any(2).double().mean())
