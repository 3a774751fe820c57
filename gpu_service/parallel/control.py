"""The connections between rank 0 and every other rank, apart from those of the collectives.

Frames of `protos/ranks.proto` over `multiprocessing.connection`, or within TLS where gRPC has it. They carry
the messages to the engine, agree on numbers at start, and notice that a rank is gone: at once when its
connection closes (the kernel closes it whatever a process dies of), and after `timeout_s` when it is stopped
or so stuck that its heartbeat ends.

    rank 1 ──┐
    rank 2 ──┼── rank 0        rank 0 sends all others what it learns from one of them
    rank 3 ──┘
"""

from __future__ import annotations

import os
import queue
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

from google.protobuf.message import DecodeError

from gpu_service.parallel.waits import CollectiveWaits, late_ranks, late_words
from moebius.network.tls import handshake_words
from protos import ranks_pb2

# A prompt of a million tokens takes 4 MB, a large image some 50 MB.
MAX_FRAME_BYTES = 1 << 30
# What a stranger may make us read before it has said who it is.
_MAX_HELLO_BYTES = 4096
# Of one read from a socket, and one write into TLS.
_CHUNK_BYTES = 1 << 20


class ConnectionLost(OSError):
    """The other end closed the connection, was silent for too long, or is not one of ours."""


class _Frames(Protocol):
    """Sends and receives frames as `multiprocessing.connection.Connection`: one thread sends at a time, and
    one receives.
    """

    def send_bytes(self, buf: bytes) -> None:
        """One frame. Raises OSError."""

    def recv_bytes(self, maxlength: int) -> bytes:
        """Returns the next frame. Raises EOFError at the end, OSError for one that is longer."""


class _SecuredFrames:
    """Frames within TLS: each is its length (8 bytes, big endian) and its bytes.

    OpenSSL's state is one for both directions and takes no two threads at once: it lives in memory, behind a
    lock that no thread holds while waiting for the network.
    """

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, server_name: str) -> None:
        """Shakes hands; `server_name`: whom a client wants to reach. Raises OSError, of which ssl.SSLError
        is one, and EOFError."""
        self._socket = connected
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = context.protocol is ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, is_server, None if is_server else server_name
        )
        self._using = threading.Lock()
        self._received = bytearray()
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._socket.sendall(self._outgoing.read())
                self._incoming.write(self._arrived())
            except ssl.SSLError:
                self._socket.sendall(self._outgoing.read())  # the alert says why
                raise
        self._socket.sendall(self._outgoing.read())

    def send_bytes(self, buf: bytes) -> None:
        """Sends a frame as `_Frames`."""
        content = memoryview(struct.pack("!Q", len(buf)) + buf)
        for begin in range(0, len(content), _CHUNK_BYTES):
            with self._using:
                self._tls.write(content[begin : begin + _CHUNK_BYTES])
                secured = self._outgoing.read()
            self._socket.sendall(secured)

    def recv_bytes(self, maxlength: int) -> bytes:
        """Receives a frame as `_Frames`."""
        (length,) = struct.unpack("!Q", self._exactly(8))
        if length > maxlength:
            raise OSError(f"a frame of {length} bytes is too long")
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        while len(self._received) < count:
            with self._using:
                try:
                    piece = self._tls.read(_CHUNK_BYTES)
                except ssl.SSLWantReadError:
                    piece = None
                except ssl.SSLZeroReturnError:
                    raise EOFError from None
            if piece is None:
                arrived = self._arrived()
                with self._using:
                    self._incoming.write(arrived)
            else:
                self._received += piece
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    def _arrived(self) -> bytes:
        arrived = self._socket.recv(_CHUNK_BYTES)
        if not arrived:
            raise EOFError
        return arrived


