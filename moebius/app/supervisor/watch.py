"""Watches one running process from a thread: whether it is ready, and whether it still lives or hangs.

A process lives while it shows a sign of life: a counter of its progress moves, or, where it has none, it
answers. One that shows none may still be busy with something long (it loads, it compiles, the machine is
so crowded that it gets no CPU), and is given far longer. One that is neither is taken for hung.

All time counts only while somebody looks: when the supervisor itself was stopped or starved, or the machine
slept, everybody else may have been, too.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from moebius.app.supervisor.activity import Activity, read_activity
from moebius.app.supervisor.spec import ProcessSpec

READY_POLL_S = 0.05
# At most so long between two looks, and for one answer. Both are parts of `hang_timeout_s` where it is short.
LONGEST_INTERVAL_S = 2.0
LONGEST_ANSWER_S = 5.0
# Who computes without a sign of life gets this many times `hang_timeout_s`.
BUSY_FACTOR = 20
# Share of a CPU that counts as computing; timers of an idle process take far less.
BUSY_SHARE = 0.1


@dataclass(frozen=True)
class Hang:
    """Why a process is taken for hung; filled by `Silence.verdict` and `ManagedProcess.hang`."""

    # Seconds without a sign of life.
    silent_s: float
    evidence: str

    def __str__(self) -> str:
        return f"no sign of life for {self.silent_s:.0f} s ({self.evidence})"


class Silence:
    """How long a process has shown no sign of life, and how long it has not even been busy."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._silent_s = 0.0
        self._idle_s = 0.0
        self._stopped = False

    def note(self, elapsed_s: float, alive: bool, busy: bool = False, stopped: bool = False) -> None:
        """One look, `elapsed_s` after the one before."""
        self._silent_s = 0.0 if alive else self._silent_s + elapsed_s
        self._idle_s = 0.0 if alive or busy else self._idle_s + elapsed_s
        self._stopped = stopped

    def verdict(self) -> Hang | None:
        """None while it may still be alive."""
        if self._idle_s >= self._limit_s:
            what = "it is stopped, as by SIGSTOP" if self._stopped else "it does not compute either"
            return Hang(self._silent_s, what)
        if self._silent_s >= self._limit_s * BUSY_FACTOR:
            return Hang(self._silent_s, "it computes, but nothing comes of it")
        return None


class Watch:
    """The watch over one process from its start to its end. Attributes may be read by any thread."""

    def __init__(self, spec: ProcessSpec, pid: int, hang_timeout_s: float) -> None:
        self._spec, self._pid = spec, pid
        self._interval_s = min(LONGEST_INTERVAL_S, hang_timeout_s / 10)
        self._answer_s = min(LONGEST_ANSWER_S, hang_timeout_s / 5)
        self._silence = Silence(hang_timeout_s)
        self._sign: object = None
        self._activity: Activity | None = None
        self._looked_at = time.monotonic()
        self._stop = threading.Event()
        # Whether its probe has said yes.
        self.ready = False
        # Whether it did its work at least once after that.
        self.served = False
        self.hang: Hang | None = None

    def start(self) -> None:
        """Begins to watch, in a thread that ends with `stop`."""
        threading.Thread(target=self._run, name=f"watch-{self._spec.name}", daemon=True).start()

    def stop(self) -> None:
        """Asks the thread to end; does not wait for a question that is open."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self.ready:
                self.ready = self._spec.probe.ready()
            if time.monotonic() - self._looked_at >= self._interval_s:
                self.look()
            self._stop.wait(self._interval_s if self.ready else min(READY_POLL_S, self._interval_s))

    def look(self) -> None:
        """Asks for a sign of life; without one, asks the kernel."""
        liveness, activity = self._spec.liveness, None
        sign = liveness.sign(self._pid, self._answer_s) if liveness is not None else None
        alive = sign is not None and sign != self._sign
        if not alive:
            activity = read_activity(self._pid)
            if activity is None:  # it has ended, which others see
                return
            alive = liveness is None and not activity.stopped
        now = time.monotonic()
        # A longer pause than ours says that we did not get to look.
        elapsed_s = min(now - self._looked_at, self._interval_s + self._answer_s)
        busy = activity is not None and self._is_busy(activity, now - self._looked_at)
        self._silence.note(elapsed_s, alive, busy, activity is not None and activity.stopped)
        self._sign = self._sign if sign is None else sign
        self._activity, self._looked_at = activity, now
        if alive and self.ready and not self.served:
            self.served = liveness is None or liveness.has_served()
        self.hang = self._silence.verdict()

    def _is_busy(self, activity: Activity, elapsed_s: float) -> bool:
        """Whether it computed, or wanted to, since the look before."""
        if activity.stopped:
            return False
        if activity.occupied or self._activity is None:
            return True
        return activity.demand_s - self._activity.demand_s >= BUSY_SHARE * elapsed_s
