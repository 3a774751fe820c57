"""Resident experts over a sleep: what falls asleep keeps them in the host's RAM for the program that wakes.

Where expert servers of this host hold them, too, nothing is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gpu_service.assembly.built import Built
from gpu_service.core.parallel import ParallelContext
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.resident.kept import KeptExperts, keep_residents
from gpu_service.experts.streaming.opening import open_packed
from gpu_service.parallel.group import RankGroup
from moebius.config import MoebiusConfig
from moebius.kernels.weight_segment import ABI_VERSION
from moebius.models.identity import expert_fingerprint
from moebius.process.sleep_mark import hand_over, take_over

# Under which the next program of this process finds the file.
_NAME = "residents"
# Threads, of this process's only wake.
_giving_back: list[threading.Thread] = []


def keep_experts(config: MoebiusConfig, built: Built) -> None:
    """Keeps the residents of an engine that was closed, as far as there is memory."""
    resident, parallel = built.resident, built.group.parallel
    if resident is None:
        return
    fingerprint = expert_fingerprint(built.identity)
    if _are_served(config, resident, fingerprint, parallel):
        return
    ranks = config.parallel.num_ranks * config.parallel.data_parallel_size
    descriptor = keep_residents(resident, _identity(config, fingerprint, parallel), ranks)
    if descriptor is not None:
        hand_over(_NAME, descriptor)


def kept_experts(config: MoebiusConfig, fingerprint: str, parallel: ParallelContext) -> KeptExperts | None:
    """Returns what the former program of this process has kept, once; None: nothing, or of another model."""
    descriptor = take_over(_NAME)
    if descriptor is None:
        return None
    return KeptExperts.open(descriptor, _identity(config, fingerprint, parallel))


@contextmanager
def given_back(kept: KeptExperts) -> Iterator[KeptExperts]:
    """Gives the memory back at the end, beside what comes next; `wait_for_memory` returns once it is free."""
    try:
        yield kept
    finally:
        _giving_back.append(kept.close())


def wait_for_memory(group: RankGroup) -> None:
    """Returns once what all ranks had kept is memory of others again: before one of them looks how much is
    free.
    """
    while _giving_back:
        _giving_back.pop().join()
    group.minimum("kept memory", 0)


def _identity(config: MoebiusConfig, fingerprint: str, parallel: ParallelContext) -> str:
    """Returns what packed experts depend on besides their format."""
    part = "whole" if parallel.holds_whole_experts else f"{parallel.tp_rank} of {parallel.tp_size}"
    return f"{fingerprint}, {config.experts.expert_dtype}, packed as {ABI_VERSION}, {part}"


def _are_served(
    config: MoebiusConfig, resident: ResidentExperts, fingerprint: str, parallel: ParallelContext
) -> bool:
    """Returns whether a start finds all of them in the memory of expert servers."""
    segments = open_packed(config.experts, tuple(resident.slots), fingerprint, parallel)
    if segments is None:
        return False
    try:
        return all(
            segments.find(layer, expert, slots.kind) is not None
            for layer, slots in resident.slots.items()
            for expert in slots.experts
        )
    finally:
        segments.close()
