"""One child process of the supervisor: start, watch, restart after a pause, stop."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import structlog

from app.supervisor.early import EarlyChild, EarlyChildren
from app.supervisor.health import Hang, ProcessSpec, Timing, Watch
from app.supervisor.lines import ForwardedLines
from moebius.errors import FAILURE_MARK, USER_ERROR_EXIT, WRONG_IDENTITY_EXIT
from moebius.process.limits import out_of_memory_kills
from moebius.process.progress import is_end_of_phase, text_of_line

CHILD_PROGRAM = str(Path(__file__).with_name("child.py"))
# To have been ready for this long counts as a request that was answered.
STABLE_AFTER_S = 30.0
# Restarts at once that can be saved up.
MOST_CREDIT = 8
# The kernel ends a killed process at once, unless it waits for a device that does not answer.
KILL_WAIT_S = 5.0
# An error of the user's (a setting, a missing file) may be temporary; after this many in a row it is not.
USER_ERRORS_ALLOWED = 5
TAIL_LINES = 30

log = structlog.get_logger(__name__)


class ManagedProcess:
    """A child process and its restarts. Not thread safe: all methods are called from the main thread,

    because PR_SET_PDEATHSIG fires when the *thread* that started the child ends.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        timing: Timing,
        json_logs: bool,
        jitter: Callable[[float, float], float] = random.uniform,
        early: EarlyChildren | None = None,
    ) -> None:
        """`jitter` draws a number between two; `early` has what the first start may take."""
        self.spec = spec
        self._early = early
        self.ready = False
        # Number of starts after the first one.
        self.restarts = 0
        # Why it was killed; None: it was not, or was started again since.
        self.killed_for: Hang | None = None
        self._timing, self._jitter = timing, jitter
        # Pauses since it last answered a request.
        self._failures_in_a_row = 0
        # Restarts without a pause that it has earned.
        self._credit = 0
        self._user_errors_in_a_row = 0
        self._popen: subprocess.Popen[bytes] | EarlyChild | None = None
        self._watch: Watch | None = None
        self._forwarder: threading.Thread | None = None
        self._started_at = 0.0
        self._ready_since = 0.0
        self._restart_at = 0.0
        # Of the whole system, when it was started.
        self._memory_kills = 0
        self._lines = ForwardedLines(spec.name, json_logs)
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        # Why it could not start, as it said itself; empty: it did, or said nothing.
        self.cause = ""
        # What it is doing and how far that is, by its last word of it; empty: nothing that takes long.
        self.progress = ""
        # Lines about that are not forwarded: the reader of `progress` shows it.
        self.withholds_progress = False
        # Takes the lines that are passed on, in a thread of ours; None: they go to our stderr.
        self.on_line: Callable[[str], None] | None = None
        # Keeps the lines that are passed on, in a thread of ours.
        self.keep_line: Callable[[str], None] = lambda line: None

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        return self._popen.pid if self._popen is not None and self._popen.poll() is None else None

    @property
    def last_pid(self) -> int | None:
        """Process id of what runs or has just ended; None before the first start and after `note_exit`."""
        return self._popen.pid if self._popen is not None else None

    @property
    def exit_code(self) -> int | None:
        """Returns how it ended (negative: by that signal); None while it runs or before the first start."""
        return self._popen.poll() if self._popen is not None else None

    @property
    def ending(self) -> str:
        """`exit_code` in words, until `note_exit`; empty while it runs."""
        code = self.exit_code
        if code is None:
            return ""
        if code >= 0:
            return f"exit code {code}"
        how = f"killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL and self.killed_for is None and out_of_memory_kills() > self._memory_kills:
            how += " as memory ran out, the machine's or what the container may use"
        return how

    @property
    def noted_exit(self) -> bool:
        """Whether it has ended, `note_exit` was called, and it was not started again."""
        return self._popen is None

    @property
    def has_served(self) -> bool:
        """Whether what runs, or has just ended, did its work at least once, as of the last look."""
        return self._watch is not None and self._watch.served > 0

    @property
    def can_not_heal(self) -> bool:
        """Returns whether it has ended in a way that another start cannot fix."""
        return self._user_errors_in_a_row >= USER_ERRORS_ALLOWED

    @property
    def last_words(self) -> str:
        """Returns why it ended, by its own words if it had any, else the last line it logged that is not
        empty.
        """
        if self._forwarder is not None:
            self._forwarder.join(timeout=1.0)
        if self.cause:
            return self.cause
        return next((line for line in reversed(self._tail) if line.strip()), "it said nothing")

    def start(self) -> None:
        """Starts the program in its own process group, with its output forwarded to our stderr."""
        self.cause = self.progress = ""
        self._memory_kills = out_of_memory_kills()
        early, self._early = self._early, None
        taken = early.take(self.spec.command, self.spec.cpus) if early is not None else None
        self._popen = taken or self._program()
        assert self._popen.stdout is not None
        self._forwarder = threading.Thread(target=self._forward, args=(self._popen.stdout,), daemon=True)
        self._forwarder.start()
        self._started_at = time.monotonic()
        self.killed_for = None
        self._watch = Watch(self.spec, self._popen.pid, self._timing.hang_timeout_s)
        self._watch.start()

    def _program(self) -> subprocess.Popen[bytes]:
        cpus = ",".join(map(str, self.spec.cpus)) or "-"
        wrapper = [sys.executable, "-I", "-S", CHILD_PROGRAM, str(os.getpid()), cpus]
        return subprocess.Popen(
            [*wrapper, *self.spec.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def hang(self, now: float) -> Hang | None:
        """Returns why it has to be replaced though it runs; None when it has not, or was killed for it
        already.
        """
        if self.pid is None or self._watch is None or self.killed_for is not None:
            return None
        age_s, limit_s = now - self._started_at, self._timing.ready_timeout_s
        if self.restarts and not self.ready and age_s > limit_s:
            return Hang(age_s, f"it is not ready, ready_timeout_s allows {limit_s:g} s")
        return self._watch.hang

    def kill_for(self, hang: Hang) -> None:
        """Ends a process that hangs, without waiting for its end."""
        self.killed_for = hang
        self.send_kill()

    def note_exit(self, now: float) -> float:
        """Plans the restart of a process that has ended; returns the pause in seconds.

        A request that it answered earns a restart at once, now or later: who kills healthy processes again
        and again, also while they start, does not make them slower to return. Without that, and after an
        error of the user's, pauses double from failure to failure, up to a limit; up to half of each is left
        out by chance, so that processes that died together do not return together each time.
        """
        served = self._watch.served_at_end() if self._watch is not None else 0
        if not served and self.ready and now - self._ready_since >= STABLE_AFTER_S:
            served = 1
        if served:
            self._failures_in_a_row = 0
            self._credit = min(self._credit + served, MOST_CREDIT)
        hopeless = (USER_ERROR_EXIT, WRONG_IDENTITY_EXIT)
        failed_by_user = self.exit_code in hopeless and not self.ready
        self._user_errors_in_a_row = self._user_errors_in_a_row + 1 if failed_by_user else 0
        pause = 0.0
        if self._credit and not failed_by_user:
            self._credit -= 1
        else:
            longest = self._timing.restart_backoff_s * 2.0 ** min(self._failures_in_a_row, 60)
            longest = min(longest, self._timing.restart_backoff_max_s)
            pause = self._jitter(longest / 2, longest)
            self._failures_in_a_row += 1
        self.ready = False
        self.kill()  # whatever it left in its process group
        self._popen = None
        self._restart_at = now + pause
        return pause

    def restart_if_due(self, now: float) -> bool:
        """Starts again once the pause after `note_exit` is over; True when it did.

        Where the system has no memory or no process to give, it is tried again after the longest pause.
        """
        if self._popen is not None or now < self._restart_at:
            return False
        try:
            self.start()
        except OSError as error:
            pause_s = self._timing.restart_backoff_max_s
            log.warning("process cannot be started", name=self.spec.name, why=error.strerror, pause_s=pause_s)
            self._restart_at = now + pause_s
            return False
        self.restarts += 1
        return True

    def check_ready(self) -> bool:
        """True when it has become ready since the last call."""
        if self.ready or self.pid is None or self._watch is None or not self._watch.ready:
            return False
        self.ready = True
        self._ready_since = time.monotonic()
        return True

    def terminate(self) -> None:
        """Asks it to stop (SIGTERM), and lets it run if it is stopped; nothing when it has ended."""
        self._end_watch()
        if self.pid is not None:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)

    def send_kill(self) -> None:
        """Ends it and everything in its process group, without waiting for that."""
        self._signal(signal.SIGKILL)

    def kill(self) -> bool:
        """Ends it and everything in its process group at once; False when it has not gone in KILL_WAIT_S."""
        self._end_watch()
        self._signal(signal.SIGKILL)
        if self._popen is not None:
            try:
                self._popen.wait(KILL_WAIT_S)
            except (subprocess.TimeoutExpired, TimeoutError):
                return False
        return True

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def _signal(self, number: signal.Signals) -> None:
        """Sends the signal to the whole group for SIGKILL, else to the process alone."""
        if self._popen is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._popen.pid, number)
            else:
                self._popen.send_signal(number)

    def _forward(self, stream: IO[bytes]) -> None:
        """Copies the program's lines to our stderr until it closes its end. Runs in a thread."""
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip()
                if text.startswith(FAILURE_MARK):
                    # The report of its end says it, once.
                    self.cause = text.removeprefix(FAILURE_MARK)
                    continue
                self._tail.append(text)
                if (found := text_of_line(text)) is not None:
                    self.progress = found
                    if self.withholds_progress:
                        continue
                elif is_end_of_phase(text):
                    self.progress = ""
                forwarded = self._lines.forwarded(text)
                if forwarded is None:
                    continue
                self.keep_line(forwarded)
                if self.on_line is not None:
                    self.on_line(forwarded)
                    continue
                with contextlib.suppress(OSError, ValueError):  # our own stderr may be closed already
                    sys.stderr.buffer.write(forwarded.encode(errors="replace") + b"\n")
                    sys.stderr.buffer.flush()
