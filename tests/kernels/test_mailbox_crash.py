"""Guards the fault path: servers killed at random moments lose no step and never answer a wrong one."""

from __future__ import annotations

import numpy as np
import pytest

from moebius import _kernels_testing as testing
from moebius.mailbox import ServerLost
from tests.helpers.mailbox import Call, Killer, geometry, new_mailbox, spawn_server

ROUNDS = 100_000
CRASHES = 8


def test_hundred_thousand_rounds_with_crashes() -> None:
    """Every answer is the exact function of its own input, in spite of several SIGKILLs."""
    with new_mailbox(geometry(2, hidden_size=16, num_slots=3)) as box:
        killer = Killer(box, CRASHES)
        killer.start()
        try:
            total = {"answered": 0, "wrong": 0, "lost": 0, "stale": 0, "resubmitted": 0}
            while total["answered"] < ROUNDS or killer.killed < CRASHES:
                part = testing.mailbox_stress(
                    box.kernel,
                    rounds=5000,
                    seed=total["answered"],
                    scale_sum=3.0,
                    deadline_ms=10_000,
                    recovery_s=30,
                )
                total = {key: total[key] + part[key] for key in total}
        finally:
            killer.end()
    assert total["wrong"] == total["stale"] == 0
    assert total["answered"] >= ROUNDS
    assert killer.killed == CRASHES
    assert total["lost"] >= 1


def test_death_is_noticed_long_before_the_deadline() -> None:
    """A killed server is reported by its lock, not by the deadline; its successor answers what is open."""
    with new_mailbox(geometry()) as box:
        first = spawn_server(box, 0)
        box.wait_servers_ready(60)
        first.kill()
        first.wait()
        call = Call(box, 3)
        epoch = call.submit()
        with pytest.raises(ServerLost, match="is gone"):
            call.collect(epoch, deadline_ms=60_000)
        assert box.server_state(0).state == "dead"
        second = spawn_server(box, 0)
        try:
            box.wait_servers_ready(60)
            np.testing.assert_array_equal(call.collect(epoch), call.expected())
            assert box.server_state(0).generation == 2
        finally:
            second.kill()
            second.wait()
