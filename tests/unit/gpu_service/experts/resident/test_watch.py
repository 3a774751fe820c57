"""Guards experts on a device against memory that changes: every flipped bit is found and repaired, and what
only moves is never taken for damage."""

from __future__ import annotations

import copy
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from gpu_service.experts.resident import watch as watch_module
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.resident.metrics import export
from gpu_service.experts.resident.watch import FILLED_AGAIN, LOST, ResidentDamaged, ResidentWatch
from gpu_service.experts.streaming.ring import HostTransfers
from moebius.models.read import read_geometry
from tests.equality.test_resident_experts import configuration, load
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.marked_segments import LAYERS, load_again
from tests.helpers.simulated_streams import SimulatedEvent
from tests.helpers.waiting import wait_until
from tests.unit.gpu_service.experts.adaptive.test_exchange import World

LAYER = 1


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Returns a tiny checkpoint."""
    return TinyMoe(num_experts=5, num_layers=3).write(tmp_path / "model")


def loaded(model: Path, **placement: Any) -> ResidentExperts:
    """Returns three experts of each layer, unless the placement says else."""
    return load(configuration(model, **(placement or {"gpu_experts": 3})), read_geometry(model))


@contextmanager
def watching(resident: ResidentExperts, interval_s: float = 0.0, **options: Any) -> Iterator[ResidentWatch]:
    """A watch that runs; it has to end."""
    watch = ResidentWatch(resident, options.pop("device", HostTransfers()), interval_s, **options)
    watch.start()
    try:
        yield watch
    finally:
        watch.close()
        assert not watch._thread.is_alive()


def flip(resident: ResidentExperts, slot: int, at: int = 17) -> torch.Tensor:
    """A bit of a slot, as faulty memory does; returns what was there."""
    weights = resident.slots[LAYER].weights[slot]
    before = weights.clone()
    weights[at] ^= 4
    return before


@pytest.mark.parametrize("placement", [{"gpu_experts": 3}, {"gpu_experts_ratio": 1.0}])
def test_flipped_bits_are_found_in_the_background_and_repaired(
    model: Path, placement: dict[str, Any]
) -> None:
    """Damage is found within the interval, also in layers that are resident as a whole, and also twice in one
    place.
    """
    resident = loaded(model, **placement)
    reasons: list[str] = []
    with capture_logs() as logs, watching(resident, 0.1, on_damage=reasons.append) as watch:
        for count, at in enumerate((17, 200, 17), 1):
            before = flip(resident, 2, at)
            wait_until(lambda count=count: watch.damages == count)  # type: ignore[misc]
            watch.begin_step()
            assert resident.slots[LAYER].weights[2].equal(before)
            assert watch.repairs == count
        compared = watch.compared_bytes
        wait_until(lambda: watch.compared_bytes > compared + 2 * resident.nbytes)
        assert watch.damages == 3
        assert watch.pass_seconds > 0
    errors = [line for line in logs if line["log_level"] == "error"]
    assert [line["event"] for line in errors] == [FILLED_AGAIN] * 3
    expert = resident.slots[LAYER].expert_of_slot[2]
    assert {(line["layer"], line["expert"], line["slot"]) for line in errors} == {(LAYER, expert, 2)}
    assert reasons == [f"layer {LAYER}, expert {expert} was damaged in the device's memory"] * 3
    registry = CollectorRegistry()
    export(watch, "tiny", registry)
    text = generate_latest(registry).decode()
    for name in ("damaged", "repaired"):
        assert f'moebius:expert_{name}_total{{engine="0",model_name="tiny"}} 3.0' in text
    assert 'moebius:expert_refused{engine="0",model_name="tiny"} 0.0' in text


@pytest.mark.parametrize("seed", range(20))
def test_every_bit_counts(model: Path, seed: int) -> None:
    """One anywhere in a slot is found by the comparison of a layer whose output is suspect."""
    resident, rng = loaded(model), random.Random(seed)
    with watching(resident) as watch:
        slot = rng.randrange(3)
        weights = resident.slots[LAYER].weights[slot]
        before, at = weights.clone(), rng.randrange(weights.numel())
        weights[at] ^= 1 << rng.randrange(8)
        watch.compare([LAYER + 1])
        assert watch.damages == 0
        watch.compare([LAYER])
        assert watch.damages == 1
        watch.begin_step()
        assert weights.equal(before)


def test_comparing_at_once_has_a_share_of_the_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that makes infinite values without damage does not have its experts compared in every step."""
    resident = loaded(model)
    with watching(resident) as watch:
        watch.compare([LAYER])
        first = watch.compared_bytes
        assert first == resident.slots[LAYER].weights.nbytes
        watch._quiet_until[LAYER] += 60
        watch.compare([LAYER])
        assert watch.compared_bytes == first
        watch.compare([LAYER + 1])
        assert watch.compared_bytes > first


