"""Guards the round trip: exact sums in server order, epochs never mistaken, failures named, sleep cheap."""

from __future__ import annotations

import time

import numpy as np
import pytest

from moebius import _kernels_testing as testing
from moebius._kernels_testing import EchoBackend
from moebius.mailbox import (
    ExpertComputeError,
    Mailbox,
    MailboxError,
    MailboxServer,
    ServerLost,
    ShutDown,
    StaleEpoch,
    server_health,
)
from tests.helpers.idle import becomes_idle
from tests.helpers.mailbox import Call, geometry, new_mailbox, served_mailbox
from tests.helpers.waiting import wait_until


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_answer_is_the_sum_over_servers(rows: int, num_servers: int, dtype: str) -> None:
    """Rows, layer, ids and weights all reach every server; the sum is exact."""
    with served_mailbox(geometry(num_servers, dtype=dtype)) as box:
        call = Call(box, rows, layer=4, seed=rows)
        np.testing.assert_array_equal(call.collect(call.submit()), call.expected())


def test_epochs_grow_over_slots_and_clients() -> None:
    """A client that takes over continues the count, and two at once are refused."""
    with served_mailbox(geometry()) as box:
        first = [Call(box, 1).submit(slot) for slot in (0, 1, 0)]
        other = Mailbox.attach(box.name, 1)
        with pytest.raises(MailboxError, match="already driven"):
            Call(other, 1).submit()
        with new_mailbox(geometry()) as unrelated:
            box.kernel = unrelated.kernel  # drops the first client, as the end of its process would
            later = Call(other, 2)
            epoch = later.submit(1)
            assert first == [1, 2, 3]
            assert epoch == 4
            np.testing.assert_array_equal(later.collect(epoch, 1), later.expected())


def test_stale_epoch_is_detected() -> None:
    """Neither an overwritten slot nor an answer that echoes another epoch is taken for an answer."""
    with served_mailbox(geometry()) as box:
        call = Call(box, 1)
        old, new = call.submit(), call.submit()
        with pytest.raises(StaleEpoch, match=f"holds epoch {new}, collect asked for {old}"):
            call.collect(old)
        np.testing.assert_array_equal(call.collect(new), call.expected())
        with open(f"/dev/shm/{box.name}", "r+b") as segment:
            header = segment.read(120)
            segment.seek(int.from_bytes(header[80:88], "little"))
            segment.write((new + 9).to_bytes(8, "little"))
        with pytest.raises(StaleEpoch, match=f"answered epoch {new + 9} where {new}"):
            call.collect(new)


def test_deadline_names_the_slow_server_and_its_late_answer_is_harmless() -> None:
    """After giving up, a new request into the same slot gets its own answer, not the late one."""
    with served_mailbox(geometry(), delay_us=2_000_000) as box:
        slow, fresh = Call(box, 1, seed=1), Call(box, 1, seed=2)
        with pytest.raises(ServerLost, match="no answer within 5 ms") as caught:
            slow.collect(slow.submit(), deadline_ms=5)
        assert caught.value.server_index == 0
        np.testing.assert_array_equal(fresh.collect(fresh.submit()), fresh.expected())


def test_server_exception_reaches_the_client_and_the_server_survives() -> None:
    """The error word carries server, layer and text; the next request is served."""
    with served_mailbox(geometry(), fail_layer=2) as box:
        call = Call(box, 1, layer=2)
        with pytest.raises(ExpertComputeError, match="set to fail at layer 2") as caught:
            call.collect(call.submit())
        assert (caught.value.server_index, caught.value.layer) == (0, 2)
        call.layer = 1
        np.testing.assert_array_equal(call.collect(call.submit()), call.expected())


def test_states_from_absent_to_absent() -> None:
    """A request waits for its server; claim, start and drain are visible, an index has one server."""
    with new_mailbox(geometry()) as box:
        call = Call(box, 1)
        epoch = call.submit()
        with pytest.raises(ServerLost, match="absent"):
            call.collect(epoch)
        server = MailboxServer(box.name, 0, EchoBackend(48))
        assert box.server_state(0).state == "loading"
        with pytest.raises(MailboxError, match="already served"):
            MailboxServer(box.name, 0, EchoBackend(48))
        server.start()
        box.wait_servers_ready(60)
        np.testing.assert_array_equal(call.collect(epoch), call.expected())
        state = box.server_state(0)
        assert (state.state, state.generation, state.calls, state.rows) == ("ready", 1, 1, 1)
        assert server.drain(60)
        assert (box.server_state(0).state, box.server_state(0).pid) == ("absent", 0)
        with pytest.raises(ServerLost, match="state is absent"):
            box.wait_servers_ready(0.01)


def test_shut_down_releases_everybody() -> None:
    """Servers leave, clients are notified."""
    with served_mailbox(geometry()) as box:
        call = Call(box, 1)
        call.collect(call.submit())
        box.shut_down()
        with pytest.raises(ShutDown):
            call.submit()
        wait_until(lambda: box.server_state(0).state == "absent")


@pytest.mark.parametrize(("slot", "layer", "rows"), [(2, 0, 1), (0, 5, 1), (0, 0, 8), (-1, 0, 1)])
def test_bad_arguments_are_named(slot: int, layer: int, rows: int) -> None:
    """Nothing outside the geometry is written."""
    with new_mailbox(geometry()) as box:
        call = Call(box, rows, layer=layer)
        with pytest.raises(ValueError, match=r"allowed|has slots|holds at most|negative"):
            call.submit(slot)


def test_trace_context_travels_only_when_set() -> None:
    """A sampled request is recorded with its ids; the next one is not."""
    with new_mailbox(geometry()) as box:
        server = MailboxServer(box.name, 0, EchoBackend(48))
        server.start()
        call = Call(box, 2, layer=3)
        box.set_trace(0, b"t" * 16, b"s" * 8)
        call.collect(call.submit())
        call.collect(call.submit())
        (traced,) = server.take_traced_calls()
        assert (traced.trace_id, traced.span_id, traced.flags) == (b"t" * 16, b"s" * 8, 1)
        assert (traced.layer, traced.rows) == (3, 2)
        server.stop()


def test_idle_server_sleeps() -> None:
    """A settled server uses less than 2 % of a core, and still beats and answers."""
    with served_mailbox(geometry(2)) as box:
        call = Call(box, 1)
        call.collect(call.submit())
        assert becomes_idle(time.process_time)
        beats = server_health(box.name)[1].progress
        wait_until(lambda: server_health(box.name)[1].progress > beats)
        np.testing.assert_array_equal(call.collect(call.submit()), call.expected())


def test_spin_is_short_without_a_core_for_everybody() -> None:
    """Spinning on a crowded machine steals from the thread that is waited for."""
    assert max(testing.mailbox_spin_ns(5, 2)) < 10_000 < min(testing.mailbox_spin_ns(5, 16))
