"""An engine assembled and warmed up as the process does it, and requests through it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from gpu_service.assembly.ahead import AheadOfWake
from gpu_service.assembly.build import Built, WarmUpGate, build_engine
from gpu_service.core.interface import EngineObserver, NullObserver
from gpu_service.ops import backends
from moebius.config import MoebiusConfig
from tests.helpers.engine_outputs import WAIT_S, EngineOutputs


class RunningEngine(EngineOutputs):
    """The engine of `built`; made by `running_engine`."""

    def __init__(self, built: Built) -> None:
        super().__init__()
        self.built, self.engine = built, built.engine


@contextmanager
def running_engine(
    config: MoebiusConfig, observer: EngineObserver | None = None, ahead: AheadOfWake | None = None
) -> Iterator[RunningEngine]:
    """Built, warm and sealed; at the end stops it and checks its books. `ahead`: of one that wakes."""
    if config.experts.expert_transport == "mailbox":
        # An earlier engine's mailbox is that engine's until nothing refers to it any more. Elsewhere it would
        # only cost a tenth of a second of every engine.
        gc.collect()
    gate = WarmUpGate()
    built = build_engine(config, observer or NullObserver(), gate.on_output, ahead)
    built.engine.start()
    try:
        gate.run(built.engine, built.model_config.vocab_size, WAIT_S, built.warm_up_tokens)
        built.memory.seal()
        running = RunningEngine(built)
        built.engine.on_output = running.on_output
        yield running
    finally:
        built.close()
        for device_type in ("cpu", "cuda"):
            backends.uninstall(device_type)
    built.engine.scheduler.check_integrity()
