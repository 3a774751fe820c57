"""Invariant: whatever streams, servers and requests do, each chosen expert of each row is computed once.

On a simulated device, whose streams advance at random: a buffer that is overwritten too early, or read before
its copy has ended, shows as another expert's mark in it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from gpu_service.experts.client import ExpertUnavailable
from gpu_service.experts.resident.experts import LayerSlots, Share
from gpu_service.experts.streaming import streamer
from gpu_service.experts.streaming.plan import SHARES
from gpu_service.experts.streaming.ring import _COPY_OPERATIONS, _PIECE_OPERATIONS, BufferRing
from gpu_service.experts.streaming.step import StreamedExperts
from gpu_service.experts.streaming.streamed_step import StreamedStep
from gpu_service.experts.streaming.streamer import ExpertStreamer
from gpu_service.layers.asked_experts import ask_experts
from tests.helpers.marked_segments import LAYERS, SHAPE, load_again, marked_segment
from tests.helpers.simulated_streams import SimulatedDevice, SimulatedEvent, SimulatedKernels
from tests.helpers.stored_experts import (
    FixedShare,
    MadeSource,
    Part,
    expert_split,
    geometry,
    tensor_split,
)

ROWS = 4
# Bytes a second of the link.
RATE = 1e9
Pairs = Counter[tuple[int, int, int, int]]
"""(layer, row, expert, server) of what was computed."""


class Residents:
    """Experts that are on the device anyhow, others in every step."""

    version = 0

    def __init__(self, computed: Callable[[int, torch.Tensor, set[int]], None]) -> None:
        self.held: dict[int, set[int]] = {layer: set() for layer in range(LAYERS)}
        self._computed = computed

    def experts(self, layer: int) -> tuple[int, ...]:
        return tuple(sorted(self.held[layer]))

    def share(self, layer: int) -> Share:
        return Share.SOME if self.held[layer] else Share.NONE

    def note(self, layer: int, ids: torch.Tensor) -> None:
        """Nothing is counted."""

    def cpu_ids(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        held = torch.tensor(sorted(self.held[layer]), dtype=torch.int32)
        return torch.where(torch.isin(ids, held), -1, ids)

    def forward(
        self,
        layer: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        partial: torch.Tensor,
    ) -> torch.Tensor:
        self._computed(layer, ids, set(self.held[layer]))
        return torch.zeros_like(hidden) if partial is None else partial


@dataclass
class Run:
    """One launch of a step, until it has ended on the device."""

    ids: list[torch.Tensor]
    streamed: StreamedExperts | None
    is_lane: bool
    computed: Pairs = field(default_factory=Counter)
    # (server, generation) of the weights that were met, and experts that were others than was meant.
    met: set[tuple[int, int]] = field(default_factory=set)
    wrong: list[int] = field(default_factory=list)
    end: SimulatedEvent | None = None


class World:
    """An engine's two lanes, servers that load again at any time, and a device that is late."""

    call_log = None  # of an expert client

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.device = SimulatedDevice(rng, RATE)
        split = rng.choice([tensor_split, expert_split])
        self.parts = split(SHAPE, rng.choice([1, 2]))
        self.segments = [marked_segment(part, server) for server, part in enumerate(self.parts)]
        self.residents = Residents(self._resident)
        self.run: Run | None = None
        self.chooser = FixedShare()
        each = max(layer.expert_bytes for s in self.segments for layer in s.layers.values())
        self.streamer = ExpertStreamer(
            geometry(SHAPE, LAYERS),
            range(LAYERS),
            BufferRing(self.device, rng.choice([2, 3, 5]), each * rng.choice([1, 2, 4])),
            self.device,
            SimulatedKernels(self.device, self._read),
            self.chooser,
            resident=self.residents,  # type: ignore[arg-type]
        )
        self.source = MadeSource(self.segments, range(LAYERS), self.device)
        self.streamer.open(self.source)
        self.launching: list[Run] = []
        self.counts: Counter[str] = Counter()
        self._owners: dict[int, Run] = {}

    def computes(self, run: Run, layer: int, ids: torch.Tensor, experts: set[int], part: int) -> None:
        """Notes what is computed of a layer."""
        for row, choices in enumerate(ids.tolist()):
            for expert in choices:
                if expert in experts:
                    run.computed[layer, row, expert, part] += 1

    def _resident(self, layer: int, ids: torch.Tensor, experts: set[int]) -> None:
        assert self.run is not None
        for part in self.parts_of(experts):
            self.computes(self.run, layer, ids, *part)

    def parts_of(self, experts: set[int]) -> list[tuple[set[int], int]]:
        """(experts, server) of each server."""
        return [(experts & set(part.experts), server) for server, part in enumerate(self.parts)]

    def _read(self, slots: LayerSlots, ids: torch.Tensor) -> None:
        """Runs on the device: what lies in the buffer at that moment counts, not what was meant to."""
        run = self._owners[id(ids)]
        for slot, meant in enumerate(slots.expert_of_slot):
            layer, expert, server, generation = slots.weights[slot, :4].tolist()
            if expert != meant:
                run.wrong.append(meant)
            run.met.add((server, generation))
            self.computes(run, layer, ids, {expert}, server)

    # The expert client: computes at once.
    def submit(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        assert self.run is not None
        for experts, server in self.parts_of(set(range(SHAPE.experts))):
            self.computes(self.run, layer, ids, experts, server)

    def collect(self, ticket: None, partial: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(ROWS, SHAPE.hidden)

    def begin(self, ids: list[torch.Tensor], is_lane: bool) -> Run | None:
        """Main lane steps compute without streaming where there is none; a lane's wait."""
        for layer in range(LAYERS):
            if not is_lane and not any(run.is_lane for run in self.launching):
                self.residents.held[layer] = set(
                    self.rng.sample(range(SHAPE.experts), self.rng.choice([0, 2]))
                )
                self.residents.version += 1
        self.chooser.value = self.rng.choice([0, 9, 30, SHARES])
        self.device.current = "lane" if is_lane else "main"
        self.chooser.asks_servers = self.rng.random() < 0.5
        streamed = self.streamer.begin_whole(ROWS, self._wait) if is_lane else self.streamer.begin(ROWS)
        if is_lane and streamed is None:
            return None
        # Each launch has tensors of its own, by which the device knows whose products they are.
        run = Run([one.clone() for one in ids], streamed, is_lane)
        self._owners |= {id(one): run for one in run.ids}
        return run

    def _wait(self, has_come: Callable[[], bool]) -> None:
        """What the lane's host does when it has to know something of the device."""
        self.counts["waited"] += 1
        while not has_come():
            self.device.advance(1)

    def launch_layer(self, run: Run, layer: int) -> None:
        """Launches a layer as the MoE block does."""
        self.run = run
        self.device.current = "lane" if run.is_lane else "main"
        hidden, weights = torch.zeros(ROWS, SHAPE.hidden), torch.ones(ROWS, SHAPE.top_k)
        client = None if run.is_lane else self
        asked = ask_experts(
            layer, hidden, run.ids[layer], weights, client, self.residents, run.streamed  # type: ignore[arg-type]
        )  # fmt: skip
        asked.collect(None)

    def finish(self, run: Run) -> bool:
        """Waits for its end; False: it has to be run again."""
        assert run.end is not None
        self.device.wait(run.end)
        ok = True
        if run.streamed is not None:
            try:
                run.streamed.check()
                self._check_times(run)
            except ExpertUnavailable:
                ok = False
            if run.is_lane:
                run.streamed.end()
        if ok:
            self._check(run)
            if isinstance(run.streamed, StreamedStep):
                deferred = [set(layer.deferred) for layer in run.streamed.plan.layers]
                chosen = [set(ids.flatten().tolist()) for ids in run.ids]
                self.counts["deferred"] += sum(map(len, deferred))
                routed = sum(len(one & other) for one, other in zip(deferred, chosen, strict=True))
                self.counts["fetched"] += routed if run.is_lane else 0
        for ids in run.ids:
            del self._owners[id(ids)]
        return ok

    def _check_times(self, run: Run) -> None:
        """The link was busy for as long as its bytes take, by the device's clock."""
        if run.is_lane or not isinstance(run.streamed, StreamedStep):
            return
        rows, share, seconds, copying = self.chooser.observed[-1]
        nbytes = sum(piece.nbytes for piece in run.streamed.plan.pieces)
        assert (rows, share) == (ROWS, run.streamed.plan.share)
        assert copying == pytest.approx(nbytes / RATE)
        assert seconds >= 0
        seen = sum(found[3] for found in self.chooser.observed)
        assert self.chooser.copied_bytes == pytest.approx(RATE * seen)
        by_layer = self.streamer.streamed_of.values()
        assert sum(nbytes for _, nbytes in by_layer) == self.streamer.streamed_bytes

    def _check(self, run: Run) -> None:
        wanted: Pairs = Counter()
        for layer, ids in enumerate(run.ids):
            for experts, server in self.parts_of(set(range(SHAPE.experts))):
                for row, choices in enumerate(ids.tolist()):
                    wanted.update((layer, row, expert, server) for expert in choices if expert in experts)
        assert run.wrong == []
        assert run.computed == wanted
        # Of no server two generations.
        assert len({server for server, _ in run.met}) == len(run.met)
        self.counts["streamed" if run.streamed is not None else "served"] += 1

    def disturb(self) -> None:
        """Anything may happen between two launches."""
        self.device.advance(self.rng.randrange(12))
        is_loading = any(not segment.is_complete for segment in self.segments)
        if self.rng.random() < (0.2 if is_loading else 0.02):
            load_again(self.rng, self.segments)


def test_whether_all_can_be_streamed_is_known_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert that no segment has keeps a lane's steps back until it is resident."""
    world = World(0)
    part = Part(tuple(range(1, SHAPE.experts)), 0, SHAPE.intermediate)
    world.streamer.open(MadeSource([marked_segment(part)], range(LAYERS), world.device))
    monkeypatch.setattr(streamer, "plan_layer", None)
    for held, can_stream in ((set[int](), False), ({1, 2}, False), ({0, 2}, True), ({0}, True)):
        world.residents.held = dict.fromkeys(range(LAYERS), held)
        world.residents.version += 1
        assert world.streamer.can_stream == can_stream
    world.residents.held[LAYERS - 1] = {1}
    assert not world.streamer.can_stream
    assert world.streamer.begin_whole(ROWS, world._wait) is None


def new_ids(rng: random.Random) -> list[torch.Tensor]:
    """Returns new ids of every layer; -1 among them."""
    found = []
    for _ in range(LAYERS):
        rows = [rng.sample(range(-1, SHAPE.experts), SHAPE.top_k) for _ in range(ROWS)]
        found.append(torch.tensor(rows, dtype=torch.int32))
    return found


def run_steps(world: World, count: int) -> None:
    """Steps of both lanes, two of the main lane in flight; some are broken off, others are run again."""
    waiting: list[Run] = []
    lane: Run | None = None
    lane_layer = 0
    again: list[list[torch.Tensor]] = []
    done = 0
    while done < count:
        if lane is None and world.rng.random() < 0.2:
            lane, lane_layer = world.begin(new_ids(world.rng), is_lane=True), 0
            if lane is not None:
                world.launching.append(lane)
        run = world.begin(again.pop(0) if again else new_ids(world.rng), is_lane=False)
        assert run is not None
        broken = world.rng.randrange(LAYERS) if world.rng.random() < 0.05 else LAYERS
        for layer in range(LAYERS):
            if layer >= broken:
                break
            world.launch_layer(run, layer)
            world.disturb()
            if lane is not None and lane.end is None and world.rng.random() < 0.7:
                world.launch_layer(lane, lane_layer)
                lane_layer += 1
                if lane_layer == LAYERS:
                    lane.end = world.device.record_read()
        if broken < LAYERS:
            # Its launches stay queued; the step is begun again later.
            again.append(run.ids)
            world.counts["broken off"] += 1
        else:
            world.device.current = "main"
            if run.streamed is not None:
                run.streamed.launched()
            run.end = world.device.record_read()
            waiting.append(run)
        while len(waiting) > 1 or (waiting and world.rng.random() < 0.3):
            oldest = waiting.pop(0)
            if not world.finish(oldest):
                again.append(oldest.ids)
                world.counts["run again"] += 1
            done += 1
        if lane is not None and lane.end is not None and world.rng.random() < 0.5:
            world.counts["lane"] += int(world.finish(lane))
            world.launching.remove(lane)
            lane = None
    world.device.drain()


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(s, marks=pytest.mark.full) for s in range(8, 40))]
)
def test_each_pair_once(seed: int) -> None:
    """Each pair is computed once with reloads, residents that move, broken-off launches, replays and both
    lanes.
    """
    world = World(seed)
    run_steps(world, 150)
    assert world.counts["streamed"] > 20
    assert world.counts["served"] > 10
    assert world.counts["broken off"] > 0
    # Some experts were expected to have no rows, and in the lane some of them had.
    assert world.counts["deferred"] > world.counts["fetched"] > 0
    assert world.counts["waited"] > 0


