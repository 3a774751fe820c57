"""Strategies that a replay compares: lists that stay, a cache that waits for its copies, and the engine's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_service.experts.adaptive.budget import TransferBudget
from gpu_service.experts.adaptive.counts import Observation
from gpu_service.experts.adaptive.decision import PlacementDecision
from gpu_service.experts.adaptive.exchange import Wanted
from gpu_service.experts.adaptive.placement import READ_EVERY_S
from gpu_service.experts.adaptive.policy import price_beside_fetching
from lab.bench.replay.fetch_slots import FetchSlots

Mask = NDArray[np.bool_]
"""bool `[layers, num_experts]`: resident."""


@dataclass(frozen=True)
class Costs:
    """What a simulated step's time is made of; filled by the command line."""

    cpu_bandwidth: float  # Bytes per second at which servers read experts.
    link_bandwidth: float  # Bytes per second from RAM to the GPU.
    expert_bytes: int
    layer_s: float  # Seconds of a layer without its experts in RAM.
    copy_price: float  # Reads by servers that a copy beside them costs.
    fetch_slots: int = 0  # Of each layer, beside those of residents.

    @property
    def read_s(self) -> float:
        """Seconds in which servers read one expert."""
        return self.expert_bytes / self.cpu_bandwidth

    @property
    def copy_s(self) -> float:
        """Seconds of one expert on the link."""
        return self.expert_bytes / self.link_bandwidth


class SimulatedStrategy(ABC):
    """Which experts are resident while steps are replayed; here they stay."""

    def __init__(self, resident: Mask, costs: Costs) -> None:
        self.resident = resident.copy()
        self.costs = costs

    @abstractmethod
    def begin_step(self, now: float, step_s: float) -> int:
        """Changes `resident`; returns how many exchanges begin. `step_s`: what steps last of late."""

    @abstractmethod
    def end_step(self, chosen: NDArray[np.integer], rows: int) -> tuple[int, float]:
        """Returns the experts that the step's choices, `[layers, num_experts]`, had copied, and seconds for
        experts; `rows`: its token rows.
        """


class StaticList(SimulatedStrategy):
    """Residents stay; the others are read by servers, or fetched within the step."""

    def __init__(self, resident: Mask, costs: Costs) -> None:
        super().__init__(resident, costs)
        self.fetch_slots: FetchSlots | None = None
        if costs.fetch_slots:
            layers, experts = resident.shape
            self.fetch_slots = FetchSlots(layers, experts, costs.fetch_slots, costs.read_s, costs.copy_s)

    def begin_step(self, now: float, step_s: float) -> int:
        return 0

    def end_step(self, chosen: NDArray[np.integer], rows: int) -> tuple[int, float]:
        missing = np.where(self.resident, 0, chosen)
        if self.fetch_slots is not None:
            return self.fetch_slots.step(missing, rows)
        return 0, int(np.count_nonzero(missing)) * self.costs.read_s


class LeastRecentlyUsed(SimulatedStrategy):
    """A cache per layer: each expert that is missing is copied, and the step waits for the copy."""

    def __init__(self, resident: Mask, costs: Costs) -> None:
        super().__init__(resident, costs)
        self._slots = resident.sum(axis=1)
        self._used_at = resident.astype(np.int64)
        self._now = 1

    def begin_step(self, now: float, step_s: float) -> int:
        return 0

    def end_step(self, chosen: NDArray[np.integer], rows: int) -> tuple[int, float]:
        missing = (chosen > 0) & ~self.resident
        # A layer without slots has its experts read by servers.
        read = int(np.count_nonzero(missing[self._slots == 0]))
        copied = int(np.count_nonzero(missing)) - read
        self._now += 1
        self._used_at[chosen > 0] = self._now
        latest = np.argsort(-self._used_at, axis=1, kind="stable")
        kept = np.arange(latest.shape[1]) < self._slots[:, None]
        np.put_along_axis(self.resident, latest, kept, axis=1)
        return copied, copied * self.costs.copy_s + read * self.costs.read_s


class Adaptive(StaticList):
    """The engine's own forecast, prices and pace; a copy takes its time on the link."""

    def __init__(
        self, resident: Mask, costs: Costs, top_k: int, known: NDArray[np.int64] | None = None
    ) -> None:
        super().__init__(resident, costs)
        layers = range(len(resident))
        self._decision = PlacementDecision(layers, resident.sum(axis=1).tolist(), resident, top_k, known)
        self._counted = np.zeros(resident.shape, np.int64)
        self._prompts = np.zeros(resident.shape, np.int64)
        # What the copy to the host had when it was launched, a step before it is looked at.
        self._fetched: NDArray[np.int64] | None = None
        self._wanted: list[Wanted] = []
        self._budget = TransferBudget()
        self._copying: deque[tuple[float, Wanted]] = deque()
        self._next_read = self._link_is_free = 0.0

    def begin_step(self, now: float, step_s: float) -> int:
        while self._copying and self._copying[0][0] <= now:
            _, each = self._copying.popleft()
            self.resident[each.layer, each.newcomer] = True
        taken = list[Wanted]()
        if self._wanted:
            most = self._budget.allowed(step_s, self.costs.link_bandwidth, self.costs.expert_bytes)
            taken, self._wanted = self._wanted[:most], self._wanted[most:]
        # Who was on its way when it was chosen to leave may not have come yet.
        begun = [each for each in taken if self.resident[each.layer, each.leaver]]
        for each in begun:
            self.resident[each.layer, each.leaver] = False
            self._link_is_free = max(self._link_is_free, now) + self.costs.copy_s
            self._copying.append((self._link_is_free, each))
        if self._fetched is not None:
            self._decide(self._fetched)
        self._fetched = None
        if now >= self._next_read:
            self._next_read = now + READ_EVERY_S
            self._fetched, self._counted = self._counted, np.zeros_like(self._counted)
        return len(begun)

    def end_step(self, chosen: NDArray[np.integer], rows: int) -> tuple[int, float]:
        self._counted += chosen
        return super().end_step(chosen, rows)

    def _decide(self, counted: NDArray[np.int64]) -> None:
        resident = self.resident.copy()
        for _, each in self._copying:
            resident[each.layer, each.newcomer] = True
        fetched = 0.0 if self.fetch_slots is None else self.fetch_slots.share
        price = price_beside_fetching(self.costs.copy_price, fetched)
        self._decision.observe(Observation(counted, self._prompts), price)
        self._wanted = self._decision.wanted(resident, price)
