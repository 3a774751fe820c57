"""Fills the slots of resident experts before anything is computed, by several threads.

An expert comes from memory of this host where it is packed there already, else from the checkpoint. Each
thread has buffers of its own, page-locked for a GPU, and fills one with some experts of a layer while the
device copies the other. The bytes are compared with their checksum, or it is computed of them, where they
lie in the buffer: whatever happens to the memory they came from afterwards concerns no slot.

    thread 1 | experts 0-5 of layer 0 → buffer | experts 12-17 …          |
    thread 2 | experts 6-11 of layer 0 → buffer | …                       |
    device   |                                  | buffer → slots 0-5 | buffer → slots 6-11 | …
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from gpu_service.device.stream import DeviceEvent, DeviceStream, current_stream
from gpu_service.experts.resident.content import SlotContent
from gpu_service.experts.resident.experts import LayerSlots
from gpu_service.experts.resident.panels import LayerFormat
from gpu_service.experts.resident.source import PackedExpert, PackedExpertSource
from moebius import _kernels
from moebius.checkpoint.scratch_reader import ScratchReader
from moebius.errors import UserError
from moebius.process.progress import Progress, phase

_log = structlog.get_logger(__name__)
# More threads wait for Python's lock, which finding an expert in a checkpoint needs, or for memory.
MAX_THREADS = 8
# Experts that are copied to the device at once take about this; a thread has two such buffers.
_RUN_BYTES = 8 * 2**20


class PackedMemory(Protocol):
    """Experts that are packed already, in this host's memory. Any thread may ask."""

    def packed(
        self, layer: int, expert: int, kind: LayerFormat
    ) -> tuple[NDArray[np.uint8], SlotContent] | None:
        """Returns the expert's bytes, uint8 `[expert_bytes]`, and what they are meant to be; None: it is not
        there in this format.
        """

    def problem(self) -> str:
        """Returns why what was read so far is worthless; empty: it is not."""


