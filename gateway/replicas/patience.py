"""How one request waits for an engine that sleeps: calls are repeated until it has loaded its model again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import grpc

from moebius.process.sleep_mark import FORCED, SleepMark

_PAUSE_S = 0.1
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True)
class SleepRules:
    """What is known of a sleeping engine; filled from the settings."""

    mark: SleepMark
    wakes_on_request: bool = True
    longest_wait_s: float = 1800.0


class Patience:
    """The patience of one request, from before its first call; for an operator's own calls, too."""

    def __init__(self, rules: SleepRules) -> None:
        self._rules = rules
        self._slept = rules.mark.exists
        self._until = time.monotonic() + rules.longest_wait_s

    async def lasts(self, error: grpc.aio.AioRpcError) -> bool:
        """Returns whether a call that has failed without an answer is to be repeated, after a pause.

        It is while the engine sleeps, falls asleep or wakes, be it that it is killed meanwhile; not once
        force has ended the call.
        """
        self._slept = self._slept or self._rules.mark.exists
        if error.code() not in _GONE or not self._slept or error.details() == FORCED:
            return False
        if not self._rules.wakes_on_request or time.monotonic() > self._until:
            return False
        await asyncio.sleep(_PAUSE_S)
        return True
