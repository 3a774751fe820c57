"""Memory of the RAM tier: a table of records, then slots of one size. As a file it outlives the engine.

    header | record of slot 0 | record of slot 1 | … | slot 0 | slot 1 | …

Under `moebius serve` the supervisor holds the file, as it holds those of packed experts
(docs/decisions/0011). A slot's record says that it is complete only while it is, so that a successor of an
engine that was killed at any moment finds no half-written slot. One engine at a time holds the file's lock.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gpu_service.cache.tiers.piece_locks import PieceLocks
from gpu_service.device.stream import own_pages
from moebius import _kernels
from moebius.errors import UserError

Bytes = npt.NDArray[np.uint8]
_MAGIC = int.from_bytes(b"moebiuKV", "little")
_VERSION = 2
_ALIGNMENT = 4096

_HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("reserved", "<u4"),
        ("identity", "V32"),
        ("num_slots", "<u8"),
        ("slot_bytes", "<u8"),
    ]
)
RECORD = np.dtype(
    [
        ("digest", "V32"),  # of the page that the slot holds, or of the page before the state
        ("parent", "V32"),  # of the page before that one; of a state the same as `digest`
        ("value", "<f8"),
        ("used", "<u8"),
        ("keep_until", "<f8"),  # seconds since the epoch; 0: not kept
        ("is_state", "<u4"),
        ("part", "<u4"),  # which part of a payload that takes several slots
        ("num_parts", "<u4"),
        ("is_complete", "<u4"),
    ]
)


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class RamSegment:
    """A mapping of the file, or memory of this process.

    Attributes:
        records: `RECORD` `[num_slots]`.
        slots: uint8 `[num_slots, slot_bytes]`.
        is_inherited: whether complete slots of a predecessor may be there.
    """

    def __init__(self, identity: bytes, slot_bytes: int, num_slots: int, path: Path | None = None) -> None:
        """`slot_bytes` is a multiple of 64; `path` None: memory of this process alone.

        What a predecessor left is kept where identity and slot size are equal, and then so is its number of
        slots. Raises UserError when the file cannot be used or is another engine's.
        """
        if num_slots < 1:
            raise UserError(
                f"kv_offload_gib: less than a page of {slot_bytes / 2**20:.1f} MiB; allowed: 0, or more"
            )
        self._lock = -1
        self.is_inherited = False
        if path is None:
            self.data: Bytes = own_pages([_size(num_slots, slot_bytes)], torch.uint8).numpy()
        else:
            num_slots = self._open(path, identity, slot_bytes, num_slots)
        header = self.data[: _HEADER.itemsize].view(_HEADER)
        if not self.is_inherited:
            header[0] = (_MAGIC, _VERSION, 0, identity, num_slots, slot_bytes)
        begin = _ALIGNMENT
        self.records = self.data[begin : begin + num_slots * RECORD.itemsize].view(RECORD)
        begin = _size(num_slots, 0)
        self.slots = self.data[begin:].reshape(num_slots, slot_bytes)
        # Of the slots' memory on a GPU's host; None: nothing is page-locked.
        self.locks: PieceLocks | None = None

    def _open(self, path: Path, identity: bytes, slot_bytes: int, num_slots: int) -> int:
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"kv_offload_dir: {path} is in use by another engine") from None
            found = os.fstat(self._lock).st_size
            header = np.frombuffer(os.pread(self._lock, _HEADER.itemsize, 0).ljust(_HEADER.itemsize), _HEADER)
            same = bytes(header[0]["identity"]) == identity and int(header[0]["slot_bytes"]) == slot_bytes
            kept = int(header[0]["num_slots"])
            is_ours = int(header[0]["magic"]) == _MAGIC and int(header[0]["version"]) == _VERSION
            if same and is_ours and found == _size(kept, slot_bytes):
                self.is_inherited, num_slots = True, kept
            else:
                os.ftruncate(self._lock, 0)
                os.ftruncate(self._lock, _size(num_slots, slot_bytes))
            self.data = _kernels.map_shared(str(path), _size(num_slots, slot_bytes))
        except OSError as error:
            raise UserError(f"kv_offload_dir: {path} cannot be used: {error.strerror}") from None
        return num_slots

    def reached(self, slot: int) -> None:
        """A block takes this slot; those that were never used are taken in order."""
        if self.locks is not None:
            self.locks.reached(slot)

    def begin_locks(self) -> None:
        """The engine serves: its slots are page-locked from now on, where they are to be."""
        if self.locks is not None:
            self.locks.begin()

    def close(self) -> None:
        """Lets another engine use the file; the mapping goes with its last view. Copies must have ended."""
        if self.locks is not None:
            self.locks.close()
            self.locks = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _size(num_slots: int, slot_bytes: int) -> int:
    """Returns the bytes of header, records and slots."""
    return _ALIGNMENT + _up(num_slots * RECORD.itemsize) + num_slots * slot_bytes


def slots_within(nbytes: int, slot_bytes: int) -> int:
    """Returns how many slots a segment of at most `nbytes` has."""
    return max(0, (nbytes - 2 * _ALIGNMENT) // (slot_bytes + RECORD.itemsize))
