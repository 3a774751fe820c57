"""The resident experts of one rank: their slots on the device, and their part of each MoE layer.

`ResidentKernels` is what a device computes of them; `TorchResidentKernels` defines it and runs anywhere.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from gpu_service.device.virtual_memory import PhysicalPool, VirtualRange
from gpu_service.experts.local_client import EXPERT_ACTIVATIONS
from gpu_service.experts.resident.content import SlotContent, content_of
from gpu_service.experts.resident.panels import LayerFormat
from gpu_service.experts.resident.source import PackedExpertSource
from gpu_service.experts.resident.unpack import unpack_expert
from gpu_service.ops.linear import linear
from gpu_service.ops.panels import PanelViews, views
from gpu_service.ops.unpack_panels import UnpackedMatrix
from moebius.checkpoint.reader import SliceReader
from moebius.models.geometry import MoeGeometry

if TYPE_CHECKING:
    from gpu_service.experts.adaptive.counts import RoutingCounts
    from gpu_service.experts.streaming.ring import TransferDevice


# In the map of a layer's slots: another rank has the expert in a slot, so that no expert server is asked.
ELSEWHERE = -2
# Places of maps that are written by a launch each: an upload takes the host as long as a dozen of them.
_WRITTEN_ONE_BY_ONE = 8


@dataclass(eq=False)
class LayerSlots:
    """Made by `make_slots`; changed in place only, so that captured graphs stay valid."""

    kind: LayerFormat
    weights: torch.Tensor  # uint8 [slots, expert_bytes]
    # int32 [num_experts] on the device: the expert's slot; -1: expert servers compute it; or `ELSEWHERE`.
    slot_of_expert: torch.Tensor
    # The host's copy, the other way round; -1: the slot is empty.
    expert_of_slot: list[int]
    # Where the layer's experts clamp (`MoeGeometry.limit_of`), if their activation does.
    limit: float
    # What the slots' memory is mapped in; None: every slot has memory, for good.
    memory: VirtualRange | None = None
    # Experts in slots of other ranks, ascending; and how many such slots there are.
    elsewhere: tuple[int, ...] = ()
    slots_elsewhere: int = field(init=False)
    # Slots that have memory, those from 0 on; changed by `resize`.
    backed: int = field(init=False)
    # By slot what it holds, for `ResidentWatch`; None: nothing, or its checksum is unknown. Set once a
    # slot is filled, and cleared before anything is written to it.
    contents: list[SlotContent | None] = field(init=False)
    gate: PanelViews = field(init=False)
    gate_up: PanelViews = field(init=False)
    down: PanelViews = field(init=False)

    def __post_init__(self) -> None:
        self.backed = len(self.expert_of_slot) if self.memory is None else 0
        self.contents = [None] * len(self.expert_of_slot)
        self.slots_elsewhere = len(self.elsewhere)
        if self.elsewhere:
            self.slot_of_expert[list(self.elsewhere)] = ELSEWHERE
        self.gate = views(self.weights, self.kind.gate)
        self.gate_up = views(self.weights, self.kind.gate_up)
        self.down = views(self.weights, self.kind.down)

    @property
    def count(self) -> int:
        """Slots, empty ones included, and those that have no memory now."""
        return len(self.expert_of_slot)

    @property
    def nbytes(self) -> int:
        """Device memory of the slots."""
        return self.backed * self.kind.expert_bytes

    def chunks_of(self, slots: int) -> int:
        """Returns how many chunks of memory `slots` slots take."""
        assert self.memory is not None, "the layer's memory does not move"
        return -(-slots * self.kind.expert_bytes // self.memory.pool.chunk_bytes)

    def grow(self, backed: int, spares_claimed: bool = False) -> None:
        """Gives the slots below `backed` memory. Raises as `VirtualRange.map`, and gives none."""
        assert self.memory is not None, "the layer's memory does not move"
        self.memory.map(range(self.chunks_of(self.backed), self.chunks_of(backed)), spares_claimed)
        self.backed = backed

    def shrink(self, backed: int) -> None:
        """Slots from `backed` on, which are empty, are not used any more; `unmap` takes their memory."""
        assert all(expert < 0 for expert in self.expert_of_slot[backed:]), "a slot is in use"
        self.backed = backed

    def unmap(self) -> None:
        """Returns the memory that no slot uses; whatever read it has ended."""
        assert self.memory is not None, "the layer's memory does not move"
        self.memory.unmap(range(self.chunks_of(self.backed), self.memory.places))

    @property
    def experts(self) -> tuple[int, ...]:
        """Expert ids in these slots, ascending."""
        return tuple(sorted(expert for expert in self.expert_of_slot if expert >= 0))

    def put(self, slot: int, expert: int, packed: torch.Tensor) -> None:
        """Replaces what is in a slot. The map never names a slot whose weights are not complete."""
        self.clear(slot)
        self.weights[slot].copy_(packed)
        self.slot_of_expert[expert] = slot
        self.expert_of_slot[slot] = expert
        self.contents[slot] = content_of(expert, packed)

    def occupy(self, experts: Sequence[int], contents: Sequence[SlotContent | None]) -> None:
        """Says which experts lie in the slots from 0 on, which were empty; their weights are complete."""
        count = len(experts)
        self.slot_of_expert[list(experts)] = torch.arange(count, dtype=torch.int32).to(self.weights.device)
        self.expert_of_slot[:count] = experts
        self.contents[:count] = contents

    def clear(self, slot: int) -> None:
        """Gives an expert up; its weights stay until they are overwritten."""
        self.contents[slot] = None
        old = self.expert_of_slot[slot]
        if old >= 0:
            self.slot_of_expert[old] = -1
            self.expert_of_slot[slot] = -1


def make_slots(
    kind: LayerFormat,
    count: int,
    num_experts: int,
    device: torch.device,
    limit: float,
    pool: PhysicalPool | None = None,
    elsewhere: tuple[int, ...] = (),
) -> LayerSlots:
    """Returns device memory for `count` experts of a format, all slots empty.

    `pool`: where memory comes from that moves; there are slots for all experts then, and `count` have memory.
    `elsewhere`: experts in slots of other ranks.
    """
    if pool is not None:
        memory = VirtualRange(pool, num_experts * kind.expert_bytes)
        # One at least: a tensor is made over a range whose first chunk is mapped.
        chunks = max(1, -(-count * kind.expert_bytes // pool.chunk_bytes))
        pool.add(max(0, chunks - pool.free))
        slots = LayerSlots(
            kind,
            memory.tensor().view(num_experts, kind.expert_bytes),
            torch.full((num_experts,), -1, dtype=torch.int32, device=device),
            [-1] * num_experts,
            limit,
            memory,
            elsewhere,
        )
        slots.grow(count)
        return slots
    return LayerSlots(
        kind,
        torch.empty((count, kind.expert_bytes), dtype=torch.uint8, device=device),
        torch.full((num_experts,), -1, dtype=torch.int32, device=device),
        [-1] * count,
        limit,
        elsewhere=elsewhere,
    )


def check_slots(layer: int, slots: LayerSlots, expected: Sequence[int] | None = None) -> None:
    """Raises AssertionError when the device's map and the host's disagree, or an expert is in two slots."""
    device_map = slots.slot_of_expert.tolist()
    host_map = [-1] * len(device_map)
    for expert in slots.elsewhere:
        host_map[expert] = ELSEWHERE
    for slot, expert in enumerate(slots.expert_of_slot):
        if expert >= 0:
            assert slot < slots.backed, f"layer {layer}: expert {expert} is in a slot without memory"
            assert host_map[expert] == -1, f"layer {layer}: expert {expert} is in two slots"
            host_map[expert] = slot
    assert device_map == host_map, f"layer {layer}: slots on the device differ from the host's"
    if expected is not None:
        assert slots.experts == tuple(expected), f"layer {layer}: experts {slots.experts} are resident"


_log = structlog.get_logger(__name__)


class ResidentKernels(ABC):
    """Free of state; T = token rows, K = experts per row, H = hidden size."""

    # Whether calls only launch work, with shapes known on the host, so that they may be captured.
    captures = False

    @abstractmethod
    def cpu_ids(
        self, slots: LayerSlots, topk_ids: torch.Tensor, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns int32 `[T, K]`: a new tensor with -1 in place of experts in slots, other ranks' too; -1
        stays.

        counts: int32 `[num_experts]` on the device, to which the number of choices of each expert is added.
        """

    @abstractmethod
    def forward(
        self,
        slots: LayerSlots,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        partial: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns float32 `[T, H]`: `partial` (any floating type; None: zeros) plus the weighted resident
        experts.

        hidden_states `[T, H]`, topk_ids int32 `[T, K]`, topk_weights float32 `[T, K]`. Ids that are not
        resident, -1 too, are skipped. A float32 `partial` is added to in place and returned.
        """

    def warm_up(self, slots: LayerSlots, max_rows: int, dtype: torch.dtype) -> None:
        """Compiles what `forward` may need for layers of this format, and up to `max_rows` rows of
        a dtype.
        """
        return


class TorchResidentKernels(ResidentKernels):
    """The reference: float32 throughout, expert after expert. Reads ids on the host."""

    def __init__(self, geometry: MoeGeometry) -> None:
        self._geometry = geometry

    def cpu_ids(
        self, slots: LayerSlots, topk_ids: torch.Tensor, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        if counts is not None:
            chosen = topk_ids[(topk_ids >= 0) & (topk_ids < counts.shape[0])].long()
            counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
        slot = slots.slot_of_expert[topk_ids.clamp(min=0).long()]
        return torch.where(slot != -1, -1, topk_ids)

    def forward(
        self,
        slots: LayerSlots,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        partial: torch.Tensor | None,
    ) -> torch.Tensor:
        rows_in = hidden_states.float()
        output = torch.zeros_like(rows_in)
        chosen = set(topk_ids.flatten().tolist())
        for slot, expert in sorted(enumerate(slots.expert_of_slot), key=lambda pair: pair[1]):
            if expert < 0 or expert not in chosen:
                continue
            *gate, up, down = unpack_expert(slots.kind, slots.weights[slot])
            rows, choices = (topk_ids == expert).nonzero(as_tuple=True)
            activation = EXPERT_ACTIVATIONS[self._geometry.activation]
            ups = _linear(rows_in[rows], up)
            gates = _linear(rows_in[rows], gate[0]) if gate else ups
            intermediate = activation(gates, ups, self._geometry.alpha, slots.limit)
            output.index_add_(0, rows, _linear(intermediate, down) * topk_weights[rows, choices, None])
        if partial is None:
            return output
        return partial.add_(output) if partial.dtype == torch.float32 else partial.float().add_(output)


def _linear(rows: torch.Tensor, matrix: UnpackedMatrix) -> torch.Tensor:
    return linear(rows, matrix.weight, matrix.bias)


class Share(Enum):
    """How much of a layer's experts the device computes; fixed when its slots are made."""

    NONE = "none"
    SOME = "some"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class SlotChange:
    """What a slot holds from the next step on; filled by who copies weights. -1: nothing."""

    layer: int
    slot: int
    expert: int
    content: SlotContent | None = None


@dataclass(frozen=True, slots=True)
class ElsewhereChange:
    """What a slot of another rank held, and holds from the next step on. -1: nothing."""

    layer: int
    leaver: int
    newcomer: int


class ResidentExperts:
    """Driven by the thread that launches steps.

    How many slots a layer has is fixed, because captured graphs depend on it; which experts they hold, and
    how many of them have memory, is not. Of a layer whose memory stays and holds all experts none can be
    replaced, since none may be missing.
    """

    def __init__(
        self, source: PackedExpertSource, slots: Mapping[int, LayerSlots], kernels: ResidentKernels
    ) -> None:
        """`slots` by MoE layer of this rank; layers without slots on any rank may be left out."""
        self._source = source
        self._slots = {layer: found for layer, found in slots.items() if found.count + found.slots_elsewhere}
        self._kernels = kernels
        # Set while another stream reads the slots: exchanges wait.
        self.is_held = False
        # Held by other threads while they read slots' bytes, and while memory of slots is unmapped.
        self.reading = threading.RLock()
        # Grows whenever slots hold other experts.
        self.version = 0
        # What steps choose is counted where a placement follows it; set before anything is captured.
        self.counts: RoutingCounts | None = None
        self._rows = {layer: row for row, layer in enumerate(self._slots)}
        self._maps = torch.stack([found.slot_of_expert for found in self._slots.values()])
        self._flat_maps = self._maps.view(-1)
        # What is in a slot here or on another rank, as the maps have it after the latest `remap`: bool
        # [layers with slots, num_experts].
        self.held: NDArray[np.bool_] = (self._maps != -1).cpu().numpy()
        for row, found in enumerate(self._slots.values()):
            found.slot_of_expert = self._maps[row]

    @property
    def captures(self) -> bool:
        """Returns whether `cpu_ids` and `forward` may be captured in a graph."""
        return self._kernels.captures

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        return sum(slots.nbytes for slots in self._slots.values())

    @property
    def num_experts(self) -> int:
        """Experts in slots of this rank, over all its layers."""
        return sum(len(slots.experts) for slots in self._slots.values())

    def experts(self, layer: int) -> tuple[int, ...]:
        """Returns the experts of a layer that are resident on any of the ranks that share it, ascending."""
        if layer not in self._slots:
            return ()
        slots = self._slots[layer]
        return tuple(sorted((*slots.experts, *slots.elsewhere))) if slots.elsewhere else slots.experts

    def share(self, layer: int) -> Share:
        """Returns what the devices of all ranks that share a layer compute of it."""
        slots = self._slots.get(layer)
        if slots is None:
            return Share.NONE
        held = slots.count + slots.slots_elsewhere
        is_whole = slots.memory is None and held == self._source.geometry.num_experts
        return Share.ALL if is_whole else Share.SOME

    def cpu_ids(self, layer: int, topk_ids: torch.Tensor) -> torch.Tensor:
        """Returns int32 `[T, K]` with -1 for experts that are resident in the layer; a new tensor.

        Choices are counted, where `counts` is set: call it once a step.
        """
        counts = None if self.counts is None else self.counts.of(layer, topk_ids.shape[0])
        return self._kernels.cpu_ids(self._slots[layer], topk_ids, counts)

    def note(self, layer: int, topk_ids: torch.Tensor) -> None:
        """Counts choices of a step that leaves nothing of the layer to expert servers."""
        if self.counts is not None:
            self.cpu_ids(layer, topk_ids)

    def forward(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        partial: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns float32 `[T, H]`: `partial` plus the resident experts' weighted sum; see `ResidentKernels`.

        With several tensor-parallel ranks it is this rank's part of the sum.
        """
        slots = self._slots[layer]
        if not slots.count:
            if partial is None:
                return torch.zeros_like(hidden_states, dtype=torch.float32)
            return partial.float()
        return self._kernels.forward(slots, hidden_states, topk_ids, topk_weights, partial)

    def warm_up(self, max_rows: int, dtype: torch.dtype) -> None:
        """Compiles every kernel that steps of up to `max_rows` rows may need, once for each format."""
        kinds = {slots.kind: slots for slots in self._slots.values() if slots.count}
        for slots in kinds.values():
            self._kernels.warm_up(slots, max_rows, dtype)

    @property
    def geometry(self) -> MoeGeometry:
        """The geometry of the model's routed experts."""
        return self._source.geometry

    @property
    def slots(self) -> Mapping[int, LayerSlots]:
        """By layer, those with slots; changed by `remap` only."""
        return self._slots

    def remap(
        self,
        changes: Sequence[SlotChange],
        device: TransferDevice,
        elsewhere: Sequence[ElsewhereChange] = (),
    ) -> None:
        """Changes which experts slots hold, all at once and without touching weights: between steps.

        `elsewhere`: what other ranks change before the same step.

        No expert may be in two slots, a layer that is resident as a whole keeps what it has, and weights have
        to be complete when an expert is mapped: the caller that copied them ensures it.
        """
        self.version += 1
        places, values = [], []
        width = self._maps.shape[1]
        for change in changes:
            slots = self._slots[change.layer]
            old = slots.expert_of_slot[change.slot]
            for expert, slot in ((old, -1), (change.expert, change.slot)):
                if expert >= 0:
                    places.append(self._rows[change.layer] * width + expert)
                    values.append(slot)
            slots.expert_of_slot[change.slot] = change.expert
            slots.contents[change.slot] = change.content
        for there in elsewhere:
            slots = self._slots[there.layer]
            held = {*slots.elsewhere, there.newcomer} - {there.leaver, -1}
            slots.elsewhere = tuple(sorted(held))
            for expert, slot in ((there.leaver, -1), (there.newcomer, ELSEWHERE)):
                if expert >= 0:
                    places.append(self._rows[there.layer] * width + expert)
                    values.append(slot)
        flags = self.held.reshape(-1)
        for place, value in zip(places, values, strict=True):
            flags[place] = value != -1
        if len(places) <= _WRITTEN_ONE_BY_ONE:
            for place, value in zip(places, values, strict=True):
                self._write_map(place, value)
        else:
            self._write_maps(device.upload(torch.tensor([places, values], dtype=torch.int32)))

    def copy_slot(self, layer: int, source: int, target: int) -> None:
        """Copies a slot's bytes to another one that no map names, between steps."""
        weights = self._slots[layer].weights
        weights[target].copy_(weights[source])

    def _write_map(self, place: int, value: int) -> None:
        """Launches the write of one place in the maps of all layers together."""
        self._flat_maps[place].fill_(value)

    def _write_maps(self, changes: torch.Tensor) -> None:
        """int32 `[2, N]` on the device: places in the maps of all layers together, and their new values."""
        self._flat_maps.index_put_((changes[0].long(),), changes[1])

    def check_integrity(self) -> None:
        """Raises AssertionError when a map names a wrong slot. Reads the device: at idle only."""
        for row, (layer, slots) in enumerate(self._slots.items()):
            check_slots(layer, slots)
            mapped = (slots.slot_of_expert != -1).cpu().numpy()
            assert (self.held[row] == mapped).all(), f"layer {layer}: what is held differs from its map"

    def packed(self, layer: int, expert: int) -> torch.Tensor:
        """uint8 `[expert_bytes]`, read and packed by the calling thread. Raises CheckpointError."""
        with SliceReader() as reader:
            return torch.from_numpy(self._source.read(layer, expert, reader))
