"""The resident experts of one rank: who is where, and their part of each MoE layer."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

import torch

from gpu_service.experts.resident.kernels import ResidentKernels
from gpu_service.experts.resident.slots import LayerSlots, check_slots
from gpu_service.experts.resident.source import PackedExpertSource
from moebius.checkpoint.reader import SliceReader


class Share(Enum):
    """How much of a layer's experts the device computes; fixed by the number of its slots."""

    NONE = "none"
    SOME = "some"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class _Change:
    """A replacement that waits for the next step; filled by `ResidentExperts.schedule`."""

    layer: int
    slot: int
    expert: int | None
    packed: torch.Tensor | None
    done: Future[None]


class ResidentExperts:
    """Driven by the thread that launches steps; `schedule` may be called from any thread.

    How many slots a layer has is fixed, because captured graphs depend on it; which experts they hold is
    not. With all experts of a layer resident none can be replaced, since none may be missing.
    """

    def __init__(
        self, source: PackedExpertSource, slots: Mapping[int, LayerSlots], kernels: ResidentKernels
    ) -> None:
        """`slots` by MoE layer of this rank; layers without slots may be left out."""
        self._source = source
        self._slots = {layer: found for layer, found in slots.items() if found.count}
        self._kernels = kernels
        self._changes: queue.SimpleQueue[_Change] = queue.SimpleQueue()

    @property
    def captures(self) -> bool:
        """Whether `cpu_ids` and `forward` may be captured in a graph."""
        return self._kernels.captures

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        return sum(slots.weights.nbytes for slots in self._slots.values())

    @property
    def num_experts(self) -> int:
        """Experts in slots, over all layers of this rank."""
        return sum(len(slots.experts) for slots in self._slots.values())

    def experts(self, layer: int) -> tuple[int, ...]:
        """Resident experts of a layer, ascending."""
        return self._slots[layer].experts if layer in self._slots else ()

    def share(self, layer: int) -> Share:
        """What the device computes of a layer."""
        slots = self._slots.get(layer)
        if slots is None:
            return Share.NONE
        return Share.ALL if slots.count == self._source.geometry.num_experts else Share.SOME

    def cpu_ids(self, layer: int, topk_ids: torch.Tensor) -> torch.Tensor:
        """int32 `[T, K]` with -1 for experts that are resident in the layer; a new tensor."""
        return self._kernels.cpu_ids(self._slots[layer], topk_ids)

    def forward(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        partial: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 `[T, H]`: `partial` plus the resident experts' weighted sum; see `ResidentKernels`.

        With several tensor-parallel ranks it is this rank's part of the sum.
        """
        return self._kernels.forward(self._slots[layer], hidden_states, topk_ids, topk_weights, partial)

    def warm_up(self, max_rows: int, dtype: torch.dtype) -> None:
        """Compiles every kernel that steps of up to `max_rows` rows may need, once for each format."""
        kinds = {slots.kind: slots for slots in self._slots.values()}
        for slots in kinds.values():
            self._kernels.warm_up(slots, max_rows, dtype)

    def assign(self, layer: int, slot: int, expert: int | None, packed: torch.Tensor | None = None) -> None:
        """Replaces what a slot holds by `expert`; None empties it. Between steps, on the engine's stream.

        `packed`: the expert's uint8 `[expert_bytes]`; None reads the checkpoint. Raises ValueError naming a
        layer without slots, a slot or expert that does not exist, an expert that another slot holds, or a
        layer that is resident as a whole; CheckpointError.
        """
        slots = self._checked(layer, slot, expert)
        if expert is None:
            slots.clear(slot)
        else:
            slots.put(slot, expert, self._packed(layer, expert) if packed is None else packed)

    def schedule(self, layer: int, slot: int, expert: int | None) -> Future[None]:
        """`assign` before the next step; weights are read by the caller's thread. Raises as `assign`."""
        packed = None if expert is None else self._packed(layer, expert)
        change = _Change(layer, slot, expert, packed, Future())
        self._changes.put(change)
        return change.done

    def begin_step(self) -> None:
        """Applies what was scheduled; called before every step, captured or not."""
        while not self._changes.empty():
            change = self._changes.get()
            try:
                self.assign(change.layer, change.slot, change.expert, change.packed)
            except Exception as error:  # it is raised in whoever waits for the change
                change.done.set_exception(error)
            else:
                change.done.set_result(None)

    def check_integrity(self) -> None:
        """Raises AssertionError when a map names a wrong slot. Reads the device: at idle only."""
        for layer, slots in self._slots.items():
            check_slots(layer, slots)

    def _packed(self, layer: int, expert: int) -> torch.Tensor:
        with SliceReader() as reader:
            return torch.from_numpy(self._source.read(layer, expert, reader).packed)

    def _checked(self, layer: int, slot: int, expert: int | None) -> LayerSlots:
        slots = self._slots.get(layer)
        if slots is None:
            raise ValueError(f"layer {layer} has no slots; layers {sorted(self._slots)} have")
        if not 0 <= slot < slots.count:
            raise ValueError(f"layer {layer} has no slot {slot}; allowed: 0 to {slots.count - 1}")
        if self.share(layer) is Share.ALL:
            raise ValueError(f"all experts of layer {layer} are resident; none can be replaced")
        if expert is not None:
            if not 0 <= expert < self._source.geometry.num_experts:
                raise ValueError(f"expert {expert} does not exist")
            if expert in slots.expert_of_slot and slots.expert_of_slot[slot] != expert:
                raise ValueError(f"expert {expert} of layer {layer} is in another slot already")
        return slots
