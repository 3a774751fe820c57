"""HTTP connections: their number, and how long one may stay open without a complete request.

A connection with a complete request stays open for as long as the answer takes. One that is still sending,
or idle, has a deadline; when the limit is reached, the one that has waited longest is closed for a new one,
so that clients that send half a request and wait cannot keep others out.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.schemas.errors import ApiError
from moebius.config import GatewayConfig
from moebius.errors import ConfigError

logger = structlog.get_logger(__name__)

# A slow line may send a large body: each second beyond the limit has to bring this many bytes.
MIN_BODY_BYTES_PER_S = 16 * 1024
# Most bytes of a request's first line and headers: the parser itself has no limit.
MAX_HEAD_BYTES = 64 * 1024
# Framing bytes of a chunked body allowed for each byte of content: sent byte by byte it has five. As many
# as a head may have are allowed in addition, for extensions of chunks and headers after the last one.
_FRAMING = 16
# Descriptors of the process itself: its sockets to the engine, event loops, logs, images being fetched.
_OWN_DESCRIPTORS = 64
_FEWEST, _MOST = 8, 16384
_LONGEST_BACKLOG = 1024

Phase = Literal["head", "body", "idle"]
Closed = Literal["head_timeout", "body_timeout", "unread_answer", "displaced", "no_place"]


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of one process; filled by `connection_limits`."""

    max_connections: int
    # Connections that the kernel accepts before the process does. All of them are accepted at once, before
    # the first is counted, so they need descriptors of their own.
    backlog: int
    header_timeout_s: float
    body_timeout_s: float
    idle_timeout_s: int


def connection_limits(config: GatewayConfig) -> ConnectionLimits:
    """Returns the limits of the settings, within this process's limit of open files.

    Raises ConfigError when `max_connections` is more than that allows.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = 2**20 if files == resource.RLIM_INFINITY else files
    backlog = min(max(files // 4, _FEWEST), _LONGEST_BACKLOG)
    most = max(files - _OWN_DESCRIPTORS - backlog, _FEWEST)
    wanted, workers = config.max_connections, config.workers
    if wanted is not None and wanted > most * workers:
        raise ConfigError(
            f"max_connections: {wanted} is not allowed; allowed: at most {most * workers}, as "
            f"{'this process' if workers == 1 else f'each of {workers} processes'} may open {files} files "
            "(ulimit -n)"
        )
    return ConnectionLimits(
        # Each process has its share, which the kernel fills evenly.
        max_connections=min(most, _MOST) if wanted is None else -(-wanted // workers),
        backlog=backlog,
        header_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
    )


@dataclass
class ConnectionTable:
    """Tracks a server's connections that wait for their client, longest waiting first; on its event loop."""

    limits: ConnectionLimits
    on_close: Callable[[Closed], None]  # called for each connection that the server closes early
    # Filled by `HttpConnection`. Dictionaries, as they keep the order in which connections began to wait.
    asking: dict[HttpConnection, None] = field(default_factory=dict)
    sending_body: dict[HttpConnection, None] = field(default_factory=dict)

    # Requests that arrived together with others, and how many were started in this turn of the event loop.
    _deferred: deque[Callable[[], None]] = field(default_factory=deque)
    _started: int = 0

    def begin(self, loop: asyncio.AbstractEventLoop, start: Callable[[], None]) -> None:
        """Calls `start` for a request that has arrived: now, or a few turns of the event loop later.

        If hundreds of requests that arrive together were started in one turn, the first would get its first
        byte only after the last had been read, and running streams would stall.
        """
        if self._started == 0:
            loop.call_soon(self._next_turn, loop)
        if self._started < _BEGUN_PER_TURN:
            self._started += 1
            start()
        else:
            self._deferred.append(start)

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._started = min(_BEGUN_PER_TURN, len(self._deferred))
        if self._started:
            # Scheduled first, so that requests that wait have their turn even if one of these raises.
            loop.call_soon(self._next_turn, loop)
        for _ in range(self._started):
            self._deferred.popleft()()

    def longest_waiting(self) -> HttpConnection | None:
        """Returns the connection that is closed for a new one: an upload only when there is no other."""
        return next(iter(self.asking), None) or next(iter(self.sending_body), None)


# Each costs a third of a millisecond of its turn.
_BEGUN_PER_TURN = 8
# For how long (seconds) and for how many bytes a client that was answered in the middle of its body may
# continue and pause: enough for an upload that is too large by mistake, not for an endless one.
_LINGER_S, _LINGER_PAUSE_S = 30.0, 5.0
_LINGER_BYTES = 64 * 2**20
_TOO_MUCH_FRAMING = "the request's chunked body has too much framing around its content"
_TOO_LONG = f"the request's head is longer than {MAX_HEAD_BYTES // 1024} KiB"


