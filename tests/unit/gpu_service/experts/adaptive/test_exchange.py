"""Invariant: while experts change slots, each chosen expert of each step is computed once, with its own
weights.

On a simulated device, whose streams advance at random: a slot that is overwritten while an earlier step
reads it, or mapped before its copy has ended, shows as another expert's mark in it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from gpu_service.experts.adaptive.exchange import Wanted
from gpu_service.experts.resident.experts import LayerSlots, check_slots
from tests.helpers.exchanging_rank import ExchangingRank
from tests.helpers.marked_segments import LAYERS, SHAPE, load_again


@dataclass
class World(ExchangingRank):
    """Whose steps look at every slot when the device comes to them."""

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

    def check_end(self) -> None:
        """Checks the end as ever; and what was copied is reported with the simulated link's speed, and
        counted by layer.
        """
        super().check_end()
        assert all(seconds == pytest.approx(nbytes / 1e9) for nbytes, seconds in self.copied)
        assert sum(nbytes for nbytes, _ in self.copied) <= self.exchanges.nbytes
        # Without a streamer a thread packs them, which may come too late for every exchange.
        assert self.copied or not self.has_streamer
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


def copyable(count: int) -> tuple[World, int, list[Wanted]]:
    """Returns a world, a layer of it, and exchanges there whose newcomers segments have as slots do."""
    for seed in range(20):
        world = World(seed)
        segments = world.exchanges._streamer.source.segments()  # type: ignore[union-attr]
        for layer, slots in world.resident.slots.items():
            stored = segments.stored[layer][0]
            absent = [expert for expert in stored.experts if expert not in slots.experts]
            if stored.kind == slots.kind and min(len(absent), slots.count) >= count:
                wanted = zip(absent[:count], slots.experts[:count], strict=True)
                return world, layer, [Wanted(layer, new, old) for new, old in wanted]
    raise AssertionError("no world has such a layer")


def test_memory_is_asked_about_after_the_last_copy_that_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that ends while its server is asked about an earlier one is judged by another question: the
    server may have loaded other weights since this one.
    """
    world, layer, (first, second) = copyable(2)
    world.exchanges.advance([first])
    world.exchanges.advance([second])
    while not world.exchanges._copying[0].copies.end.is_done:
        world.device.advance(1)
    segments = world.exchanges._copying[0].segments
    assert segments is not None

    def problem() -> str:
        world.device.drain()
        return ""

    monkeypatch.setattr(segments, "problem", problem)
    assert not world.exchanges._copying[1].copies.end.is_done
    world.exchanges.advance(())
    assert first.newcomer in world.resident.slots[layer].experts
    assert world.exchanges.under_way == [(layer, second.newcomer)]
    monkeypatch.setattr(segments, "problem", lambda: "other weights")
    world.exchanges.advance(())
    assert second.newcomer not in world.resident.slots[layer].experts
    world.exchanges.close()


def test_a_copy_that_fails_leaves_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two copies is used though the second could not be launched, and exchanges go on."""
    world, layer, (first, second) = copyable(2)
    streamer = world.exchanges._streamer
    assert streamer is not None
    copy, calls = streamer.copy, list[object]()

    def fails(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("nothing can be launched")
        copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(streamer, "copy", fails)
    with pytest.raises(RuntimeError, match="nothing can be launched"):
        world.exchanges.advance([first, second])
    world.exchanges.wait()
    assert first.newcomer in world.resident.slots[layer].experts
    world.exchanges.advance([Wanted(layer, second.newcomer, -1)])
    world.exchanges.wait()
    assert second.newcomer in world.resident.slots[layer].experts
    world.check_end()
    world.exchanges.close()
