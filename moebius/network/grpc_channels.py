"""gRPC channels and ports as `tls.py` was configured, and why a TLS connection does not come about.

They are plain text while `security.grpc_tls` is off, else TLS with what the files say at the time of each
handshake. gRPC's Python reads a client's certificate once per channel: these channels open another one when
the files have changed. New calls take that, and the old one is closed when its last call has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
import structlog

from moebius.errors import ConfigError
from moebius.network.tls import GrpcTls, active_tls

_log = structlog.get_logger(__name__)
Options = Sequence[tuple[str, Any]]
_ASK_TIMEOUT_S = 3.0
# Between two lines about the same address, seconds.
REPORT_EVERY_S = 60.0


def listen(server: grpc.Server | grpc.aio.Server, address: str) -> int:
    """Binds a server that has not started; its port.

    Raises RuntimeError when the address cannot be bound, ConfigError when TLS has no certificate for it.
    """
    tls = active_tls()
    if tls is None:
        return int(server.add_insecure_port(address))
    if not tls.renewed.files.certificate:
        raise ConfigError("grpc_cert_file is empty, but grpc_tls is 'tls': a server needs a PEM file")
    return int(server.add_secure_port(address, tls.server_credentials()))


def open_channel(address: str, options: Options = ()) -> grpc.Channel:
    """Returns a channel as by `grpc.insecure_channel`, with TLS where that is configured."""
    tls = active_tls()
    if tls is None:
        return grpc.insecure_channel(address, options=list(options))
    every = [*options, *tls.target_options(address)]
    return RenewingChannel(
        address, tls, lambda: grpc.secure_channel(address, tls.channel_credentials(), options=every)
    )


def open_aio_channel(address: str, options: Options = (), server_name: str = "") -> grpc.aio.Channel:
    """Returns a channel as by `grpc.aio.insecure_channel`, with TLS where that is configured; on the running
    loop.

    `server_name`: what the certificate has to say, where the address was found by that name.
    """
    tls = active_tls()
    if tls is None:
        return grpc.aio.insecure_channel(address, options=list(options))
    every = [*options, *(tls.target_options(address) or tls.named(server_name))]
    return RenewingAioChannel(
        address, tls, lambda: grpc.aio.secure_channel(address, tls.channel_credentials(), options=every)
    )


class _Opened:
    """One channel with the certificates of one time; used by `_Renewing`."""

    def __init__(self, channel: Any, generation: int) -> None:
        self.channel = channel
        self.generation = generation
        self.calls = 0
        self.methods: dict[Any, Any] = {}


class _Renewing(ABC):
    """What both kinds of channel share: the present channel, and the calls of those before it."""

    def __init__(self, address: str, tls: GrpcTls, opener: Callable[[], Any]) -> None:
        """`opener` makes a channel with the files as they are now."""
        self._address = address
        self._tls = tls
        self._open = opener
        self._lock = threading.Lock()
        self._now = _Opened(opener(), tls.renewed.generation)
        self._retired: set[_Opened] = set()

    @abstractmethod
    def _close(self, channel: Any) -> None:
        """Closes a channel without calls."""

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """Returns what the method of gRPC's channel does."""
        return _Call(self, "unary_unary", arguments, named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """Returns what the method of gRPC's channel does."""
        return _Call(self, "unary_stream", arguments, named)

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        """Returns what the method of gRPC's channel does."""
        return _Call(self, "stream_unary", arguments, named)

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """Returns what the method of gRPC's channel does."""
        return _Call(self, "stream_stream", arguments, named)

    def _enter(self) -> _Opened:
        """Returns the present channel, with a call more."""
        self._tls.renewed.current()
        with self._lock:
            if self._now.generation != self._tls.renewed.generation:
                old, self._now = self._now, _Opened(self._open(), self._tls.renewed.generation)
                self._retired.add(old)
                self._close_unused(old)
            self._now.calls += 1
            return self._now

    def _leave(self, opened: _Opened, code: grpc.StatusCode | None) -> None:
        """A call has ended, with this status."""
        with self._lock:
            opened.calls -= 1
            self._close_unused(opened)
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            report_failed_handshake(self._address, self._tls)

    def _close_unused(self, opened: _Opened) -> None:
        if opened in self._retired and not opened.calls:
            self._retired.discard(opened)
            self._close(opened.channel)

    def _method(self, opened: _Opened, kind: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        key = (kind, arguments[0])
        if key not in opened.methods:
            opened.methods[key] = getattr(opened.channel, kind)(*arguments, **named)
        return opened.methods[key]


class _Call:
    """A method of a stub: starts its calls on the present channel, and notes their ends."""

    def __init__(
        self, channel: _Renewing, kind: str, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._channel = channel
        self._kind = kind
        self._arguments = arguments
        self._named = named
        # A synchronous call with one answer blocks until that is there.
        self._blocks = kind.endswith("_unary") and isinstance(channel, RenewingChannel)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls the same method of gRPC's."""
        return self._run("__call__", self._blocks, arguments, named)

    def future(self, *arguments: Any, **named: Any) -> Any:
        """Calls the same method of gRPC's."""
        return self._run("future", False, arguments, named)

    def with_call(self, *arguments: Any, **named: Any) -> Any:
        """Calls the same method of gRPC's."""
        return self._run("with_call", True, arguments, named)

    def _run(self, name: str, blocks: bool, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        channel = self._channel
        opened = channel._enter()
        code: grpc.StatusCode | None = None
        handed_over = False
        try:
            call = getattr(channel._method(opened, self._kind, self._arguments, self._named), name)(
                *arguments, **named
            )
            if not blocks:
                call.add_done_callback(lambda done: channel._leave(opened, _code(done)))
                handed_over = True
            return call
        except grpc.RpcError as error:
            code = error.code()
            raise
        finally:
            if not handed_over:
                channel._leave(opened, code)


def _code(call: Any) -> grpc.StatusCode | None:
    """Returns the status of a call that has ended."""
    found = call.code()
    code: grpc.StatusCode | None = _result(found) if asyncio.iscoroutine(found) else found
    return code


def _result(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns what a coroutine returns that has nothing to wait for; None: it would have waited."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    return None


class RenewingChannel(_Renewing, grpc.Channel):
    """A `grpc.Channel` of the present certificates."""

    def _close(self, channel: Any) -> None:
        # Not here: the thread that reports the end of a call is one that closing waits for.
        threading.Thread(target=channel.close, name="close-channel", daemon=True).start()

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        """Subscribes to the channel that is used now."""
        self._now.channel.subscribe(callback, try_to_connect=try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        """Unsubscribes from the channel that is used now."""
        self._now.channel.unsubscribe(callback)

    def close(self) -> None:
        """Ends all calls."""
        for opened in (self._now, *self._retired):
            opened.channel.close()

    def __enter__(self) -> RenewingChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RenewingAioChannel(_Renewing, grpc.aio.Channel):
    """A `grpc.aio.Channel` of the present certificates."""

    def _close(self, channel: Any) -> None:
        self._closing = asyncio.ensure_future(channel.close())

    async def close(self, grace: float | None = None) -> None:
        """Ends all calls, after `grace` seconds."""
        for opened in (self._now, *self._retired):
            await opened.channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Returns the state of the channel that is used now."""
        state: grpc.ChannelConnectivity = self._now.channel.get_state(try_to_connect)
        return state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits for a change of the channel that is used now."""
        await self._now.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until the channel that is used now is ready."""
        await self._now.channel.channel_ready()

    async def __aenter__(self) -> RenewingAioChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


_reported: dict[str, float] = {}
_reporting = threading.Lock()


def report_failed_handshake(address: str, tls: GrpcTls | None) -> None:
    """Logs why no TLS connection to `address` comes about, if that is why a call failed.

    `tls` None: this process speaks plain text, and the other one may not. gRPC itself only says that the
    socket was closed. Returns at once; looks in a thread, at most once a minute per address.
    """
    now = time.monotonic()
    with _reporting:
        if now - _reported.get(address, -REPORT_EVERY_S) < REPORT_EVERY_S:
            return
        _reported[address] = now

    def look() -> None:
        reason = _plain_text_problem(address) if tls is None else handshake_problem(address, tls)
        if reason:
            _log.warning("TLS handshake failed", peer=address, reason=reason)
        else:  # something else: a later failure may be one
            with _reporting:
                _reported.pop(address, None)

    threading.Thread(target=look, name="tls-report", daemon=True).start()


def tls_problem(address: str) -> str:
    """Returns why a connection fails: `handshake_problem` with the configured TLS; without, that the server
    speaks TLS where it does.
    """
    tls = active_tls()
    if tls is not None:
        return handshake_problem(address, tls)
    return _plain_text_problem(address)


def _plain_text_problem(address: str) -> str:
    return "it speaks TLS, and grpc_tls is 'off' here" if _speaks_tls(address) else ""


def _speaks_tls(address: str) -> bool:
    """Tries a handshake that accepts any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    connection = _connected(address)
    if connection is None:
        return False
    with contextlib.closing(connection), contextlib.suppress(OSError), context.wrap_socket(connection):
        return True
    return False


def handshake_problem(address: str, tls: GrpcTls) -> str:
    """Returns why a TLS handshake with `address` fails, tried once; empty: it does not, or nothing listens
    there.
    """
    files = tls.renewed.files
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    name = dict(tls.target_options(address)).get("grpc.ssl_target_name_override") or _host(address)
    try:
        context.load_verify_locations(files.ca)
        if files.certificate:
            context.load_cert_chain(files.certificate, files.key)
    except (OSError, ssl.SSLError) as error:
        return f"the files of this process cannot be used: {error}"
    connection = _connected(address)
    if connection is None:
        return ""
    with contextlib.closing(connection):
        try:
            with context.wrap_socket(connection, server_hostname=name) as secured:
                # In TLS 1.3 a server looks at the client's certificate after the client has finished; one
                # that accepts it begins to speak.
                secured.settimeout(_ASK_TIMEOUT_S)
                return "" if secured.recv(1) else _refused(tls)
        except ssl.SSLCertVerificationError as error:
            return f"the server's certificate is refused: {error.verify_message}"
        except ssl.SSLError as error:
            return f"the server refuses: {_alert(error)}"
        except TimeoutError:
            return ""
        except OSError as error:
            return f"{_refused(tls)} ({error.strerror or error})"


def _refused(tls: GrpcTls) -> str:
    """Returns the reason for servers that close without an alert, as gRPC's do."""
    shown = tls.renewed.current().subject
    if not shown:
        return "the server refuses clients without a certificate, and grpc_cert_file is empty"
    return f"the server refuses this process's certificate ({shown})"


def _alert(error: ssl.SSLError) -> str:
    """OpenSSL's words for an alert, e.g. "tlsv13 alert certificate required"."""
    return (error.reason or str(error)).replace("_", " ").lower()


def _host(address: str) -> str:
    return address.rpartition(":")[0].removeprefix("dns:").strip("/[]")


def _connected(address: str) -> socket.socket | None:
    """Returns a connection to a gRPC address (host:port or unix:path); None: nothing listens there."""
    try:
        if address.startswith("unix:"):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(_ASK_TIMEOUT_S)
            connection.connect(address.removeprefix("unix:"))
            return connection
        return socket.create_connection((_host(address), int(address.rpartition(":")[2])), _ASK_TIMEOUT_S)
    except (OSError, ValueError):
        return None
