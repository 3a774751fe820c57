"""One child process of the supervisor: start, watch, restart after a pause, stop."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from moebius.app.supervisor.spec import ProcessSpec

CHILD_PROGRAM = str(Path(__file__).with_name("child.py"))
# A process that was ready for this long starts its next series of restarts with the shortest pause.
STABLE_AFTER_S = 30.0
TAIL_LINES = 30


class ManagedProcess:
    """A child process and its restarts. Not thread safe: all methods are called from the main thread,

    because PR_SET_PDEATHSIG fires when the *thread* that started the child ends.
    """

    def __init__(self, spec: ProcessSpec, backoff_s: float, backoff_max_s: float, json_logs: bool) -> None:
        self.spec = spec
        self.ready = False
        # Number of starts after the first one.
        self.restarts = 0
        self._backoff_s, self._backoff_max_s = backoff_s, backoff_max_s
        self._failures_in_a_row = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._forwarder: threading.Thread | None = None
        self._ready_since = 0.0
        self._restart_at = 0.0
        self._prefix = b"" if json_logs else f"{spec.name:<9}| ".encode()
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        return self._popen.pid if self._popen is not None and self._popen.poll() is None else None

    @property
    def exit_code(self) -> int | None:
        """How it ended (negative: by that signal); None while it runs or before the first start."""
        return self._popen.poll() if self._popen is not None else None

    @property
    def noted_exit(self) -> bool:
        """Whether it has ended, `note_exit` was called, and it was not started again."""
        return self._popen is None

    @property
    def last_words(self) -> str:
        """The last line it logged that is not empty."""
        if self._forwarder is not None:
            self._forwarder.join(timeout=1.0)
        return next((line for line in reversed(self._tail) if line.strip()), "it said nothing")

    def start(self) -> None:
        """Starts the program in its own process group, with its output forwarded to our stderr."""
        cpus = ",".join(map(str, self.spec.cpus)) or "-"
        wrapper = [sys.executable, "-I", "-S", CHILD_PROGRAM, str(os.getpid()), cpus]
        self._popen = subprocess.Popen(
            [*wrapper, *self.spec.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        assert self._popen.stdout is not None
        self._forwarder = threading.Thread(target=self._forward, args=(self._popen.stdout,), daemon=True)
        self._forwarder.start()

    def note_exit(self, now: float) -> float:
        """Plans the restart of a process that has ended; returns the pause in seconds."""
        if self.ready and now - self._ready_since >= STABLE_AFTER_S:
            self._failures_in_a_row = 0
        pause = min(self._backoff_s * 2.0 ** min(self._failures_in_a_row, 60), self._backoff_max_s)
        self._failures_in_a_row += 1
        self.ready = False
        self.kill()  # whatever it left in its process group
        self._popen = None
        self._restart_at = now + pause
        return pause

    def restart_if_due(self, now: float) -> bool:
        """Starts again once the pause after `note_exit` is over; True when it did."""
        if self._popen is not None or now < self._restart_at:
            return False
        self.restarts += 1
        self.start()
        return True

    def check_ready(self) -> bool:
        """Asks the probe unless the answer was yes before; True when it has just become ready."""
        if self.ready or self.pid is None or not self.spec.probe.ready():
            return False
        self.ready = True
        self._ready_since = time.monotonic()
        return True

    def terminate(self) -> None:
        """Asks it to stop (SIGTERM); nothing when it has ended."""
        if self.pid is not None:
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and everything in its process group at once."""
        self._signal(signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait()

    def _signal(self, number: signal.Signals) -> None:
        """To the process alone for SIGTERM; to its whole group for SIGKILL."""
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
                self._tail.append(line.decode(errors="replace").rstrip())
                with contextlib.suppress(OSError, ValueError):  # our own stderr may be closed already
                    sys.stderr.buffer.write(self._prefix + line.rstrip(b"\n") + b"\n")
                    sys.stderr.buffer.flush()
