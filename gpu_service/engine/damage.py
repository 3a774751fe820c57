"""What becomes of steps once an expert is found damaged: what was computed before may be wrong.

Servers answer nothing more with such an expert, but KV of earlier steps was computed with it. So requests are
computed again from their tokens, no prefix is kept, and a step launched before the find gives out nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future

import structlog

from gpu_service.core.interface import Inbox, RunOperation
from gpu_service.engine.step_runner import StepRunner
from gpu_service.scheduler.scheduler import Scheduler

COMPUTE_AGAIN = "compute all again"

_log = structlog.get_logger(__name__)


class DamageWatch:
    """Used by the engine thread."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner, inbox: Inbox) -> None:
        """`runner` knows of damaged experts; those of before do not count."""
        self._scheduler, self._runner, self._inbox = scheduler, runner, inbox
        # Damages of which requests know, and the first step that was launched since the latest was found.
        self.known, self.trusted_from = runner.damages, 0

    def look(self, nonfinite_layers: Collection[int] = ()) -> bool:
        """Checks a step before its tokens are given out; returns whether all was forgotten here and now.

        `nonfinite_layers`: made values in the step that are not finite, so that their experts are suspect.
        Of several ranks, all have to forget at one place, which is after the step: by an operation.
        """
        if nonfinite_layers:
            self._runner.suspect(nonfinite_layers)
        damages = self._runner.damages
        if not self._inbox.is_entry or damages == self.known:
            return False
        self.known = damages
        if not self._inbox.is_alone:
            self._inbox.post(RunOperation(COMPUTE_AGAIN, "", Future()))
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Running requests return to the queue with the tokens they have, and no prefix is kept; those of the
        lane's open step once that has ended. Steps in flight are worthless, and end before others are
        scheduled.
        """
        requests = len(self._scheduler.running)
        _log.warning(
            "an expert was damaged: requests are computed again and no prefix is kept", requests=requests
        )
        scheduler = self._scheduler
        self.trusted_from = scheduler.next_step
        for request in [request for request in scheduler.running if not request.in_lane]:
            scheduler.preempt(request, keep=False)
        for request in scheduler.waiting:
            request.expected_len = -1
        scheduler.cache.flush()

    def clear_pages(self) -> None:
        """Drops cached prefixes and clears all free pages, since a masked score does not hide NaN in them.

        To be called when no step in flight writes to them any more.
        """
        self._scheduler.cache.flush()
        self._runner.zero_pages(self._scheduler.cache.pool.free_pages())
