"""Invariant: while experts change slots, each chosen expert of each step is computed once, with its own
weights.

On a simulated device, whose streams advance at random: a slot that is overwritten while an earlier step
reads it, or mapped before its copy has ended, shows as another expert's mark in it.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from gpu_service.experts.adaptive.exchange import SlotExchanges, Wanted
from gpu_service.experts.resident.experts import (
    LayerSlots,
    ResidentExperts,
    TorchResidentKernels,
    check_slots,
    make_slots,
)
from gpu_service.experts.resident.panels import layer_format
from tests.helpers.marked_segments import LAYERS, SHAPE, load_again, marked_segment
from tests.helpers.simulated_streams import SimulatedDevice
from tests.helpers.stored_experts import MadeSegment, MadeSource, expert_split, geometry, tensor_split


class SimulatedResidents(ResidentExperts):
    """Whose maps change when the stream comes to it."""

    simulated: SimulatedDevice

    def _write_maps(self, changes: torch.Tensor) -> None:
        kept = changes.clone()
        write = super()._write_maps
        self.simulated.launch(lambda: write(kept))


class PackedSource:
    """What `ResidentExperts` asks a checkpoint for: experts with marks."""

    def __init__(self) -> None:
        self.geometry = geometry(SHAPE, LAYERS)
        self.fails = False

    def read(self, layer: int, expert: int, reader: Any) -> Any:
        if self.fails:
            raise OSError("the file is gone")
        kind = layer_format("int8", "int8", SHAPE.hidden, SHAPE.intermediate, False)
        packed = np.zeros(kind.expert_bytes, np.uint8)
        packed[:2] = layer, expert
        return type("Packed", (), {"packed": packed})()


class Streamer:
    """What exchanges ask of the streamer."""

    def __init__(self, source: MadeSource) -> None:
        self.source = source

    def copy(self, *arguments: Any) -> None:
        self.source.copy(*arguments)


@dataclass
class World:
    """An engine whose steps read slots late, and servers that load again at any time."""

    seed: int
    has_streamer: bool = True
    wrong: list[str] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.device = SimulatedDevice(rng)
        parts = rng.choice([tensor_split(SHAPE, 1), expert_split(SHAPE, 2), tensor_split(SHAPE, 2)])
        self.segments: list[MadeSegment] = [marked_segment(part, n) for n, part in enumerate(parts)]
        kind = layer_format("int8", "int8", SHAPE.hidden, SHAPE.intermediate, False)
        slots: dict[int, LayerSlots] = {}
        for layer in range(LAYERS):
            count = rng.choice([1, 3, 6])
            slots[layer] = make_slots(kind, count, SHAPE.experts, torch.device("cpu"), 0.0)
            for slot, expert in enumerate(rng.sample(range(SHAPE.experts), count)):
                packed = torch.zeros(kind.expert_bytes, dtype=torch.uint8)
                packed[0], packed[1] = layer, expert
                slots[layer].put(slot, expert, packed)
        self.packed = PackedSource()
        self.resident = SimulatedResidents(
            self.packed,
            slots,
            TorchResidentKernels(self.packed.geometry),  # type: ignore[arg-type]
        )
        self.resident.simulated = self.device
        source = MadeSource(self.segments, range(LAYERS), self.device)
        streamer = Streamer(source) if self.has_streamer else None
        self.copied: list[tuple[int, float]] = []
        self.exchanges = SlotExchanges(
            self.resident,
            self.device,
            streamer,  # type: ignore[arg-type]
            lambda nbytes, seconds: self.copied.append((nbytes, seconds)),
        )

    def wanted(self) -> list[Wanted]:
        """Anything, also what is not possible any more."""
        return [
            Wanted(self.rng.randrange(LAYERS), *self.rng.sample(range(SHAPE.experts), 2))
            for _ in range(self.rng.choice([0, 0, 1, 4]))
        ]

    def step(self) -> None:
        """Launches a step's reads: what is in slots when the device comes to them is compared."""
        for layer in range(LAYERS):
            slots = self.resident.slots[layer]

            def read(layer: int = layer, slots: LayerSlots = slots) -> None:
                held = Counter(slot for slot in slots.slot_of_expert.tolist() if slot >= 0)
                if max(held.values(), default=1) > 1:
                    self.wrong.append(f"layer {layer}: two experts in one slot")
                for expert, slot in enumerate(slots.slot_of_expert.tolist()):
                    if slot >= 0 and slots.weights[slot, :2].tolist() != [layer, expert]:
                        self.wrong.append(f"layer {layer}: expert {expert} is not in its slot")

            self.device.launch(read)
            self.device.advance(self.rng.randrange(6))
        self.steps += 1

    def check_end(self) -> None:
        """Everything has ended: maps of device and host agree, and every slot that can be is filled."""
        while any(not segment.is_complete for segment in self.segments):
            load_again(self.rng, self.segments)
        self.exchanges.wait()
        self.device.drain()
        for layer, slots in self.resident.slots.items():
            check_slots(layer, slots)
        assert self.wrong == []
        # At the simulated link's speed, each copy for itself.
        assert all(seconds == pytest.approx(nbytes / 1e9) for nbytes, seconds in self.copied)
        assert 0 < sum(nbytes for nbytes, _ in self.copied) <= self.exchanges.nbytes
        counted = self.exchanges.by_layer.values()
        assert sum(count for count, _ in counted) == self.exchanges.count
        assert sum(nbytes for _, nbytes in counted) == self.exchanges.nbytes


