"""Guards a mailbox of several clients: each brings and gets its own rows, and none hangs on another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_uint64

import numpy as np
import pytest

from moebius import _kernels_testing as testing
from moebius._kernels_testing import EchoBackend
from moebius.mailbox import Mailbox, MailboxError, MailboxServer, ServerLost, row_begin
from tests.helpers.idle import becomes_idle
from tests.helpers.mailbox import Call, Killer, geometry, new_mailbox, served_mailbox
from tests.helpers.waiting import wait_until


def attach(box: Mailbox, client: int, group: int = 0) -> Mailbox:
    """Returns another client of the same segment."""
    return Mailbox.attach(box.name, 1, client=client, group=group)


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
@pytest.mark.parametrize("num_clients", [2, 3])
def test_each_client_gets_its_own_rows(num_clients: int, rows: int) -> None:
    """One forward over all rows; every client adds its part, and leaves the others' rows alone."""
    with served_mailbox(geometry(2, num_clients=num_clients)) as box:
        boxes = [box, *(attach(box, client) for client in range(1, num_clients))]
        calls = [Call(one, rows, layer=3, seed=rows) for one in boxes]
        epochs = [call.submit() for call in calls]
        assert epochs == [1] * num_clients
        for client, (call, epoch) in enumerate(zip(calls, epochs, strict=True)):
            own = slice(row_begin(rows, client, num_clients), row_begin(rows, client + 1, num_clients))
            output = call.collect(epoch)
            np.testing.assert_array_equal(output[own], call.expected()[own])
            output[own] = np.nan
            assert np.isnan(output).all()
        assert [box.server_state(0).calls, box.server_state(0).rows] == [1, rows]


def test_late_client_delays_but_never_hangs_a_server() -> None:
    """Until the last client rings there is nothing to compute; the server can be drained all the same."""
    with new_mailbox(geometry(num_clients=2)) as box:
        server = MailboxServer(box.name, 0, EchoBackend(48))
        server.start()
        first, second = Call(box, 4, seed=1), Call(attach(box, 1), 4, seed=1)
        epoch = first.submit()
        with pytest.raises(ServerLost, match="no answer within 20 ms"):
            first.collect(epoch, deadline_ms=20)
        assert box.server_state(0).calls == 0
        second.submit()
        np.testing.assert_array_equal(first.collect(epoch)[:2], first.expected()[:2])
        first.submit()
        assert server.drain(60)
        assert box.server_state(0).state == "absent"


def test_a_client_that_gives_up_releases_its_peers() -> None:
    """A peer's wait ends long before its own deadline, and starts again once the report is withdrawn."""
    with new_mailbox(geometry(num_clients=2)) as box:
        server = MailboxServer(box.name, 0, EchoBackend(48))
        server.start()
        other = attach(box, 1)
        call = Call(box, 1)
        epoch = call.submit()
        other.kernel.claim(device=False)
        other.kernel.report_failure(1, 0, 3, 0, epoch)
        with pytest.raises(ServerLost, match="client 1 of the mailbox gave up"):
            call.collect(epoch, deadline_ms=3_600_000)  # pytest's limit is shorter
        assert other.kernel.client_report(1) == (1, 0, 3, 0, epoch)
        other.kernel.clear_failure()
        Call(other, 1).submit()
        np.testing.assert_array_equal(call.collect(epoch)[:0], call.expected()[:0])
        server.stop()


def test_clients_of_one_index_exclude_one_another() -> None:
    """Each client and each group has its own place; a taken one is refused, an impossible one named."""
    with served_mailbox(geometry(num_clients=2)) as box:
        places = [box, attach(box, 1), attach(box, 0, group=1), attach(box, 1, group=1)]
        for place in places:
            place.kernel.claim(device=False)
        with pytest.raises(MailboxError, match="already driven by another client 3"):
            attach(box, 1, group=1).kernel.claim(device=False)
        with pytest.raises(ValueError, match=r"clients 0\.\.1 and groups 0\.\.7"):
            attach(box, 2)


def test_abandoned_requests_are_never_computed() -> None:
    """After clients agree to start over, a server that comes back owes nothing for the old epochs."""
    with new_mailbox(geometry(num_clients=2)) as box:
        other = attach(box, 1)
        calls = [Call(box, 2, seed=3), Call(other, 2, seed=3)]
        assert [call.submit() for call in calls] == [1, 1]
        box.kernel.abandon_requests(0, 2)
        server = MailboxServer(box.name, 0, EchoBackend(48))
        server.start()
        for one in (box, other):
            one.kernel.set_epoch(max(box.kernel.highest_epoch(), other.kernel.highest_epoch()))
        epochs = [call.submit() for call in calls]
        assert epochs == [2, 2]
        for client, call in enumerate(calls):
            answer = call.collect(2)[client : client + 1]
            np.testing.assert_array_equal(answer, call.expected()[client : client + 1])
        assert box.server_state(0).calls == 1
        server.stop()


def test_server_watches_ready_lines_of_a_device_driven_client() -> None:
    """Nothing rings the doorbell here: the ready line alone is seen, asleep or not, and idling is cheap."""
    with served_mailbox(geometry(2)) as box:
        box.kernel.claim(device=True)
        call = Call(box, 3)
        call.collect(call.submit())
        # Two servers look every millisecond; a spinning one would take a whole core.
        assert becomes_idle(time.process_time, below=0.25)
        np.testing.assert_array_equal(ring_silently(box, call), call.expected())


def ring_silently(box: Mailbox, call: Call) -> np.ndarray:
    """Submits by writing the epoch words alone, as a device does, from another mapping of the segment."""
    epoch = call.submit()
    call.collect(epoch)
    header = box.kernel.address
    found = box.geometry.regions()
    for place in (found.requests, found.flags):
        c_uint64.from_address(header + place).value = epoch + 1
    done = c_uint64.from_address(header + found.flags + 64 * box.geometry.num_slots)
    wait_until(lambda: done.value == epoch + 1)
    return call.output


def test_two_clients_with_crashes() -> None:
    """Servers killed at random moments: both clients get exact answers for all rows, under one epoch."""
    rounds, crashes = 20_000, 4
    with new_mailbox(geometry(2, hidden_size=16, num_slots=3, num_clients=2)) as box:
        killer = Killer(box, crashes)
        killer.start()
        boxes = [box, attach(box, 1)]
        step: Callable[[Mailbox, int], dict[str, int]] = lambda one, seed: testing.mailbox_stress(  # noqa: E731
            one.kernel, rounds=2000, seed=seed, scale_sum=3.0, deadline_ms=10_000, recovery_s=30
        )
        total = {"answered": 0, "wrong": 0, "lost": 0, "stale": 0, "resubmitted": 0}
        try:
            with ThreadPoolExecutor(2) as pool:
                while total["answered"] < 2 * rounds or killer.killed < crashes:
                    seed = total["answered"]
                    for part in [f.result() for f in [pool.submit(step, one, seed) for one in boxes]]:
                        total = {key: total[key] + part[key] for key in total}
        finally:
            killer.end()
    assert total["wrong"] == total["stale"] == total["resubmitted"] == 0
    assert total["lost"] >= 1
    assert threading.active_count() >= 1
