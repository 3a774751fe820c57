"""How a dimension, or a list of experts, is divided among servers of unequal weight."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

# Weights of GGUF's blocks.
BLOCK = 256


def split_bounds(size: int, shares: Sequence[int], multiple: int = 1) -> list[tuple[int, int]]:
    """Returns consecutive `[begin, end)` that cover `[0, size)`, their lengths proportional to `shares`.

    Every bound is a multiple of `multiple` (the kernels' panel height), save the last end. Shares that
    round to nothing are errors: a server without weights would be a waste that goes unnoticed. Where
    `size` has too few multiples for all servers, `multiple` falls back to 1. Raises ValueError.
    """
    if not shares or min(shares) < 1:
        raise ValueError(f"shares {tuple(shares)} are not allowed; each of at least one share must be >= 1")
    if size < len(shares):
        raise ValueError(f"{size} parts cannot be divided among {len(shares)} servers")
    if size // multiple < len(shares):
        multiple = 1
    units, total, passed = size // multiple, sum(shares), 0
    ends: list[int] = []
    for position, share in enumerate(shares):
        passed += share
        smallest = (ends[-1] if ends else 0) + 1
        largest = units - (len(shares) - position - 1)
        # Round half up; then every server before and after keeps at least one unit.
        ends.append(min(max((2 * units * passed + total) // (2 * total), smallest), largest))
    bounds = [0, *(end * multiple for end in ends[:-1]), size]
    return list(itertools.pairwise(bounds))


def block_bounds(size: int, shares: Sequence[int], multiple: int) -> list[tuple[int, int]]:
    """Returns bounds as `split_bounds`, for weights in blocks of 256 that share a number, as GGUF's types
    have them.

    Of whole blocks every part begins at a multiple of the largest divisor of 256 that its length has: packed
    formats have one number for that many weights (kernels/format/panel_layout.h). For that, longer parts come
    first, or parts are less equal. Where no bounds are so, they are those of `split_bounds`.
    """
    bounds = split_bounds(size, shares, multiple)
    if size % BLOCK or _begin_evenly(bounds):
        return bounds
    lengths = sorted((end - begin for begin, end in bounds), reverse=True)
    ends = list(itertools.accumulate(lengths, initial=0))
    tried = [list(itertools.pairwise(ends))] if len(set(shares)) == 1 else []
    coarser = (step for step in (64, 128, BLOCK) if step % multiple == 0 and size // step >= len(shares))
    tried += [split_bounds(size, shares, step) for step in coarser]
    return next(filter(_begin_evenly, tried), bounds)


def _begin_evenly(bounds: Sequence[tuple[int, int]]) -> bool:
    return all(begin % math.gcd(end - begin, BLOCK) == 0 for begin, end in bounds)


def equal_shares(count: int, shares: Sequence[int]) -> tuple[int, ...]:
    """`shares` as given, or `count` equal ones when none are. Raises ValueError when the numbers differ."""
    if not shares:
        return (1,) * count
    if len(shares) != count:
        raise ValueError(f"split_shares has {len(shares)} entries; split_count is {count}")
    return tuple(shares)
