"""When the engine sleeps and wakes: calls and idleness ask for it, `main` does it (docs/decisions/0040)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import structlog
from google.protobuf import json_format
from prometheus_client import REGISTRY, Gauge

from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.process.sleep_mark import ASLEEP, SleepMark
from protos import engine_pb2 as pb

_log = structlog.get_logger(__name__)
_LOOK_S = 0.25
NO_PLACE = "an engine sleeps with a sleep_file and all ranks on one host only"


class EngineSleep:
    """The sleep of one engine. Used in the event loop only."""

    def __init__(
        self, mark: SleepMark | None = None, wakes_on_request: bool = True, after_s: float = 0.0
    ) -> None:
        """`mark`: None where the engine cannot sleep; `after_s`: idle seconds, 0: only when asked."""
        self.mark = mark or SleepMark("")
        self._wakes_on_request = wakes_on_request
        self._after_s, self._limit_s = after_s, after_s or None
        self._used_at = time.monotonic()
        # What the engine says of its model while it has none in memory; None: it is awake.
        self.info: pb.GetModelInfoResponse | None = None
        self.force = False
        self.wanted, self.quiet = asyncio.Event(), asyncio.Event()
        self.waking, self.awake = asyncio.Event(), asyncio.Event()

    def resume(self) -> bool:
        """Returns whether the predecessor of this process fell asleep; then `info` is what it has left.

        A mark that cannot be read is removed: the engine loads, which is always right.
        """
        if not self.mark.exists:
            return False
        try:
            self.info = json_format.Parse(self.mark.read(), pb.GetModelInfoResponse())
        except (OSError, json_format.ParseError) as error:
            _log.warning("the engine does not sleep on", reason=str(error))
            self.mark.clear()
        return self.info is not None

    def ask(self, info: pb.GetModelInfoResponse, force: bool) -> None:
        """Asks for sleep. Raises OSError where the mark cannot be made, and nothing happens."""
        if not self.wanted.is_set():
            self.mark.write(json_format.MessageToJson(info))
        self.force = self.force or force
        self.wanted.set()

    def loaded(self) -> None:
        """The model is in memory: waiting calls go on."""
        self.info = None
        self.used()
        self.awake.set()

    def used(self, keep_alive_s: float | None = None) -> None:
        """A request begins or ends; `keep_alive_s`: its wish for the time after it, None: it has none."""
        self._used_at = time.monotonic()
        if keep_alive_s is not None and self._after_s:
            self._limit_s = None if keep_alive_s < 0 else keep_alive_s

    async def until_awake(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Wakes the engine for a request, and waits for it; aborts the call where requests may not."""
        if self.info is None:
            return
        if not self._wakes_on_request:
            await context.abort(grpc.StatusCode.UNAVAILABLE, ASLEEP)
        await self.wake()

    async def wake(self) -> None:
        """Returns once the model is in memory."""
        if self.info is not None:
            self.waking.set()
            await self.awake.wait()

    async def watch_idleness(self, info: pb.GetModelInfoResponse, is_busy: Callable[[], bool]) -> None:
        """Asks for sleep after the set time without requests; returns then, or never."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if is_busy():
                self._used_at = time.monotonic()
            elif self._limit_s is not None and time.monotonic() - self._used_at >= self._limit_s:
                try:
                    return self.ask(info, force=False)
                except OSError as error:
                    _log.error("the engine stays awake", reason=f"sleep_file: {error}")
                    return None


def make_sleep(config: MoebiusConfig) -> EngineSleep:
    """Returns the sleep of a configured engine. Raises UserError for sleep_after_s where it cannot sleep."""
    gpu, path = config.gpu, config.model.sleep_file
    mark = SleepMark(path if config.parallel.rank_hosts == 1 else "")
    if gpu.sleep_after_s and not mark.has_place:
        raise UserError(f"sleep_after_s: {gpu.sleep_after_s:g} is not allowed: {NO_PLACE}; allowed: 0")
    return EngineSleep(mark, gpu.wake_on_request, gpu.sleep_after_s)


def export_sleep(sleep: EngineSleep, model_name: str) -> None:
    """Exports whether the engine sleeps."""
    text = "1 while the engine has no model in memory"
    gauge = Gauge("moebius:engine_sleeping", text, ["model_name"], registry=REGISTRY)
    gauge.labels(model_name).set_function(lambda: float(sleep.info is not None))
