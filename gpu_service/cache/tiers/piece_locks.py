"""Page-locks the slots of the RAM tier piece by piece, ahead of the blocks that fill them.

Locking takes all of a piece's memory and zeroes it, at some GB/s: of the whole tier that would be a large
part of an engine's start, and memory that prefixes may never need. So a thread locks the first pieces once
the engine serves, and stays as far ahead of what blocks have reached. Copies of a slot that is not locked
(yet, or because the driver refuses) are the same and slower: the driver copies through a buffer of its own.

Steps that are launched meanwhile wait for the driver: those of a start with 18 GiB of a predecessor's blocks
took two seconds more. So nothing is locked before the engine serves, pieces are small, the system gives them
their memory before the driver sees them, and the thread rests after each for as long as the driver took.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Sequence

import structlog
import torch

from gpu_service.device.pinned import LEFT_BYTES, MIB, MORE_PINNED, Registrar, may_be_limited
from moebius.process.memory_advice import MADV_POPULATE_WRITE, advise

_log = structlog.get_logger(__name__)
_PIECE_BYTES = 64 * MIB
# Pieces that are locked ahead of blocks: a prompt's come faster than memory is taken and zeroed.
_AHEAD = 16
# When a piece that was refused is tried again, seconds: a driver may refuse memory of a copy under way.
_RETRIES_S = (0.2, 1.0, 5.0)
_LONGEST_REST_S = 0.1
# The reserve's mappings are of the same pages, and take the memory of one.
_RESERVE_STEP = 16 * MIB


class PieceLocks:
    """Locks slots from the first on. `reached` is called by any one thread; a thread of its own locks, from
    `begin` on.
    """

    def __init__(
        self,
        slots: torch.Tensor,
        registrar: Registrar,
        piece_bytes: int = _PIECE_BYTES,
        is_limited: bool = False,
        retries_s: Sequence[float] = _RETRIES_S,
        ahead: int = _AHEAD,
    ) -> None:
        """`slots`: uint8 `[num_slots, slot_bytes]`, beginning at a page. `is_limited`: a driver may refuse;
        then `LEFT_BYTES` of what it allows stay free for others. `retries_s`: waits before a piece that was
        refused is tried again; after the last one no more are locked. `ahead`: pieces beyond the one that
        blocks have reached.
        """
        self._slots, self._registrar, self._is_limited = slots, registrar, is_limited
        # Pieces begin at pages, which are locked once.
        self._step = math.lcm(slots.shape[1], mmap.PAGESIZE) // slots.shape[1]
        self._step *= max(1, piece_bytes // (self._step * slots.shape[1]))
        self._wanted, self._ahead = 0, ahead
        # Slots that are locked, from the first on; bytes of them.
        self.num_locked = self.locked_bytes = 0
        self._changed, self._stopping, self._retries_s = threading.Event(), False, retries_s
        self.reached(-self._step)  # the first piece is the next one
        self._thread = threading.Thread(target=self._run, name="prefix-locks", daemon=True)

    def begin(self) -> None:
        """The engine serves: what blocks have reached is locked from now on. Once, by the one thread."""
        self._thread.start()

    def reached(self, slot: int) -> None:
        """A block takes this slot: the piece with it is locked, and those that follow."""
        wanted = min(len(self._slots), (slot // self._step + 1 + self._ahead) * self._step)
        if wanted > self._wanted:
            self._wanted = wanted
            self._changed.set()

    def close(self) -> None:
        """Ends the thread, and takes back all locks. Copies must have ended."""
        self._stopping = True
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._registrar.active():
                self._lock_until_closed()
        except Exception:  # a driver may raise anything; copies go on without locks
            _log.exception("the RAM tier of the prefix cache is not page-locked any further")

    def _lock_until_closed(self) -> None:
        locked, problem = list[torch.Tensor](), ""
        reserve: list[torch.Tensor] | None = None
        while not self._stopping:
            self._changed.wait()
            self._changed.clear()
            while not self._stopping and not problem and self.num_locked < self._wanted:
                if reserve is None:
                    reserve, problem = self._reserved() if self._is_limited else ([], "")
                piece = self._slots[self.num_locked : self.num_locked + self._step].view(-1)
                problem = problem or self._registered(piece)
                if not problem:
                    locked.append(piece)
                    self.num_locked = min(len(self._slots), self.num_locked + self._step)
                    self.locked_bytes += piece.nbytes
            if problem and reserve is not None:
                self._release(reserve)
                reserve = None
                self._complain(problem)
        self._release([*locked, *(reserve or [])])

    def _registered(self, piece: torch.Tensor) -> str:
        """Returns why a piece cannot be locked, whenever it is tried; empty: it is."""
        # A kernel that cannot do it leaves it to the driver.
        advise(piece.data_ptr(), piece.nbytes, MADV_POPULATE_WRITE)
        begin = time.monotonic()
        problem = self._registrar.register(piece.data_ptr(), piece.nbytes)
        for wait_s in self._retries_s:
            if not problem:
                break
            end = time.monotonic() + wait_s
            while not self._stopping and (left := end - time.monotonic()) > 0:
                time.sleep(min(0.05, left))
            problem = problem if self._stopping else self._registrar.register(piece.data_ptr(), piece.nbytes)
        if not problem:
            time.sleep(min(_LONGEST_REST_S, time.monotonic() - begin))
        return problem

    def _reserved(self) -> tuple[list[torch.Tensor], str]:
        """Locks what is left to others where there is a limit; returns it, and why that fails."""
        found: list[torch.Tensor] = []
        file = os.memfd_create("moebius-prefix-reserve")
        try:
            os.ftruncate(file, _RESERVE_STEP)
            while len(found) * _RESERVE_STEP < LEFT_BYTES:
                pages = torch.frombuffer(mmap.mmap(file, _RESERVE_STEP), dtype=torch.uint8)
                if problem := self._registrar.register(pages.data_ptr(), pages.nbytes):
                    return found, problem
                found.append(pages)
        finally:
            os.close(file)
        return found, ""

    def _release(self, locked: list[torch.Tensor]) -> None:
        for pages in locked:
            self._registrar.unregister(pages.data_ptr())

    def _complain(self, problem: str) -> None:
        _log.warning(
            "not all RAM for prefixes can be page-locked; the rest is copied through the driver's buffer, "
            "which is slower",
            page_locked_gib=round(self.locked_bytes / 2**30, 2),
            of_gib=round(self._slots.nbytes / 2**30, 2),
            because=problem,
            remedy=MORE_PINNED,
        )


def make_piece_locks(slots: torch.Tensor, registrar: Registrar) -> PieceLocks:
    """Returns the locks of a tier on this machine."""
    return PieceLocks(slots, registrar, is_limited=may_be_limited())