@pytest.mark.parametrize("has_streamer", [True, False])
@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(s, marks=pytest.mark.full) for s in range(10, 80))]
)
def test_steps_meet_the_experts_that_are_mapped(seed: int, has_streamer: bool) -> None:
    """With random wishes, reloads, and copies that end whenever they do."""
    world = World(seed, has_streamer)
    for _ in range(400):
        world.exchanges.advance(world.wanted())
        world.step()
        if has_streamer and world.rng.random() < 0.05:
            load_again(world.rng, world.segments)
    world.check_end()
    world.exchanges.close()


def test_an_expert_that_cannot_be_read_stays_with_the_servers() -> None:
    """The slot keeps whom it has, and exchanges go on later."""
    world = World(1, has_streamer=False)
    slots = world.resident.slots[0]
    leaver, newcomer = slots.experts[0], next(e for e in range(SHAPE.experts) if e not in slots.experts)
    world.packed.fails = True
    world.exchanges.advance([Wanted(0, newcomer, leaver)])
    world.exchanges.wait()
    assert leaver in slots.experts
    world.packed.fails = False
    world.exchanges.advance([Wanted(0, newcomer, leaver)])
    world.exchanges.wait()
    assert newcomer in slots.experts
    world.check_end()
    world.exchanges.close()


def test_what_was_copied_from_damaged_memory_is_given_up() -> None:
    """After a find no slot has what came from a segment, mapped or on its way; the checkpoint's stays."""
    world = World(3)
    world.exchanges._streamer.source.segments = lambda: None  # type: ignore[union-attr, assignment]
    slots = world.resident.slots[0]
    kept = set(slots.experts)
    world.exchanges.distrust()
    assert set(slots.experts) == kept
    world = World(3)
    segments = world.exchanges._streamer.source.segments()  # type: ignore[union-attr]
    layer, slots = next((n, s) for n, s in world.resident.slots.items() if s.count < SHAPE.experts)
    stored = segments.stored[layer][0]
    if stored.kind != slots.kind:
        pytest.skip("this world's servers share experts by channels")
    newcomer = next(e for e in stored.experts if e not in slots.experts)
    leaver, *others = slots.experts
    world.exchanges.advance([Wanted(layer, newcomer, leaver)])
    world.exchanges.wait()
    assert newcomer in slots.experts
    coming = next(e for e in stored.experts if e not in slots.experts)
    world.exchanges.advance([Wanted(layer, coming, others[0])] if others else [])
    world.exchanges.distrust()
    world.exchanges.wait()
    world.device.drain()
    assert newcomer not in slots.experts
    assert coming not in slots.experts
    assert set(slots.experts) == set(others[1:])
    check_slots(layer, slots)
    world.exchanges.close()
