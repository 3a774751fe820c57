"""Guards how ranks meet and stay in touch: no rank joins that does not fit, and every loss has a name."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

import gpu_service.parallel.control
from gpu_service.parallel.control import ConnectionLost, GroupLost, RankConnection, RankControl
from gpu_service.parallel.join import Rendezvous, meet
from moebius.config import SecurityConfig
from moebius.errors import ConfigError, UserError
from moebius.network.tls import configure_tls
from protos import ranks_pb2
from tests.helpers.certificates import Authority, Pair, grpc_security, write_secret
from tests.helpers.ports import free_port
from tests.helpers.waiting import wait_until


def welcome(store_port: int = 0) -> ranks_pb2.Welcome:
    """Returns what rank 0 answers."""
    return ranks_pb2.Welcome(store_port=store_port)


def iteration(text: str) -> ranks_pb2.Iteration:
    """Returns one that says something recognisable; empty text: one without messages."""
    messages = [ranks_pb2.Message(abort_request_id=text)] if text else []
    return ranks_pb2.Iteration(messages=messages)


@pytest.fixture(scope="module")
def authority() -> Authority:
    """Returns the CA of all ranks."""
    return Authority()


@contextmanager
def secured(directory: Path, pair: Pair, ca: bytes, mode: str = "mutual") -> Iterator[None]:
    """Ranks that meet inside speak TLS with this certificate."""
    write_secret(directory, pair, ca)
    configure_tls(grpc_security(directory, mode))
    try:
        yield
    finally:
        configure_tls(SecurityConfig())


Trio = tuple[list[RankControl], list[queue.SimpleQueue[tuple[str, bool]]]]


def rendezvous(size: int, **changes: Any) -> Rendezvous:
    """Returns rank 0's, at a free port."""
    return replace(Rendezvous(0, size, f"127.0.0.1:{free_port()}", 60.0, "same"), **changes)