def test_steps_stream_what_earlier_ones_chose() -> None:
    """Counts arrive with a step's end, on a device that is late; later steps copy those experts first."""
    world = World(3)
    world.chooser.value = SHARES // 2
    ids = [torch.tensor([[5, 6]] * ROWS, dtype=torch.int32) for _ in range(LAYERS)]
    found = []
    for _ in range(4):
        streamed = world.streamer.begin(ROWS)
        assert streamed is not None
        found.append([layer.experts for layer in streamed.plan.layers])  # type: ignore[attr-defined]
        run = Run([one.clone() for one in ids], streamed, is_lane=False)
        world._owners |= {id(one): run for one in run.ids}
        for layer in range(LAYERS):
            world.launch_layer(run, layer)
        streamed.launched()
        run.end = world.device.record_read()
        assert world.finish(run)
    assert found[:2] == [[(0, 1, 2, 3)] * LAYERS] * 2
    assert all({5, 6} <= set(experts) for step in found[2:] for experts in step)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_very_many_steps() -> None:
    """10^5 of them."""
    total: Counter[str] = Counter()
    for seed in range(100, 140):
        world = World(seed)
        run_steps(world, 2500)
        total += world.counts
    assert min(total[name] for name in ("streamed", "served", "broken off", "run again", "lane")) > 100


