"""Damages packed experts of a running server, as faulty memory would: through a mapping of its segment; and
repairs those of an engine, as its server does.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from moebius.kernels import ExpertEngine
from moebius.kernels.weight_segment import WeightSegment
from tests.helpers.moe_golden import Expert

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


@contextmanager
def repairer(engine: ExpertEngine, read: Callable[[int, int], Expert]) -> Iterator[list[tuple[int, int]]]:
    """A thread that packs again what is found, from what `read(layer, expert)` gives; yields what it was."""
    repaired, stop = list[tuple[int, int]](), threading.Event()

    def run() -> None:
        while not stop.is_set():
            found = engine.wait_for_damage(10.0)
            if found is not None:
                assert engine.repair_expert(*found, *read(*found))
                repaired.append(found)

    engine.expect_repairs(True)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield repaired
    finally:
        stop.set()
        engine.interrupt_damage_wait()
        thread.join()
        engine.expect_repairs(False)
