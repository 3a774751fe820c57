"""The first rank's clock for `policy.py`: how long decode steps take, by their rows, with drafts and without.

Measured from commit to commit, as clients see it: a step without drafts overlaps with its neighbours, one
with drafts does not. Only steps in which every request decodes count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpu_service.core.step import Batch
from gpu_service.speculation.policy import bucket

# Weight of the newest time, and how much of the mean so far it counts at most: a pause is not the usual.
_NEWEST, _MOST = 0.25, 2.0
# Changes of a time that are not worth a message to all ranks.
_REPORTED_CHANGE = 0.05
# Of a first few times the shortest counts: any of them may have compiled or loaded something.
_FIRST = 4
# How often a step without drafts has to be measured before others are compared with it.
_TRUSTED = 3
# Decode steps after which a time that was not measured again is forgotten, so that it is. That of steps
# without drafts at first sooner, each time later: drafts that always are worth it leave none to measure.
_FORGOTTEN, _FORGOTTEN_AT_FIRST = 512, 64


@dataclass(slots=True)
class _Time:
    seconds: float
    step: int  # of all decode steps: when it was last measured
    count: int = 0


_Times = dict[int, _Time]


class DraftPace:
    """Changed by the engine thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Of steps without drafts and with, by rows.
        self._plain: _Times = {}
        self._verifying: _Times = {}
        # After how many steps those without drafts are forgotten next, by rows.
        self._lasts: dict[int, int] = {}
        self._reported: list[dict[int, float]] = [{}, {}]
        self._steps = 0
        self._last: float | None = None

    def idled(self) -> None:
        """There was nothing to compute: the time since the last commit is no step's."""
        self._last = None

    def committed(self, batch: Batch, overlaps: bool) -> None:
        """A step has ended; `overlaps`: it was launched while another was in flight, or none ever is."""
        last, self._last = self._last, self._clock()
        # A step without drafts in which the drafter runs all the same is of neither kind.
        is_kind = bool(batch.drafts) or (overlaps and not batch.num_drafts and not batch.runs_drafter)
        if last is None or not batch.is_uniform_decode or not is_kind:
            return
        self._steps += 1
        self._measured(self._verifying if batch.drafts else self._plain, batch.num_tokens, self._last - last)
        self._forget()

    def _forget(self) -> None:
        for rows, known in list(self._verifying.items()):
            if self._steps - known.step > _FORGOTTEN:
                del self._verifying[rows]
        for rows, known in list(self._plain.items()):
            lasts = self._lasts.setdefault(rows, _FORGOTTEN_AT_FIRST)
            if self._steps - known.step > lasts:
                self._lasts[rows] = min(2 * lasts, _FORGOTTEN)
                del self._plain[rows]

    def _measured(self, times: _Times, rows: int, seconds: float) -> None:
        known = times.setdefault(bucket(rows), _Time(seconds, self._steps))
        known.count += 1
        if known.count <= _FIRST:
            known.seconds = min(known.seconds, seconds)
        else:
            known.seconds += _NEWEST * (min(seconds, _MOST * known.seconds) - known.seconds)
        known.step = self._steps

    def message(self) -> str | None:
        """Returns the message for `Speculation.read` of every rank; None: nothing has changed by much."""
        times = [
            {rows: known.seconds for rows, known in table.items() if known.count >= least}
            for table, least in ((self._plain, _TRUSTED), (self._verifying, 1))
        ]
        if all(map(_are_close, times, self._reported)):
            return None
        self._reported = times
        return json.dumps(times)


def _are_close(times: dict[int, float], reported: dict[int, float]) -> bool:
    if times.keys() != reported.keys():
        return False
    return all(
        abs(seconds - reported[rows]) <= _REPORTED_CHANGE * reported[rows] for rows, seconds in times.items()
    )
