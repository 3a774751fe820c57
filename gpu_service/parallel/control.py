"""The connections between rank 0 and every other rank, beside the tensors' own.

They carry the messages to the engine, agree on numbers at start, and notice that a rank is gone: at once
when its connection closes (the kernel closes it whatever a process dies of), and after `timeout_s` when it
is stopped or stuck so hard that its heartbeat ends.

    rank 1 ──┐
    rank 2 ──┼── rank 0        rank 0 tells all others what it learns from one of them
    rank 3 ──┘
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from gpu_service.parallel.wire import MAX_PAYLOAD, Connection, Kind, WireError

# Heartbeats in the time after which a silent rank is given up.
_BEATS = 4
# An error may be the echo of another rank's death, which is told within this time.
_ECHO_S = 1.0


class GroupLost(RuntimeError):
    """The group of ranks has ended; the message names the rank and says why."""


class RankControl:
    """One rank's ends. `on_lost(reason, own)` is called once, by any thread, when the group can not go on;

    `own`: because of this rank. Methods raise GroupLost from then on. `connections` are by rank: all others
    for rank 0, else rank 0 only.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Mapping[int, Connection],
        timeout_s: float,
        on_lost: Callable[[str, bool], None],
    ) -> None:
        self.rank = rank
        self.size = size
        self._connections = dict(connections)
        self._on_lost = on_lost
        self._lost: str | None = None
        # Held until `on_lost` is done: nobody goes on, or ends in another way, while it ends the process.
        self._losing = threading.RLock()
        self._closing = threading.Event()
        self._ended = threading.Event()
        # None wakes whoever waits when the group is lost.
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Of messages that arrive in several frames; touched by the thread that receives from rank 0.
        self._parts: list[bytes] = []
        self._values: dict[int, queue.SimpleQueue[Any]] = {peer: queue.SimpleQueue() for peer in connections}
        for peer, connection in self._connections.items():
            self._thread(f"rank-{peer}", self._receive, peer, connection)
        self._thread("rank-heartbeat", self._beat, timeout_s / _BEATS)

    def publish(self, payload: bytes) -> None:
        """Rank 0: gives all others what the next iteration applies."""
        last = max(0, len(payload) - 1) // MAX_PAYLOAD * MAX_PAYLOAD
        for peer in self._connections:
            for begin in range(0, last, MAX_PAYLOAD):
                self._send(peer, Kind.PART, payload[begin : begin + MAX_PAYLOAD])
            self._send(peer, Kind.MESSAGES, payload[last:])

    def next_messages(self) -> bytes:
        """Every other rank: blocks for what rank 0 published next."""
        payload = self._messages.get()
        if payload is None:
            raise GroupLost(self._lost)
        return payload

    def exchange(self, what: str, value: int) -> list[int]:
        """Every rank's number, by rank; returns when all ranks have called it with the same `what`."""
        if self.rank:
            self._send(0, Kind.VALUE, json.dumps([what, value]).encode())
            name, values = self._value(0)
        else:
            found = {peer: self._value(peer) for peer in self._connections}
            for peer, (name, _) in found.items():
                self._check_same(what, peer, name)
            values = [value, *(found[peer][1] for peer in sorted(found))]
            name = what
            for peer in self._connections:
                self._send(peer, Kind.VALUE, json.dumps([what, values]).encode())
        self._check_same(what, 0, name)
        return [int(number) for number in values]

    def fail(self, reason: str) -> None:
        """This rank can not go on: tells all others, then `on_lost`; unless another rank was first."""
        self._ended.wait(_ECHO_S)
        self._lose(f"rank {self.rank}: {reason}", own=True)

    def close(self) -> None:
        """Leaves in order: the others see no death in it, and nothing that follows is this rank's failure."""
        self._lost = self._lost or f"rank {self.rank} has left"
        self._closing.set()
        for connection in self._connections.values():
            _try_send(connection, Kind.GOODBYE)
            connection.close()

    def _check_same(self, what: str, peer: int, name: str) -> None:
        if name != what:
            self.fail(f"waits for {what!r}, but rank {peer} for {name!r}")
            raise GroupLost(self._lost)

    def _value(self, peer: int) -> Any:
        value = self._values[peer].get()
        if value is None:
            raise GroupLost(self._lost or f"rank {peer} has left")
        return value

    def _send(self, peer: int, kind: Kind, payload: bytes) -> None:
        if self._lost is not None:
            with self._losing:
                raise GroupLost(self._lost)
        try:
            self._connections[peer].send(kind, payload)
        except WireError as error:
            self._lose(f"rank {peer}: {error}")
            raise GroupLost(self._lost) from error

    def _receive(self, peer: int, connection: Connection) -> None:
        """A thread per connection."""
        try:
            while True:
                kind, payload = connection.receive()
                if kind is Kind.GOODBYE:
                    self._left(peer)
                    return
                self._accept(peer, kind, payload)
        except (WireError, ValueError) as error:
            if not self._closing.is_set():
                self._lose(f"rank {peer}: {error}")

    def _accept(self, peer: int, kind: Kind, payload: bytes) -> None:
        match kind:
            case Kind.PART:
                self._parts.append(payload)
            case Kind.MESSAGES:
                self._messages.put(b"".join((*self._parts, payload)))
                self._parts.clear()
            case Kind.VALUE:
                self._values[peer].put(json.loads(payload))
            case Kind.FATAL:
                self._lose(str(json.loads(payload)))
            case Kind.HEARTBEAT:
                return
            case _:
                self._lose(f"rank {peer}: sent {kind.name}, which has no place here")

    def _beat(self, interval_s: float) -> None:
        while not self._closing.wait(interval_s):
            for connection in self._connections.values():
                # A connection that can not carry it is noticed by the thread that receives from it.
                _try_send(connection, Kind.HEARTBEAT)

    def _left(self, peer: int) -> None:
        """A rank ended in order. Whoever still waits for something of it waits in vain.

        For rank 0 that is no loss: it may still be telling the others to end, too.
        """
        if peer == 0:
            self._lost = self._lost or "rank 0 has left"
            self._messages.put(None)
        self._values[peer].put(None)

    def _lose(self, reason: str, own: bool = False) -> None:
        with self._losing:
            if self._lost is not None:
                return
            self._lost = reason
            self._closing.set()
            self._ended.set()
            for connection in self._connections.values():
                _try_send(connection, Kind.FATAL, json.dumps(reason).encode())
            self._on_lost(reason, own)
        self._messages.put(None)
        for values in self._values.values():
            values.put(None)

    def _thread(self, name: str, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, name=name, daemon=True).start()


def _try_send(connection: Connection, kind: Kind, payload: bytes = b"") -> bool:
    try:
        connection.send(kind, payload)
    except WireError:
        return False
    return True