@pytest.mark.parametrize(("products", "buffers"), [(0.2, 4), (1.0, 4), (3.0, 4), (1.0, 2)])
def test_copies_run_under_products(products: float, buffers: int) -> None:
    """A step takes what the slower of link and products takes; the next one's copies begin at once.

    What a profiler would note of them is counted as they are launched.
    """
    device = SimulatedDevice(random.Random(0))
    segment = marked_segment(Part(tuple(range(6)), 0, 32))
    each = segment.layers[0].expert_bytes
    # A piece of three experts takes a second.
    device._rate = 3 * each
    streamer = ExpertStreamer(
        geometry(SHAPE, LAYERS),
        range(LAYERS),
        BufferRing(device, buffers, 3 * each),
        device,
        SimulatedKernels(device, lambda slots, ids: None, products),
        FixedShare(),
    )
    streamer.open(MadeSource([segment], range(LAYERS), device))
    steps, pieces = 5, 2 * LAYERS
    for _ in range(steps):
        streamed = streamer.begin(ROWS)
        assert streamed is not None
        for layer in range(LAYERS):
            streamed.forward(
                layer, torch.zeros(ROWS, 16), [new_ids(random.Random(0))[0]], torch.ones(ROWS, 2), [None]
            )
    assert streamer.ring.operations == steps * pieces * (_PIECE_OPERATIONS + _COPY_OPERATIONS)
    device.drain()
    slower, faster = max(1.0, products), min(1.0, products)
    assert device.time <= steps * pieces * slower + faster + 1e-6
