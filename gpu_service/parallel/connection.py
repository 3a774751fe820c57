"""Frames between rank 0 and another rank: `protos/ranks.proto` over `multiprocessing.connection`."""

from __future__ import annotations

import os
import socket
import struct
import threading
from multiprocessing.connection import Connection

from google.protobuf.message import DecodeError

from protos import ranks_pb2

# A prompt of a million tokens takes 4 MB, a large image some 50 MB.
MAX_FRAME_BYTES = 1 << 30
# What a stranger may make us read before it has said who it is.
_MAX_HELLO_BYTES = 4096


class ConnectionLost(OSError):
    """The other end closed the connection, was silent for too long, or is not one of ours."""


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
        self._frames = Connection(os.dup(connected.fileno()))
        self._sending = threading.Lock()
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """By the kernel: `Connection` has no timeouts, and they must also end a frame that stops half-way."""
        seconds = int(timeout_s)
        value = struct.pack("ll", seconds, int((timeout_s - seconds) * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, value)

    def send(self, frame: ranks_pb2.Frame) -> None:
        """Raises ConnectionLost."""
        try:
            with self._sending:
                self._frames.send_bytes(frame.SerializeToString())
        except OSError as error:
            raise ConnectionLost(_reason(error)) from error

    def try_send(self, frame: ranks_pb2.Frame) -> None:
        """Sends unless the other end is gone: whoever receives from it notices that."""
        try:
            self.send(frame)
        except ConnectionLost:
            return

    def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> ranks_pb2.Frame:
        """The next frame. Raises ConnectionLost when none begins, or one does not end, within the timeout."""
        try:
            return ranks_pb2.Frame.FromString(self._frames.recv_bytes(max_bytes))
        except DecodeError as error:
            raise ConnectionLost(f"what arrived is no frame: {error}") from error
        except EOFError as error:
            raise ConnectionLost("the connection was closed") from error
        except OSError as error:
            raise ConnectionLost(_reason(error)) from error

    def receive_hello(self) -> ranks_pb2.Hello:
        """The first frame of a rank. Raises ConnectionLost when something else arrives."""
        frame = self.receive(_MAX_HELLO_BYTES)
        if frame.WhichOneof("content") != "hello":
            raise ConnectionLost("what arrived is no rank's first frame")
        return frame.hello

    def close(self) -> None:
        """Ends both directions; whoever receives is told."""
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
    return f"the connection was lost ({error.strerror or error})"
