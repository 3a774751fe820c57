"""Guards that what a request keeps is given up last below the device, too, where its time goes with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_service.cache.tiers.digests import identity_digest, page_digests, root_digest, state_key
from gpu_service.cache.tiers.disk_tier import DiskTier
from gpu_service.cache.tiers.ram_segment import RamSegment
from gpu_service.cache.tiers.ram_tier import RamTier

PAGE = 2
IDENTITY = identity_digest("a model")
ROOT = root_digest(IDENTITY, "")


def names(count: int, begin: int = 0) -> list[bytes]:
    """A chain of pages."""
    return page_digests(ROOT, np.arange(begin, begin + count * PAGE), PAGE)


def ram_tier(num_slots: int, wall_clock: Callable[[], float], path: Path | None = None) -> RamTier:
    """Returns a tier of pages that take a slot each, and of states that take three."""
    return RamTier(RamSegment(IDENTITY, 64, num_slots, path), 64, 160, wall_clock)


def put(tier: RamTier, chain: list[bytes]) -> None:
    """Stores pages that follow one another."""
    for parent, key in zip([ROOT, *chain], chain, strict=False):
        assert tier.reserve(key, parent, PAGE, tier.clock + 1)
        tier.complete(key)
        tier.check_integrity()


def test_ram_gives_up_kept_blocks_last_until_their_time_is_over() -> None:
    """Others come and go; a prefix with a state stays whole, and afterwards goes by its last use."""
    now = [1000.0]
    tier, kept = ram_tier(12, lambda: now[0]), names(2)
    put(tier, kept)
    assert tier.reserve(state_key(kept[1]), kept[1], PAGE, tier.clock + 1)
    tier.complete(state_key(kept[1]))
    tier.keep([*kept, state_key(kept[1])], 1060.0)
    assert set(tier.kept_keys) == {*kept, state_key(kept[1])}
    for number in range(30):
        put(tier, names(1, 100 + 10 * number))
    assert all(key in tier for key in [*kept, state_key(kept[1])])
    tier.keep(kept, 1030.0)
    assert tier.kept_until(kept[0]) == 1060.0, "a shorter time changes nothing"
    now[0] = 1060.0
    assert tier.kept_keys == []
    for number in range(30):
        put(tier, names(1, 1000 + 10 * number))
    assert not any(key in tier for key in [*kept, state_key(kept[1])])


def test_ram_keeps_at_most_half_and_the_longest() -> None:
    """Where too many blocks are kept, those whose time ends first are as others; what is new has room."""
    tier, chains = ram_tier(8, lambda: 0.0), [names(2, 100 * number) for number in range(4)]
    for number, chain in enumerate(chains):
        put(tier, chain)
        tier.keep(chain, 50.0 + number)
    put(tier, names(4, 1000))
    assert [[key in tier for key in chain] for chain in chains] == [[False] * 2] * 2 + [[True] * 2] * 2
    assert len(tier.kept_keys) == 4
    assert all(key in tier for key in names(4, 1000))


def test_ram_gives_up_a_kept_block_before_it_refuses() -> None:
    """What may not go for a new block, since it is pinned, does not make kept blocks stay."""
    tier, kept, pinned = ram_tier(4, lambda: 0.0), names(2), names(2, 100)
    put(tier, kept)
    tier.keep(kept, 50.0)
    put(tier, pinned)
    tier.pin(pinned)
    put(tier, names(1, 200))
    assert [key in tier for key in kept] == [True, False]


def test_a_successor_keeps_what_its_predecessor_kept(tmp_path: Path) -> None:
    """Until the same moment, by a clock that both have."""
    now = [1000.0]
    tier, kept = ram_tier(6, lambda: now[0], tmp_path / "engine.kv"), names(2)
    put(tier, kept[:1])
    tier.keep(kept[:1], 1060.0)
    tier.reserve(kept[1], kept[0], PAGE, tier.clock + 1)
    tier.keep(kept, 1070.0)  # before it is filled
    tier.complete(kept[1])
    tier.segment.close()
    now[0] = 1050.0
    successor = ram_tier(6, lambda: now[0], tmp_path / "engine.kv")
    assert [successor.kept_until(key) for key in kept] == [1070.0, 1070.0]
    for number in range(10):
        put(successor, names(1, 100 + 10 * number))
    assert all(key in successor for key in kept)
    successor.segment.close()
    now[0] = 1080.0
    assert ram_tier(6, lambda: now[0], tmp_path / "engine.kv").kept_keys == []


def payload(fill: int, nbytes: int = 1000) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Equal bytes."""
    return np.full(nbytes, fill, np.uint8)


