"""Memory of expert slots that comes and goes while steps run: to KV pages, from them, and between layers.

A layer's slots with memory are those from 0 on. To give memory up, its least chosen experts are unmapped,
what lies beyond the new end moves into slots that they leave, and the chunks go back to the pool once every
step that was launched before has ended:

    main stream | step n | losers unmapped, others moved | step n+1 …          | chunks unmapped | step m …

Between those moments steps see one map each, captured graphs included, and the host waits for nothing.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_service.device.virtual_memory import PhysicalPool, VirtualMemoryUnavailable
from gpu_service.experts.adaptive.exchange import SlotExchanges
from gpu_service.experts.resident.content import SlotContent
from gpu_service.experts.resident.experts import ResidentExperts, SlotChange
from gpu_service.experts.streaming.ring import TransferDevice

Rates = NDArray[np.float64]
"""float64 `[layers with slots, experts]`: choices of each expert by a decoded token."""

# Chunks that one step maps for slots, at most: each takes the host some microseconds.
_MOST_MAPPED = 64
# How often layers may exchange memory, seconds, how many steps of layers give some up each time, and the
# tokens within which what another layer gains has to bring the copies that it takes.
_BETWEEN_LAYERS_S, _BETWEEN_LAYERS, _PAYS_WITHIN = 0.25, 4, 2048.0


class SlotSupply:
    """The supply of one rank; driven by the thread that launches steps, with the engine's stream active."""

    def __init__(
        self,
        resident: ResidentExperts,
        exchanges: SlotExchanges,
        device: TransferDevice,
        pool: PhysicalPool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pool`: from which the slots' memory comes."""
        self._resident, self._exchanges, self._device = resident, exchanges, device
        self.pool, self._clock = pool, clock
        self._rows = {layer: row for row, layer in enumerate(resident.slots)}
        self._layers = {layer: slots for layer, slots in resident.slots.items() if slots.memory is not None}
        # The end of steps that may still read what was given up, and of copies that may still write there,
        # those included whose expert is not used after all; empty: nothing was given up.
        self._retiring: tuple[Any, ...] = ()
        # Layer, slot and content of experts that moved: others may compare their bytes from that end on.
        self._moved: list[tuple[int, int, SlotContent]] = []
        self._next_exchange = 0.0
        # Spare chunks that were not enough for a slot of any layer: they are not offered again every step.
        self._too_few = 0
        # Bytes that slots gave up and got since the start.
        self.given_bytes = self.taken_bytes = 0

    @property
    def backed(self) -> NDArray[np.int64]:
        """int64 `[layers with slots]`: slots that have memory."""
        return np.array([slots.backed for slots in self._resident.slots.values()])

    @property
    def wants_memory(self) -> bool:
        """Returns whether some expert has no slot."""
        return any(slots.backed < slots.count for slots in self._layers.values())

    @property
    def nbytes(self) -> int:
        """Bytes mapped for slots."""
        return sum(slots.memory.mapped for slots in self._layers.values() if slots.memory) * (
            self.pool.chunk_bytes
        )

    def retire(self) -> None:
        """Unmaps what was given up, if no step reads it any more; allowed while residents are held."""
        if not self._retiring or not all(map(self._device.has_ended, self._retiring)):
            return
        # Another thread may be comparing a slot's bytes: then with the next step.
        if self._resident.reading.acquire(blocking=False):
            try:
                self._unmap()
            finally:
                self._resident.reading.release()

    def advance(self, rates: Rates, copy_price: float | None) -> None:
        """Between two steps: gives up what pages claim, or takes what they leave. `retire` comes first.

        `copy_price` as `ExpertCosts.copy_price`, of a layer's memory for another's.
        """
        if self._retiring:
            return
        lack = self.pool.claimed - self.pool.free
        if lack > 0:
            self._give_up(lack, rates)
        elif -lack > self._too_few and self.wants_memory:
            before = self.taken_bytes
            self._take(min(-lack, _MOST_MAPPED), rates)
            self._too_few = 0 if self.taken_bytes > before else -lack
        elif copy_price is not None and self._clock() >= self._next_exchange:
            self._next_exchange, self._too_few = self._clock() + _BETWEEN_LAYERS_S, 0
            self._exchange_layers(rates, copy_price)

    def give_up_now(self, rates: Rates) -> None:
        """Gives up what pages claim, as `advance`, and waits until it is done; called while no step is in
        flight.
        """
        self._exchanges.wait()
        while self.pool.claimed > self.pool.free or self._retiring:
            if not self._retiring:
                self._give_up(self.pool.claimed - self.pool.free, rates)
            if not self._retiring:
                return
            for event in self._retiring:
                self._device.wait(event)
            with self._resident.reading:
                self._unmap()

    def check_integrity(self) -> None:
        """Raises AssertionError when an expert has no memory, or a chunk is mapped beyond the slots' end."""
        for layer, slots in self._layers.items():
            assert slots.memory is not None
            held = [place for place in range(slots.memory.places) if slots.memory.is_mapped(place)]
            needed = list(range(slots.chunks_of(slots.backed)))
            assert held[: len(needed)] == needed, f"layer {layer}: slots without memory"
            assert self._retiring or held == needed, f"layer {layer}: memory that no slot uses"
            assert all(n < 0 for n in slots.expert_of_slot[slots.backed :]), f"layer {layer}: lost experts"

    def _unmap(self) -> None:
        for slots in self._layers.values():
            slots.unmap()
        for layer, slot, content in self._moved:
            contents = self._layers[layer].contents
            if contents[slot] is None and self._layers[layer].expert_of_slot[slot] == content.expert:
                contents[slot] = content
        self._retiring, self._moved = (), []

    # ---- giving up ----

    def _give_up(self, chunks: int, rates: Rates) -> None:
        """Gives up the cheapest slots of all layers, for at least `chunks` where there are as many."""
        ends = {layer: slots.backed for layer, slots in self._layers.items()}
        offers = {layer: self._offers(layer, rates) for layer in self._layers}
        heap = [(*offer, layer) for layer, found in offers.items() if (offer := next(found, None))]
        heapq.heapify(heap)
        while chunks > 0 and heap:
            _, end, freed, layer = heapq.heappop(heap)
            ends[layer] = -end
            chunks -= freed
            offer = next(offers[layer], None)
            if offer is not None:
                heapq.heappush(heap, (*offer, layer))
        self._shrink({layer: end for layer, end in ends.items() if end < self._layers[layer].backed}, rates)

    def _offers(self, layer: int, rates: Rates) -> Iterator[tuple[float, int, int]]:
        """Yields what giving up one chunk more costs: choices a token times bytes by chunk; slots left,
        negated, so that of equal ones a layer with many comes first; chunks.
        """
        slots = self._layers[layer]
        size, each = self.pool.chunk_bytes, slots.kind.expert_bytes
        held = [expert for expert in slots.expert_of_slot if expert >= 0]
        worth = np.sort(rates[self._rows[layer], held])
        # Empty slots, and those that are being filled, go first; what is being filled stays.
        worth = np.concatenate((np.zeros(slots.backed - len(held)), worth))
        end, least = slots.backed, 1 + max(self._exchanges.slots_under_way(layer), default=-1)
        while end > least:
            before = slots.chunks_of(end)
            left = max(least, (before - 1) * size // each)
            freed = before - slots.chunks_of(left)
            if not freed:
                return
            dropped = worth[slots.backed - end : slots.backed - left]
            end = left
            yield float(dropped.sum()) * each / freed, -end, freed

    def _shrink(self, ends: dict[int, int], rates: Rates) -> None:
        """Leaves layers the slots below `ends` and their most chosen experts; begins to retire the rest."""
        if not ends:
            return
        leaving, moves = list[SlotChange](), list[tuple[SlotChange, int]]()
        for layer, end in ends.items():
            slots = self._layers[layer]
            stays = self._staying(layer, end, rates)
            taken = self._exchanges.slots_under_way(layer)
            holes = (n for n in range(end) if n not in taken and slots.expert_of_slot[n] not in stays)
            for slot, expert in enumerate(slots.expert_of_slot):
                if expert < 0 or (expert in stays and slot < end):
                    continue
                leaving.append(SlotChange(layer, slot, -1))
                if expert in stays:
                    hole, content = next(holes), slots.contents[slot]
                    moves.append((SlotChange(layer, hole, expert), slot))
                    if content is not None:
                        self._moved.append((layer, hole, content))
                else:
                    self._exchanges.moved(layer, slot, None)
        self._resident.remap(leaving, self._device)
        for change, slot in moves:
            self._resident.copy_slot(change.layer, slot, change.slot)
            self._exchanges.moved(change.layer, slot, change.slot)
        if moves:
            self._resident.remap([change for change, _ in moves], self._device)
        for layer, end in ends.items():
            slots = self._layers[layer]
            self.given_bytes += (slots.chunks_of(slots.backed) - slots.chunks_of(end)) * self.pool.chunk_bytes
            slots.shrink(end)
        self._retiring = self._device.record_read(), self._device.record_copied()

    def _staying(self, layer: int, end: int, rates: Rates) -> set[int]:
        slots = self._layers[layer]
        room = end - len(self._exchanges.slots_under_way(layer))
        held = [expert for expert in slots.expert_of_slot if expert >= 0]
        order = np.argsort(-rates[self._rows[layer], held], kind="stable")[:room]
        return {held[n] for n in order}

    # ---- taking ----

    def _take(self, chunks: int, rates: Rates) -> None:
        """Slots for the most chosen absent experts of all layers; the placement fills them."""
        heap = [wish for layer in self._layers if (wish := self._wish(layer, rates)) is not None]
        heapq.heapify(heap)
        while chunks > 0 and heap:
            _, needed, end, layer = heapq.heappop(heap)
            slots = self._layers[layer]
            if needed > chunks:
                continue
            try:
                slots.grow(end, spares_claimed=True)
            except VirtualMemoryUnavailable:  # pages claimed it meanwhile
                return
            chunks -= needed
            self.taken_bytes += needed * self.pool.chunk_bytes
            wish = self._wish(layer, rates)
            if wish is not None:
                heapq.heappush(heap, wish)

    def _wish(self, layer: int, rates: Rates) -> tuple[float, int, int, int] | None:
        """Returns what a slot more brings, negated: as `_offers`, chunks, slots then, layer; None: has all
        slots.
        """
        slots, size = self._layers[layer], self.pool.chunk_bytes
        if slots.backed == slots.count:
            return None
        each, before = slots.kind.expert_bytes, slots.chunks_of(slots.backed)
        after = slots.chunks_of(slots.backed + 1)
        end = min(slots.count, max(slots.backed + 1, after * size // each))
        if after == before:
            return -np.inf, 0, end, layer
        held = [expert for expert in slots.expert_of_slot if expert >= 0]
        absent = np.sort(np.delete(rates[self._rows[layer]], held))[::-1]
        empty = slots.backed - len(held)
        gained = float(absent[empty : empty + end - slots.backed].sum())
        return -gained * each / (after - before), after - before, end, layer

    def _exchange_layers(self, rates: Rates, copy_price: float) -> None:
        """Layers whose slots bring least give some up; the next step gives them to those that gain most."""
        wishes = sorted(wish for layer in self._layers if (wish := self._wish(layer, rates)) is not None)
        firsts = ((next(self._offers(layer, rates), None), layer) for layer in self._layers)
        offers = sorted((*offer, layer) for offer, layer in firsts if offer is not None)
        ends = dict[int, int]()
        for gained, chunks, end, gaining in wishes[:_BETWEEN_LAYERS]:
            # As many as the wish needs, or those that gave would take it back.
            giving, cost, freed = dict[int, int](), 0.0, 0
            for price, left, count, layer in offers:
                if freed < chunks and layer != gaining and layer not in ends:
                    giving[layer] = -left
                    cost, freed = cost + price * count, freed + count
            slots = self._layers[gaining]
            copies = copy_price / _PAYS_WITHIN * (end - slots.backed) * slots.kind.expert_bytes
            if freed >= chunks and gaining not in ends and -gained * chunks - cost > copies:
                ends |= giving
        self._shrink(ends, rates)


def make_supply(
    resident: ResidentExperts, exchanges: SlotExchanges, device: TransferDevice
) -> SlotSupply | None:
    """Returns the supply of slots; None: the memory of all slots stays."""
    pools = [slots.memory.pool for slots in resident.slots.values() if slots.memory is not None]
    return SlotSupply(resident, exchanges, device, pools[0]) if pools else None
