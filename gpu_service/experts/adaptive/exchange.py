"""Exchanges of experts in slots, carried out between steps while steps go on.

    main stream | step n | leaver unmapped | step n+1 …              | newcomer mapped | step m …
    copy stream |                          | newcomer's bytes → slot |

From the first mark on expert servers compute the leaver, from the second on the GPU the newcomer: in every
step each expert is computed once. Steps launched before the first mark may still read the leaver's bytes,
so the copy waits for them; the second mark is set by a host that has seen the copy end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog
import torch

from gpu_service.experts.resident.content import SlotContent, content_of
from gpu_service.experts.resident.experts import ResidentExperts, SlotChange
from gpu_service.experts.streaming.plan import CopyRun, Piece, StoredExperts
from gpu_service.experts.streaming.ring import TransferDevice
from gpu_service.experts.streaming.segments import ExpertSegments
from gpu_service.experts.streaming.streamer import ExpertStreamer
from moebius.checkpoint.errors import CheckpointError
from moebius.errors import UserError, brief

_log = structlog.get_logger(__name__)
# Experts that are packed from the checkpoint at once, where no segment has them as the GPU holds them.
_PACKED_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """An expert that shall take another's slot; filled by the placement's thread."""

    layer: int
    newcomer: int
    leaver: int


class _Packed(NamedTuple):
    """An expert that was packed from the checkpoint."""

    bytes: torch.Tensor  # uint8 [expert_bytes]
    content: SlotContent


# What is wanted, and its bytes where they were packed for it.
_Copy = tuple[Wanted, _Packed | None]


@dataclass(eq=False, slots=True)
class _Copies:
    """The copies that one step launched, one after another; filled by `SlotExchanges._launch`."""

    begin: Any
    end: Any = None
    nbytes: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class _Copying:
    """A newcomer on its way; filled when its copy is launched."""

    layer: int
    slot: int
    expert: int
    copies: _Copies
    # What is copied from; None: memory of our own.
    segments: ExpertSegments | None
    # None: nothing is known of what was copied.
    content: SlotContent | None
    keeps: torch.Tensor | None = None


class SlotExchanges:
    """Driven by the thread that launches steps, with the engine's stream active."""

    def __init__(
        self,
        resident: ResidentExperts,
        device: TransferDevice,
        streamer: ExpertStreamer | None,
        copied: Callable[[int, float], None] = lambda nbytes, seconds: None,
    ) -> None:
        """`streamer`: whose source has the servers' segments; None: experts are packed from the
        checkpoint. `copied` is called with the bytes of a step's copies and their seconds on the link.
        """
        self._resident = resident
        self._device = device
        self._streamer, self._copied = streamer, copied
        self._copying: deque[_Copying] = deque()
        self._packing: deque[tuple[Wanted, Future[_Packed]]] = deque()
        # (layer, slot) of experts that came from a segment, not from the checkpoint.
        self._from_segments: set[tuple[int, int]] = set()
        self._packer = ThreadPoolExecutor(1, "packing-residents")
        # Where what is wanted was found last.
        self._found_in: ExpertSegments | None = None
        # Of all exchanges that were begun.
        self.count = self.nbytes = 0
        # The same by layer.
        self.by_layer: dict[int, tuple[int, int]] = dict.fromkeys(resident.slots, (0, 0))

    @property
    def under_way(self) -> list[tuple[int, int]]:
        """(layer, expert) of newcomers that are not mapped yet."""
        return [(each.layer, each.expert) for each in self._copying] + [
            (wanted.layer, wanted.newcomer) for wanted, _ in self._packing
        ]

    @property
    def copies(self) -> bool:
        """Whether copies may be running now."""
        return bool(self._copying)

    def slots_under_way(self, layer: int) -> set[int]:
        """Slots of a layer to which an expert is being copied."""
        return {each.slot for each in self._copying if each.layer == layer}

    def moved(self, layer: int, slot: int, new: int | None) -> None:
        """What was in a slot is in another one now; None: nowhere any more."""
        if new is not None:
            self._from_segments.discard((layer, new))
        if (layer, slot) in self._from_segments:
            self._from_segments.remove((layer, slot))
            if new is not None:
                self._from_segments.add((layer, new))

    def advance(self, wanted: Sequence[Wanted]) -> None:
        """Between two steps: maps what has been copied, and begins what is wanted."""
        changes = self._ended()
        if changes:
            self._resident.remap(changes, self._device)
        copies = self._possible([(each, None) for each in self._copyable(wanted)] + self._packed())
        if copies:
            changes = [SlotChange(each.layer, slot, -1) for each, _, slot in copies]
            self._resident.remap(changes, self._device)
            self._launch(copies)

    def distrust(self) -> None:
        """Servers have found an expert damaged: what was copied from their memory may have been, too.

        Its slots are emptied before the next step, and copies under way are not used.
        """
        self._copying = deque(each for each in self._copying if each.segments is None)
        changes = [SlotChange(layer, slot, -1) for layer, slot in sorted(self._from_segments)]
        self._from_segments = set()
        if changes:
            self._resident.remap(changes, self._device)

    def wait(self) -> None:
        """Maps everything that was begun: for tests and measurements."""
        while self.under_way:
            for each in self._copying:
                self._device.wait(each.copies.end)
            for _, packed in self._packing:
                packed.exception()
            self.advance(())

    def close(self) -> None:
        """Nothing is begun any more; steps must have ended."""
        self._packer.shutdown(cancel_futures=True)

    def _ended(self) -> list[SlotChange]:
        changes = list[SlotChange]()
        for each, problem in self._copied_newcomers():
            if problem:
                # The slot stays empty until the placement wants an expert there.
                _log.warning("an expert that was copied is not used", layer=each.layer, because=problem)
                self._pack(Wanted(each.layer, each.expert, -1))
            else:
                changes.append(SlotChange(each.layer, each.slot, each.expert, each.content))
        return changes

    def _copied_newcomers(self) -> Iterator[tuple[_Copying, str]]:
        """Yields those whose copies have ended since the last call, with what makes their bytes worthless."""
        ended = list[_Copying]()
        while self._copying and self._device.has_ended(self._copying[0].copies.end):
            ended.append(self._copying.popleft())
            copies = ended[-1].copies
            if not self._copying or self._copying[0].copies is not copies:
                self._copied(copies.nbytes, self._device.seconds_between(copies.begin, copies.end))
        # All of these have been copied: one question, asked now, is enough for all of a segment's.
        problems: dict[int, str] = {}
        for each in ended:
            if each.segments is not None and id(each.segments) not in problems:
                problems[id(each.segments)] = each.segments.problem()
            yield each, problems.get(id(each.segments), "")

    def _copyable(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Returns what can be copied at once; the others are packed first."""
        if not wanted:
            return []
        source = None if self._streamer is None else self._streamer.source
        segments = None if source is None else source.segments()
        if self._streamer is not None and segments is None:
            # Servers load, or their segments are being opened: soon they can be copied from.
            return []
        found = []
        for each in wanted:
            if segments is not None and self._stored(segments, each) is not None:
                found.append(each)
            elif len(self._packing) < _PACKED_AHEAD:
                self._pack(each)
        return found

    def _possible(self, copies: Sequence[_Copy]) -> list[tuple[Wanted, _Packed | None, int]]:
        """Returns those whose slots are still as they were when they were wanted, with the slot; of one slot
        or newcomer the first. A slot whose newcomer is on its way is not free.
        """
        coming = {*self.under_way}
        taken = {(each.layer, each.slot) for each in self._copying}
        found = []
        for each, packed in copies:
            slots = self._resident.slots[each.layer]
            held = slots.expert_of_slot[: slots.backed]
            free = (
                n for n, expert in enumerate(held) if expert == each.leaver and (each.layer, n) not in taken
            )
            slot, newcomer = next(free, None), (each.layer, each.newcomer)
            if slot is not None and each.newcomer not in held and newcomer not in coming:
                taken.add((each.layer, slot))
                coming.add(newcomer)
                found.append((each, packed, slot))
        return found

    def _pack(self, each: Wanted) -> None:
        self._packing.append((each, self._packer.submit(self._read, each)))

    def _read(self, each: Wanted) -> _Packed:
        packed = self._resident.packed(each.layer, each.newcomer)
        content = content_of(each.newcomer, packed)
        return _Packed(packed.pin_memory() if self._device.device.type == "cuda" else packed, content)

    def _packed(self) -> list[_Copy]:
        found: list[_Copy] = []
        while self._packing and self._packing[0][1].done():
            each, packed = self._packing.popleft()
            try:
                found.append((each, packed.result()))
            except (CheckpointError, UserError, OSError) as error:
                _log.warning(
                    "an expert cannot be read for the GPU; servers go on computing it",
                    layer=each.layer,
                    expert=each.newcomer,
                    error=brief(error),
                )
        return found

    def _stored(self, segments: ExpertSegments, each: Wanted) -> tuple[StoredExperts, int] | None:
        """Returns the part that has the whole expert just as slots of its layer do, and its slot there; None:
        there is none.
        """
        self._found_in = segments
        return segments.find(each.layer, each.newcomer, self._resident.slots[each.layer].kind)

    def _launch(self, copies: Sequence[tuple[Wanted, _Packed | None, int]]) -> None:
        """Copies into slots that no later step reads, once every step launched so far has ended."""
        self._device.copy_waits(self._device.record_read())
        begun = _Copies(self._device.record_copied())
        try:
            for each, packed, slot in copies:
                self._copying.append(self._copy(each, slot, packed, begun))
                nbytes = self._resident.slots[each.layer].kind.expert_bytes
                begun.nbytes += nbytes
                count, so_far = self.by_layer[each.layer]
                self.by_layer[each.layer] = count + 1, so_far + nbytes
                self.count, self.nbytes = self.count + 1, self.nbytes + nbytes
        finally:  # those before one that failed are on their way
            begun.end = self._device.record_copied()

    def _copy(self, each: Wanted, slot: int, packed: _Packed | None, copies: _Copies) -> _Copying:
        target, place = self._resident.slots[each.layer].weights[slot], (each.layer, slot)
        if packed is not None:
            self._device.copy(target, packed.bytes)
            self._from_segments.discard(place)
            return _Copying(*place, each.newcomer, copies, None, packed.content, packed.bytes)
        segments = self._found_in
        assert segments is not None
        assert self._streamer is not None
        found = self._stored(segments, each)
        assert found is not None
        stored, place_there = found
        size = stored.kind.expert_bytes
        content = segments.content(stored, place_there)
        run = CopyRun(stored.offset + place_there * size, 0, size)
        self._streamer.copy(segments, target, Piece(stored, (each.newcomer,), (run,)), run)
        self._from_segments.add(place)
        return _Copying(*place, each.newcomer, copies, segments, content)
