"""The placement that follows traffic: watches what steps choose, and has slots' experts exchanged between
steps.

The thread that launches steps asks for counts now and then and hands them to a thread of the placement's own,
which forecasts and decides; exchanges that are wanted go back the same way, a few per step.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from gpu_service.experts.adaptive.budget import TransferBudget
from gpu_service.experts.adaptive.counts import Observation, RoutingCounts
from gpu_service.experts.adaptive.decision import PlacementDecision
from gpu_service.experts.adaptive.exchange import SlotExchanges, Wanted
from gpu_service.experts.adaptive.policy import USUAL_COPY_PRICE, price_beside_fetching
from gpu_service.experts.adaptive.supply import SlotSupply
from gpu_service.experts.costs import ExpertCosts
from gpu_service.experts.resident.experts import ResidentExperts

_log = structlog.get_logger(__name__)
# How often counts are read, at most.
READ_EVERY_S = 0.02
# What a step is taken to last after a pause.
_LONGEST_STEP_S = 0.05
# Half-life of the share of hits that steps are predicted with, choices of a layer.
_HITS_OVER = 1024.0
_SAVED_EVERY_S = 60.0
# Half-life of decoded tokens per second.
_TOKENS_OVER_S = 1.0
# After a find of damage, while servers repack the expert and compare the others.
_CAREFUL_S = 60.0


@dataclass(frozen=True, eq=False, slots=True)
class _Residents:
    """The residents of one moment; filled by `begin_step`."""

    mask: NDArray[np.bool_]  # As `AdaptivePlacement.resident_mask`.
    num_slots: NDArray[np.int64]  # [layers]: slots that have memory.


@dataclass(frozen=True, slots=True)
class PlacementFigures:
    """Since the start; filled by `AdaptivePlacement.figures`."""

    exchanges: int
    copied_bytes: int
    # Of decoding rows' choices in layers with slots: all, and of experts that were in one.
    chosen: int
    hits: int
    half_lives: dict[int, float]  # By layer: what its forecast follows, tokens.
    layers: dict[int, LayerFigures]


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """The same of one layer with slots."""

    exchanges: int
    copied_bytes: int
    chosen: int
    hits: int


class AdaptivePlacement:
    """The placement of one rank.

    `begin_step` is called by the thread that launches steps, `figures` by any.
    """

    def __init__(
        self,
        resident: ResidentExperts,
        counts: RoutingCounts,
        exchanges: SlotExchanges,
        costs: ExpertCosts,
        known: NDArray[np.int64] | None = None,
        save: Callable[[NDArray[np.int64]], None] = lambda record: None,
        supply: SlotSupply | None = None,
    ) -> None:
        """`known`: recorded counts int64 `[layers with slots, num_experts]`.

        `save` is given such counts every minute and at the end, by a thread. `supply`: None where the
        memory of slots stays.
        """
        self.supply = supply
        self._resident = resident
        self._counts = counts
        self._exchanges = exchanges
        self._costs, self._save = costs, save
        self.budget = TransferBudget()
        # Whether copies run beside the step that is being launched; None: those of earlier ones may.
        self.has_copies: bool | None = False
        self._layers = tuple(resident.slots)
        self._rows = {layer: row for row, layer in enumerate(self._layers)}
        self._bytes_each = max(found.kind.expert_bytes for found in resident.slots.values())
        top_k = resident.geometry.top_k
        slots = [found.backed + found.slots_elsewhere for found in resident.slots.values()]
        self._decision = PlacementDecision(self._layers, slots, self.resident_mask(), top_k, known)
        # Of decoded tokens: choices by expert and token, and how many there are in a second.
        self._rates = self._decision.rates
        self._is_absent = ~self.resident_mask()
        self._token_rate, self._last_observed = 0.0, time.monotonic()
        # What was chosen, and what was resident then; None for the latter: another decision is under way.
        self._inbox: queue.SimpleQueue[tuple[Observation, _Residents | None] | None]
        self._inbox = queue.SimpleQueue()
        self._wanted: list[Wanted] = []
        self._is_deciding = False
        # Set once there is a client of expert servers; see `ExpertClient.damages`.
        self.damages: Callable[[], int] = int
        # Set where steps fetch; see `ExpertFetcher.share`.
        self.fetched_share: Callable[[], float] = float
        self._known_damages, self._careful_until = 0, 0.0
        self._next_read = self._last_step = 0.0
        self._step_s = _LONGEST_STEP_S
        # Of decode, by layer with slots: since the start, and decayed sums of choices and hits of all.
        self._chosen = np.zeros(len(slots), np.int64)
        self._hits = np.zeros(len(slots), np.int64)
        self._recent_chosen = self._recent_hits = 0.0
        self._half_lives: dict[int, float] = {}
        self._saved = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="placement", daemon=True)
        self._thread.start()

    def begin_step(self) -> None:
        """Launches work before every step of the main lane and waits for nothing."""
        now = time.monotonic()
        self._step_s += 0.1 * (min(now - self._last_step, _LONGEST_STEP_S) - self._step_s)
        self._last_step = now
        if self.supply is not None:
            self.supply.retire()
        if self._resident.is_held:
            self.has_copies = None
            return
        damages = self.damages()
        if damages != self._known_damages:
            self._known_damages, self._careful_until = damages, now + _CAREFUL_S
            self._exchanges.distrust()
        is_careful = now < self._careful_until
        begun = self._exchanges.count
        self._exchanges.advance(() if is_careful else self._next_exchanges())
        self.has_copies = True if self._exchanges.count > begun else None if self._exchanges.copies else False
        if self.supply is not None:
            self.supply.advance(self._rates, None if is_careful else self.copy_price)
        found = self._counts.poll()
        if found is not None:
            resident = None if self._is_deciding else _Residents(self.resident_mask(), self._num_slots)
            self._is_deciding = True
            self._inbox.put((found, resident))
        if now >= self._next_read:
            self._next_read = now + READ_EVERY_S
            self._counts.fetch()

    def give_up_now(self) -> None:
        """Gives the pool the memory that KV pages claim, before it returns: while no step is in flight."""
        if self.supply is not None:
            self.supply.give_up_now(self._rates)

    @property
    def wants_memory(self) -> bool:
        """Returns whether some expert of a layer whose memory moves has no slot."""
        return self.supply is not None and self.supply.wants_memory

    @property
    def value_per_byte(self) -> float | None:
        """Seconds of expert servers that one byte more for slots would save in a second: of the best expert
        that has none. None: what servers take is not known yet.
        """
        costs = self._costs.figures
        if costs.cpu_expert_seconds is None:
            return None
        saved = max(0.0, costs.cpu_expert_seconds - (costs.gpu_expert_seconds or 0.0))
        best = float(np.where(self._is_absent, self._rates, 0.0).max(initial=0.0))
        return best * self._token_rate * saved / self._bytes_each

    @property
    def _num_slots(self) -> NDArray[np.int64]:
        return np.array([slots.backed + slots.slots_elsewhere for slots in self._resident.slots.values()])

    def resident_mask(self) -> NDArray[np.bool_]:
        """Returns bool `[layers, experts]`: in a slot, of other ranks too, or on its way there.

        Only by the thread that launches steps.
        """
        mask = self._resident.held.copy()
        for layer, expert in self._exchanges.under_way:
            mask[self._rows[layer], expert] = True
        return mask

    def figures(self) -> PlacementFigures:
        """Returns what has happened so far."""
        exchanges, chosen, hits = self._exchanges, self._chosen.tolist(), self._hits.tolist()
        layers = {
            layer: LayerFigures(*exchanges.by_layer[layer], chosen[row], hits[row])
            for row, layer in enumerate(self._layers)
        }
        half_lives = dict(self._half_lives)
        return PlacementFigures(exchanges.count, exchanges.nbytes, sum(chosen), sum(hits), half_lives, layers)

    @property
    def hit_share(self) -> float:
        """The share in slots of the latest choices of decoding rows in layers with slots; 0 before any."""
        return self._recent_hits / self._recent_chosen if self._recent_chosen else 0.0

    @property
    def copy_price(self) -> float | None:
        """Choices that the largest expert has to bring, copied into a slot; see `ExpertCosts.copy_price`."""
        price = self._costs.copy_price(self._bytes_each)
        return None if price is None else price_beside_fetching(price, self.fetched_share())

    def choose_again(self) -> None:
        """Exchanges that wait were worth their copies by costs that are no longer true."""
        self._wanted = []

    def close(self) -> None:
        """Steps must have ended. Saves what was counted."""
        self._inbox.put(None)
        self._thread.join()
        self._exchanges.close()

    def _next_exchanges(self) -> list[Wanted]:
        if not self._wanted:
            return []
        refills = self._wanted[0].leaver < 0
        count = self.budget.allowed(self._step_s, self._costs.link, self._bytes_each, refills)
        if not count and self._costs.link_is_unseen:
            count = 1  # A link that seems too slow for any copy would never be measured again.
        taken, self._wanted = self._wanted[:count], self._wanted[count:]
        return taken

    def _run(self) -> None:
        try:
            while (item := self._inbox.get()) is not None:
                self._take(*item)
            self._save(self._decision.to_record())
        except Exception:  # serving goes on with what is resident
            _log.exception("experts on the GPU are not exchanged any more")

    def _take(self, observation: Observation, residents: _Residents | None) -> None:
        price = self.copy_price
        # Where no copy is worth it, or its price is not known yet, the forecast learns all the same.
        usable = USUAL_COPY_PRICE if price is None or math.isinf(price) else price
        self._decision.observe(observation, usable)
        self._note_tokens(observation)
        if residents is not None:
            self._note_hits(observation, residents.mask)
            self._half_lives, self._rates = self._decision.half_lives, self._decision.rates
            self._is_absent = ~residents.mask
            self._decision.resize(residents.num_slots)
            self._wanted = self._wanted_now(residents.mask, price)
            self._is_deciding = False
        if time.monotonic() - self._saved > _SAVED_EVERY_S:
            self._saved = time.monotonic()
            self._save(self._decision.to_record())

    def _wanted_now(self, resident: NDArray[np.bool_], price: float | None) -> list[Wanted]:
        if price is None:  # empty slots alone
            return self._decision.wanted(resident, math.inf)
        wanted = self._decision.wanted(resident, price)
        if not wanted and self._costs.link_is_unseen:
            wanted = self._decision.wanted(resident, 0.0)[:1]
        return wanted

    def _note_tokens(self, observation: Observation) -> None:
        now = time.monotonic()
        seconds, self._last_observed = max(1e-3, now - self._last_observed), now
        tokens = float(observation.decode.sum(axis=1).max(initial=0)) / self._resident.geometry.top_k
        newest = 1 - 0.5 ** (seconds / _TOKENS_OVER_S)
        self._token_rate += newest * (tokens / seconds - self._token_rate)

    def _note_hits(self, observation: Observation, resident: NDArray[np.bool_]) -> None:
        chosen = observation.decode.sum(axis=1)
        hits = np.where(resident, observation.decode, 0).sum(axis=1)
        self._chosen, self._hits = self._chosen + chosen, self._hits + hits
        kept = 0.5 ** (float(chosen.max(initial=0)) / _HITS_OVER)
        self._recent_chosen = kept * self._recent_chosen + float(chosen.sum())
        self._recent_hits = kept * self._recent_hits + float(hits.sum())
