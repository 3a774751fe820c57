"""Guards the pool of chunks and the pages over it: each chunk has one owner, its bytes move along, and pages
that may be used have memory that is theirs alone and begins as zeros.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_service.cache.elastic_pages import ElasticPages
from gpu_service.device.host_virtual_memory import HostVirtualMemory
from gpu_service.device.virtual_memory import (
    PhysicalPool,
    VirtualMemoryUnavailable,
    VirtualRange,
    pooled_bytes,
)

CHUNK = 4096
CPU = torch.device("cpu")


def pool_of(chunks: int) -> PhysicalPool:
    """Free chunks of the host."""
    pool = PhysicalPool(HostVirtualMemory(), CHUNK)
    pool.add(chunks)
    return pool


def test_bytes_move_with_their_chunk() -> None:
    """What one range wrote another one reads once the chunk is its own; addresses stay."""
    pool = pool_of(2)
    first, second = VirtualRange(pool, 3 * CHUNK), VirtualRange(pool, 3 * CHUNK)
    one, other = first.tensor(), second.tensor()
    address = one.data_ptr()
    first.map([2])
    one[2 * CHUNK :] = 7
    first.unmap([2])
    second.map([0, 1])
    assert sorted(int(other[place * CHUNK]) for place in (0, 1)) == [0, 7]
    assert one.data_ptr() == address
    with pytest.raises(VirtualMemoryUnavailable, match="1 chunks wanted, 0 of 2 free"):
        first.map([0])


def test_what_is_not_mapped_cannot_be_touched() -> None:
    """A read of it ends the process: no test of moving memory could fail otherwise."""
    code = (
        "from tests.unit.gpu_service.device.test_virtual_memory import *\n"
        "held = VirtualRange(pool_of(1), 2 * CHUNK)\n"
        "memory = held.tensor()\nheld.map([0])\nmemory[0] = 1\n"
        "print('mapped', flush=True)\nmemory[CHUNK] = 1\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=os.getcwd(), check=False)
    assert ended.stdout == b"mapped\n"
    assert ended.returncode == -signal.SIGSEGV


def test_memory_goes_back_with_its_last_tensor() -> None:
    """A range ends with its tensors, and a pool's free chunks with the pool."""
    gc.collect()  # pools of other tests
    pool = pool_of(3)
    before = pooled_bytes(CPU)
    held = VirtualRange(pool, 2 * CHUNK)
    memory = held.tensor()[:CHUNK]
    held.map([0, 1])
    assert pool.free == 1
    del memory
    gc.collect()
    assert pool.free == 3
    pool.close()
    assert pool.size == 0
    assert pooled_bytes(CPU) == before - 3 * CHUNK


def test_claimed_chunks_are_left_for_who_claims() -> None:
    """Slots take what is spare only."""
    pool = pool_of(4)
    pool.claim(3)
    with pytest.raises(VirtualMemoryUnavailable, match="2 chunks wanted, 1 of 4 free"):
        pool.take(2, spares_claimed=True)
    assert len(pool.take(1, spares_claimed=True)) == 1
    assert len(pool.take(3)) == 3


def test_chunks_fit_what_the_device_maps() -> None:
    """Others are refused by name."""
    with pytest.raises(ValueError, match="allowed: multiples of"):
        PhysicalPool(HostVirtualMemory(), CHUNK + 1)


@given(
    rows=st.lists(st.integers(1, 3 * CHUNK), min_size=1, max_size=4),
    num_pages=st.integers(2, 60),
    flips=st.lists(st.integers(0, 1000), max_size=30),
)
def test_groups_come_and_go(rows: list[int], num_pages: int, flips: list[int]) -> None:
    """Groups of layers whose rows differ and begin anywhere in chunks keep what is written to them, take as
    many chunks as was said, and begin as zeros whatever was there before.
    """
    pool = pool_of(sum(-(-num_pages * row // CHUNK) for row in rows) + 1)
    pages = ElasticPages(pool, num_pages, max(rows))
    tensors = [pages.allocate((num_pages, row), torch.uint8, CPU) for row in rows]
    marks: dict[int, int] = {}
    for number, flip in enumerate(flips, 1):
        group = flip % pages.num_groups
        span = pages.pages_of(group)
        if group in marks:
            pages.remove([group])
            del marks[group]
        else:
            needed, before = pages.chunks_for([group]), pool.free
            pages.add([group])
            assert before - pool.free == needed
            for tensor in tensors:
                assert not tensor[span.start : span.stop].any()
                tensor[span.start : span.stop] = number
            marks[group] = number
        for held, mark in marks.items():
            at = pages.pages_of(held)
            assert all(bool((tensor[at.start : at.stop] == mark).all()) for tensor in tensors)
        assert pages.mapped + pool.free == pool.size
        assert len(pages.holders()) == pages.mapped
        absent = {
            page for each in range(pages.num_groups) if each not in marks for page in pages.pages_of(each)
        }
        assert absent == set(pages.absent_pages())
