"""Log lines for repeated failures of one reason: the first at once, then the number of further ones."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

INTERVAL_S = 10.0


@dataclass
class _Reason:
    """One reason and its count; filled by `RepeatedWarnings`."""

    timer: asyncio.TimerHandle
    count: int = 0  # since its last log line
    latest: dict[str, Any] = field(default_factory=dict)


class RepeatedWarnings:
    """Limits log lines, for instance of every request while an engine is gone. For one event loop."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        """`interval_s`: between two lines of one reason."""
        self._interval_s = interval_s
        self._reasons: dict[Hashable, tuple[Any, str, _Reason]] = {}

    def warn(self, log: Any, event: str, reason: Hashable, **fields: Any) -> None:
        """Logs at once if this reason has not been logged lately, else counts it: a line per interval has the
        number of further ones, with the fields of the latest."""
        known = self._reasons.get(reason)
        if known is not None:
            known[2].count += 1
            known[2].latest = fields
            return
        log.warning(event, **fields)
        self._reasons[reason] = (log, event, _Reason(self._timer(reason)))

    def _timer(self, reason: Hashable) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._interval_s, self._log_repeats, reason)

    def _log_repeats(self, reason: Hashable) -> None:
        log, event, found = self._reasons.pop(reason)
        if found.count:
            log.warning(event, more=found.count, within_s=self._interval_s, **found.latest)
            self._reasons[reason] = (log, event, _Reason(self._timer(reason)))

    def close(self) -> None:
        """Logs what was only counted."""
        for log, event, found in self._reasons.values():
            found.timer.cancel()
            if found.count:
                log.warning(event, more=found.count, within_s=self._interval_s, **found.latest)
        self._reasons.clear()
