"""Opens the expert servers' segments: for streaming, and for experts that become resident at the start."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import structlog

from gpu_service.core.parallel import ParallelContext
from gpu_service.experts.streaming.segments import ExpertSegments, SegmentsUnusable, identity_problem
from moebius.config import ExpertConfig
from moebius.kernels.weight_segment import WeightSegment, WeightSegmentError, segment_path
from moebius.models.identity import identity_part

_log = structlog.get_logger(__name__)


def segment_paths(settings: ExpertConfig) -> list[Path]:
    """Returns where the servers of these settings keep their experts, whether they do or not."""
    return [segment_path(settings.expert_weights_dir, index) for index in range(settings.split_count)]


def open_segments(
    paths: Sequence[Path], layers: Sequence[int], fingerprint: str, *, are_checked: bool = True
) -> ExpertSegments:
    """Returns the segments of all servers, whose checkpoint has the `fingerprint`.

    `are_checked`: the servers have compared all experts with their checksums, so that readers need not.
    Raises SegmentsUnusable while servers load, and for segments of other experts.
    """
    with ExitStack() as undo:
        segments = []
        for path in paths:
            try:
                segment = WeightSegment.open(path)
            except WeightSegmentError as error:
                raise SegmentsUnusable(str(error)) from error
            undo.callback(segment.close)
            if are_checked and not segment.is_checked:
                raise SegmentsUnusable(
                    f"expert weights {path}: its server still compares what it found there"
                )
            segments.append(segment)
        opened = ExpertSegments(segments, layers, paths)
        problem = identity_problem(opened.identity, fingerprint)
        if problem:
            raise SegmentsUnusable(f"expert weights {paths[0]}: {problem}")
        undo.pop_all()
        return opened


def open_packed(
    settings: ExpertConfig, layers: Sequence[int], fingerprint: str, parallel: ParallelContext
) -> ExpertSegments | None:
    """Returns segments from which the residents of `layers` can be copied; None: those are packed from the
    checkpoint.

    They can where servers of this host have loaded all experts already, as after a restart of the engine, and
    this rank holds whole ones. Readers have to compare checksums.
    """
    has_whole = parallel.tp_size == 1 or parallel.holds_whole_experts
    if not layers or not has_whole or not settings.expert_weights_dir or settings.expert_memory_gib:
        return None
    try:
        opened = open_segments(segment_paths(settings), layers, fingerprint, are_checked=False)
    except SegmentsUnusable as error:
        _log.info("resident experts are packed from the checkpoint", because=str(error))
        return None
    dtype = identity_part(opened.identity, "expert_dtype")
    if dtype in ("", settings.expert_dtype):
        return opened
    opened.close()
    _log.info("resident experts are packed from the checkpoint", because=f"servers have expert_dtype {dtype}")
    return None
