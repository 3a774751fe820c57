"""Guards the host's eye on device-driven steps: a request that is open too long is never overlooked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from gpu_service.experts.doorbell import watch as watching
from gpu_service.experts.doorbell.watch import Watch
from moebius.mailbox import Mailbox


class FakeKernel:
    """A mailbox of one client whose only slot is open from when the test says so, and overdue at once."""

    is_shut_down = False

    def __init__(self) -> None:
        self.epoch = 0
        self.looks = 0
        self.on_look: Callable[[], None] = lambda: None
        self.abandoned = threading.Event()

    def open_epoch(self, slot: int) -> int:
        """Called by each look."""
        self.looks += 1
        self.on_look()
        return self.epoch

    def overdue(self, slot: int, since_ns: int, deadline_ns: int) -> tuple[int, str]:
        """Its server is dead."""
        return 0, "its process is gone"

    def set_abandon(self, server_plus_one: int) -> None:
        """What ends the device's wait."""
        self.abandoned.set()

    def release_waits(self, first_slot: int, num_slots: int) -> None:
        """Nothing waits."""


class FakeMailbox:
    """What a watch reads of a mailbox."""

    class geometry:
        """One client."""

        num_clients = 1

    client = 0

    def __init__(self) -> None:
        self.kernel = FakeKernel()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernel]:
    """Yields the kernel of a mailbox that a watch with quick polls looks at."""
    monkeypatch.setattr(watching, "POLL_S", 0.001)
    monkeypatch.setattr(watching, "QUIET_POLLS", 5)
    box = FakeMailbox()
    watch = Watch(cast(Mailbox, box), range(1), 1000, releases_waits=True)
    cast(Any, box.kernel).watch = watch
    yield box.kernel
    watch.close()


@pytest.mark.parametrize("poll", range(1, 7))
def test_a_step_that_begins_during_any_look_is_watched(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, poll: int
) -> None:
    """The step's request opens only after that look, which may be the last one before the thread sleeps."""
    monkeypatch.setattr(watching, "LOOK_AGAIN_S", 3600.0)
    first = kernel.looks
    opens_at = 0

    def arm_during_the_look() -> None:
        nonlocal opens_at
        if kernel.looks == first + poll:
            kernel.watch.arm()
            opens_at = kernel.looks + 1
        elif opens_at and kernel.looks >= opens_at:
            kernel.epoch = 5

    kernel.on_look = arm_during_the_look
    kernel.watch.arm()
    assert kernel.abandoned.wait(30)


def test_a_step_that_rings_late_is_watched(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose first request opens long after it began finds the watch awake again."""
    monkeypatch.setattr(watching, "LOOK_AGAIN_S", 0.05)
    kernel.watch.arm()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        time.sleep(0.01)
    kernel.epoch = 5
    assert kernel.abandoned.wait(30)