def test_comparing_is_spread_over_the_interval(model: Path) -> None:
    """Each slot is compared once within it and not more often, by the bytes that were compared."""
    resident = loaded(model)
    with watching(resident, 3600.0) as watch:
        wait_until(lambda: watch.compared_bytes > 0)
        assert watch.compared_bytes < resident.nbytes
        assert watch.pass_seconds == 0.0


def _same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


class Meddling(HostTransfers):
    """Before or after a copy, something happens."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        # Memory that keeps nothing as it was written.
        self.spoils: torch.Tensor | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        act, self.before = self.before, lambda: None
        act()
        super().copy(target, source)
        if self.spoils is not None and _same_memory(self.spoils, target):
            target[5] ^= 1

    def wait(self, event: None) -> None:  # type: ignore[override]
        act, self.after = self.after, lambda: None
        act()


def replace(resident: ResidentExperts, expert: int | None) -> None:
    """What is in the first slot."""
    slots = resident.slots[LAYER]
    if expert is None:
        slots.clear(0)
    else:
        slots.put(0, expert, resident.packed(LAYER, expert))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("change", ["replaced", "emptied", "the same again"])
def test_a_slot_that_is_replaced_while_it_is_compared_is_skipped(
    model: Path, change: str, moment: str
) -> None:
    """Whatever was read of it, and whichever expert is in it afterwards."""
    resident, device = loaded(model), Meddling()
    watch = ResidentWatch(resident, device, 0.0)
    slots = resident.slots[LAYER]
    newcomer = next(expert for expert in range(5) if expert not in slots.experts)
    expert = {"replaced": newcomer, "emptied": None, "the same again": slots.expert_of_slot[0]}[change]
    if moment == "after":
        flip(resident, 0)
    setattr(device, moment, lambda: replace(resident, expert))
    watch.compare([LAYER])
    assert watch.damages == 0
    watch.compare([LAYER + 1])
    watch.begin_step()
    if expert is not None:
        assert slots.weights[0].equal(resident.packed(LAYER, expert))


def test_a_damaged_slot_that_is_replaced_before_its_repair_keeps_the_newcomer(model: Path) -> None:
    """The damage counts, since steps have used it; nothing is written over who is there now."""
    resident = loaded(model)
    with watching(resident) as watch:
        flip(resident, 0)
        watch.compare([LAYER])
        newcomer = next(expert for expert in range(5) if expert not in resident.slots[LAYER].experts)
        replace(resident, newcomer)
        watch.begin_step()
        assert (watch.damages, watch.repairs) == (1, 0)
        assert resident.slots[LAYER].weights[0].equal(resident.packed(LAYER, newcomer))


@pytest.mark.parametrize("what", ["gone", "other weights"])
def test_without_its_checkpoint_steps_fail_by_name(
    model: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once the files are there again they go on; one line says each of it."""
    monkeypatch.setattr(watch_module, "RETRY_S", 0.05)
    resident = loaded(model)
    kept = model.with_name("kept")
    with capture_logs() as logs, watching(resident) as watch:
        before = flip(resident, 1)
        shutil.move(model, kept)
        if what == "other weights":
            model.symlink_to(TinyMoe(num_experts=5, num_layers=3, seed=9).write(model.with_name("other")))
        watch.compare([LAYER])
        expert = resident.slots[LAYER].expert_of_slot[1]
        text = (
            f"layer {LAYER}, expert {expert} is damaged in the device's memory and cannot be filled again: "
        )
        for _ in range(2):
            with pytest.raises(ResidentDamaged, match=text):
                watch.begin_step()
        assert text in watch.problem
        wait_until(lambda: len([line for line in logs if line["event"] == LOST]) == 1)
        restored = model.with_name("restored")
        restored.symlink_to(kept)
        restored.replace(model)  # In one step: a try between two would find no files, and log that, too.
        wait_until(lambda: not watch.problem)
        watch.begin_step()
        assert resident.slots[LAYER].weights[1].equal(before)
    assert [line["event"] for line in logs if line["log_level"] == "error"] == [LOST, FILLED_AGAIN]


