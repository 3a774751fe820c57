"""An engine's steps over experts that change slots, on a simulated device."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import torch

from gpu_service.device.virtual_memory import PhysicalPool
from gpu_service.experts.adaptive.counts import RoutingCounts
from gpu_service.experts.adaptive.placement import AdaptivePlacement
from gpu_service.experts.adaptive.supply import make_supply
from gpu_service.experts.costs import ExpertCosts
from tests.helpers.exchanging_rank import ExchangingRank
from tests.helpers.marked_segments import LAYERS, SHAPE, load_again

MOST_IN_FLIGHT = 3
# (layer, row, expert): a choice of a step's row.
Choice = tuple[int, int, int]


@dataclass
class Step:
    """Ids int32 `[rows, top_k]` by layer, and what has been computed of them."""

    ids: list[torch.Tensor]
    computed: Counter[Choice] = field(default_factory=Counter)
    is_lost: bool = False  # A server was gone when it was asked; the step is launched again.
    has_ended: bool = False

    @property
    def choices(self) -> set[Choice]:
        """All that has to be computed."""
        return {
            (layer, row, expert)
            for layer, ids in enumerate(self.ids)
            for row, experts in enumerate(ids.tolist())
            for expert in experts
        }


class Engine(ExchangingRank):
    """Launches steps as the engine does: some ahead, between them what `change` does to slots."""

    def __init__(self, seed: int, pool: PhysicalPool | None = None) -> None:
        """`pool`: where memory of slots comes from that moves."""
        super().__init__(seed, has_streamer=seed % 4 != 3, pool=pool)
        self.in_flight: deque[Step] = deque()
        self.lost: deque[Step] = deque()
        self.lane: Step | None = None
        self.servers_are_there = True
        self.rows = 1
        self.damages = self.ended = 0
        self.placement: AdaptivePlacement | None = None
        if seed % 2 or pool is not None:
            counts = RoutingCounts(range(LAYERS), SHAPE.experts, self.device)
            self.resident.counts = counts
            self.placement = AdaptivePlacement(
                self.resident,
                counts,
                self.exchanges,
                ExpertCosts(SHAPE.experts, 2.0),
                supply=make_supply(self.resident, self.exchanges, self.device),
            )
            self.placement.damages = lambda: self.damages

    def change(self) -> None:
        """Between two steps."""
        if self.placement is not None:
            self.placement.begin_step()
        elif not self.resident.is_held:
            if self.rng.random() < 0.01:
                self.exchanges.distrust()
            wanted = self.wanted()
            self.exchanges.advance(wanted + [each for each in self.refills() if self.rng.random() < 0.3])

    def launch(self, step: Step, is_lane: bool = False) -> None:
        """Launches as a step of the engine: per layer it routes, asks servers, and computes what is
        resident.
        """
        self.device.current = "lane" if is_lane else "main"
        for layer, ids in enumerate(step.ids):
            self.device.launch(lambda layer=layer, ids=ids: self.ask_servers(step, layer, ids, is_lane))
            self.device.launch(lambda layer=layer, ids=ids: self.compute(step, layer, ids))
        self.device.launch(lambda: setattr(step, "has_ended", True))
        self.device.current = "main"

    def ask_servers(self, step: Step, layer: int, ids: torch.Tensor, is_lane: bool) -> None:
        """A lane's step streams what is not resident, and asks no server."""
        step.is_lost |= not (self.servers_are_there or is_lane)
        for row, experts in enumerate(self.resident.cpu_ids(layer, ids).tolist()):
            step.computed.update((layer, row, expert) for expert in experts if expert >= 0)

    def compute(self, step: Step, layer: int, ids: torch.Tensor) -> None:
        """What the device finds in slots when it comes to them."""
        slots = self.resident.slots[layer]
        slot_of = slots.slot_of_expert.tolist()
        held = [slot for slot in slot_of if slot >= 0]
        if len(set(held)) < len(held):
            self.wrong.append(f"layer {layer}: two experts are in one slot")
        for row, experts in enumerate(ids.tolist()):
            for expert in experts:
                slot = slot_of[expert]
                if slot >= 0:
                    step.computed[layer, row, expert] += 1
                    if slots.weights[slot, :2].tolist() != [layer, expert]:
                        self.wrong.append(f"layer {layer}: expert {expert} is not in its slot")

    def begin_lane(self) -> None:
        """A long prompt's step on a stream of its own, after all that was launched; slots stay meanwhile."""
        self.lane = self.new_step()
        launched = self.device.record_read()
        self.device.current = "lane"
        self.device.compute_waits(launched)
        self.resident.is_held = True
        self.launch(self.lane, is_lane=True)

    def new_step(self) -> Step:
        """Returns a new step of as many rows as requests are decoding; those of requests that ended are
        gone.
        """
        self.rows = self.rng.choice([1, max(1, self.rows - 1), min(6, self.rows + 1)])
        ids = [
            torch.tensor(
                [self.rng.sample(range(SHAPE.experts), SHAPE.top_k) for _ in range(self.rows)],
                dtype=torch.int32,
            )
            for _ in range(LAYERS)
        ]
        return Step(ids)

    def step(self) -> None:
        """One more step, and what may happen around it."""
        self.happen()
        self.change()
        if self.lane is None and self.rng.random() < 0.05:
            self.begin_lane()
        step = self.lost.popleft() if self.lost and self.servers_are_there else self.new_step()
        self.launch(step)
        self.in_flight.append(step)
        self.device.advance(self.rng.randrange(16))
        while len(self.in_flight) > MOST_IN_FLIGHT:
            self.device.advance(1)
            self.end_steps()
        self.end_steps()

    def happen(self) -> None:
        """Servers are lost, come back, or load again; an expert is found damaged."""
        chance = self.rng.random()
        if chance < 0.02:
            self.servers_are_there = not self.servers_are_there
        if chance < 0.05 and self.has_streamer:
            load_again(self.rng, self.segments)
        if 0.05 < chance < 0.055:
            self.damages += 1

    def end_steps(self) -> None:
        """Looks at what was computed of steps that have ended; lost ones are launched again."""
        if self.lane is not None and self.lane.has_ended:
            self.check(self.lane)
            self.lane, self.resident.is_held = None, False
        while self.in_flight and self.in_flight[0].has_ended:
            step = self.in_flight.popleft()
            if step.is_lost:
                self.lost.append(Step(step.ids))
            else:
                self.check(step)

    def check(self, step: Step) -> None:
        """Every choice once."""
        self.ended += 1
        if dict(step.computed) != dict.fromkeys(step.choices, 1):
            self.wrong.append(f"step {self.ended} computed {dict(step.computed)} of {step.choices}")

    def end(self) -> None:
        """The last steps, and all that is on its way."""
        self.servers_are_there = True
        while self.lost:
            self.launch(step := self.lost.popleft())
            self.in_flight.append(step)
        self.device.drain()
        self.end_steps()
        # What is not whole is packed, which nothing does any more once it is closed.
        self.exchanges.wait()
        if self.placement is not None:
            self.placement.close()
        self.check_end()
        self.exchanges.close()
        assert not self.in_flight
