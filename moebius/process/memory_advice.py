"""Advice to the system about memory, by ctypes: mmap.madvise keeps Python's lock, and populating can take as
long as a disk does.
"""

from __future__ import annotations

import ctypes

# Linux 5.14; Python's mmap does not name them.
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(address: int, nbytes: int, advice: int) -> int:
    """Returns the system's error, 0: none. `address` is that of a page."""
    return 0 if _madvise(address, nbytes, advice) == 0 else ctypes.get_errno()
