"""One layer's experts against the reference's, given the same rows and choices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_service.experts.client import ExpertClient
from gpu_service.experts.resident.experts import ResidentExperts, Share
from gpu_service.verify.errors import relative_error
from moebius.app.verify.watch import Routed


@dataclass(frozen=True)
class ExpertsFound:
    """Filled by `compare_experts`; None: no expert of the kind is in the layer."""

    cpu_error: float | None
    gpu_error: float | None
    worst_expert: int
    worst_expert_error: float


def compare_experts(
    layer: int,
    routed: Routed,
    wanted: torch.Tensor,
    reference: ExpertClient,
    ours: ExpertClient,
    resident: ResidentExperts | None,
) -> ExpertsFound:
    """`wanted` float32 `[T, H]` is the reference's answer to `routed`; those on the GPU are told apart."""
    rows, ids, weights = routed.hidden_states, routed.topk_ids, routed.topk_weights
    share = Share.NONE if resident is None else resident.share(layer)
    cpu_ids, on_device, gpu_error = ids, torch.zeros_like(wanted), None
    if resident is not None and share is not Share.NONE:
        cpu_ids = torch.full_like(ids, -1) if share is Share.ALL else resident.cpu_ids(layer, ids)
        gpu_ids = torch.where(cpu_ids < 0, ids, torch.full_like(ids, -1))
        wanted_there = _answer(reference, layer, rows, gpu_ids, weights)
        on_device = resident.forward(layer, rows, ids, weights).cpu()
        gpu_error = relative_error(on_device, wanted_there)
        wanted_here = wanted - wanted_there
    else:
        wanted_here = wanted
    cpu_error, found = None, on_device
    if share is not Share.ALL:
        here = _answer(ours, layer, rows, cpu_ids, weights)
        cpu_error = relative_error(here, wanted_here)
        found = found + here
    worst, error = worst_expert(found, wanted, ids.cpu())
    return ExpertsFound(cpu_error, gpu_error, worst, error)


def _answer(
    client: ExpertClient, layer: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return client.collect(client.submit(layer, rows, ids, weights)).cpu()


def worst_expert(found: torch.Tensor, wanted: torch.Tensor, ids: torch.Tensor) -> tuple[int, float]:
    """The expert whose tokens' sums are farthest off. A wrong expert is chosen by all tokens that are off."""
    errors = (found.double() - wanted.double()).square().sum(1)
    sizes = wanted.double().square().sum(1)
    chosen, rows = (
        ids.clamp(min=0).long().flatten(),
        torch.arange(ids.shape[0]).repeat_interleave(ids.shape[1]),
    )
    count = int(chosen.max()) + 1
    totals = [
        torch.zeros(count, dtype=torch.float64).index_add_(0, chosen, part[rows]) for part in (errors, sizes)
    ]
    relative = (totals[0] / totals[1].clamp(min=1e-300)).sqrt()
    relative[totals[1] == 0] = 0.0
    worst = int(relative.nan_to_num(nan=torch.inf).argmax())
    return worst, float(relative[worst])


def routing_agreement(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Share of the reference's choices int32 `[T, K]` that ours made, too, in whatever order."""
    return float((reference.unsqueeze(2) == ours.unsqueeze(1)).any(2).double().mean())