def load_slots(
    source: PackedExpertSource,
    slots: Mapping[int, LayerSlots],
    chosen: Mapping[int, Sequence[int]],
    max_error: float,
    packed: PackedMemory | None = None,
) -> None:
    """Puts the experts `chosen` of each layer into its slots from 0 on.

    `packed`: where they are looked for before they are packed. `max_error`: that requantising a layer may
    make, relative. Raises CheckpointError naming a tensor, UserError naming a layer and a setting.
    """
    loading = _Loading(source, slots, chosen, packed)
    with phase("loading resident experts", sum(s.nbytes for s in slots.values()), "GB") as progress:
        loading.run(progress)
        for layer, experts in chosen.items():
            slots[layer].occupy(experts, loading.contents[layer])
    loading.check_errors(max_error)
    count = sum(map(len, chosen.values()))
    _log.info(
        "resident experts loaded",
        experts=count,
        packed_already=loading.num_copied,
        layers=len(chosen),
        formats=", ".join(sorted({"/".join(s.kind.formats) for s in slots.values()})),
        gib=round(sum(s.nbytes for s in slots.values()) / 2**30, 3),
        seconds=round(progress.seconds, 2),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Experts of a layer that lie in slots side by side, from `slot` on."""

    layer: int
    slot: int
    experts: Sequence[int]


class _Loading:
    """Driven by `load_slots`; its threads share the list of runs."""

    def __init__(
        self,
        source: PackedExpertSource,
        slots: Mapping[int, LayerSlots],
        chosen: Mapping[int, Sequence[int]],
        packed: PackedMemory | None,
    ) -> None:
        self._source, self._slots, self._packed = source, slots, packed
        self._stream = current_stream(next(iter(slots.values())).weights.device)
        runs = [run for layer, experts in chosen.items() for run in _runs(layer, experts, slots[layer].kind)]
        self._run_bytes = max(
            (len(run.experts) * slots[run.layer].kind.expert_bytes for run in runs), default=0
        )
        self._runs: Iterator[_Run] = iter(runs)
        self._lock = threading.Lock()
        # By layer and slot.
        self.contents: dict[int, list[SlotContent | None]] = {
            layer: [None] * len(experts) for layer, experts in chosen.items()
        }
        # Experts that were packed already.
        self.num_copied = 0
        # By layer, over all weights of matrices that had to be rounded: squared error and squared reference.
        self._errors: dict[int, list[float]] = {layer: [0.0, 0.0] for layer in chosen}

    def run(self, progress: Progress) -> None:
        """Returns when all weights are on the device. Raises what a thread raises."""
        threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads, "resident") as pool:
            for done in [pool.submit(self._fill_some, progress) for _ in range(threads)]:
                done.result()

    def check_errors(self, max_error: float) -> None:
        """Raises UserError where requantising changes a layer's experts by more."""
        for layer, (error, reference) in self._errors.items():
            relative = math.sqrt(error / reference) if reference else 0.0
            if relative > max_error:
                raise UserError(
                    f"layer {layer}: requantising its experts makes a relative error of {relative:.3f}; "
                    f"max_requantise_error allows {max_error}"
                )

    def _fill_some(self, progress: Progress) -> None:
        with self._stream.active(), ScratchReader() as reader:
            buffers = _Buffers(self._run_bytes, self._stream)
            while True:
                with self._lock:
                    run = next(self._runs, None)
                if run is None:
                    break
                reader.reset()
                try:
                    self._fill(run, buffers, reader, progress)
                except BaseException:
                    with self._lock:  # the other threads need not read the rest
                        list(self._runs)
                    raise
            buffers.wait()

    def _fill(self, run: _Run, buffers: _Buffers, reader: ScratchReader, progress: Progress) -> None:
        """Fills a run's slots."""
        slots, packed = self._slots[run.layer], self._packed
        each, count = slots.kind.expert_bytes, len(run.experts)
        rows = buffers.take()[: count * each].view(count, each)
        memory = list(rows.numpy())
        contents = self._copied(run, memory, packed)
        problem = "" if packed is None else packed.problem()
        if problem:
            # The checksums may be those of other weights by now, with which these agree.
            self._give_up(problem)
            contents = [None] * count
        absent = [place for place, content in enumerate(contents) if content is None]
        if absent:
            experts = [run.experts[place] for place in absent]
            made = self._source.fill(run.layer, experts, reader, [memory[place] for place in absent])
            for place, one in zip(absent, made, strict=True):
                contents[place] = one.content
            self._note_errors(run.layer, made)
        slots.weights[run.slot : run.slot + count].copy_(rows, non_blocking=True)
        buffers.give_back()
        with self._lock:
            self.num_copied += count - len(absent)
            self.contents[run.layer][run.slot : run.slot + count] = contents
        progress.advance(count * each)

    def _copied(
        self, run: _Run, memory: Sequence[NDArray[np.uint8]], packed: PackedMemory | None
    ) -> list[SlotContent | None]:
        """Returns what is in `memory` now; None: the expert has to be packed."""
        contents: list[SlotContent | None] = [None] * len(run.experts)
        if packed is None:
            return contents
        kind = self._slots[run.layer].kind
        found = {
            place: one
            for place, expert in enumerate(run.experts)
            if (one := packed.packed(run.layer, expert, kind)) is not None
        }
        meant = {place: content for place, (_, content) in found.items()}
        digests = _kernels.copy_weights(
            [packed_bytes for packed_bytes, _ in found.values()],
            [memory[place] for place in found],
            [content.seed for content in meant.values()],
        )
        for (place, content), digest in zip(meant.items(), digests, strict=True):
            if content.digest == digest:
                contents[place] = content
                continue
            _log.warning(
                "a packed expert in memory differs from its checksum; it is packed from the checkpoint",
                layer=run.layer,
                expert=content.expert,
            )
        return contents

    def _note_errors(self, layer: int, made: Sequence[PackedExpert]) -> None:
        with self._lock:
            self._errors[layer][0] += sum(one.squared_error for one in made)
            self._errors[layer][1] += sum(one.squared_reference for one in made)

    def _give_up(self, problem: str) -> None:
        with self._lock:
            is_first, self._packed = self._packed is not None, None
        if is_first:
            _log.warning("resident experts are packed from the checkpoint from now on", because=problem)


class _Buffers:
    """The two buffers of a thread: it fills one while the device copies what the other one has."""

    def __init__(self, nbytes: int, stream: DeviceStream) -> None:
        self._stream = stream
        # The pages of new memory come one by one, for which threads wait for each other, and a device copies
        # from page-locked memory at the link's full rate: so they are made once for all experts.
        self._turns = itertools.cycle(enumerate([stream.host_buffer(nbytes) for _ in range(2)]))
        self._events: list[DeviceEvent | None] = [None, None]
        self._taken = 0

    def take(self) -> torch.Tensor:
        """Returns the next one, once the device has read what it had before."""
        self._taken, buffer = next(self._turns)
        self._wait(self._taken)
        return buffer

    def give_back(self) -> None:
        """The device's work that was launched so far is the last that reads what was taken."""
        self._events[self._taken] = self._stream.record()

    def wait(self) -> None:
        """Returns once the device has read both."""
        for number in range(len(self._events)):
            self._wait(number)

    def _wait(self, number: int) -> None:
        event = self._events[number]
        if event is not None:
            event.wait()


def _runs(layer: int, experts: Sequence[int], kind: LayerFormat) -> Iterator[_Run]:
    most = max(1, _RUN_BYTES // kind.expert_bytes)
    for slot in range(0, len(experts), most):
        yield _Run(layer, slot, experts[slot : slot + most])
