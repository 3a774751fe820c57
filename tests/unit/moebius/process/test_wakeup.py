"""Guards what signal handlers wake: signals that arrive in the middle of one another never hang a process."""

from __future__ import annotations

import subprocess
import sys
import threading

from moebius.process.wakeup import Wakeup

EVERYWHERE = """
import signal, sys
from moebius.process.wakeup import Wakeup
wakeup, nested = Wakeup(), []
signal.signal(signal.SIGUSR1, lambda number, frame: wakeup.set())
def trace(frame, event, argument):
    if frame.f_code.co_filename.endswith(("wakeup.py", "threading.py")):
        sys.settrace(None)
        nested.append(frame.f_lineno)
        signal.raise_signal(signal.SIGUSR1)
        sys.settrace(trace)
        return trace
for call in (wakeup.set, wakeup.clear, lambda: wakeup.wait(0.01), wakeup.clear, wakeup.is_set):
    sys.settrace(trace)
    call()
    sys.settrace(None)
print(len(nested))
"""


def test_signals_in_the_middle_of_everything() -> None:
    """A handler sets it at every line of every method: nothing waits for itself."""
    command = [sys.executable, "-c", EVERYWHERE]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(run.stdout) > 10


def test_it_is_an_event() -> None:
    """Set before and during a wait, cleared, and not set at all."""
    wakeup = Wakeup()
    assert not wakeup.wait(0.001)
    wakeup.set()
    assert wakeup.is_set()
    assert wakeup.wait(60)
    assert wakeup.wait(60)
    wakeup.clear()
    assert not wakeup.is_set()
    assert not wakeup.wait(0.001)
    threading.Timer(0.05, wakeup.set).start()
    assert wakeup.wait(3600)  # pytest's limit is shorter
