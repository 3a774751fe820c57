"""Guards how ranks meet and stay in touch: nobody joins who does not fit, and every loss has a name."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import pytest

import gpu_service.parallel.control
from gpu_service.parallel.control import GroupLost, RankControl
from gpu_service.parallel.rendezvous import Meeting, meet
from gpu_service.parallel.wire import Kind
from moebius.errors import ConfigError, UserError
from tests.helpers.rank_group import free_port

Trio = tuple[list[RankControl], list[queue.SimpleQueue[tuple[str, bool]]]]


def meeting(size: int, **changes: Any) -> Meeting:
    """Rank 0's, at a free port."""
    return replace(Meeting(0, size, f"127.0.0.1:{free_port()}", 10.0, "same"), **changes)


def run(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """In a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work, *arguments)
    pool.shutdown(wait=False)
    return future


@pytest.fixture
def trio() -> Iterator[Trio]:
    """Three ranks in one process, and what each was told about the group's end."""
    first = meeting(3)
    met = [run(meet, replace(first, rank=rank), {"store_port": 7}) for rank in range(3)]
    told: list[queue.SimpleQueue[tuple[str, bool]]] = [queue.SimpleQueue() for _ in met]
    controls = []
    for rank, future in enumerate(met):
        connections, welcome = future.result(10)
        assert welcome == {"store_port": 7}
        lost = told[rank]
        controls.append(RankControl(rank, 3, connections, 10.0, lambda *end, lost=lost: lost.put(end)))
    yield controls, told
    for control in controls:
        control.close()


def test_numbers_are_exchanged_by_rank(trio: Trio) -> None:
    """Every rank gets all numbers, in rank order, as often as asked."""
    controls, _ = trio
    for _ in range(3):
        futures = [run(control.exchange, "pages", 10 - control.rank) for control in controls]
        assert [future.result(10) for future in futures] == [[10, 9, 8]] * 3


def test_ranks_that_ask_for_different_things_part(trio: Trio) -> None:
    """A rank at another point of its start is an error that says so, not a mixed-up number."""
    controls, told = trio
    futures = [run(c.exchange, "pages" if c.rank < 2 else "loaded", 1) for c in controls]
    for future in futures:
        with pytest.raises(GroupLost):
            future.result(10)
    assert told[0].get(timeout=10) == ("rank 0: waits for 'pages', but rank 2 for 'loaded'", True)
    assert told[1].get(timeout=10) == ("rank 0: waits for 'pages', but rank 2 for 'loaded'", False)


def test_messages_arrive_once_each_and_in_order(trio: Trio) -> None:
    """Also empty ones: an iteration without messages is an iteration."""
    controls, _ = trio
    for payload in (b"one", b"", b"three"):
        controls[0].publish(payload)
    for control in controls[1:]:
        assert [control.next_messages() for _ in range(3)] == [b"one", b"", b"three"]


@pytest.mark.parametrize("length", [999, 1000, 1001, 3000, 3500])
def test_long_messages_arrive_whole(trio: Trio, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame has a largest size; images make messages longer than that."""
    monkeypatch.setattr(gpu_service.parallel.control, "MAX_PAYLOAD", 1000)
    controls, _ = trio
    payload = bytes(index * index % 251 for index in range(length))
    controls[0].publish(payload)
    controls[0].publish(b"next")
    for other in controls[1:]:
        assert [other.next_messages() for _ in range(2)] == [payload, b"next"]


def test_a_failure_is_told_to_all(trio: Trio) -> None:
    """Rank 2 fails; ranks 0 and 1 are told which one and why, and whoever waits is woken."""
    controls, told = trio
    waiting = run(controls[1].next_messages)
    controls[2].fail("out of memory")
    assert told[2].get(timeout=10) == ("rank 2: out of memory", True)
    for rank in (0, 1):
        assert told[rank].get(timeout=10) == ("rank 2: out of memory", False)
    with pytest.raises(GroupLost, match="rank 2: out of memory"):
        waiting.result(10)
    with pytest.raises(GroupLost):
        controls[0].publish(b"late")


def test_leaving_in_order_is_no_loss(trio: Trio) -> None:
    """A group that closes tells nobody of an error."""
    controls, told = trio
    for control in controls:
        control.close()
    time.sleep(0.1)
    assert all(lost.empty() for lost in told)


def test_rank_zero_outlives_the_others(trio: Trio) -> None:
    """A rank may have left after the last message while another is still to be sent it."""
    controls, told = trio
    controls[1].close()
    time.sleep(0.1)
    controls[0]._send(2, Kind.MESSAGES, b"the end")
    assert controls[2].next_messages() == b"the end"
    assert all(lost.empty() for lost in told)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"size": 3}, "one of 3 ranks, this group has 2"),
        ({"rank": 2}, "rank: 2 is not allowed; allowed: 1 to 1"),
        ({"fingerprint": "other"}, "the settings of rank 1 differ"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused(changes: dict[str, Any], reason: str) -> None:
    """It is told why; the group goes on waiting for the right one, also after a stranger's visit."""
    first = meeting(2)
    gathered = run(meet, first, {})
    with pytest.raises(UserError, match=f"refused by rank 0 .*{reason}"):
        meet(replace(first, rank=1, **changes) if "rank" not in changes else replace(first, **changes), {})
    with socket.create_connection(first.host_port) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    joined, _ = meet(replace(first, rank=1), {})
    connections, _ = gathered.result(10)
    assert list(connections) == [1]
    for connection in (*connections.values(), *joined.values()):
        connection.close()


def test_who_is_missing_is_named() -> None:
    """Neither side waits longer than `rank_timeout_s`, and both say for whom and where."""
    first = meeting(3, timeout_s=0.3)
    with pytest.raises(UserError, match=rf"rank 1, 2 did not join at {first.address} within 0.3 s"):
        meet(first, {})
    with pytest.raises(UserError, match=r"rank 1: rank 0 is not reachable at .* \(rank_timeout_s\)"):
        meet(replace(first, rank=1), {})


@pytest.mark.parametrize("address", ["", "localhost", "localhost:0", "localhost:x", ":1", "h:65536"])
def test_bad_addresses_are_refused(address: str) -> None:
    """The setting, its value and the form it has to have."""
    with pytest.raises(ConfigError, match=r"rank_address: .* allowed: host:port"):
        meet(replace(meeting(2), address=address), {})


def test_a_taken_port_is_named() -> None:
    """Somebody else listens at the ranks' address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=f"rank_address: can not listen on {address}"):
            meet(replace(meeting(2), address=address), {})


def test_nobody_goes_on_while_a_loss_ends_the_process(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that echoes it, and a message to the lost group: whoever raised might end it otherwise."""
    controls, _ = trio
    monkeypatch.setattr(gpu_service.parallel.control, "_ECHO_S", 0.01)
    ending, ended = threading.Event(), threading.Event()

    def end(reason: str, own: bool) -> None:
        ending.set()
        ended.wait(10)

    monkeypatch.setattr(controls[0], "_on_lost", end)
    run(controls[2].fail, "gone")
    assert ending.wait(10)
    late = [run(controls[0].fail, "an echo"), run(controls[0].publish, b"more")]
    assert not wait(late, timeout=0.2).done
    ended.set()
    late[0].result(10)
    with pytest.raises(GroupLost, match="rank 2: gone"):
        late[1].result(10)
