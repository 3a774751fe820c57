"""Frames between rank 0 and the others: one byte of kind, four of length, the payload.

Payloads are JSON or, for messages to the engine, `codec.py`'s form: data only, never code.
"""

from __future__ import annotations

import enum
import json
import socket
import struct
import threading
from typing import Any

_HEADER = struct.Struct("!BI")
# A prompt of a million tokens takes 4 MB, a large image some 50 MB; what is longer goes in parts.
MAX_PAYLOAD = 1 << 28


class WireError(OSError):
    """The other end closed the connection, was silent for too long, or is not one of ours."""


class Kind(enum.IntEnum):
    """What a payload is."""

    HELLO = 1  # JSON, the first frame of a rank
    WELCOME = 2  # JSON, rank 0's answer
    REFUSED = 3  # JSON text: why a rank may not join
    HEARTBEAT = 4  # empty
    MESSAGES = 5  # what the engine applies in one iteration of its loop
    VALUE = 6  # JSON, one rank's number, or all ranks' numbers
    FATAL = 7  # JSON text: why the group ends
    GOODBYE = 8  # empty: the connection ends in order
    PART = 9  # begin or middle of messages that are too long for one frame; MESSAGES is their end


class Connection:
    """A framed socket: any thread sends, one thread receives."""

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._sending = threading.Lock()
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """Longest silence before `receive` gives up, and longest wait of `send`."""
        self._socket.settimeout(timeout_s)

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Raises WireError."""
        try:
            with self._sending:
                self._socket.sendall(_HEADER.pack(kind, len(payload)) + payload)
        except OSError as error:
            raise WireError(_reason(error)) from error

    def send_json(self, kind: Kind, value: Any) -> None:
        """Raises WireError."""
        self.send(kind, json.dumps(value).encode())

    def receive(self) -> tuple[Kind, bytes]:
        """The next frame. Raises WireError when none begins, or one does not end, within the timeout."""
        try:
            kind, length = _HEADER.unpack(self._exactly(_HEADER.size))
            if length > MAX_PAYLOAD:
                raise WireError(f"a frame of {length} bytes is announced; at most {MAX_PAYLOAD} are allowed")
            return Kind(kind), self._exactly(length)
        except ValueError as error:
            raise WireError(f"what arrived is no frame: {error}") from error
        except OSError as error:
            raise WireError(_reason(error)) from error

    def close(self) -> None:
        """Ends both directions; whoever receives is told."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The other end was faster.
            self._socket.close()
            return
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if received == 0:
                raise WireError("the connection was closed")
            view = view[received:]
        return bytes(data)


def _reason(error: OSError) -> str:
    if isinstance(error, WireError):
        return str(error)
    if isinstance(error, TimeoutError):
        return "silent for too long (rank_timeout_s)"
    return f"the connection was lost ({error.strerror or error})"
