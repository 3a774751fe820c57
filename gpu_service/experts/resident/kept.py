"""Packed residents in the host's memory: left by an engine that falls asleep, for the program that wakes.

They are in an anonymous file (memfd), which is open in both programs and has no name: when the process is
killed it is gone. Its bytes:

    [0, 16)        where the table begins, and its length
    [2 MiB n, …)   of each layer, its experts side by side
    [table, …)     JSON, as `_table` makes it
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from gpu_service.device.stream import DeviceStream, current_stream
from gpu_service.experts.resident.content import SlotContent
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.resident.load import MAX_THREADS
from gpu_service.experts.resident.panels import LayerFormat
from moebius.errors import brief
from moebius.process.limits import available_memory, total_memory

_log = structlog.get_logger(__name__)
_HEADER = np.dtype([("table", "<u8"), ("table_bytes", "<u8")])
_ALIGNMENT = 2 * 2**20
# Experts that a thread copies before it asks for others.
_AT_ONCE = 4
# Bytes that are given back at once.
_AT_A_TIME = 64 * 2**20
# Memory that is left to others, as a part of all there is.
_LEFT = 0.05


@dataclass(frozen=True, slots=True)
class _KeptLayer:
    """What is kept of a layer; filled by `_layers_of`."""

    layer: int
    # Of `LayerFormat`: what another version would lay out otherwise differs here.
    kind: str
    expert_bytes: int
    # From the file's begin.
    offset: int
    # Where they were, and what they are, in the order in which they lie in the file.
    slots: Sequence[int]
    contents: Sequence[SlotContent]


def keep_residents(resident: ResidentExperts, identity: str, ranks: int = 1) -> int | None:
    """Copies the residents of this rank to memory of the host, once no step runs any more.

    Returns the file's descriptor; None, with a line that says why: there is not enough memory. `identity`: of
    whatever the bytes depend on besides their format; `ranks`: of this host, each of which keeps as much.
    """
    begin = time.monotonic()
    layers = _layers_of(resident)
    end, table = _end(layers), _table(layers, identity)
    total = end + len(table)
    wanted, free = total * ranks, available_memory() - int(_LEFT * total_memory())
    if wanted > free:
        _log.info(
            "resident experts are not kept in RAM: waking reads the checkpoint",
            gib=round(wanted / 2**30, 2),
            free_gib=round(free / 2**30, 2),
        )
        return None
    descriptor = os.memfd_create("moebius-residents", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, total)
        data = _mapped(descriptor, total)
        _write(data, resident, layers)
        data[end:] = np.frombuffer(table, np.uint8)
        data[: _HEADER.itemsize].view(_HEADER)[0] = end, len(table)
    except (OSError, RuntimeError) as error:
        os.close(descriptor)
        _log.warning("resident experts are not kept in RAM: waking reads the checkpoint", error=brief(error))
        return None
    _log.info(
        "resident experts are kept in RAM",
        experts=sum(len(one.slots) for one in layers),
        gib=round(total / 2**30, 2),
        seconds=round(time.monotonic() - begin, 2),
    )
    return descriptor


class KeptExperts:
    """`PackedMemory` over what an engine kept; made by `open`."""

    def __init__(self, data: NDArray[np.uint8], table: dict[str, Any], descriptor: int) -> None:
        self._data, self._descriptor = data, descriptor
        # By layer: the format that was asked for last, and whether it is the one that was kept.
        self._asked: dict[int, tuple[LayerFormat, bool]] = {}
        self._kinds = {one["layer"]: one["kind"] for one in table["layers"]}
        self._places = {
            (one["layer"], expert): (one["offset"] + place * one["expert_bytes"], digest, seed)
            for one in table["layers"]
            for place, (expert, digest, seed) in enumerate(one["experts"])
        }

    @staticmethod
    def open(descriptor: int, identity: str) -> KeptExperts | None:
        """Returns what is there, to be closed; None: it is of another model or version. The descriptor is no
        longer the caller's.
        """
        try:
            area = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            _log.info("no resident experts are kept in RAM", because=brief(error))
            return None
        data = np.frombuffer(area, np.uint8)
        header = data[: _HEADER.itemsize].view(_HEADER)[0]
        begin, length = int(header["table"]), int(header["table_bytes"])
        try:
            table = json.loads(data[begin : begin + length].tobytes())
        except ValueError:
            table = {}
        if table.get("identity") == identity:
            return KeptExperts(data, table, descriptor)
        os.close(descriptor)
        _log.info("resident experts that were kept in RAM are of another model, or of other settings")
        return None

    def close(self) -> threading.Thread:
        """Gives the memory back, in a thread that is returned: of 15 GiB it takes seconds. Nothing may be
        asked of it any more.
        """
        parts = self._descriptor, self._data
        self._places, self._data = {}, np.empty(0, np.uint8)
        thread = threading.Thread(target=_give_back, args=parts, name="kept-residents", daemon=True)
        thread.start()
        return thread

    def packed(
        self, layer: int, expert: int, kind: LayerFormat
    ) -> tuple[NDArray[np.uint8], SlotContent] | None:
        """Returns an expert's bytes and what they are meant to be; None: it was not kept in this format."""
        found = self._places.get((layer, expert))
        if found is None or not self._fits(layer, kind):
            return None
        offset, digest, seed = found
        return self._data[offset : offset + kind.expert_bytes], SlotContent(expert, digest, seed)

    def problem(self) -> str:
        """Returns an empty text: nothing writes there any more."""
        return ""

    def _fits(self, layer: int, kind: LayerFormat) -> bool:
        asked, fits = self._asked.get(layer, (None, False))
        if asked is not kind:  # to write a format out takes as long as to copy an expert
            fits = self._kinds[layer] == repr(kind)
            self._asked[layer] = kind, fits
        return fits