def run(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """In a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work, *arguments)
    pool.shutdown(wait=False)
    return future


@pytest.fixture(params=["plain", "mutual TLS"])
def trio(request: pytest.FixtureRequest, authority: Authority, tmp_path: Path) -> Iterator[Trio]:
    """Three ranks in one process, and what each learned about the group's end."""
    is_plain = request.param == "plain"
    with nullcontext() if is_plain else secured(tmp_path / "s", authority.issue("rank"), authority.pem):
        first = rendezvous(3)
        met = [run(meet, replace(first, rank=rank), welcome(7)) for rank in range(3)]
        lost_by_rank: list[queue.SimpleQueue[tuple[str, bool]]] = [queue.SimpleQueue() for _ in met]
        controls = []
        for rank, future in enumerate(met):
            connections, received = future.result(60)
            assert received == welcome(7)
            lost = lost_by_rank[rank]
            controls.append(RankControl(rank, 3, connections, 60.0, lambda *end, lost=lost: lost.put(end)))
    yield controls, lost_by_rank
    for control in controls:
        control.close()


def test_numbers_are_exchanged_by_rank(trio: Trio) -> None:
    """Every rank gets all numbers, in rank order, as often as asked."""
    controls, _ = trio
    for _ in range(3):
        futures = [run(control.exchange, "pages", 10 - control.rank) for control in controls]
        assert [future.result(60) for future in futures] == [[10, 9, 8]] * 3


def test_ranks_that_ask_for_different_things_part(trio: Trio) -> None:
    """A rank at another point of its start is an error that says so, not a mixed-up number."""
    controls, lost_by_rank = trio
    futures = [run(c.exchange, "pages" if c.rank < 2 else "loaded", 1) for c in controls]
    for future in futures:
        with pytest.raises(GroupLost):
            future.result(60)
    assert lost_by_rank[0].get(timeout=60) == ("rank 0: waits for 'pages', but rank 2 for 'loaded'", True)
    assert lost_by_rank[1].get(timeout=60) == ("rank 0: waits for 'pages', but rank 2 for 'loaded'", False)


def test_messages_arrive_once_each_and_in_order(trio: Trio) -> None:
    """Empty messages arrive, too: an iteration without messages is an iteration."""
    controls, _ = trio
    sent = [iteration(text) for text in ("one", "", "three")]
    for each in sent:
        controls[0].publish(each)
    for control in controls[1:]:
        assert [control.next_iteration() for _ in range(3)] == sent


@pytest.mark.parametrize("length", [16 * 1024, 16 * 1024 + 1, 3_000_000])
def test_long_messages_arrive_whole(trio: Trio, length: int) -> None:
    """Images make messages longer than what a socket takes at once."""
    controls, _ = trio
    pixels = bytes(index * index % 251 for index in range(length))
    sent = [ranks_pb2.Iteration(images=[ranks_pb2.Image(pixels=pixels)]), iteration("next")]
    for each in sent:
        controls[0].publish(each)
    for other in controls[1:]:
        assert [other.next_iteration() for _ in range(2)] == sent


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\0\0\0\x09part"])
def test_a_silent_rank_is_noticed(sent: bytes) -> None:
    """The rank is noticed after the timeout, between two frames and within one: a frozen process closes
    nothing.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        frozen = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    connection = RankConnection(accepted, 0.2)
    frozen.sendall(sent)
    with pytest.raises(ConnectionLost, match=r"silent for too long \(rank_timeout_s\)"):
        connection.receive()
    connection.close()
    frozen.close()


def test_a_rank_that_reads_nothing_delays_no_other() -> None:
    """`send` gives up after the timeout once the frozen process's buffers are full."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        frozen = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    connection = RankConnection(accepted, 0.2)
    large = ranks_pb2.Frame(fatal="x" * 2**25)
    with pytest.raises(ConnectionLost, match="silent for too long"):
        connection.send(large)
    connection.close()
    frozen.close()


def test_a_failure_is_sent_to_all(trio: Trio) -> None:
    """Rank 2 fails; ranks 0 and 1 learn which one and why, and ranks that wait are woken."""
    controls, lost_by_rank = trio
    waiting = run(controls[1].next_iteration)
    controls[2].fail("out of memory")
    assert lost_by_rank[2].get(timeout=60) == ("rank 2: out of memory", True)
    for rank in (0, 1):
        assert lost_by_rank[rank].get(timeout=60) == ("rank 2: out of memory", False)
    with pytest.raises(GroupLost, match="rank 2: out of memory"):
        waiting.result(60)
    with pytest.raises(GroupLost):
        controls[0].publish(iteration("late"))


def test_leaving_in_order_is_no_loss(trio: Trio) -> None:
    """A group that closes reports no error."""
    controls, lost_by_rank = trio
    for control in controls:
        control.close()
    time.sleep(0.1)
    assert all(lost.empty() for lost in lost_by_rank)


def test_rank_zero_outlives_the_others(trio: Trio) -> None:
    """A rank may have left after the last message while another is still to be sent it."""
    controls, lost_by_rank = trio
    controls[1].close()
    time.sleep(0.1)
    controls[0]._send(2, ranks_pb2.Frame(iteration=iteration("the end")))
    assert controls[2].next_iteration() == iteration("the end")
    assert all(lost.empty() for lost in lost_by_rank)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"size": 3}, "one of 3 ranks, this group has 2"),
        ({"rank": 2}, "rank: 2 is not allowed; allowed: 1 to 1"),
        ({"fingerprint": "other"}, "the settings of rank 1 differ"),
        (
            {"identity": "config.json=00\nmodel.safetensors=03\n"},
            "rank 1 reads other files of the model than rank 0: model.safetensors has changed",
        ),
    ],
)
def test_a_rank_that_does_not_fit_is_refused(changes: dict[str, Any], reason: str) -> None:
    """It gets the reason; the group goes on waiting for the right one, also after a stranger's visit."""
    first = rendezvous(2, identity="config.json=00\nmodel.safetensors=01\n")
    gathered = run(meet, first, welcome())
    with pytest.raises(UserError, match=f"refused by rank 0 .*{reason}"):
        meet(
            replace(first, rank=1, **changes) if "rank" not in changes else replace(first, **changes),
            welcome(),
        )
    with socket.create_connection(first.host_port) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    joined, _ = meet(replace(first, rank=1), welcome())
    connections, _ = gathered.result(60)
    assert list(connections) == [1]
    for connection in (*connections.values(), *joined.values()):
        connection.close()


class Tapped:
    """What a socket carries, in both directions."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.carried = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        run(self._pass_on, target)

    def _pass_on(self, target: tuple[str, int]) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(target)
        self._listener.close()
        for source, sink in ((client, server), (server, client)):
            run(self._copy, source, sink)

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                self.carried += piece
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("mode", ["plain", "tls", "mutual"])
def test_prompts_can_not_be_read_on_the_way(authority: Authority, tmp_path: Path, mode: str) -> None:
    """With TLS nothing of what ranks say passes as it is; without it does, so these are the right bytes."""
    is_plain = mode == "plain"
    with nullcontext() if is_plain else secured(tmp_path, authority.issue("rank"), authority.pem, mode):
        first = rendezvous(2)
        gathered = run(meet, first, welcome())
        wait_until(lambda: is_listening(first))
        tap = Tapped(first.host_port)
        joined, _ = meet(replace(first, rank=1, address=tap.address), welcome())
        (ours,) = gathered.result(60)[0].values()
        (theirs,) = joined.values()
        ours.send(ranks_pb2.Frame(iteration=iteration("a secret prompt")))
        theirs.send(ranks_pb2.Frame(fatal="a secret answer"))
        assert theirs.receive().iteration == iteration("a secret prompt")
        assert ours.receive().fatal == "a secret answer"
        assert (b"a secret prompt" in tap.carried) is is_plain
        assert (b"a secret answer" in tap.carried) is is_plain
        for connection in (ours, theirs):
            connection.close()


def is_listening(where: Rendezvous) -> bool:
    """Returns whether rank 0 is there; its address is tried, which it takes for a stranger's visit."""
    with suppress(OSError), socket.create_connection(where.host_port):
        return True
    return False


