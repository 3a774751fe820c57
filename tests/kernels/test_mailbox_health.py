"""Guards what others see of a server: alive while it works, never ready for a dead one's sake."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from moebius import _kernels_testing as testing
from moebius.kernels import ExpertEngine
from moebius.mailbox import Mailbox, MailboxError, MailboxServer, ServerLost, server_health
from tests.helpers.mailbox import Call, geometry, new_mailbox, served_mailbox, spawn_server
from tests.helpers.waiting import wait_until

# Linux's open-file-description locks; `fcntl` of Python 3.11 has no names for them.
F_OFD_GETLK, F_OFD_SETLK = 36, 37
FLOCK = struct.Struct("hhqqi4x")
IDENTITY_LOCK, SERVER_CLAIM_BASE = 32, 96


def test_progress_advances_at_idle_and_within_one_long_request() -> None:
    """A live server counts on whether it waits or computes for long, without answering anything meanwhile."""
    with served_mailbox(geometry(), delay_us=3_000_000) as box:
        box.wait_servers_ready(60)
        idle = server_health(box.name)[0]
        assert (idle.state, idle.pid, idle.request_s) == ("ready", os.getpid(), 0.0)
        wait_until(lambda: server_health(box.name)[0].progress > idle.progress + 1)
        # On a busy machine a request may end before this thread has looked twice: then the next one counts.
        assert any(counts_within_a_request(box) for _ in range(20))


def counts_within_a_request(box: Mailbox) -> bool:
    """Returns whether the server was seen to count, and its request to age, before its answer."""
    call, calls = Call(box, 2), server_health(box.name)[0].calls
    epoch = call.submit()

    def ended() -> bool:
        return server_health(box.name)[0].calls > calls

    wait_until(lambda: server_health(box.name)[0].request_s > 0 or ended())
    begun = server_health(box.name)[0]
    wait_until(lambda: server_health(box.name)[0].progress >= begun.progress + 5 or ended())
    now = server_health(box.name)[0]
    np.testing.assert_array_equal(call.collect(epoch, deadline_ms=60_000), call.expected())
    assert server_health(box.name)[0].request_s == 0
    return now.calls == begun.calls == calls and now.request_s > begun.request_s > 0


def test_progress_of_a_stopped_process_stands_still() -> None:
    """What tells a frozen server from a slow one."""
    with new_mailbox(geometry()) as box:
        server = spawn_server(box, 0)
        try:
            box.wait_servers_ready(60)
            server.send_signal(signal.SIGSTOP)
            os.waitpid(server.pid, os.WUNTRACED)
            frozen = server_health(box.name)[0]
            time.sleep(0.5)
            assert server_health(box.name)[0].progress == frozen.progress
            assert server_health(box.name)[0].state == "ready"
            server.send_signal(signal.SIGCONT)
            wait_until(lambda: server_health(box.name)[0].progress > frozen.progress)
        finally:
            server.kill()
            server.wait()


@pytest.mark.parametrize(("threads", "pieces"), [(1, 4), (2, 2)])
def test_an_engine_counts_pieces_of_one_call(threads: int, pieces: int) -> None:
    """Real experts report more than the request's end, however few pieces the calling thread gets."""
    shape = geometry(hidden_size=64, max_rows=64, num_layers=1, top_k=2)
    engine = ExpertEngine(64, 64, 8, 1, weight_format="bfloat16", num_threads=threads)
    testing.fill_random(engine.backend, 0, seed=1)
    with new_mailbox(shape) as box:
        server = MailboxServer(box.name, 0, engine.backend, heartbeat_s=3600.0, spin_ns=0)
        server.start()
        try:
            box.wait_servers_ready(60)
            call = Call(box, 64)
            call.topk_ids = np.arange(128, dtype=np.int32).reshape(64, 2) % 8
            before = server_health(box.name)[0].progress
            call.collect(call.submit())
            assert server_health(box.name)[0].progress >= before + pieces
        finally:
            server.stop()


def test_looking_is_not_using() -> None:
    """A watcher must not keep a dead launcher's segment from being replaced."""
    name = f"moebius-test-{os.getpid()}-{time.monotonic_ns()}"
    box = Mailbox.create(name, geometry(2))
    try:
        assert [state.state for state in server_health(name)] == ["absent", "absent"]
        del box
        assert server_health(name)
        assert Mailbox.is_stale(name)
    finally:
        Mailbox.unlink(name)
    with pytest.raises(MailboxError, match=name):
        server_health(name)


def _lock(segment: int, kind: int, byte: int, command: int) -> int:
    """`fcntl` on one byte of the file; the lock type that it answers."""
    answer = fcntl.fcntl(segment, command, FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    return int(FLOCK.unpack(answer)[0])


def test_a_newcomer_does_not_look_ready_before_it_is() -> None:
    """Between taking its index and saying that it loads, a server is not taken for its ready predecessor.

    The newcomer is held exactly there: it waits for the lock on the identity, which the test has.
    """
    with new_mailbox(geometry()) as box:
        first = spawn_server(box, 0, identity="model=a\n")
        box.wait_servers_ready(60)
        first.kill()
        first.wait()
        segment = os.open(Path("/dev/shm", box.name), os.O_RDWR)
        _lock(segment, fcntl.F_WRLCK, IDENTITY_LOCK, F_OFD_SETLK)
        second = spawn_server(box, 0, identity="model=a\n")
        try:
            wait_until(lambda: _lock(segment, fcntl.F_WRLCK, SERVER_CLAIM_BASE, F_OFD_GETLK) != fcntl.F_UNLCK)
            assert server_health(box.name)[0].state == "dead"
            with pytest.raises(ServerLost, match="not ready in time"):
                box.wait_servers_ready(0.05)
            _lock(segment, fcntl.F_UNLCK, IDENTITY_LOCK, F_OFD_SETLK)
            assert box.wait_servers_ready(60) == [2]
        finally:
            os.close(segment)
            second.kill()
            second.wait()
