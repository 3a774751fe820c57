"""The process of a rank that serves nobody: it repeats what rank 0 does until rank 0 ends."""

from __future__ import annotations

import signal
from types import FrameType

import structlog

from gpu_service.build import build_engine
from gpu_service.engine.interface import NullObserver
from moebius.config import MoebiusConfig

_log = structlog.get_logger(__name__)


def run_follower(config: MoebiusConfig) -> int:
    """Loads this rank's part and runs it to the end; returns the exit status.

    A group that is lost ends the process from within (`join.end_process`).
    """
    rank = config.parallel.rank
    built = build_engine(config, NullObserver(), lambda deltas: None)

    def stop(number: int, frame: FrameType | None) -> None:
        # Alone it can not leave in order: the others would wait for it.
        built.group.fail(f"stopped by {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    built.engine.start()
    _log.info("ready", rank=rank)
    # Returns when rank 0 has sent the end.
    built.engine.join()
    built.close()
    return 0