def _give_back(descriptor: int, data: NDArray[np.uint8]) -> None:
    """Shortens the file piece by piece, so that no thread that maps memory has to wait for all of it. The
    mapping `data` goes last, empty.
    """
    try:
        for length in range((data.nbytes - 1) // _AT_A_TIME * _AT_A_TIME, -1, -_AT_A_TIME):
            os.ftruncate(descriptor, length)
    finally:
        os.close(descriptor)


def _layers_of(resident: ResidentExperts) -> list[_KeptLayer]:
    layers, end = list[_KeptLayer](), _ALIGNMENT
    for layer, slots in resident.slots.items():
        held = [(slot, content) for slot, content in enumerate(slots.contents) if content is not None]
        if held:
            places, contents = zip(*held, strict=True)
            kind = slots.kind
            layers.append(_KeptLayer(layer, repr(kind), kind.expert_bytes, end, places, contents))
            end = _end(layers)
    return layers


def _end(layers: Sequence[_KeptLayer]) -> int:
    """Returns where the next layer would begin."""
    if not layers:
        return _ALIGNMENT
    end = layers[-1].offset + len(layers[-1].slots) * layers[-1].expert_bytes
    return -(-end // _ALIGNMENT) * _ALIGNMENT


def _table(layers: Sequence[_KeptLayer], identity: str) -> bytes:
    found = [
        {
            "layer": one.layer,
            "kind": one.kind,
            "expert_bytes": one.expert_bytes,
            "offset": one.offset,
            "experts": [(content.expert, content.digest, content.seed) for content in one.contents],
        }
        for one in layers
    ]
    return json.dumps({"identity": identity, "layers": found}).encode()


def _mapped(descriptor: int, nbytes: int) -> NDArray[np.uint8]:
    area = mmap.mmap(descriptor, nbytes)
    with suppress(OSError):  # a kernel without them
        area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8)


def _write(data: NDArray[np.uint8], resident: ResidentExperts, layers: Sequence[_KeptLayer]) -> None:
    """Copies by several threads: pages of new memory come one by one."""
    stream = current_stream(next(iter(resident.slots.values())).weights.device)
    # An iterator of a list gives each entry once, whichever threads ask.
    work = iter([(one, begin) for one in layers for begin in range(0, len(one.slots), _AT_ONCE)])
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "keeping") as pool:
        for done in [pool.submit(_write_some, data, resident, work, stream) for _ in range(threads)]:
            done.result()


def _write_some(
    data: NDArray[np.uint8],
    resident: ResidentExperts,
    work: Iterator[tuple[_KeptLayer, int]],
    stream: DeviceStream,
) -> None:
    largest = max(slots.kind.expert_bytes for slots in resident.slots.values())
    # Page-locked memory would else be that of the first GPU.
    with stream.active():
        buffer = stream.host_buffer(largest)
        for layer, first in work:
            weights, each = resident.slots[layer.layer].weights, layer.expert_bytes
            for place in range(first, min(first + _AT_ONCE, len(layer.slots))):
                staged, at = buffer[:each], layer.offset + place * each
                staged.copy_(weights[layer.slots[place]])
                np.copyto(data[at : at + each], staged.numpy())
