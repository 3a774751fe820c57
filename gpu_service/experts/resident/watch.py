"""The watch over experts on a device: slots whose bytes have changed are found, and filled again.

A thread of its own copies slots to the host and compares them with their checksums: all once within the
configured time, at a share of it, and without waiting for steps. It also packs a damaged expert once more.
Slots are written by the thread that launches steps alone, in `begin_step`, so that an exchange is never met:

    steps | step n | step n+1 …     | waits | slot filled | step m
    watch | compares … finds damage | packs |             | compares …

`damages` grows at the find, and from then on no step begins before the slot is whole. So when the
number has grown at a step's end, each step launched before may have used the damaged expert, and later ones
do not (gpu_service/engine/damage.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch

from gpu_service.experts.client import ExpertComputeFailed
from gpu_service.experts.resident.content import SlotContent
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.streaming.ring import TransferDevice
from gpu_service.ops.overflow import suspects
from moebius.errors import brief
from moebius.experts.verify_pace import VERIFY_SHARE, VerifyPace

_log = structlog.get_logger(__name__)
# How often it is tried again to pack an expert that could not be: its checkpoint may be there again.
RETRY_S = 10.0
FILLED_AGAIN = "an expert on the device was damaged in memory and is filled again from the checkpoint"
LOST = "an expert on the device is damaged in memory and cannot be filled again: steps fail"


class ResidentDamaged(ExpertComputeFailed):
    """A slot is damaged and cannot be filled again; the message names its expert and says why."""


@dataclass(eq=False, slots=True)
class _Damage:
    """The damage of one slot, from the find until it is filled again; filled by `ResidentWatch`."""

    content: SlotContent
    # What goes into the slot; None: it could not be packed yet.
    packed: torch.Tensor | None = None
    problem: str = ""
    retry_at: float = 0.0
    found_at: float = field(default_factory=time.monotonic)


class ResidentWatch:
    """`begin_step` is called by the thread that launches steps, the rest by any."""

    def __init__(
        self,
        resident: ResidentExperts,
        device: TransferDevice,
        interval_s: float,
        on_damage: Callable[[str], None] = lambda reason: None,
        active: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`device`: has a copy stream of the watch's own. `interval_s`: seconds in which all slots are
        compared once; 0: only suspect ones. `on_damage` is called at each find, by the thread that finds it;
        the watch's own thread runs within `active`.
        """
        self._resident, self._device, self._interval_s = resident, device, interval_s
        self._on_damage, self._active = on_damage, active
        most = max(slots.kind.expert_bytes for slots in resident.slots.values())
        # Where bytes of a slot are compared; under the lock, as slots' memory may move otherwise.
        self._staging = torch.empty(most, dtype=torch.uint8, pin_memory=device.device.type == "cuda")
        self._reading = resident.reading
        self._changed = threading.Condition()
        # By layer and slot, under `_changed`.
        self._damaged: dict[tuple[int, int], _Damage] = {}
        self._stopping = False
        # By layer: until when it is not compared again at once.
        self._quiet_until: dict[int, float] = {}
        # Slots found damaged, filled again, and bytes compared, since the start.
        self.damages = self.repairs = self.compared_bytes = 0
        # Seconds of the latest comparison of all slots; 0: there was none yet.
        self.pass_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="residents-watch", daemon=True)

    def start(self) -> None:
        """Slots are compared from now on."""
        self._thread.start()

    def interrupt(self) -> None:
        """Steps that wait for a repair fail at once, later ones too."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing is compared any more; steps must have ended."""
        self.interrupt()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def problem(self) -> str:
        """Returns why the next step fails; empty: it does not."""
        with self._changed:
            return next((found.problem for found in self._damaged.values() if found.problem), "")

    def suspect(self, noted: Collection[int], is_float16: bool) -> None:
        """Compares layers that may have made what was noted; see `ops.overflow.suspects`."""
        self.compare(suspects(noted, self._resident.slots, is_float16))

    def compare(self, layers: Iterable[int]) -> None:
        """Compares the slots of these layers before it returns: their output was not finite.

        Takes at most `VERIFY_SHARE` of the time for each layer, since some models and prompts make such
        values without any damage.
        """
        for layer in layers:
            slots, begin = self._resident.slots.get(layer), time.monotonic()
            if slots is None or begin < self._quiet_until.get(layer, 0.0):
                continue
            for slot in range(slots.count):
                self._compare(layer, slot)
            end = time.monotonic()
            self._quiet_until[layer] = end + (end - begin) * (1 / VERIFY_SHARE - 1)

    def begin_step(self) -> None:
        """Returns once no slot is known to be damaged; called before each step.

        Raises ResidentDamaged when one cannot be filled again; the next step may try.
        """
        if not self._damaged:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._all_attended)
            damaged = tuple(self._damaged.items())
        for (layer, slot), found in damaged:
            slots = self._resident.slots[layer]
            if slots.contents[slot] is found.content:
                self._fill(layer, slot, found)
            with self._changed:
                del self._damaged[layer, slot]

    @property
    def _all_attended(self) -> bool:
        return all(found.packed is not None or found.problem for found in self._damaged.values())

    def _fill(self, layer: int, slot: int, found: _Damage) -> None:
        slots, content, packed = self._resident.slots[layer], found.content, found.packed
        if packed is None:
            raise ResidentDamaged(
                found.problem or "an expert on the device is damaged, and its watch has ended"
            )
        slots.contents[slot] = None
        self._device.copy(slots.weights[slot], packed)
        self._device.wait(self._device.record_copied())
        kept = self._is_whole(layer, slot, content)
        slots.contents[slot] = found.content = SlotContent(content.expert, content.digest, content.seed)
        if not kept:
            self._note_problem(layer, found, "the memory does not keep what is written to it")
            raise ResidentDamaged(found.problem)
        self.repairs += 1
        seconds = round(time.monotonic() - found.found_at, 3)
        _log.error(FILLED_AGAIN, layer=layer, expert=content.expert, slot=slot, seconds=seconds)

    def _run(self) -> None:
        try:
            with self._active():
                while self._attend(0.0 if self._interval_s else RETRY_S):
                    if self._interval_s:
                        self._compare_all()
        except Exception:  # a driver may raise anything; steps go on, but for one that meets a damage
            _log.exception("experts on the device are not compared with their checksums any more")
            self.interrupt()

    def _compare_all(self) -> None:
        """Each slot once, evenly over the interval."""
        held = self._resident.slots
        pace = VerifyPace(self._resident.nbytes, self._interval_s)
        before = self.damages
        for layer, slots in held.items():
            for slot in range(slots.count):
                begin = time.monotonic()
                self._compare(layer, slot)
                if not self._attend(pace.pause_s(slots.kind.expert_bytes, time.monotonic() - begin)):
                    return
        self.pass_seconds = pace.elapsed_s
        _log.info(
            "checksums of experts on the device compared",
            experts=self._resident.num_experts,
            damaged=self.damages - before,
            seconds=round(self.pass_seconds, 3),
        )

    def _compare(self, layer: int, slot: int) -> None:
        with self._reading:
            content = self._resident.slots[layer].contents[slot]
            if content is None or (layer, slot) in self._damaged or self._is_whole(layer, slot, content):
                return
        self._found(layer, slot, content)

    def _is_whole(self, layer: int, slot: int, content: SlotContent) -> bool:
        """Returns whether the slot's bytes are the content's."""
        slots = self._resident.slots[layer]
        with self._reading:
            staged = self._staging[: slots.kind.expert_bytes]
            self._device.copy(staged, slots.weights[slot])
            self._device.wait(self._device.record_copied())
            self.compared_bytes += staged.nbytes
            return content.matches(staged)

    def _found(self, layer: int, slot: int, content: SlotContent) -> None:
        """Unless the slot was given to another expert while its bytes were read."""
        with self._changed:
            is_replaced = self._resident.slots[layer].contents[slot] is not content
            if is_replaced or (layer, slot) in self._damaged:
                return
            self._damaged[layer, slot] = _Damage(content)
            self.damages += 1
            self._changed.notify_all()
        self._on_damage(f"layer {layer}, expert {content.expert} was damaged in the device's memory")

    def _attend(self, seconds: float) -> bool:
        """Packs for slots that are found damaged meanwhile, by whichever thread; False: the watch ends."""
        end = time.monotonic() + seconds
        while True:
            with self._changed:
                if self._stopping:
                    return False
                now = time.monotonic()
                due = [
                    (place[0], found)
                    for place, found in self._damaged.items()
                    if found.packed is None and found.retry_at <= now
                ]
                if not due and now >= end:
                    return True
                if not due:
                    self._changed.wait(min(end - now, RETRY_S))
            for layer, found in due:
                self._pack(layer, found)

    def _pack(self, layer: int, found: _Damage) -> None:
        expert, problem = found.content.expert, ""
        try:
            packed = self._resident.packed(layer, expert)
            if not found.content.matches(packed):
                problem = "the checkpoint gives other weights than those that were here: it has changed since"
            elif self._device.device.type == "cuda":
                packed = packed.pin_memory()
        except Exception as error:  # whatever it is, steps that need the expert are not to wait for ever
            problem = brief(error)
        if problem:
            self._note_problem(layer, found, problem)
            return
        with self._changed:
            found.packed, found.problem = packed, ""
            self._changed.notify_all()

    def _note_problem(self, layer: int, found: _Damage, reason: str) -> None:
        text = (
            f"layer {layer}, expert {found.content.expert} is damaged in the device's memory and cannot be "
            f"filled again: {reason}"
        )
        if found.problem != text:
            _log.error(LOST, layer=layer, expert=found.content.expert, reason=reason, retry_s=RETRY_S)
        with self._changed:
            found.packed, found.problem, found.retry_at = None, text, time.monotonic() + RETRY_S
            self._changed.notify_all()
