"""Segments opened and registered with CUDA in the background, while expert servers already compute.

What cannot be registered is staged: the host copies it to page-locked memory first, which costs its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import structlog
import torch

from gpu_service.device.pinned import LEFT_BYTES, MORE_PINNED, Registrar, in_place
from gpu_service.experts.streaming.plan import CopyRun, Piece, StoredExperts
from gpu_service.experts.streaming.ring import TransferDevice
from gpu_service.experts.streaming.segments import ExpertSegments, SegmentsUnusable
from moebius.errors import brief
from moebius.process.progress import phase

_log = structlog.get_logger(__name__)
# How often a wait for servers looks again, and how often a long phase says how far it is.
_POLL_S = 0.2
# Page-locked memory through which unregistered experts go.
_STAGING_BUFFERS, _STAGING_BYTES = 4, 16 * 2**20


class SegmentSource:
    """`ExpertSource` over the servers' segments. A thread of its own opens, registers and closes them."""

    def __init__(
        self,
        open_segments: Callable[[], ExpertSegments],
        device: TransferDevice,
        registrar: Registrar,
        on_ready: Callable[[SegmentSource, ExpertSegments], None] = lambda source, segments: None,
        on_release: Callable[[], None] = lambda: None,
        limit: int | None = None,
    ) -> None:
        """`open_segments` raises SegmentsUnusable or OSError while servers load, and is then called again.

        `on_ready` is called by the thread, before the first copy, when segments are ready for the first time,
        `on_release` before any are given up: it returns when nothing but copies may read them. `limit`: bytes
        that may be page-locked, as they were tried; None: as many as the driver registers.
        """
        self._open = open_segments
        self._device = device
        self._registrar = registrar
        self._on_release = on_release
        self._limit = limit
        self._on_ready: Callable[[SegmentSource, ExpertSegments], None] | None = on_ready
        self._ready: ExpertSegments | None = None
        # What the thread has open, ready or not; addresses of its registered parts; those that are not.
        self._opened: ExpertSegments | None = None
        self._registered: list[tuple[int, StoredExperts]] = []
        self._staged: set[tuple[int, int]] = set()
        self._staging: list[tuple[torch.Tensor, Any]] = []
        self._complained = False
        self._wanted, self._stopping = threading.Event(), threading.Event()
        self._wanted.set()
        self._thread = threading.Thread(target=self._run, name="expert-segments", daemon=True)
        self._thread.start()

    def segments(self) -> ExpertSegments | None:
        found = self._ready
        if found is None:
            return None
        problem = found.problem()
        if not problem:
            return found
        _log.warning("experts are not streamed until they can be opened again", because=problem)
        # Steps that were begun may go on copying from what is mapped, to no avail.
        self._ready = None
        self._wanted.set()
        return None

    def copy(self, segments: ExpertSegments, target: torch.Tensor, piece: Piece, run: CopyRun) -> None:
        stored = piece.stored
        source = segments.data[stored.segment][run.source : run.source + run.nbytes]
        if (stored.segment, stored.layer) not in self._staged:
            self._device.copy(target, source)
            return
        for begin in range(0, run.nbytes, _STAGING_BYTES):
            self._stage(target[begin : begin + _STAGING_BYTES], source[begin : begin + _STAGING_BYTES])

    def address(self, segments: ExpertSegments, stored: StoredExperts) -> int | None:
        if (stored.segment, stored.layer) in self._staged:
            return None
        return segments.data[stored.segment].data_ptr() + stored.offset

    def time_copy(self, segments: ExpertSegments, target: torch.Tensor, piece: Piece, run: CopyRun) -> float:
        """Seconds of a run's copy while nothing else is copied."""
        stored = piece.stored
        if (stored.segment, stored.layer) not in self._staged:
            source = segments.data[stored.segment][run.source : run.source + run.nbytes]
            return self._device.time_copy(target, source)
        begin = time.perf_counter()
        self.copy(segments, target, piece, run)
        self._device.wait(self._device.record_copied())
        return time.perf_counter() - begin

    def wait_ready(self, timeout_s: float) -> bool:
        """Blocks until experts can be streamed; False: not within the time."""
        deadline = time.monotonic() + timeout_s
        while self._ready is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._ready is not None

    def close(self) -> None:
        """Steps must have ended."""
        self._ready = None
        self._stopping.set()
        self._wanted.set()
        self._thread.join()

    def _stage(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Waits for the oldest staging buffer: streaming waits only where memory is not registered."""
        if len(self._staging) < _STAGING_BUFFERS:
            buffer = self._staging_buffer()
        else:
            buffer, event = self._staging.pop(0)
            self._device.wait(event)
        staged = buffer[: source.shape[0]]
        staged.copy_(source)
        self._device.copy(target, staged)
        self._staging.append((buffer, self._device.record_copied()))

    def _staging_buffer(self) -> torch.Tensor:
        """Returns a page-locked buffer, or another one where nothing more can be: it is copied twice then."""
        try:
            is_cuda = self._device.device.type == "cuda"
            return torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
        except RuntimeError as error:
            _log.warning("no buffer for experts can be page-locked", because=brief(error))
            return torch.empty(_STAGING_BYTES, dtype=torch.uint8)

    def _run(self) -> None:
        try:
            with self._registrar.active():
                self._serve()
        except Exception:  # a driver may raise anything; serving goes on without streaming
            _log.exception("experts are not streamed: their segments could not be opened")
            self._ready = None

    def _serve(self) -> None:
        while not self._stopping.is_set():
            self._wanted.wait()
            self._release()
            if self._stopping.is_set():
                return
            opened = self._open_when_complete()
            if opened is None:
                continue
            self._opened = opened
            self._register(opened)
            if self._stopping.is_set():
                continue
            if self._on_ready is not None:
                self._on_ready(self, opened)
                self._on_ready = None
            self._wanted.clear()
            self._ready = opened
        self._release()

    def _open_when_complete(self) -> ExpertSegments | None:
        said = ""
        while not self._stopping.is_set():
            try:
                return self._open()
            except (SegmentsUnusable, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    _log.info("experts cannot be streamed yet", because=said)
            self._stopping.wait(_POLL_S)
        return None

    def _register(self, segments: ExpertSegments) -> None:
        """Layer by layer, so that no single call holds the driver's lock for long."""
        parts = [part for stored in segments.stored.values() for part in stored]
        total = sum(part.nbytes for part in parts)
        is_possible, problem = True, ""
        allowed = in_place([part.nbytes for part in parts], self._limit)
        with phase("registering experts with CUDA", total, "GB") as progress:
            for number, part in enumerate(parts):
                if self._stopping.is_set():
                    return
                if is_possible and number < allowed:
                    problem = self._register_part(segments, part)
                    is_possible = not problem
                if not is_possible or number >= allowed:
                    self._staged.add((part.segment, part.layer))
                progress.advance(part.nbytes)
        if problem:
            self._leave_room()
            self._complain(total, problem)
        seconds = progress.seconds
        _log.info(
            "experts can be streamed",
            gib=_gib(total),
            staged_parts=len(self._staged),
            seconds=round(seconds, 2),
            gb_per_s=round(total / max(seconds, 1e-9) / 1e9, 1),
        )

    def _register_part(self, segments: ExpertSegments, part: StoredExperts) -> str:
        """Returns why it cannot be registered; empty: it is, or there is nothing of it."""
        if not part.nbytes:
            return ""
        address = segments.data[part.segment].data_ptr() + part.offset
        problem = self._registrar.register(address, part.nbytes)
        if not problem:
            self._registered.append((address, part))
        return problem

    def _leave_room(self) -> None:
        """Takes back the last parts where all that may be page-locked is: nothing else could be any more."""
        room = 0
        while self._registered and room < LEFT_BYTES:
            address, part = self._registered.pop()
            self._registrar.unregister(address)
            self._staged.add((part.segment, part.layer))
            room += part.nbytes

    def _complain(self, total: int, problem: str) -> None:
        """Says once how much is page-locked, and what would allow more."""
        if self._complained:
            return
        self._complained = True
        locked = sum(part.nbytes for _, part in self._registered)
        _log.warning(
            "not all expert memory can be page-locked; the other layers are copied through a buffer that is, "
            "which is slower and takes the host's time",
            page_locked_gib=_gib(locked),
            of_gib=_gib(total),
            because=problem,
            remedy=f"{MORE_PINNED}; expert_weights_dir must be in a tmpfs: no file of a disk can be locked",
        )

    def _release(self) -> None:
        """Unregisters and closes, once nothing reads them and copies have ended."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        self._on_release()
        self._device.wait(self._device.record_copied())
        for address, _ in self._registered:
            self._registrar.unregister(address)
        self._registered, self._staged = [], set()
        opened.close()


def _gib(nbytes: int) -> float:
    return round(nbytes / 2**30, 2)
