"""Damages packed experts of a running server, as faulty memory would: through a mapping of its segment."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from moebius.kernels.weight_segment import WeightSegment

REPAIRED = "an expert was damaged in memory and is packed again"
REFUSED = "an expert is damaged in memory and cannot be packed again"
FORGOTTEN = "an expert was damaged: requests are computed again"


def segment_of(state_dir: Path, server: int) -> WeightSegment:
    """Returns the segment of expert server `server` of a `moebius serve` with that state directory."""
    return WeightSegment.open(next(iter(state_dir.rglob(f"expert-{server}.weights"))))


def place_of(segment: WeightSegment, layer: int, expert: int) -> tuple[int, int]:
    """Returns where the expert's bytes begin in the segment, and how many there are."""
    found = segment.layers[layer]
    return found.offset + found.experts.index(expert) * found.expert_bytes, found.expert_bytes


def flip_bits(segment: WeightSegment, layer: int, expert: int, count: int = 1, seed: int = 0) -> None:
    """`count` bits of different float32 weights, the highest one of their exponents, so that texts change."""
    begin, size = place_of(segment, layer, expert)
    for at in random.Random(seed).sample(range(size // 4), count):
        segment.data[begin + 4 * at + 3] ^= 0x40


def put_nan(segment: WeightSegment, layer: int, expert: int) -> None:
    """In place of one float32 weight."""
    begin, _ = place_of(segment, layer, expert)
    segment.data[begin + 64 : begin + 68].view(np.float32)[0] = np.nan
