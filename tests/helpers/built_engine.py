"""An engine assembled and warmed up as the process does it, and requests through it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gpu_service.assembly.build import Built, WarmUpGate, build_engine
from gpu_service.core.interface import EngineObserver, NullObserver, OutputDelta
from gpu_service.core.request import Request
from gpu_service.ops import backends
from moebius.config import MoebiusConfig

WAIT_S = 120.0


@dataclass(frozen=True)
class RunningEngine:
    """Filled by `running_engine`."""

    built: Built
    ended: threading.Semaphore  # counts requests that have ended

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """Submits all at once; the tokens of each when all have ended well."""
        for request in requests:
            self.built.engine.submit([request])
        return self.wait(requests)

    def wait(self, requests: Sequence[Request]) -> list[list[int]]:
        """Returns the tokens of each request once `count` have ended without an error."""
        for _ in requests:
            assert self.ended.acquire(timeout=WAIT_S)
        assert [request.error_message for request in requests] == [""] * len(requests)
        return [request.output_token_ids for request in requests]


@contextmanager
def running_engine(config: MoebiusConfig, observer: EngineObserver | None = None) -> Iterator[RunningEngine]:
    """Built, warm and sealed; at the end stops it and checks its books."""
    ended = threading.Semaphore(0)

    def on_output(deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                ended.release()

    # An earlier engine's mailbox is that engine's until nothing refers to it any more.
    gc.collect()
    gate = WarmUpGate()
    built = build_engine(config, observer or NullObserver(), gate.on_output)
    built.engine.start()
    try:
        gate.run(built.engine, built.model_config.vocab_size, WAIT_S, built.warm_up_tokens)
        built.memory.seal()
        built.engine.on_output = on_output
        yield RunningEngine(built, ended)
    finally:
        built.close()
        for device_type in ("cpu", "cuda"):
            backends.uninstall(device_type)
    built.engine.scheduler.check_integrity()
