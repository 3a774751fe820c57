"""The messages of the first gateway process and the others, over a socket pair, and the port they share."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from gateway.telemetry.combined import Samples
from moebius.config import MoebiusConfig
from moebius.models.identity import Parts

HEARTBEAT_S = 1.0  # between two heartbeats
_HEADER = struct.Struct("!I")  # length of what follows, bytes


@dataclass(frozen=True)
class MemberSetup:
    """The first message to a process; filled by `group.py`."""

    config: MoebiusConfig  # with the port that all of them share
    index: int  # its place in `Places`
    count: int  # number of places
    places: int  # descriptor of the places' memory
    listens_when_ready: bool  # another process serves meanwhile
    files: Parts = field(default_factory=dict)  # digests of the files that all processes must read


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat; filled by `member.py`."""

    is_ready: bool  # the model is known: requests can be answered
    samples: Samples | None  # in some beats: its counters
    refusal: str = ""  # changed model files that keep it, or parts of it, from serving


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket on the common port: the kernel distributes new connections among those that listen."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((host, port))
    return made


class ChannelClosed(Exception):
    """The other process has ended."""


class Channel:
    """One end of a channel, on which either side may ask; `run` has to run for as long as it is used."""

    def __init__(self, answer: Callable[[str, Any], Awaitable[Any]]) -> None:
        """`answer` gets the other side's requests and notices, and returns the reply."""
        self._answer = answer
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, connection: socket.socket) -> None:
        """Receives messages until the other side closes its end; then all open requests fail."""
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        try:
            while True:
                header = await reader.readexactly(_HEADER.size)
                number, is_answer, name, value = pickle.loads(
                    await reader.readexactly(_HEADER.unpack(header)[0])
                )
                if not is_answer:
                    task = asyncio.create_task(self._take(number, name, value))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                elif (asked := self._asked.get(number)) is not None and not asked.done():
                    asked.set_result(value)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(ChannelClosed())
            self._writer.close()
            self._writer = None

    async def ask(self, name: str, value: Any = None) -> Any:
        """Sends a request and returns the reply. Raises ChannelClosed."""
        number = next(self._numbers)
        self._asked[number] = answer = asyncio.get_running_loop().create_future()
        try:
            self._send(number, False, name, value)
            return await answer
        finally:
            del self._asked[number]

    def notify(self, name: str, value: Any = None) -> None:
        """Sends a notice, without a reply. Raises ChannelClosed."""
        self._send(0, False, name, value)

    async def _take(self, number: int, name: str, value: Any) -> None:
        answer = await self._answer(name, value)
        if number and self._writer is not None:
            self._send(number, True, name, answer)

    def _send(self, *message: Any) -> None:
        if self._writer is None:
            raise ChannelClosed
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._writer.write(_HEADER.pack(len(data)) + data)