class RankConnection:
    """A connected TCP socket that carries frames: any thread sends, one thread receives.

    Bytes only: nothing that arrives is unpickled.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        """`timeout_s`: longest silence before `receive` gives up, and longest wait of `send`."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(True)
        self._socket = connected
        # A descriptor of its own: `close` ends the connection while another thread may still read from it.
        self._frames: _Frames = Connection(os.dup(connected.fileno()))
        self._sending = threading.Lock()
        self.set_timeout(timeout_s)

    def secure(self, context: ssl.SSLContext, server_name: str = "") -> None:
        """Goes on within TLS, before anything was sent or received. Raises ConnectionLost.

        `server_name`: what the certificate of rank 0 has to be for; rank 0 leaves it empty.
        """
        try:
            self._frames = _SecuredFrames(self._socket.dup(), context, server_name)
        except EOFError as error:
            raise ConnectionLost("the connection was closed during the TLS handshake") from error
        except OSError as error:
            raise ConnectionLost(_reason(error)) from error

    def set_timeout(self, timeout_s: float) -> None:
        """Sets the kernel's timeout: `Connection` has none, and it must also end a frame that stops
        half-way.
        """
        seconds = int(timeout_s)
        value = struct.pack("ll", seconds, int((timeout_s - seconds) * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, value)

    def send(self, frame: ranks_pb2.Frame) -> None:
        """Sends one frame. Raises ConnectionLost."""
        try:
            with self._sending:
                self._frames.send_bytes(frame.SerializeToString())
        except OSError as error:
            raise ConnectionLost(_reason(error)) from error

    def try_send(self, frame: ranks_pb2.Frame) -> None:
        """Sends unless the other end is gone, which the thread that receives from it notices."""
        try:
            self.send(frame)
        except ConnectionLost:
            return

    def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> ranks_pb2.Frame:
        """Returns the next frame. Raises ConnectionLost when none begins, or one does not end, within the
        timeout.
        """
        try:
            return ranks_pb2.Frame.FromString(self._frames.recv_bytes(max_bytes))
        except DecodeError as error:
            raise ConnectionLost(f"what arrived is no frame: {error}") from error
        except EOFError as error:
            raise ConnectionLost("the connection was closed") from error
        except OSError as error:
            raise ConnectionLost(_reason(error)) from error

    def receive_hello(self) -> ranks_pb2.Hello:
        """Returns the first frame of a rank. Raises ConnectionLost when something else arrives."""
        frame = self.receive(_MAX_HELLO_BYTES)
        if frame.WhichOneof("content") != "hello":
            raise ConnectionLost("what arrived is no rank's first frame")
        return frame.hello

    def close(self) -> None:
        """Ends both directions; a thread that receives gets ConnectionLost."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The other end was faster.
            self._socket.close()
            return
        self._socket.close()


def _reason(error: OSError) -> str:
    if isinstance(error, BlockingIOError):
        return "silent for too long (rank_timeout_s)"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {handshake_words(error)}"
    return f"the connection was lost ({error.strerror or error})"


_GOODBYE = ranks_pb2.Frame(goodbye=ranks_pb2.Goodbye())

# Heartbeats in the time after which a silent rank is given up.
_BEATS = 4
# An error may be the echo of another rank's death, which is reported within this time.
_ECHO_S = 1.0


class GroupLost(RuntimeError):
    """The group of ranks has ended; the message names the rank and says why."""


class RankControl:
    """One rank's ends. `on_lost(reason, own)` is called once, by any thread, when the group cannot go on;

    `own`: because of this rank. Methods raise GroupLost from then on. `connections` are by rank: all others
    for rank 0, else rank 0 only.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Mapping[int, RankConnection],
        timeout_s: float,
        on_lost: Callable[[str, bool], None],
    ) -> None:
        # What of this rank's steps waits for others; all ranks send theirs to rank 0.
        self.waits = CollectiveWaits()
        self._waited_s = dict.fromkeys(range(size), 0.0)
        # Rank 0: what is called with a report and its rank, by the thread that receives it.
        self.on_report: Callable[[int, ranks_pb2.Report], None] = lambda rank, report: None
        self._timeout_s, self._judges = timeout_s, False
        self.rank = rank
        self.size = size
        self._connections = dict(connections)
        self._on_lost = on_lost
        self._lost: str | None = None
        # Held until `on_lost` is done: no thread goes on, or ends in another way, while it ends the process.
        self._losing = threading.RLock()
        self._closing = threading.Event()
        self._ended = threading.Event()
        # None wakes the waiting threads when the group is lost.
        self._iterations: queue.SimpleQueue[ranks_pb2.Iteration | None] = queue.SimpleQueue()
        self._exchanges: dict[int, queue.SimpleQueue[ranks_pb2.Exchange | None]] = {
            peer: queue.SimpleQueue() for peer in connections
        }
        for peer, connection in self._connections.items():
            self._thread(f"rank-{peer}", self._receive, peer, connection)
        self._thread("rank-heartbeat", self._beat, timeout_s / _BEATS)

    def publish(self, iteration: ranks_pb2.Iteration) -> None:
        """Rank 0: gives all others what the next iteration applies."""
        frame = ranks_pb2.Frame(iteration=iteration)
        for peer in self._connections:
            self._send(peer, frame)

    def next_iteration(self) -> ranks_pb2.Iteration:
        """Every other rank: blocks for what rank 0 published next."""
        iteration = self._iterations.get()
        if iteration is None:
            raise GroupLost(self._lost)
        return iteration

    def judge_waits(self) -> None:
        """Rank 0: ends the group from now on when ranks wait longer than the timeout for one that does not.

        Not while kernels are compiled, for which a rank takes as long as it takes.
        """
        self._judges = True

    def exchange(self, what: str, value: int) -> list[int]:
        """Every rank's number, by rank; returns when all ranks have called it with the same `what`."""
        if self.rank:
            self._send(0, _exchange(what, [value]))
            answer = self._exchanged(0)
            self._check_same(what, 0, answer.what)
            return list(answer.values)
        found = {peer: self._exchanged(peer) for peer in self._connections}
        for peer, answer in found.items():
            self._check_same(what, peer, answer.what)
        values = [value, *(found[peer].values[0] for peer in sorted(found))]
        for peer in self._connections:
            self._send(peer, _exchange(what, values))
        return values

    def report(self, report: ranks_pb2.Report) -> None:
        """Every other rank: gives rank 0 a report, unless that is gone."""
        self._connections[0].try_send(ranks_pb2.Frame(report=report))

    def fail(self, reason: str) -> None:
        """Ends the group because of this rank: sends all others the reason, then calls `on_lost`.

        Does nothing if another rank was first.
        """
        self._ended.wait(_ECHO_S)
        self._lose(f"rank {self.rank}: {reason}", own=True)

    def close(self) -> None:
        """Leaves in order: the others do not take it for a death, nor what follows for a failure."""
        self._lost = self._lost or f"rank {self.rank} has left"
        self._closing.set()
        for connection in self._connections.values():
            connection.try_send(_GOODBYE)
            connection.close()

    def _check_same(self, what: str, peer: int, name: str) -> None:
        if name != what:
            self.fail(f"waits for {what!r}, but rank {peer} for {name!r}")
            raise GroupLost(self._lost)

    def _exchanged(self, peer: int) -> ranks_pb2.Exchange:
        answer = self._exchanges[peer].get()
        if answer is None:
            raise GroupLost(self._lost or f"rank {peer} has left")
        return answer

    def _send(self, peer: int, frame: ranks_pb2.Frame) -> None:
        if self._lost is not None:
            with self._losing:
                raise GroupLost(self._lost)
        try:
            self._connections[peer].send(frame)
        except ConnectionLost as error:
            self._lose(f"rank {peer}: {error}")
            raise GroupLost(self._lost) from error

    def _receive(self, peer: int, connection: RankConnection) -> None:
        """A thread per connection."""
        try:
            while True:
                frame = connection.receive()
                if frame.WhichOneof("content") == "goodbye":
                    self._left(peer)
                    return
                self._accept(peer, frame)
        except ConnectionLost as error:
            if not self._closing.is_set():
                self._lose(f"rank {peer}: {error}")

    def _accept(self, peer: int, frame: ranks_pb2.Frame) -> None:
        kind = frame.WhichOneof("content")
        match kind:
            case "iteration":
                self._iterations.put(frame.iteration)
            case "exchange":
                self._exchanges[peer].put(frame.exchange)
            case "report":
                self.on_report(peer, frame.report)
            case "fatal":
                self._lose(frame.fatal)
            case "heartbeat":
                self._waited_s[peer] = frame.heartbeat.waited_s
            case _:
                self._lose(f"rank {peer}: sent {kind}, which has no place here")

    def _beat(self, interval_s: float) -> None:
        while not self._closing.wait(interval_s):
            waited_s = self._waited_s[self.rank] = self.waits.longest_s
            frame = ranks_pb2.Frame(heartbeat=ranks_pb2.Heartbeat(waited_s=waited_s))
            for connection in self._connections.values():
                # A connection that cannot carry it is noticed by the thread that receives from it.
                connection.try_send(frame)
            if self._judges:
                self._judge()

    def _judge(self) -> None:
        waited_s = dict(self._waited_s)
        if late := late_ranks(waited_s, self._timeout_s):
            self._lose(late_words(late, waited_s), own=late == (self.rank,))

    def _left(self, peer: int) -> None:
        """A rank ended in order. A rank that still waits for a message of it waits in vain.

        For rank 0 that is no loss: it may still be sending the others the end, too.
        """
        if peer == 0:
            self._lost = self._lost or "rank 0 has left"
            self._iterations.put(None)
        self._exchanges[peer].put(None)

    def _lose(self, reason: str, own: bool = False) -> None:
        with self._losing:
            if self._lost is not None:
                return
            self._lost = reason
            self._closing.set()
            self._ended.set()
            for connection in self._connections.values():
                connection.try_send(ranks_pb2.Frame(fatal=reason))
            self._on_lost(reason, own)
        self._iterations.put(None)
        for exchanges in self._exchanges.values():
            exchanges.put(None)

    def _thread(self, name: str, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, name=name, daemon=True).start()


def _exchange(what: str, values: Sequence[int]) -> ranks_pb2.Frame:
    return ranks_pb2.Frame(exchange=ranks_pb2.Exchange(what=what, values=values))