def test_memory_that_keeps_nothing_is_not_computed_with(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is read again before the next step."""
    monkeypatch.setattr(watch_module, "RETRY_S", 0.05)
    resident, device = loaded(model), Meddling()
    with watching(resident, device=device) as watch:
        flip(resident, 1)
        watch.compare([LAYER])
        device.spoils = resident.slots[LAYER].weights
        with pytest.raises(ResidentDamaged, match="the memory does not keep what is written to it"):
            watch.begin_step()
        device.spoils = None
        wait_until(lambda: not watch.problem)
        watch.begin_step()
    assert watch.repairs == 1


def test_a_step_that_waits_for_a_repair_ends_with_the_engine(model: Path) -> None:
    """The watch's thread may be busy with a file that does not come."""
    resident = loaded(model)
    begun, release = threading.Event(), threading.Event()

    def slow(layer: int, expert: int) -> torch.Tensor:
        begun.set()
        release.wait(60)
        raise OSError("too late")

    resident.packed = slow  # type: ignore[method-assign]
    with watching(resident) as watch:
        flip(resident, 0)
        watch.compare([LAYER])
        assert begun.wait(60)
        threading.Timer(0.1, watch.interrupt).start()
        with pytest.raises(ResidentDamaged, match="its watch has ended"):
            watch.begin_step()
        release.set()


class Interleaved:
    """A simulated device as the watch's thread has it: with a stream of its own, and while it waits the
    thread that launches steps goes on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._own = copy.copy(world.device)
        self._own.copy_stream = "watch"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._go_on()
        self._own.copy(target, source)

    def wait(self, event: SimulatedEvent) -> None:
        while not event.is_done:
            self._own.advance(1)
            self._go_on()

    def _go_on(self) -> None:
        for _ in range(self._world.rng.choice([0, 0, 0, 1, 4])):
            self._world.exchanges.advance(self._world.wanted())
            self._world.step()


@pytest.mark.parametrize("has_streamer", [True, False])
def test_a_thousand_exchanges_are_no_damage(has_streamer: bool) -> None:
    """Slots compared at any moment of random exchanges and reloads; at the end what is in them is whole."""
    exchanges, compared, seed = 0, 0, 0
    while exchanges < 1000:
        world = World(seed, has_streamer)
        watch = ResidentWatch(world.resident, Interleaved(world), 0.0)  # type: ignore[arg-type]
        for _ in range(60):
            watch._quiet_until = {}
            watch.compare([world.rng.randrange(LAYERS)])
            assert watch.damages == 0
            world.exchanges.advance(world.wanted())
            world.step()
            if has_streamer and world.rng.random() < 0.05:
                load_again(world.rng, world.segments)
        world.check_end()
        for slots in world.resident.slots.values():
            for weights, content in zip(slots.weights, slots.contents, strict=True):
                assert content is None or content.matches(weights)
        world.exchanges.close()
        exchanges, compared, seed = (
            exchanges + world.exchanges.count,
            compared + watch.compared_bytes,
            seed + 1,
        )
    assert compared > 0
