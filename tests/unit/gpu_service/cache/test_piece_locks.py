"""Guards page-locking of the RAM tier: ahead of blocks, in pieces, as far as a driver allows."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from gpu_service.cache.tiers.digests import identity_digest, page_digests, root_digest
from gpu_service.cache.tiers.piece_locks import PieceLocks
from gpu_service.cache.tiers.ram_segment import RamSegment
from gpu_service.cache.tiers.ram_tier import RamTier
from gpu_service.device.pinned import LEFT_BYTES
from tests.helpers.limited_pinning import Limited
from tests.helpers.waiting import wait_until

IDENTITY = identity_digest("a model")
# 64 slots are a page: the least that a piece has.
SLOT_BYTES, STEP = 64, 64
PIECE_BYTES = SLOT_BYTES * STEP
NUM_PIECES = 5
RETRIES_S = (0.01, 0.02)


def locked_tier(
    driver: Limited, path: Path | None = None, is_limited: bool = False, serves: bool = True
) -> tuple[RamTier, PieceLocks]:
    """Returns a tier of five pieces of a page, and its locks; `serves`: which have begun."""
    segment = RamSegment(IDENTITY, SLOT_BYTES, NUM_PIECES * STEP - 7, path)
    settings = PIECE_BYTES, is_limited, RETRIES_S, 1
    segment.locks = PieceLocks(torch.from_numpy(segment.slots), driver, *settings)
    tier = RamTier(segment, SLOT_BYTES, 160)
    if serves:
        segment.begin_locks()
    return tier, segment.locks


def fill(tier: RamTier, begin: int, count: int) -> None:
    """Stores pages that differ."""
    names = page_digests(root_digest(IDENTITY, ""), np.arange(2 * (begin + count)), 2)
    for index in range(begin, begin + count):
        assert tier.reserve(names[index], names[index - 1], 2, tier.clock)
        tier.views(names[index])[0][:] = index % 251
        tier.complete(names[index])


def test_pieces_are_locked_as_blocks_reach_them() -> None:
    """The first at the start, then the piece of a block and the next one, each once; all are taken back."""
    driver = Limited(2**40)
    tier, locks = locked_tier(driver)
    wait_until(lambda: len(driver.locked) == 1)
    for piece in range(NUM_PIECES):
        fill(tier, piece * STEP, 1)
        expected = min(NUM_PIECES, piece + 2)
        wait_until(lambda expected=expected: len(driver.locked) == expected)  # type: ignore[misc]
        fill(tier, piece * STEP + 1, STEP - (8 if piece == NUM_PIECES - 1 else 1))
    assert locks.num_locked == len(tier.segment.slots)
    base = tier.segment.slots.ctypes.data
    assert sorted(driver.locked) == [base + piece * PIECE_BYTES for piece in range(NUM_PIECES)]
    assert all(address % PIECE_BYTES == 0 for address in driver.locked)
    assert sum(driver.locked.values()) == tier.segment.slots.nbytes
    tier.segment.close()
    assert not driver.locked


def test_blocks_of_a_predecessor_are_locked(tmp_path: Path) -> None:
    """In the background, up to the last slot that holds one."""
    tier, _ = locked_tier(Limited(2**40), tmp_path / "engine.kv")
    fill(tier, 0, 2 * STEP + 1)
    tier.segment.close()
    driver = Limited(2**40)
    again, _ = locked_tier(driver, tmp_path / "engine.kv")
    assert len(again) == 2 * STEP + 1
    wait_until(lambda: len(driver.locked) == 4)
    again.segment.close()


def test_nothing_is_locked_before_the_engine_serves(tmp_path: Path) -> None:
    """Blocks of a predecessor wait until the first steps have run, which would wait for the driver; a tier
    that is closed before has no thread to wait for.
    """
    tier, _ = locked_tier(Limited(2**40), tmp_path / "engine.kv")
    fill(tier, 0, STEP + 1)
    tier.segment.close()
    driver = Limited(2**40)
    again, locks = locked_tier(driver, tmp_path / "engine.kv", serves=False)
    assert len(again) == STEP + 1
    assert "prefix-locks" not in {thread.name for thread in threading.enumerate()}
    assert not driver.locked
    again.segment.begin_locks()
    wait_until(lambda: len(driver.locked) == 3)
    again.segment.close()
    assert not driver.locked
    unused, locks = locked_tier(driver, tmp_path / "engine.kv", serves=False)
    unused.segment.close()
    assert locks.num_locked == 0


@pytest.mark.parametrize("is_limited", [False, True])
def test_what_cannot_be_locked_is_used_all_the_same(is_limited: bool) -> None:
    """All slots hold blocks, one line says how many are locked, and where a limit was to be expected the rest
    of it is left to others.
    """
    driver = Limited(2 * PIECE_BYTES + (LEFT_BYTES if is_limited else 0))
    with capture_logs() as logs:
        tier, locks = locked_tier(driver, is_limited=is_limited)
        fill(tier, 0, NUM_PIECES * STEP - 7)
        wait_until(lambda: bool(logs))
    assert [log["event"].partition(";")[0] for log in logs] == ["not all RAM for prefixes can be page-locked"]
    assert sum(driver.locked.values()) == locks.locked_bytes == 2 * PIECE_BYTES
    assert driver.limit - sum(driver.locked.values()) == (LEFT_BYTES if is_limited else 0)
    assert [int(slot[0]) for slot in tier.segment.slots] == [
        index % 251 for index in range(NUM_PIECES * STEP - 7)
    ]
    tier.segment.close()
    assert not driver.locked


def test_a_driver_that_raises_costs_the_locks_alone() -> None:
    """Blocks are kept, and the error is logged with its traceback."""

    class Broken(Limited):
        def register(self, address: int, nbytes: int) -> str:
            raise RuntimeError("no context")

    with capture_logs() as logs:
        tier, locks = locked_tier(Broken(0))
        fill(tier, 0, 3)
        wait_until(lambda: bool(logs))
    assert logs[0]["exc_info"]
    assert locks.num_locked == 0
    assert len(tier) == 3
    tier.segment.close()


def test_a_piece_that_was_refused_is_tried_again() -> None:
    """A refusal that is over by the last try costs nothing; one that is not ends the locking."""

    class Busy(Limited):
        refusals = len(RETRIES_S)

        def register(self, address: int, nbytes: int) -> str:
            self.refusals -= 1
            return "invalid argument" if self.refusals >= 0 else super().register(address, nbytes)

    driver = Busy(2**40)
    tier, locks = locked_tier(driver)
    with capture_logs() as logs:
        wait_until(lambda: locks.num_locked == STEP)
        driver.refusals = len(RETRIES_S) + 1
        fill(tier, 0, 1)
        wait_until(lambda: bool(logs))
    assert locks.num_locked == STEP
    assert logs[0]["because"] == "invalid argument"
    tier.segment.close()
    assert not driver.locked
