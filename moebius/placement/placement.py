"""Which routed experts are on the GPU at start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moebius.checkpoint.moe_config import MoeGeometry


@dataclass(frozen=True)
class Placement:
    """Filled by `make_placement`; the same on every rank."""

    num_experts: int
    # Resident expert ids, ascending, of every MoE layer of the model; layers without any have an empty tuple.
    resident: Mapping[int, tuple[int, ...]]

    @staticmethod
    def of(geometry: MoeGeometry, pairs: Iterable[tuple[int, int]]) -> Placement:
        """Of (layer, expert) pairs. Raises ValueError for a pair that the model lacks or that comes twice."""
        chosen: dict[int, set[int]] = {layer: set() for layer in geometry.moe_layers}
        for layer, expert in pairs:
            if layer not in chosen or not 0 <= expert < geometry.num_experts:
                raise ValueError(f"layer {layer} of this model has no expert {expert}")
            if expert in chosen[layer]:
                raise ValueError(f"expert {expert} of layer {layer} is placed twice")
            chosen[layer].add(expert)
        resident = {layer: tuple(sorted(experts)) for layer, experts in chosen.items()}
        return Placement(geometry.num_experts, resident)

    @property
    def count(self) -> int:
        """Resident experts over all layers."""
        return sum(map(len, self.resident.values()))

    @property
    def covers_everything(self) -> bool:
        """Whether no layer needs an expert server."""
        return all(len(experts) == self.num_experts for experts in self.resident.values())

    def is_whole(self, layer: int) -> bool:
        """Whether all experts of the layer are resident."""
        return len(self.resident[layer]) == self.num_experts
