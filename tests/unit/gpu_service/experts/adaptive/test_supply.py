"""Invariant: while memory of slots moves, each chosen expert of each step is computed once, with its own
weights, and the memory that goes is what is chosen least.

Steps run late on a simulated device, and slots are really unmapped: one that still reads what was given up
ends the process, and one that reads another expert's bytes sees another mark.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from gpu_service.device.host_virtual_memory import HostVirtualMemory
from gpu_service.device.virtual_memory import PhysicalPool, VirtualRange
from gpu_service.experts.adaptive.supply import SlotSupply
from tests.helpers.exchanging_rank import ExchangingRank
from tests.helpers.marked_segments import LAYERS, SHAPE

CHUNK = 4096
PRICE = 0.01


@dataclass
class World(ExchangingRank):
    """Whose slots share a pool with pages of somebody else."""

    pages: VirtualRange = field(init=False)

    def __post_init__(self) -> None:
        self.pool = PhysicalPool(HostVirtualMemory(), CHUNK)
        super().__post_init__()
        # Of the pool, and as many again.
        self.pages = VirtualRange(self.pool, 1000 * CHUNK)
        self.pool.add(4)
        self.now = 0.0
        self.supply = SlotSupply(
            self.resident, self.exchanges, self.device, self.pool, clock=lambda: self.now
        )
        self.numbers = np.random.default_rng(self.seed)
        self.rates = self.numbers.random((LAYERS, SHAPE.experts))

    def step(self) -> None:
        """Launches a step's reads of every expert that is mapped when the device comes to them."""
        for layer, slots in self.resident.slots.items():

            def read(layer: int = layer, slots: object = slots) -> None:
                held = self.resident.slots[layer]
                places = [slot for slot in held.slot_of_expert.tolist() if slot >= 0]
                if max(Counter(places).values(), default=1) > 1:
                    self.wrong.append(f"layer {layer}: two experts in one slot")
                for expert, slot in enumerate(held.slot_of_expert.tolist()):
                    if slot >= 0 and held.weights[slot, :2].tolist() != [layer, expert]:
                        self.wrong.append(f"layer {layer}: expert {expert} is not in its slot")

            self.device.launch(read)
        self.device.advance(self.rng.randrange(6))

    def compare(self) -> int:
        """Compares as `ResidentWatch` at any moment, without waiting for steps; returns how many slots it
        could.
        """
        compared = 0
        for layer, slots in self.resident.slots.items():
            for slot, content in enumerate(slots.contents):
                if content is not None:
                    assert slots.weights[slot, :2].tolist() == [layer, content.expert], "a false find"
                    compared += 1
        return compared

    def between_steps(self) -> None:
        """Advances as `AdaptivePlacement.begin_step` does, with wishes of all kinds."""
        self.now += self.rng.choice([0.0, 0.3])
        self.supply.retire()
        self.exchanges.advance(self.wanted() + self.refills()[:2])
        self.supply.advance(self.rates, self.rng.choice([None, PRICE]))
        assert self.pool is not None
        if self.rng.random() < 0.3:
            self.rates = self.numbers.random((LAYERS, SHAPE.experts))
        if self.rng.random() < 0.3:
            self.pool.claim(self.rng.randrange(8))
        if self.pool.claimed and self.pool.free >= self.pool.claimed:
            free = [n for n in range(self.pages.places) if not self.pages.is_mapped(n)]
            self.pages.map(free[: self.pool.claimed])
            self.pool.claim(0)
        elif self.rng.random() < 0.2:
            held = [n for n in range(self.pages.places) if self.pages.is_mapped(n)]
            self.pages.unmap(held[: self.rng.randrange(1 + len(held))])


@pytest.mark.parametrize("has_streamer", [True, False])
@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(s, marks=pytest.mark.full) for s in range(10, 80))]
)
def test_steps_meet_the_experts_that_are_mapped(seed: int, has_streamer: bool) -> None:
    """With random claims, memory that comes back, exchanges, and copies that end whenever they do."""
    world = World(seed, has_streamer)
    pool = world.pool
    assert pool is not None
    compared = 0
    for _ in range(300):
        world.between_steps()
        compared += world.compare()
        world.step()
        world.supply.check_integrity()
        mapped = sum(len(slots.memory.holders()) for slots in world.resident.slots.values() if slots.memory)
        assert mapped + world.pages.mapped + pool.free == pool.size
    world.check_end()
    assert compared > 0
    assert world.supply.given_bytes > 0
    assert world.supply.taken_bytes > 0


def test_what_is_chosen_least_goes_and_the_most_chosen_comes() -> None:
    """Over all layers no expert that is left is chosen less than one that had to go."""
    world = World(3)
    pool, layers = world.pool, world.resident.slots
    assert pool is not None
    while world.supply.wants_memory:
        pool.add(1)
        world.supply.advance(world.rates, None)
        world.exchanges.advance(world.refills())
        world.exchanges.wait()
        world.device.drain()
    assert all(len(slots.experts) == SHAPE.experts for slots in layers.values())
    pool.claim(pool.free + pool.size // 3)
    world.supply.advance(world.rates, None)
    world.device.drain()
    world.supply.retire()
    assert pool.free >= pool.claimed
    for row, (layer, slots) in enumerate(layers.items()):
        held = set(slots.experts)
        gone = [world.rates[row, n] for n in range(SHAPE.experts) if n not in held]
        assert not gone or max(gone) < min(world.rates[row, n] for n in held), f"layer {layer}"
    sizes = {layer: len(slots.experts) for layer, slots in layers.items()}
    assert len(set(sizes.values())) > 1, "every layer gave as much"
    world.check_end()


def test_layers_give_up_as_much_while_nothing_is_known_of_them() -> None:
    """At the start no expert has been chosen: no layer loses all of its experts before others lose half."""
    world = World(3)
    pool = world.pool
    assert pool is not None
    before = world.supply.backed
    pool.claim(pool.free + pool.size // 3)
    world.supply.advance(np.zeros_like(world.rates), None)
    world.device.drain()
    world.supply.retire()
    assert pool.free >= pool.claimed
    after = world.supply.backed
    assert (after < before).all()
    assert after.max() - after.min() <= 2
    world.check_end()


def test_memory_moves_to_layers_that_gain_more() -> None:
    """While no memory is claimed, the layer whose absent experts are chosen most gets slots of the others."""
    world = World(5)
    pool = world.pool
    assert pool is not None
    world.pages.map(range(pool.free))
    world.rates = np.full((LAYERS, SHAPE.experts), 0.01)
    world.rates[1] = 0.9
    before = world.supply.backed
    for _ in range(200):
        world.now += 0.3
        world.supply.retire()
        world.supply.advance(world.rates, PRICE)
        world.exchanges.advance(world.refills())
        world.exchanges.wait()
        world.device.drain()
    after = world.supply.backed
    assert after[1] > before[1]
    assert after[1] == SHAPE.experts or after.sum() == after[1]
    world.check_end()
