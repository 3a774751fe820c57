"""States of requests with linear attention: rewritten by every step, kept where prefixes may end.

steps of a request   ... N reads a, writes b | N+1 reads b, writes c | N+2 reads c, writes d ...

A step holds what it reads and writes until its results are committed, so whatever happens to the request,
the step can be run again. A step with drafts writes a state for each of them, too; that after the last one
that was right is the request's. A request holds the state after its last scheduled token, and snapshots:
states after whole pages that were computed, for the prefix tree. Nothing is ever copied.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from gpu_service.cache.state_cache import ZERO_SLOT, StateSlots, make_states, state_bytes
from gpu_service.core.request import Request
from gpu_service.core.step import Batch
from moebius.config import GpuConfig
from moebius.models.layers.layer import Layers


class OutOfStates(RuntimeError):
    """A slot was asked for and none is free; the caller must wait for a step's commit first."""


class StatePool:
    """Slots with counts of holders. The last slot freed is the first handed out again."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots` includes slot 0, as in `StateSlots`."""
        if num_slots < 2:
            raise ValueError(f"num_slots must be at least 2 (slot 0 is all zeros), got {num_slots}")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))
        self._holders = [0] * num_slots

    @property
    def available(self) -> int:
        """Slots that no request holds."""
        return len(self._free)

    def alloc(self) -> int:
        """Returns a free slot, which is held once now. Raises OutOfStates when there is none."""
        if not self._free:
            raise OutOfStates(f"all {self.num_slots - 1} slots of states are held")
        slot = self._free.pop()
        self._holders[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        """One holder more. Raises ValueError for a slot that is free."""
        if slot == ZERO_SLOT:
            return
        if self._holders[slot] < 1:
            raise ValueError(f"slot {slot} is free: its state may be overwritten")
        self._holders[slot] += 1

    def drop(self, slot: int) -> None:
        """One holder less; the last one frees the slot. Raises ValueError when there was none."""
        if slot == ZERO_SLOT:
            return
        if self._holders[slot] < 1:
            raise ValueError(f"slot {slot} is not held")
        self._holders[slot] -= 1
        if self._holders[slot] == 0:
            self._free.append(slot)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raises AssertionError unless `held`, once for each holder, is what was counted."""
        counts = Counter(slot for slot in held if slot != ZERO_SLOT)
        seen = [counts[slot] for slot in range(self.num_slots)]
        assert seen == self._holders, f"holders of states {seen}, counted {self._holders}"
        free = sorted(slot for slot in range(1, self.num_slots) if self._holders[slot] == 0)
        assert sorted(self._free) == free, f"free slots {sorted(self._free)}, expected {free}"


# Slots of a request that runs in two steps in flight: what each reads, and what the later one writes.
SLOTS_PER_REQUEST = 3


def slots_per_request(gpu: GpuConfig) -> int:
    """Returns the same where steps have drafts, too: a request in such a step is in no other one."""
    if not gpu.may_draft:
        return SLOTS_PER_REQUEST
    return max(SLOTS_PER_REQUEST, 2 + gpu.num_draft_tokens)


def num_snapshots(gpu: GpuConfig) -> int:
    """States that may be kept for others to start from."""
    if not gpu.prefix_caching:
        return 0
    return gpu.num_seqs if gpu.state_snapshots is None else gpu.state_snapshots


def num_state_slots(gpu: GpuConfig) -> int:
    """Slots that the settings ask for: of zeros, of running requests, of snapshots."""
    return 1 + slots_per_request(gpu) * gpu.num_seqs + num_snapshots(gpu)


def all_states_bytes(gpu: GpuConfig, rank_layers: Layers, dtype: torch.dtype) -> int:
    """Returns the bytes of all slots, that of padding included; 0 where no layer has a state."""
    return (num_state_slots(gpu) + 1) * state_bytes(rank_layers, dtype)


def allocate_states(
    gpu: GpuConfig, rank_layers: Layers, dtype: torch.dtype, device: torch.device
) -> StateSlots | None:
    """Returns all slots that the settings ask for; None where no layer has a state."""
    return make_states(rank_layers, num_state_slots(gpu), dtype, device)


def _slots_of(batch: Batch) -> list[int]:
    """All that a step reads and writes."""
    return [*batch.state_reads, *batch.state_writes, *itertools.chain.from_iterable(batch.draft_states)]


class RequestStates:
    """Hands slots to steps; bounds how many states are snapshots, those of the tree included."""

    def __init__(self, pool: StatePool, max_snapshots: int) -> None:
        self.pool = pool
        self.max_snapshots = max_snapshots
        # Held by requests or the tree for others to start from.
        self.num_snapshots = 0
        # By number, steps that were planned and not committed; they hold their slots.
        self._steps: dict[int, Batch] = {}

    def start(self, request: Request, slot: int) -> None:
        """A request is given its slot in the batch; it starts from a state of the tree's, or from zeros."""
        self.pool.hold(slot)
        request.state_slot = slot

    def advance(self, request: Request, batch: Batch) -> None:
        """Plans that the batch's next row reads the request's state and writes a new one.

        Raises OutOfStates when no slot is free before an earlier step is committed.
        """
        written = self.pool.alloc()
        # What the request held is the step's from now on; the new one is held by both.
        batch.state_reads.append(request.state_slot)
        batch.state_writes.append(written)
        self.pool.hold(written)
        request.state_slot = written
        self._steps[batch.step] = batch

    def advance_drafts(self, batch: Batch, index: int, count: int) -> bool:
        """Plans that the `count` drafts of a request of the batch write a state each; False: too few slots
        are free."""
        if count > self.pool.available:
            return False
        if not batch.draft_states:
            batch.draft_states = [[] for _ in batch.requests]
        batch.draft_states[index] = [self.pool.alloc() for _ in range(count)]
        return True

    def accept(self, request: Request, slot: int) -> None:
        """The request's state is the one after a draft that was right."""
        self.pool.hold(slot)
        self.pool.drop(request.state_slot)
        request.state_slot = slot

    def committed(self, batch: Batch) -> None:
        """The batch will never be run again."""
        if self._steps.pop(batch.step, None) is None:
            return
        for slot in _slots_of(batch):
            self.pool.drop(slot)

    @property
    def is_full(self) -> bool:
        """Returns whether one snapshot more needs another one forgotten."""
        return self.num_snapshots >= self.max_snapshots

    def snapshot(self, request: Request, slot: int, length: int) -> None:
        """Keeps the state after the first `length` tokens of a request; not `is_full`."""
        self.pool.hold(slot)
        self.num_snapshots += 1
        request.snapshots.append((length, slot))

    def adopt(self) -> int:
        """Returns a slot for a snapshot that comes from elsewhere; not `is_full`. Raises OutOfStates."""
        slot = self.pool.alloc()
        self.num_snapshots += 1
        return slot

    def forget(self, slot: int) -> None:
        """A snapshot is no longer kept, by a request or by the tree."""
        self.num_snapshots -= 1
        self.pool.drop(slot)

    def take_snapshots(self, request: Request) -> Sequence[tuple[int, int]]:
        """Returns those of a request, (length, slot) in ascending order; the caller keeps or forgets each."""
        taken, request.snapshots = request.snapshots, []
        return taken

    def leave(self, request: Request) -> None:
        """The request runs no more, for now or for ever."""
        for _, slot in self.take_snapshots(request):
            self.forget(slot)
        self.pool.drop(request.state_slot)
        request.state_slot = ZERO_SLOT

    def check_integrity(
        self, requests: Iterable[Request], cached: Sequence[int], copied: Sequence[int] = ()
    ) -> None:
        """Raises AssertionError unless every slot's holders are requests, steps, the tree (`cached`) and
        copies that are being made (`copied`).
        """
        held, snapshots = [*cached, *copied], len(cached)
        for request in requests:
            held += [request.state_slot, *(slot for _, slot in request.snapshots)]
            snapshots += len(request.snapshots)
        for batch in self._steps.values():
            held += _slots_of(batch)
        self.pool.check_integrity(held)
        assert snapshots == self.num_snapshots, f"{snapshots} snapshots, counted {self.num_snapshots}"
