"""Invariant: threads of an expert server stay awake between the layers of a step that a device drives.

Waking them all takes as long as a small layer, and a device's attention lies between two layers.
"""

from __future__ import annotations

import time

import pytest

from moebius._kernels_testing import pool_default_spin_microseconds
from moebius.kernels import ExpertEngine
from moebius.mailbox import MailboxServer
from tests.helpers.mailbox import geometry, new_mailbox

PAUSE_US = 3000


def test_threads_bridge_the_pauses_of_a_device() -> None:
    """Threads spin from the step on that a device begins, until a client that calls without pauses has the
    mailbox.
    """
    default_us = pool_default_spin_microseconds(1)
    if default_us == 0:
        pytest.skip("a CPU quota below the number of threads: nothing spins here")
    engine = ExpertEngine(48, 16, 5, 3, weight_format="float32", num_threads=1)
    with new_mailbox(geometry()) as box:
        server = MailboxServer(box.name, 0, engine.backend)
        server.start()
        try:
            for device, expected_us in ((False, default_us), (True, PAUSE_US), (False, default_us)):
                box.kernel.claim(device=device)
                give_up = time.monotonic() + 60
                while engine.spin_microseconds != expected_us:
                    box.kernel.wake_servers()
                    assert time.monotonic() < give_up, (device, engine.spin_microseconds)
                    time.sleep(0.001)
                box.kernel.release()
        finally:
            server.stop()