class LingeringTransport:
    """Wraps a transport; `close` leaves closing to the connection while that lingers."""

    def __init__(self, transport: asyncio.Transport, connection: HttpConnection) -> None:
        self._transport = transport
        self._connection = connection
        self._head = b""  # of an answer whose body follows

    def write(self, data: bytes) -> None:
        """Writes at once, except for an answer's head, which is sent with the beginning of its body."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._connection.loop.call_soon(self.flush)  # in case its body takes longer
            return
        self._transport.write(data)

    def flush(self) -> None:
        """Sends a head that is held back."""
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Returns whether the connection is closing or lingers."""
        return self._connection.lingers or self._transport.is_closing()

    def close(self) -> None:
        """Closes at once, unless the client is still sending a body that was answered."""
        self.flush()
        if not self._connection.linger(self._transport):
            self._transport.close()


class HttpConnection(HttpToolsProtocol):
    """One connection, with a deadline while the server waits for the client. `protocol_for` binds the table.

    Closing a socket whose input is not read resets the connection, and discards the answer that the client
    has not read yet: 413 in the middle of a body is such an answer. So the rest is read and dropped
    for a while (RFC 9112, 9.6).
    """

    table: ConnectionTable

    _phase: tuple[Phase | None, object] = (None, None)
    _since = 0.0  # the loop's time at which the phase began
    _received = 0  # bytes since then
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    lingers = False  # answered and closed for writing; what still arrives is dropped
    _is_lost = False
    # The part of a request that was parsed last; "between" also before the first one.
    _parsing: Literal["between", "head", "body"] = "between"
    _head_bytes = 0
    _body_bytes, _framing_bytes = 0, 0  # since the head was complete: content, and framing around it
    # The request that is being answered, or was last: `self.cycle` is the one parsed last, which may have
    # to wait for the answers to those before it.
    _active: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts the connection: within the limit, in place of the longest waiting one, or with 503."""
        super().connection_made(LingeringTransport(transport, self))  # type: ignore[arg-type]
        if len(self.connections) > self.table.limits.max_connections:
            displaced = self.table.longest_waiting()
            if displaced is None:
                self._refuse(
                    ApiError(503, "all connections are in use: try again later", retry_after_s=1), "no_place"
                )
                return
            displaced._displace()
        self._note_phase()

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the connection from the table."""
        self._is_lost = True
        self._leave()
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts the bytes that arrive, and tracks which part of a request they belong to."""
        self._received += len(data)
        if self.lingers:
            if self._received > _LINGER_BYTES:
                self._end_lingering()
            return
        if self.transport.is_closing():  # what came was no HTTP and was answered: the parser has ended
            return
        was_body, body_bytes = self._parsing == "body", self._body_bytes
        if not was_body:
            self._head_bytes += len(data)
        super().data_received(data)
        if was_body and self._parsing == "body":
            self._framing_bytes += len(data) - (self._body_bytes - body_bytes)
        if not self.transport.is_closing():
            if self._parsing == "head" and self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(_TOO_LONG)
            elif self._framing_bytes > MAX_HEAD_BYTES + _FRAMING * self._body_bytes:
                self.send_400_response(_TOO_MUCH_FRAMING)
        self._note_phase()

    def on_message_begin(self) -> None:
        """Notes the first byte of a request."""
        self._parsing, self._head_bytes = "head", 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Notes that the head is complete and its request may run."""
        self._parsing = "body"
        self._body_bytes = self._framing_bytes = 0
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes one header. Those that follow a chunked body are dropped: the request runs, and does not read
        them."""
        if self._parsing != "body":
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Takes a piece of the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Notes that the whole request has arrived."""
        self._parsing = "between"
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        begin = partial(super()._start_asgi_task, cycle, app)
        self.table.begin(self.loop, begin)

    def linger(self, transport: asyncio.Transport) -> bool:
        """Returns whether the client still sends a body and is given time to read its answer."""
        if self.lingers or self._is_lost or transport.is_closing():
            return self.lingers and not self._is_lost
        was_answered = self._active is not None and self._active.response_complete
        if self._parsing != "body" or not was_answered or not transport.can_write_eof():
            return False
        self._leave()
        self.lingers = True
        self.table.asking[self] = None  # it may be closed for a new one
        transport.write_eof()
        if self.flow.read_paused:
            self.flow.resume_reading()
        self._since, self._received = self.loop.time(), 0
        self._deadline = self.loop.call_later(_LINGER_PAUSE_S, self._linger_on, self._received)
        return True

    def _linger_on(self, received: int) -> None:
        """Keeps lingering while more arrives."""
        if self._received == received or self.loop.time() - self._since > _LINGER_S:
            self._end_lingering()
            return
        self._deadline = self.loop.call_later(_LINGER_PAUSE_S, self._linger_on, self._received)

    def _end_lingering(self) -> None:
        self._leave()
        self.transport.abort()

    def shutdown(self) -> None:
        """Closes the connection when the process ends."""
        if self.lingers:
            self.transport.abort()
        else:
            super().shutdown()

    def on_response_complete(self) -> None:
        """Waits for the next request; uvicorn closes the connection after `idle_timeout_s`."""
        super().on_response_complete()
        self._note_phase()

    def pause_writing(self) -> None:
        """Notes that the client does not read; it has `idle_timeout_s` to continue."""
        super().pause_writing()
        if self._unread is None:
            timeout_s = self.table.limits.idle_timeout_s
            self._unread = self.loop.call_later(timeout_s, self._drop, "unread_answer")

    def resume_writing(self) -> None:
        """Notes that the client reads again."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """Refuses what is not HTTP, in the shape of all errors."""
        self._answer_and_close(ApiError(400, msg, code="invalid_http"))

    def _where(self) -> Phase | None:
        """Returns the phase that waits for the client; None: the request is complete, or it is closing."""
        if self.transport.is_closing():
            return None
        if self._active is not None and not self._active.response_complete:
            return "body" if self._active.more_body else None
        if self._parsing == "body":
            return "body"  # answered before all of it had arrived
        return "idle" if self._active is not None and self._parsing == "between" else "head"

    def _note_phase(self) -> None:
        """Starts the clock of a new phase. Each pipelined request has its own."""
        if self.lingers:
            return
        phase = self._where()
        if (phase, self._active) == self._phase:
            return
        self._leave()
        self._phase, self._since, self._received = (phase, self._active), self.loop.time(), 0
        if phase is None:
            return
        (self.table.sending_body if phase == "body" else self.table.asking)[self] = None
        limits = self.table.limits
        if phase != "idle":
            seconds = limits.body_timeout_s if phase == "body" else limits.header_timeout_s
            self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _leave(self) -> None:
        """Ends the wait for the rest of a request."""
        self._phase = (None, None)
        self.table.asking.pop(self, None)
        self.table.sending_body.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        """Ends a phase whose time is over; a body that still arrives fast enough gets more time."""
        self._deadline = None
        limits = self.table.limits
        if self._phase[0] == "head":
            message = f"the request's head did not arrive within {limits.header_timeout_s:g} s"
            self._refuse(ApiError(408, message, code="request_timeout"), "head_timeout")
            return
        allowed_s = limits.body_timeout_s + self._received / MIN_BODY_BYTES_PER_S
        left_s = self._since + allowed_s - self.loop.time()
        if self.flow.read_paused:  # the server itself has paused reading
            left_s = max(left_s, 1.0)
        if left_s > 0:
            self._deadline = self.loop.call_later(left_s, self._on_deadline)
            return
        message = (
            f"the request's body did not arrive within {limits.body_timeout_s:g} s, and a second more for "
            f"each {MIN_BODY_BYTES_PER_S // 1024} KiB"
        )
        self._refuse(ApiError(408, message, code="request_timeout"), "body_timeout")

    def _refuse(self, error: ApiError, reason: Closed) -> None:
        """Answers with the error, unless the client sent nothing or was answered before it had sent all."""
        self.table.on_close(reason)
        never_spoke = reason == "head_timeout" and not self._received
        was_answered = reason == "body_timeout" and self._has_begun_to_answer()
        self._leave()
        self.connections.discard(self)
        if never_spoke or was_answered:
            self.transport.close()
        else:
            self._answer_and_close(error)

    def _answer_and_close(self, error: ApiError) -> None:
        """Sends the error, unless another answer is being sent, and closes."""
        active = self._active
        if active is None or not active.response_started or active.response_complete:
            if active is not None:
                # The application's answer to half a request is no longer sent.
                active.disconnected = True
                active.message_event.set()
            self.transport.write(_raw_answer(error))
        self.transport.close()

    def _has_begun_to_answer(self) -> bool:
        return self._active is not None and self._active.response_started

    def _displace(self) -> None:
        self._drop("displaced")

    def _drop(self, reason: Closed) -> None:
        """Closes the connection at once, without an answer."""
        self.table.on_close(reason)
        self._leave()
        self.connections.discard(self)
        self.transport.abort()


def _raw_answer(error: ApiError) -> bytes:
    """Returns a complete HTTP answer, for errors outside the application."""
    body = json.dumps(error.body()).encode()
    head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", "Content-Type: application/json"]
    head += [f"{name}: {value}" for name, value in error.headers().items()]
    head += [f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join([*head, "", ""]).encode() + body


def protocol_for(bound: ConnectionTable) -> type[asyncio.Protocol]:
    """Returns the protocol class for uvicorn, which makes one object of it per connection."""

    class Connection(HttpConnection):
        table = bound

    return Connection
