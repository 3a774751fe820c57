"""HTTPS: secures connections before they become HTTP, with the certificate files' present contents.

The event loop's own TLS (`create_server(ssl=…)`) would read the certificate once, and would not report
which client failed, or why.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, ClassVar

import structlog

from gateway.transport.connections import ConnectionLimits
from moebius.config import MoebiusConfig
from moebius.network.tls import RenewedFiles, http_files

logger = structlog.get_logger(__name__)
# Seconds between two log lines about clients of one address; and addresses that are remembered.
REPORT_EVERY_S = 60.0
_MAX_ADDRESSES = 1024
# OpenSSL's terms, and those that operators know.
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client showed no certificate (http_client_ca_file)",
    "HTTP_REQUEST": "the client speaks plain HTTP",
    "WRONG_VERSION_NUMBER": "the client does not speak TLS",
    "TLSV1_ALERT_UNKNOWN_CA": "the client does not know the CA of http_cert_file",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the client refuses the certificate of http_cert_file",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the client says that the certificate of http_cert_file has expired",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the client refuses the certificate of http_cert_file",
}

ProtocolFactory = Callable[..., asyncio.Protocol]


class HttpsContext:
    """Provides the TLS context for the present contents of the files."""

    def __init__(self, files: RenewedFiles) -> None:
        self._files = files
        self._generation = files.generation
        self._context = self._made()

    def current(self) -> ssl.SSLContext:
        """Returns the context, rebuilt when the files have changed."""
        self._files.current()
        if self._generation != self._files.generation:
            self._generation = self._files.generation
            try:
                self._context = self._made()
            except (OSError, ssl.SSLError) as error:  # replaced again during the read
                logger.warning("the certificate stays as it was", reason=str(error))
        return self._context

    def _made(self) -> ssl.SSLContext:
        files, context = self._files.files, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(files.certificate, files.key)
        if files.ca:
            context.load_verify_locations(files.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class FailedHandshakes:
    """Logs failed handshakes with their reason, once a minute per address; counts all of them."""

    def __init__(self, on_failed: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`on_failed` gets the short name of each failure's reason."""
        self._on_failed = on_failed
        self._clock = clock
        self._reported: dict[str, float] = {}
        self._left_out = 0

    def note(self, client: str, error: BaseException) -> None:
        """Notes a failed handshake with the client at this address."""
        self._on_failed("tls_handshake")
        if isinstance(error, ConnectionError | EOFError):
            logger.debug("a client left before the TLS handshake had ended", client=client)
            return
        now = self._clock()
        if now - self._reported.get(client, -REPORT_EVERY_S) < REPORT_EVERY_S:
            self._left_out += 1
            return
        self._reported.pop(client, None)
        self._reported[client] = now
        if len(self._reported) > _MAX_ADDRESSES:
            del self._reported[next(iter(self._reported))]
        left_out, self._left_out = self._left_out, 0
        more = {"lines_left_out": left_out} if left_out else {}
        logger.warning("TLS handshake failed", client=client, reason=failure_words(error), **more)


def failure_words(error: BaseException) -> str:
    """Returns why a handshake failed, for an operator."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or str(error)
        return _REASONS.get(reason, reason.replace("_", " ").lower())
    if isinstance(error, TimeoutError):
        return "it took too long"
    return str(error) or type(error).__name__


class TlsAcceptor(asyncio.Protocol):
    """A new connection until it is secured: passes its socket to a handshake, then to HTTP."""

    # All running handshakes of the process.
    handshakes: ClassVar[set[asyncio.Task[None]]] = set()

    def __init__(
        self,
        protocol: Callable[[], asyncio.Protocol],
        context: HttpsContext,
        limits: ConnectionLimits,
        failed: FailedHandshakes,
    ) -> None:
        self._protocol = protocol
        self._context = context
        self._limits = limits
        self._failed = failed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the socket over before anything is read."""
        address = transport.get_extra_info("peername")
        client = str(address[0]) if address else "unknown"
        connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        connection.setblocking(False)
        transport.abort()  # type: ignore[attr-defined]
        if len(self.handshakes) >= self._limits.backlog:
            connection.close()
            self._failed.note(client, OSError("too many handshakes at once"))
            return
        task = asyncio.get_running_loop().create_task(self._secure(connection, client))
        self.handshakes.add(task)
        task.add_done_callback(self.handshakes.discard)

    async def _secure(self, connection: socket.socket, client: str) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._context.current(),
                ssl_handshake_timeout=self._limits.header_timeout_s,
            )
        except (OSError, EOFError) as error:  # ssl.SSLError and TimeoutError are OSErrors
            self._failed.note(client, error)


def secured(
    protocol: type[asyncio.Protocol],
    config: MoebiusConfig,
    limits: ConnectionLimits,
    on_failed: Callable[[str], None],
) -> ProtocolFactory:
    """Returns `protocol`, within TLS if the settings have a certificate.

    `on_failed` is called for each handshake that fails. Raises ConfigError for files that cannot be used.
    """
    files = http_files(config.security)
    if files is None:
        return protocol
    context, failed = HttpsContext(RenewedFiles(files)), FailedHandshakes(on_failed)

    def accept(**arguments: Any) -> TlsAcceptor:
        return TlsAcceptor(lambda: protocol(**arguments), context, limits, failed)

    return accept
