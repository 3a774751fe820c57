"""Slots of one layer on the device, and the map that says which expert is in which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gpu_service.experts.resident.panels import LayerFormat, PanelViews, views


@dataclass(eq=False)
class LayerSlots:
    """Made by `make_slots`; changed in place only, so that captured graphs stay valid."""

    kind: LayerFormat
    weights: torch.Tensor  # uint8 [slots, expert_bytes]
    # int32 [num_experts] on the device: the expert's slot; -1: it is computed elsewhere.
    slot_of_expert: torch.Tensor
    # The host's copy, the other way round; -1: the slot is empty.
    expert_of_slot: list[int]
    # Where the layer's experts clamp (`MoeGeometry.limit_of`), if their activation does.
    limit: float
    gate_up: PanelViews = field(init=False)
    down: PanelViews = field(init=False)

    def __post_init__(self) -> None:
        self.gate_up = views(self.weights, self.kind.gate_up)
        self.down = views(self.weights, self.kind.down)

    @property
    def count(self) -> int:
        """Slots, empty ones included."""
        return len(self.expert_of_slot)

    @property
    def experts(self) -> tuple[int, ...]:
        """Resident expert ids, ascending."""
        return tuple(sorted(expert for expert in self.expert_of_slot if expert >= 0))

    def put(self, slot: int, expert: int, packed: torch.Tensor) -> None:
        """Replaces what is in a slot. The map never names a slot whose weights are not complete."""
        self.clear(slot)
        self.weights[slot].copy_(packed, non_blocking=packed.is_pinned())
        self.slot_of_expert[expert] = slot
        self.expert_of_slot[slot] = expert

    def clear(self, slot: int) -> None:
        """Gives an expert up; its weights stay until they are overwritten."""
        old = self.expert_of_slot[slot]
        if old >= 0:
            self.slot_of_expert[old] = -1
            self.expert_of_slot[slot] = -1


def make_slots(
    kind: LayerFormat, count: int, num_experts: int, device: torch.device, limit: float
) -> LayerSlots:
    """`count` empty slots."""
    return LayerSlots(
        kind,
        torch.empty((count, kind.expert_bytes), dtype=torch.uint8, device=device),
        torch.full((num_experts,), -1, dtype=torch.int32, device=device),
        [-1] * count,
        limit,
    )


def check_slots(layer: int, slots: LayerSlots, expected: Sequence[int] | None = None) -> None:
    """Raises AssertionError when the device's map and the host's disagree, or an expert is in two slots."""
    device_map = slots.slot_of_expert.tolist()
    host_map = [-1] * len(device_map)
    for slot, expert in enumerate(slots.expert_of_slot):
        if expert >= 0:
            assert host_map[expert] == -1, f"layer {layer}: expert {expert} is in two slots"
            host_map[expert] = slot
    assert device_map == host_map, f"layer {layer}: slots on the device differ from the host's"
    if expected is not None:
        assert slots.experts == tuple(expected), f"layer {layer}: experts {slots.experts} are resident"
