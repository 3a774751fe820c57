"""Brings lost expert servers back: what runners of steps on a CPU and on a GPU have in common.

A server may be lost again while it is waited for, while it is checked, and in the step that is run again: all
of that is one recovery, which ends with the time that it has and not with a number of attempts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import structlog

from gpu_service.experts.client import ExpertClient, ExpertUnavailable

_log = structlog.get_logger(__name__)


class Recovery:
    """Used by the thread that runs steps; of several ranks all call `run` at the same places."""

    def __init__(
        self,
        experts: ExpertClient | None,
        timeout_s: float,
        active: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`timeout_s`: what one recovery may take; `active`: in which a client recovers, because it may write
        to the device's memory.
        """
        self._experts = experts
        self._timeout_s = timeout_s
        self._active = active
        # Whether it waits for servers now. Read by other threads.
        self.is_running = False
        # Nothing may be launched before `run` has succeeded: the last one failed, or a launch was broken off.
        self.is_due = False

    def deadline(self) -> float:
        """Returns when a recovery that begins now has to be over, of time.monotonic()."""
        return time.monotonic() + self._timeout_s

    def run(self, deadline: float, failure: ExpertUnavailable | None = None) -> None:
        """Returns when all servers are ready and checked; `failure` is what it is for.

        Raises `failure` where there is no client, or no time left; ExpertUnavailable when a server is not
        back in time, or can not come back.
        """
        if self._experts is None:
            assert failure is not None, "without a client nothing can be broken off"
            raise failure
        self.is_due = True
        # Ranks read different clocks, and a rank that left alone would keep the others waiting.
        if failure is not None and self._experts.agree_on(time.monotonic() >= deadline):
            raise failure
        self.is_running = True
        try:
            with self._active():
                self._experts.recover(max(0.0, deadline - time.monotonic()))
        finally:
            self.is_running = False
        self.is_due = False
        _log.info("expert servers are ready again")