def append(tier: DiskTier, chain: list[bytes]) -> None:
    """Writes pages that follow one another."""
    for parent, key in zip([ROOT, *chain], chain, strict=False):
        assert tier.append(key, parent, PAGE, payload(7))


def age_files(directory: Path) -> None:
    """The files seem to have been used long ago, in the order in which they were written."""
    for age, path in enumerate(sorted(directory.glob("*.kv"), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (age, age))


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_disk_gives_up_files_with_kept_prefixes_last(is_kept: bool, tmp_path: Path) -> None:
    """An oldest file outlives newer ones while a prefix in it is kept, and then goes first, of another model
    as of this one."""
    now = [1000.0]
    for identity in (identity_digest("another model"), IDENTITY):
        first = DiskTier(tmp_path, identity, 40_000, wall_clock=lambda: now[0])
        append(first, names(3))
        if is_kept:
            first.keep(names(3), 1060.0)
        first.close()
    oldest = sorted(tmp_path.glob("*.kv"))
    tier = DiskTier(tmp_path, IDENTITY, 40_000, wall_clock=lambda: now[0])
    for number in range(60):
        age_files(tmp_path)
        append(tier, names(1, 100 + 10 * number))
    assert [path.exists() for path in oldest] == [is_kept] * 2
    now[0] = 1060.0
    for number in range(60):
        age_files(tmp_path)
        append(tier, names(1, 10_000 + 10 * number))
    assert [path.exists() for path in oldest] == [False] * 2
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 40_000
    tier.close()


def test_a_disk_keeps_at_most_half_of_its_budget(tmp_path: Path) -> None:
    """Beyond that the files whose time ends first go as others do."""
    tier = DiskTier(tmp_path, IDENTITY, 40_000, wall_clock=lambda: 0.0)
    for number in range(60):
        age_files(tmp_path)
        chain = names(1, 10 * number)
        append(tier, chain)
        tier.keep(chain, 1000.0 + number if number < 8 else 500.0)
    held = [number for number in range(60) if tier.record(names(1, 10 * number)[0]) is not None]
    assert set(range(8)) <= set(held), "kept the longest"
    assert 59 in held
    tier.close()


def test_engines_tell_each_other_what_they_keep(tmp_path: Path) -> None:
    """An engine keeps a prefix of another one's file, with all pages before it; a torn mark counts for
    nothing; the next start knows; what is written later is marked when it is written."""
    first, second = (DiskTier(tmp_path, IDENTITY, 10**6, wall_clock=lambda: 0.0) for _ in range(2))
    chain, late = names(3), names(4)
    append(first, chain)
    second.refresh()
    second.keep(late, 60.0)  # The last page comes later.
    assert second.append(late[3], late[2], PAGE, payload(1))
    first.refresh()
    assert [first.kept_until(key) for key in late] == [60.0] * 4
    second.close()
    first.close()
    marks = sorted(tmp_path.glob("*.kept"))
    assert len(marks) == 2, "each file says what is kept of it"
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in marks)
    with marks[0].open("ab") as file:
        file.write(b"\xff" * 50)
    third = DiskTier(tmp_path, IDENTITY, 10**6, wall_clock=lambda: 0.0)
    assert sorted(third.kept_keys) == sorted(late)
    third.drop()
    assert third.kept_keys == []
    assert not list(tmp_path.glob("*.k*"))
    third.close()
