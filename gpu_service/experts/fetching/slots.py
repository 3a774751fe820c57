"""Fetch slots: a small cache of experts for each layer, whose content kernels of the steps themselves decide.

The host knows the addresses that experts are copied from and what computing and copying cost. Which expert is
in which slot only the device knows: it changes within captured steps.

Tensor-parallel ranks have slots for other experts each, whole ones. All decide about all of them, each on its
own and alike (`agreement.py`): place p of a layer is slot p // ranks of rank p % ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gpu_service.experts.resident.experts import LayerSlots, make_slots
from gpu_service.experts.resident.panels import LayerFormat
from gpu_service.experts.streaming.plan import StoredExperts

# Columns of `FetchState.counters`.
COPIED, IN_SLOTS, LEFT = range(3)
# Columns of `FetchState.prices`.
SERVER_SECONDS, LINK_SECONDS = range(2)


@dataclass(frozen=True, eq=False)
class FetchLayer:
    """One layer's fetch slots and what the kernels know of it; views of `FetchState`. E experts, S slots."""

    # By group of parts: an expert that servers divide by channels has a part in each. All share one map.
    groups: tuple[LayerSlots, ...]
    # int64 [groups, E]: where the host has the expert; 0: it must not be copied.
    addresses: torch.Tensor
    # float32 [2]: servers' seconds for a (row, expert) pair, and the link's for an expert; zeros: nothing is
    # worth a copy.
    prices: torch.Tensor
    # float32 [E]: decayed sum of choices.
    scores: torch.Tensor
    # int32 [1 + 2 S]: how many experts the step copies to this rank, then each one's number and slot.
    coming: torch.Tensor
    # int64 [3], since the start, of all ranks: experts copied, pairs computed in slots, pairs left to
    # servers.
    counters: torch.Tensor
    # int32 [E]: the expert's place among all ranks' slots; -1: none. Of one rank the map of its slots itself.
    places: torch.Tensor
    rank: int = 0
    num_ranks: int = 1

    @property
    def count(self) -> int:
        """Slots of this rank."""
        return self.groups[0].count

    @property
    def num_places(self) -> int:
        """Slots of all ranks."""
        return self.count * self.num_ranks

    @property
    def num_experts(self) -> int:
        """The number of experts of the layer."""
        return self.scores.shape[0]

    @property
    def slot_of_expert(self) -> torch.Tensor:
        """int32 `[E]` on the device; -1: the expert is in no fetch slot of this rank."""
        return self.groups[0].slot_of_expert


@dataclass(frozen=True, eq=False)
class FetchState:
    """All layers' memory on the device, made by `make_state`; captured graphs read and write it in place."""

    layers: Mapping[int, FetchLayer]
    maps: torch.Tensor  # int32 [layers, E]
    places: torch.Tensor  # int32 [layers, E]; with one rank the same memory as `maps`
    addresses: torch.Tensor  # int64 [layers, groups, E]
    prices: torch.Tensor  # float32 [layers, 2]
    counters: torch.Tensor  # int64 [layers, 3]
    # By layer, bytes of an expert in all groups.
    expert_bytes: Mapping[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Device memory of all fetch slots."""
        return sum(group.nbytes for layer in self.layers.values() for group in layer.groups)

    def forget(self) -> None:
        """No expert is in a fetch slot any more, from the next step on."""
        self.maps.fill_(-1)
        self.places.fill_(-1)


def make_state(
    kinds: Mapping[int, Sequence[LayerFormat]],
    num_slots: int,
    num_experts: int,
    limits: Mapping[int, float],
    device: torch.device,
    rank: int = 0,
    num_ranks: int = 1,
) -> FetchState:
    """Returns empty slots, prices at which nothing is copied.

    `kinds`: by layer, of each group of parts; `limits`: by layer, where its experts clamp; `num_slots`: of
    each of `num_ranks` ranks, of which this is number `rank`.
    """
    count, groups = len(kinds), max(map(len, kinds.values()))
    maps = torch.full((count, num_experts), -1, dtype=torch.int32, device=device)
    places = maps if num_ranks == 1 else maps.clone()
    addresses = torch.zeros((count, groups, num_experts), dtype=torch.int64, device=device)
    prices = torch.zeros((count, 2), dtype=torch.float32, device=device)
    scores = torch.zeros((count, num_experts), dtype=torch.float32, device=device)
    coming = torch.zeros((count, 1 + 2 * num_slots), dtype=torch.int32, device=device)
    counters = torch.zeros((count, 3), dtype=torch.int64, device=device)
    layers = {}
    for row, (layer, found) in enumerate(kinds.items()):
        own = [make_slots(kind, num_slots, num_experts, device, limits[layer]) for kind in found]
        for slots in own:
            slots.slot_of_expert, slots.expert_of_slot = maps[row], own[0].expert_of_slot
        tables = addresses[row], prices[row], scores[row], coming[row], counters[row], places[row]
        layers[layer] = FetchLayer(tuple(own), *tables, rank, num_ranks)
    nbytes = {layer: sum(kind.expert_bytes for kind in found) for layer, found in kinds.items()}
    return FetchState(layers, maps, places, addresses, prices, counters, nbytes)


def addresses_of(
    groups: Sequence[LayerFormat],
    stored: Sequence[tuple[StoredExperts, int | None]],
    num_experts: int,
) -> list[list[int]]:
    """Returns by group and expert where the host has it, 0 where it must not be copied:
    `[groups][num_experts]`.

    `stored`: a layer's parts, each with the address of its first expert, None where the device cannot read
    it. Parts of the same format that have different experts are one group; an expert that lacks a part is
    in none, and a layer whose parts are not those of `groups` has no expert to copy.
    """
    found: list[tuple[LayerFormat, dict[int, int]]] = []
    for part, base in stored:
        each = part.kind.expert_bytes
        own = {expert: 0 if base is None else base + slot * each for slot, expert in enumerate(part.experts)}
        for kind, known in found:
            if kind == part.kind and not known.keys() & own.keys():
                known.update(own)
                break
        else:
            found.append((part.kind, own))
    nothing = [[0] * num_experts for _ in groups]
    if [kind for kind, _ in found] != list(groups):
        return nothing
    whole = [expert for expert in range(num_experts) if all(known.get(expert) for _, known in found)]
    for row, (_, known) in zip(nothing, found, strict=True):
        for expert in whole:
            row[expert] = known[expert]
    return nothing
