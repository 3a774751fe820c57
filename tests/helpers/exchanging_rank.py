"""A rank whose experts change slots on a simulated device: every slot says whose expert it holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gpu_service.device.virtual_memory import PhysicalPool
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

    def _write_map(self, place: int, value: int) -> None:
        write = super()._write_map
        self.simulated.launch(lambda: write(place, value))

    def _write_maps(self, changes: torch.Tensor) -> None:
        kept = changes.clone()
        write = super()._write_maps
        self.simulated.launch(lambda: write(kept))

    def copy_slot(self, layer: int, source: int, target: int) -> None:
        copy = super().copy_slot
        self.simulated.launch(lambda: copy(layer, source, target))


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
        return packed


class Streamer:
    """What exchanges ask of the streamer."""

    def __init__(self, source: MadeSource) -> None:
        self.source = source

    def copy(self, *arguments: Any) -> None:
        self.source.copy(*arguments)


@dataclass
class ExchangingRank:
    """A rank whose slots are read late, and servers that load again at any time; seeded."""

    seed: int
    has_streamer: bool = True
    # Where memory of slots comes from that moves; None: every slot has memory, for good.
    pool: PhysicalPool | None = None
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.device = SimulatedDevice(rng)
        parts = rng.choice([tensor_split(SHAPE, 1), expert_split(SHAPE, 2), tensor_split(SHAPE, 2)])
        self.segments: list[MadeSegment] = [marked_segment(part, n) for n, part in enumerate(parts)]
        kind = layer_format("int8", "int8", SHAPE.hidden, SHAPE.intermediate, False)
        slots: dict[int, LayerSlots] = {}
        for layer in range(LAYERS):
            count = rng.choice([1, 3, 6])
            slots[layer] = make_slots(kind, count, SHAPE.experts, torch.device("cpu"), 0.0, self.pool)
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
        # Bytes and seconds of copies, as they are reported.
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

    def refills(self) -> list[Wanted]:
        """Returns an expert for each empty slot."""
        found = []
        for layer, slots in self.resident.slots.items():
            absent = sorted({*range(SHAPE.experts)} - {*slots.experts})
            for _ in range(slots.expert_of_slot[: slots.backed].count(-1)):
                found.append(Wanted(layer, self.rng.choice(absent), -1))
        return found

    def check_end(self) -> None:
        """Everything has ended: maps of device and host agree, and every slot that can be is filled."""
        while any(not segment.is_complete for segment in self.segments):
            load_again(self.rng, self.segments)
        self.exchanges.wait()
        self.device.drain()
        for layer, slots in self.resident.slots.items():
            check_slots(layer, slots)
        assert self.wrong == []
