"""Who computes an expert, in words for an error message."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moebius.checkpoint.moe_config import MoeGeometry
from moebius.checkpoint.split import equal_shares, split_bounds
from moebius.config import ExpertConfig, MoebiusConfig


def place_of(
    config: MoebiusConfig, geometry: MoeGeometry, experts: Sequence[int], on_device: Collection[int]
) -> str:
    """The device, this process, or the expert servers that hold a part of any of the experts."""
    served = [expert for expert in experts if expert not in on_device]
    places = [] if len(served) == len(experts) else ["the engine's device"]
    if served:
        places.append(_servers(config.experts, geometry, served))
    return " and ".join(places)


def shares_experts(config: ExpertConfig) -> bool:
    """Whether several servers hold a part of every expert each."""
    return config.expert_split == "tensor" and _count(config) > 1


def _count(config: ExpertConfig) -> int:
    return len(config.expert_addresses) if config.expert_transport == "grpc" else config.split_count


def _servers(config: ExpertConfig, geometry: MoeGeometry, experts: Sequence[int]) -> str:
    if config.expert_transport == "local":
        return "the engine's own process"
    count = _count(config)
    holders = list(range(count))
    if config.expert_split == "expert":
        bounds = split_bounds(geometry.num_experts, equal_shares(count, config.split_shares))
        holders = [i for i, (begin, end) in enumerate(bounds) if any(begin <= e < end for e in experts)]
    names = [f"{i} ({config.expert_addresses[i]})" if config.expert_addresses else str(i) for i in holders]
    if len(names) == 1:
        return f"expert server {names[0]}"
    return f"expert servers {', '.join(names)}, each of which holds a part"
