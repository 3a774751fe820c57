"""Which routed experts go onto GPUs: what the settings say, or as many as fit beside the wanted KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moebius.app.planning.expert_bytes import StoredExperts, packed_expert
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.config import MoebiusConfig
from moebius.expert_dtype import REQUANTISED
from moebius.expert_slices import rank_neurons
from moebius.placement.make import make_placement


@dataclass(frozen=True, slots=True)
class Residency:
    """Filled by the functions below."""

    # MoE layer -> ids of resident experts.
    resident: Mapping[int, tuple[int, ...]]
    num_experts: int
    # Whether nobody chose it: the settings that ask `moebius serve` for it are then in `flags`.
    is_filled: bool
    flags: str

    @property
    def by_layer(self) -> dict[int, int]:
        """MoE layer -> number of resident experts."""
        return {layer: len(experts) for layer, experts in self.resident.items()}

    @property
    def count(self) -> int:
        """Over all layers."""
        return sum(self.by_layer.values())

    @property
    def share(self) -> float:
        """Of all routed experts."""
        return self.count / max(1, self.num_experts * len(self.by_layer))

    @property
    def is_everything(self) -> bool:
        """No expert server is needed."""
        return all(count == self.num_experts for count in self.by_layer.values())


def has_placement(config: MoebiusConfig) -> bool:
    """Whether settings say what is resident."""
    placement = config.placement
    chosen = (placement.gpu_experts, placement.gpu_experts_ratio)
    return bool(placement.gpu_layers) or any(value is not None for value in chosen)


def chosen_residency(config: MoebiusConfig, geometry: MoeGeometry) -> Residency:
    """What `moebius serve` would place. Raises UserError naming a setting."""
    placed = make_placement(config.placement, geometry)
    return Residency(placed.resident, geometry.num_experts, False, "")


def filled_residency(
    config: MoebiusConfig, geometry: MoeGeometry, fits: Callable[[Residency], bool]
) -> Residency:
    """As many experts of every MoE layer as fit; none where not even one does.

    `fits` must be monotone: what fits with more experts fits with fewer.
    """
    low, high = 0, geometry.num_experts
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(_even(config, geometry, middle)) else (low, middle - 1)
    return _even(config, geometry, low)


def _even(config: MoebiusConfig, geometry: MoeGeometry, each: int) -> Residency:
    chosen = config.placement.model_copy(update={"gpu_experts": each})
    flags = f"--gpu-experts {each}" if each else ""
    return Residency(make_placement(chosen, geometry).resident, geometry.num_experts, True, flags)


def resident_bytes(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    stored: Mapping[int, StoredExperts],
    counts: Mapping[int, int],
    layers: Sequence[int],
    tp_rank: int,
    widest: str,
) -> tuple[int, int]:
    """Experts on one rank's GPU, and bytes of all of them; `layers` are the rank's MoE layers."""
    count = total = 0
    size, dtype = geometry.moe_intermediate_size, config.experts.expert_dtype
    ranks = config.parallel.tensor_parallel_size
    for layer in layers:
        if counts[layer]:
            found = stored[layer]
            begin, end = rank_neurons(size, found.group, REQUANTISED.get(dtype), tp_rank, ranks)
            packed = packed_expert(found, geometry.hidden_size, end - begin, dtype, widest)
            count, total = count + counts[layer], total + counts[layer] * packed.expert_bytes
    return count, total