def refusals(logs: Sequence[Any]) -> list[str]:
    """Returns why rank 0 took no rank for one."""
    return [line["reason"] for line in logs if "was no rank" in line["event"]]


@pytest.mark.parametrize(
    ("who", "its_words", "our_words"),
    [
        ("stranger", "the other's certificate is refused: ", "does not know the CA"),
        ("plain", "does not speak TLS", "grpc_tls is off"),
        ("nobody", "the other showed no certificate", "rank 0 at "),
        ("other host", "", "the other's certificate is refused: IP address mismatch"),
    ],
)
def test_ranks_of_others_are_refused_and_named(
    authority: Authority, tmp_path: Path, who: str, its_words: str, our_words: str
) -> None:
    """Without TLS, without a certificate or with one of another CA none becomes a rank, nor is rank 0 taken
    for one with another host's certificate; both sides say why, and the right one still joins."""
    other, first = Authority("other CA"), rendezvous(2)
    hosts = ("elsewhere",) if who == "other host" else ("localhost",)
    own = authority.issue("rank", hosts=hosts, addresses=() if who == "other host" else ("127.0.0.1",))
    with structlog.testing.capture_logs() as logs:
        with secured(tmp_path / "own", own, authority.pem):
            gathered = run(meet, first, welcome())
            wait_until(lambda: is_listening(first))
        if who == "plain":
            context: Any = nullcontext()
        elif who == "nobody":
            context = tls_without_certificate(tmp_path / "own" / "ca.crt")
        else:
            pair = other.issue("rank") if who == "stranger" else authority.issue("rank")
            context = secured(tmp_path / "its", pair, authority.pem, "tls")
        with context, pytest.raises(UserError, match="rank 1: rank 0 at") as caught:
            meet(replace(first, rank=1), welcome())
        assert our_words in str(caught.value)
        if its_words:
            # Rank 0 notices by itself, a moment before or after this rank.
            wait_until(lambda: any(its_words in reason for reason in refusals(logs)))
    settings = grpc_security(tmp_path / "own").model_copy(
        update={"grpc_server_name": "elsewhere" if who == "other host" else ""}
    )
    configure_tls(settings)
    try:
        joined, _ = meet(replace(first, rank=1), welcome())
    finally:
        configure_tls(SecurityConfig())
    for connection in (*gathered.result(60)[0].values(), *joined.values()):
        connection.close()


@contextmanager
def tls_without_certificate(ca: Path) -> Iterator[None]:
    """A client that checks the server and shows nothing."""
    configure_tls(SecurityConfig(grpc_tls="tls", grpc_ca_file=str(ca)))
    try:
        yield
    finally:
        configure_tls(SecurityConfig())


def test_who_is_missing_is_named() -> None:
    """Neither side waits longer than `rank_timeout_s`, and both say for whom and where."""
    first = rendezvous(3, timeout_s=0.3)
    with pytest.raises(UserError, match=rf"rank 1, 2 did not join at {first.address} within 0.3 s"):
        meet(first, welcome())
    with pytest.raises(UserError, match=r"rank 1: rank 0 is not reachable at .* \(rank_timeout_s\)"):
        meet(replace(first, rank=1), welcome())


@pytest.mark.parametrize("address", ["", "localhost", "localhost:0", "localhost:x", ":1", "h:65536"])
def test_bad_addresses_are_refused(address: str) -> None:
    """The setting, its value and the form it has to have."""
    with pytest.raises(ConfigError, match=r"rank_address: .* allowed: host:port"):
        meet(replace(rendezvous(2), address=address), welcome())


def test_a_taken_port_is_named() -> None:
    """Somebody else listens at the ranks' address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=f"rank_address: cannot listen on {address}"):
            meet(replace(rendezvous(2), address=address), welcome())


def test_no_thread_goes_on_while_a_loss_ends_the_process(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that echoes it, and a message to the lost group: the caller might end it otherwise."""
    controls, _ = trio
    monkeypatch.setattr(gpu_service.parallel.control, "_ECHO_S", 0.01)
    ending, ended = threading.Event(), threading.Event()

    def end(reason: str, own: bool) -> None:
        ending.set()
        ended.wait(60)

    monkeypatch.setattr(controls[0], "_on_lost", end)
    run(controls[2].fail, "gone")
    assert ending.wait(60)
    late = [run(controls[0].fail, "an echo"), run(controls[0].publish, iteration("more"))]
    assert not wait(late, timeout=0.2).done
    ended.set()
    late[0].result(60)
    with pytest.raises(GroupLost, match="rank 2: gone"):
        late[1].result(60)
