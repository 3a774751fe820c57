"""Exchanges of experts in slots that all ranks of a stage make before the same step.

Ranks route alike, so the first one decides for all. Steps are numbered alike, too: every `TURN_STEPS` of them
all ranks exchange a few numbers, and then do the same:

    rank 0 | decides …          | turn: leavers unmapped | copies …  | turn: all have copied, newcomers mapped
    rank 1 |                    | the same               | copies …  | the same

Where ranks hold channels of each expert, each copies its own part; where they hold whole ones, the rank with
the leaver's slot copies, and the others learn who computes what. One batch is under way at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from gpu_service.core.parallel import ParallelContext
from gpu_service.experts.adaptive.exchange import SlotExchanges, Wanted
from gpu_service.experts.resident.content import SlotContent
from gpu_service.experts.resident.experts import ElsewhereChange, ResidentExperts, SlotChange
from gpu_service.experts.streaming.ring import TransferDevice
from gpu_service.experts.streaming.streamer import ExpertStreamer
from moebius.errors import brief
from moebius.experts.rank_division import rank_residents

_log = structlog.get_logger(__name__)
TURN_STEPS = 16
BATCH = 16
Largest = Callable[[torch.Tensor], torch.Tensor]


@dataclass(eq=False, slots=True)
class Place:
    """A slot of some rank, the same list on all ranks; filled by `AgreedExchanges`."""

    rank: int | None  # None: every rank has a part of the expert in such a slot.
    slot: int  # On that rank.
    expert: int  # -1: empty.
    was_exchanged: bool = False


@dataclass(eq=False, slots=True)
class Moving:
    """One exchange of the batch that is under way; filled by `AgreedExchanges`."""

    wanted: Wanted
    place: Place
    packing: Future[Any] | None = None  # Of this rank, until its bytes are there.
    is_copied: bool = False
    has_failed: bool = False
    content: SlotContent | None = None


class AgreedExchanges(SlotExchanges):
    """Driven by the thread that launches steps, once a step, on all ranks alike."""

    def __init__(
        self,
        resident: ResidentExperts,
        device: TransferDevice,
        streamer: ExpertStreamer | None,
        copied: Callable[[int, float], None],
        parallel: ParallelContext,
        largest: Largest,
    ) -> None:
        """`largest` gives all ranks of all stages the largest of their numbers, by element."""
        super().__init__(resident, device, streamer, copied)
        self._parallel, self._largest = parallel, largest
        self._tables = _places(resident, parallel)
        self._batch: list[Moving] = []
        self._proposed: list[Wanted] = []
        self._step, self._distrusts = 0, False

    @property
    def under_way(self) -> list[tuple[int, int]]:
        return [(each.wanted.layer, each.wanted.newcomer) for each in self._batch]

    def distrust(self) -> None:
        """All ranks empty the slots that were exchanged, at the next turn."""
        self._distrusts = True

    def advance(self, wanted: Sequence[Wanted]) -> None:
        """Before each step; changes slots at every `TURN_STEPS`-th.

        What the first rank wants counts, as far as it fits a batch; later counts know better than the rest.
        """
        if self._parallel.tp_rank == 0:
            self._proposed = [*self._proposed, *wanted][:BATCH]
        self._attend()
        self._step += 1
        if self._step % TURN_STEPS == 0:
            self._turn()

    def wait(self) -> None:
        """Not of one rank alone."""
        raise NotImplementedError("ranks end a batch together, at a turn")

    def _turn(self) -> None:
        own = torch.zeros(self._parallel.num_stages, BATCH + 1, 4, dtype=torch.int64)
        stage = own[self._parallel.stage]
        for row, each in enumerate(self._proposed):
            stage[row, :3] = torch.tensor([each.layer + 1, each.newcomer + 1, each.leaver + 2])
        for row, moving in enumerate(self._batch):
            stage[row, 3] = int(moving.has_failed)
        is_late = any(not (each.is_copied or each.has_failed) for each in self._batch)
        stage[BATCH, :2] = torch.tensor([int(is_late), int(self._distrusts)])
        agreed = self._largest(own)[self._parallel.stage].tolist()
        self._distrusts = False
        is_late, distrusts = agreed[BATCH][:2]
        if distrusts:
            self._empty()
        elif self._batch and not is_late:
            self._map([moving for row, moving in enumerate(self._batch) if not agreed[row][3]])
        if not self._batch:
            self._proposed = []
            self._begin([Wanted(n - 1, new - 1, old - 2) for n, new, old, _ in agreed[:BATCH] if n])

    def _begin(self, wanted: Sequence[Wanted]) -> None:
        """Unmaps leavers, and begins the copies of this rank."""
        for each in wanted:
            places = self._tables[each.layer]
            taken = {id(moving.place) for moving in self._batch}
            free = (one for one in places if one.expert == each.leaver and id(one) not in taken)
            place, coming = next(free, None), (each.layer, each.newcomer) in self.under_way
            if place is not None and not coming and all(one.expert != each.newcomer for one in places):
                self._batch.append(Moving(each, place))
        self._remap([(moving, -1, None) for moving in self._batch])
        # What segments hold of an expert may be as wide as a rank's channels and be others.
        has_parts = not self._parallel.holds_whole_experts
        source = None if has_parts or self._streamer is None else self._streamer.source
        segments = None if source is None or not self._batch else source.segments()
        copies = list[tuple[Wanted, None, int]]()
        for moving in self._batch:
            moving.place.expert, moving.place.was_exchanged = -1, True
            if not self._is_here(moving.place):
                moving.is_copied = True
            elif segments is not None and self._stored(segments, moving.wanted) is not None:
                copies.append((moving.wanted, None, moving.place.slot))
            else:
                moving.packing = self._packer.submit(self._read, moving.wanted)
        if copies:
            self._launch(copies)

    def _attend(self) -> None:
        """Copies what was packed, and notes which copies have ended."""
        for moving in self._batch:
            if moving.packing is not None and moving.packing.done():
                packing, moving.packing = moving.packing, None
                try:
                    self._launch([(moving.wanted, packing.result(), moving.place.slot)])
                except Exception as error:  # whatever it is, all ranks go on without the expert
                    moving.has_failed = True
                    _log.warning(
                        "an expert cannot be read for the GPU; servers go on computing it",
                        layer=moving.wanted.layer,
                        expert=moving.wanted.newcomer,
                        error=brief(error),
                    )
        for each, problem in self._copied_newcomers():
            for moving in self._batch:
                if (moving.wanted.layer, moving.wanted.newcomer) == (each.layer, each.expert):
                    moving.is_copied, moving.has_failed = True, bool(problem)
                    moving.content = each.content

    def _map(self, copied: Sequence[Moving]) -> None:
        """The batch has ended on all ranks; slots of what failed stay empty until one is wanted there."""
        self._remap([(moving, moving.wanted.newcomer, moving.content) for moving in copied])
        for moving in copied:
            moving.place.expert = moving.wanted.newcomer
        self._batch = []

    def _empty(self) -> None:
        """Copies that are under way are not used; later ones into their slots follow them on the link."""
        self._batch, self._copying = [], type(self._copying)()
        emptied = [
            Moving(Wanted(layer, -1, place.expert), place)
            for layer, places in self._tables.items()
            for place in places
            if place.was_exchanged and place.expert >= 0
        ]
        self._remap([(moving, -1, None) for moving in emptied])
        for moving in emptied:
            moving.place.expert = -1

    def _remap(self, moves: Sequence[tuple[Moving, int, SlotContent | None]]) -> None:
        """Each place holds another expert from the next step on; -1: none."""
        here = [each for each in moves if self._is_here(each[0].place)]
        there = [each for each in moves if not self._is_here(each[0].place)]
        if moves:
            self._resident.remap(
                [
                    SlotChange(moving.wanted.layer, moving.place.slot, expert, content)
                    for moving, expert, content in here
                ],
                self._device,
                [
                    ElsewhereChange(moving.wanted.layer, moving.place.expert, expert)
                    for moving, expert, _ in there
                ],
            )

    def _is_here(self, place: Place) -> bool:
        return place.rank is None or place.rank == self._parallel.tp_rank


def _places(resident: ResidentExperts, parallel: ParallelContext) -> Mapping[int, list[Place]]:
    """Returns the slots of all ranks of the stage, by layer: the same list on each."""
    if not parallel.holds_whole_experts:
        return {
            layer: [Place(None, slot, expert) for slot, expert in enumerate(slots.expert_of_slot)]
            for layer, slots in resident.slots.items()
        }
    everything = {layer: resident.experts(layer) for layer in resident.slots}
    ranks = range(parallel.tp_size)
    parts = [rank_residents(everything, rank, parallel.tp_size) for rank in ranks]
    return {
        layer: [Place(rank, slot, expert) for rank in ranks for slot, expert in enumerate(parts[rank][layer])]
        for layer in everything
    }
