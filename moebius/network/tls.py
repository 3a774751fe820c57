"""TLS between processes: certificate files, checked by name, read again when they change.

`configure_tls` is called once at the start of every process, like `configure_logging`; `grpc_channels` opens
channels and ports accordingly. A connection that exists goes on with what it was opened with: a renewed
certificate ends no call.

Files may be cert-manager's `tls.crt`, `tls.key` and `ca.crt`, which a kubelet replaces by moving the symlink
`..data`: what counts is where a path leads.
"""

from __future__ import annotations

import datetime
import os
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from moebius.config import SecurityConfig
from moebius.errors import ConfigError

if TYPE_CHECKING:
    import grpc
    from cryptography.x509 import Certificate

_log = structlog.get_logger(__name__)
# Files are looked at again after so long, seconds; whether a certificate soon expires is said from then on.
LOOK_EVERY_S = 1.0
SOON = datetime.timedelta(days=7)
# What OpenSSL calls things that operators know by another name.
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the other showed no certificate",
    "WRONG_VERSION_NUMBER": "the other does not speak TLS (grpc_tls)",
    "RECORD_LAYER_FAILURE": "the other does not speak TLS (grpc_tls)",
    "HTTP_REQUEST": "the other speaks plain HTTP",
    "TLSV1_ALERT_UNKNOWN_CA": "the other does not know the CA of this process's certificate (grpc_cert_file)",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the other wants a certificate, and grpc_cert_file is empty",
}


@dataclass(frozen=True)
class CertificateFiles:
    """Paths of one use of TLS; empty: there is none. Filled by `grpc_files` and `http_files`."""

    certificate: str
    key: str
    ca: str
    # Begins the names of the settings in messages: "grpc" or "http".
    prefix: str
    # Whether the certificate has to be signed by one of `ca`, as everybody else will check it by that.
    is_own_ca: bool = False

    @property
    def setting_of_ca(self) -> str:
        """The name of the setting that `ca` comes from."""
        return "http_client_ca_file" if self.prefix == "http" else "grpc_ca_file"

    def identity(self) -> tuple[object, ...]:
        """Returns what changes when a file, or what a symlink leads to, is replaced."""
        return tuple(_identity(path) for path in (self.certificate, self.key, self.ca) if path)


def _identity(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class Credentials:
    """Contents of the files, PEM; empty where there is no file. Filled by `read_credentials`."""

    certificate: bytes
    key: bytes
    ca: bytes
    # Whose certificate it is and who issued it; empty: there is none.
    subject: str
    # When the certificate, or one of its chain, expires; None: there is no certificate.
    not_after: datetime.datetime | None


def grpc_files(settings: SecurityConfig) -> CertificateFiles:
    """The files of gRPC. Raises ConfigError when one is missing in the settings."""
    files = CertificateFiles(
        settings.grpc_cert_file,
        settings.grpc_key_file,
        settings.grpc_ca_file,
        "grpc",
        is_own_ca=settings.grpc_tls == "mutual",
    )
    wanted = [("grpc_ca_file", files.ca)]
    if settings.grpc_tls == "mutual" or files.certificate or files.key:
        wanted += [("grpc_cert_file", files.certificate), ("grpc_key_file", files.key)]
    for name, path in wanted:
        if not path:
            raise ConfigError(f"{name} is empty, but grpc_tls is {settings.grpc_tls!r}: it needs a PEM file")
    return files


def http_files(settings: SecurityConfig) -> CertificateFiles | None:
    """Returns the files of the HTTP server; None: plain text. Raises ConfigError for half of a pair."""
    files = CertificateFiles(
        settings.http_cert_file, settings.http_key_file, settings.http_client_ca_file, "http"
    )
    if not (files.certificate or files.key or files.ca):
        return None
    for name, path in (("http_cert_file", files.certificate), ("http_key_file", files.key)):
        if not path:
            raise ConfigError(f"{name} is empty, but other files of HTTPS are given: it needs a PEM file")
    return files


def read_credentials(files: CertificateFiles) -> Credentials:
    """Returns the files' contents.

    Raises ConfigError naming setting, file and reason: it cannot be read, is no PEM, has expired or is not
    valid yet, the key is that of another certificate, or the certificate is signed by another CA.
    """
    certificate = _read(f"{files.prefix}_cert_file", files.certificate)
    key = _read(f"{files.prefix}_key_file", files.key)
    ca = _read(files.setting_of_ca, files.ca)
    authorities = _certificates(files.setting_of_ca, files.ca, ca) if ca else []
    chain = _certificates(f"{files.prefix}_cert_file", files.certificate, certificate) if certificate else []
    if chain:
        _check_key(files, key, chain[0])
        if files.is_own_ca and not _is_signed(chain, authorities):
            raise ConfigError(
                f"{files.prefix}_cert_file: the certificate in {files.certificate} "
                f"({_name(chain[0])}, issued by {chain[0].issuer.rfc4514_string()}) is not signed by a CA of "
                f"{files.setting_of_ca} ({files.ca})"
            )
    ends = [one.not_valid_after_utc for one in chain]
    subject = f"{_name(chain[0])}, issued by {chain[0].issuer.rfc4514_string()}" if chain else ""
    return Credentials(certificate, key, ca, subject, min(ends, default=None))


def _read(setting: str, path: str) -> bytes:
    if not path:
        return b""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from None
    if not content.strip():
        raise ConfigError(f"{setting}: {path} is empty; it has to be a PEM file")
    return content


def _certificates(setting: str, path: str, content: bytes) -> list[Certificate]:
    """Returns all of a PEM file, each valid now."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(content)
    except ValueError:
        raise ConfigError(f"{setting}: {path} has no certificate in PEM") from None
    now = datetime.datetime.now(datetime.UTC)
    for one in found:
        if one.not_valid_after_utc < now:
            raise ConfigError(
                f"{setting}: the certificate in {path} ({_name(one)}) expired at {one.not_valid_after_utc}"
            )
        if one.not_valid_before_utc > now:
            begin = one.not_valid_before_utc
            raise ConfigError(
                f"{setting}: the certificate in {path} ({_name(one)}) is not valid before {begin}"
            )
    return found


def _check_key(files: CertificateFiles, key: bytes, certificate: Certificate) -> None:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    setting = f"{files.prefix}_key_file"
    try:
        loaded = load_pem_private_key(key, password=None)
    except TypeError:
        raise ConfigError(f"{setting}: {files.key} is encrypted; allowed: a key without a password") from None
    except Exception:  # ValueError, or UnsupportedAlgorithm
        raise ConfigError(f"{setting}: {files.key} has no private key in PEM") from None
    if loaded.public_key() != certificate.public_key():
        raise ConfigError(
            f"{setting}: {files.key} is not the key of the certificate in {files.certificate} "
            f"({_name(certificate)})"
        )


def _is_signed(chain: Sequence[Certificate], authorities: Sequence[Certificate]) -> bool:
    """Returns whether the first of `chain` leads to one of `authorities`, through others of the chain."""
    current, known = chain[0], list(chain[1:])
    for _ in range(len(chain)):
        if current in authorities or any(_issued(current, one) for one in authorities):
            return True
        issuer = next((one for one in known if _issued(current, one)), None)
        if issuer is None:
            return False
        current = issuer
    return False


def _issued(certificate: Certificate, issuer: Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _name(certificate: Certificate) -> str:
    return certificate.subject.rfc4514_string() or "without a subject"


# All of this process, as long as something uses them.
_in_use: weakref.WeakSet[RenewedFiles] = weakref.WeakSet()


def certificate_ends() -> dict[str, datetime.datetime]:
    """Returns when the certificates that this process shows expire, by their use ("grpc", "http"); of several
    for one use the earliest time."""
    ends: dict[str, datetime.datetime] = {}
    for files in tuple(_in_use):
        not_after, use = files.current().not_after, files.files.prefix
        if not_after is not None:
            ends[use] = min(not_after, ends.get(use, not_after))
    return ends


class RenewedFiles:
    """The credentials of some files, as they are now. Any thread may ask.

    Files that changed for the worse (half written, expired) leave what was there before in use; one log line
    says so.
    """

    def __init__(self, files: CertificateFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads them. Raises ConfigError."""
        self.files = files
        self.generation = 0  # counts the changes
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = files.identity()
        self._credentials = read_credentials(files)
        self._looked_at = clock()
        self._note_expiry()
        _in_use.add(self)

    def current(self) -> Credentials:
        """Returns what the files say, looked at again once a second."""
        with self._lock:
            if self._clock() - self._looked_at >= LOOK_EVERY_S:
                self._looked_at = self._clock()
                self._look()
            return self._credentials

    def _look(self) -> None:
        seen = self.files.identity()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._credentials = read_credentials(self.files)
        except ConfigError as error:
            _log.warning("certificates stay as they were", reason=str(error))
            return
        self.generation += 1
        not_after = self._credentials.not_after
        _log.info("certificates were read again", path=self.files.certificate, expires=str(not_after))
        self._note_expiry()

    def _note_expiry(self) -> None:
        not_after = self._credentials.not_after
        if not_after is not None and not_after - datetime.datetime.now(datetime.UTC) < SOON:
            _log.warning("a certificate expires soon", path=self.files.certificate, expires=str(not_after))


@dataclass(frozen=True)
class GrpcTls:
    """How this process speaks TLS; filled by `configure_tls`."""

    renewed: RenewedFiles
    is_mutual: bool
    server_name: str

    def target_options(self, address: str) -> list[tuple[str, Any]]:
        """Which name the server's certificate must have, where the address does not say it."""
        name = self.server_name or ("localhost" if address.startswith("unix:") else "")
        return self.named(name)

    def named(self, name: str) -> list[tuple[str, Any]]:
        """Returns the option for a server of this name; none for an empty one."""
        return [("grpc.ssl_target_name_override", name)] if name else []

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials of a client, as the files are now."""
        import grpc

        now = self.renewed.current()
        return grpc.ssl_channel_credentials(now.ca or None, now.key or None, now.certificate or None)

    def server_context(self) -> ssl.SSLContext:
        """Returns the context for connections that are not gRPC's, with the files as they are now.

        Raises ConfigError.
        """
        files = self.renewed.files
        if not files.certificate:
            raise ConfigError("grpc_cert_file is empty, but grpc_tls is 'tls': a server needs a PEM file")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        if self.is_mutual:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """Returns the context of a client: as `server_context`, and checks the server's certificate and its
        name.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        files = self.renewed.files
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(files.ca)
            if files.certificate:
                context.load_cert_chain(files.certificate, files.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the files of grpc_tls cannot be used: {error}") from None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns the credentials of a server for one port; asks for the files at each handshake."""
        import grpc

        def configuration() -> Any:
            now = self.renewed.current()
            pair = [(now.key, now.certificate)]
            return grpc.ssl_server_certificate_configuration(pair, root_certificates=now.ca or None)

        used = self.renewed.generation

        def changed() -> Any:
            nonlocal used
            self.renewed.current()
            if used == self.renewed.generation:
                return None
            used = self.renewed.generation
            return configuration()

        return grpc.dynamic_ssl_server_credentials(configuration(), changed, self.is_mutual)


def handshake_words(error: ssl.SSLError) -> str:
    """Returns why TLS with somebody fails, for an operator."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the other's certificate is refused: {error.verify_message}"
    reason = error.reason or str(error)
    return _REASONS.get(reason, reason.replace("_", " ").lower())


_active: GrpcTls | None = None


def configure_tls(settings: SecurityConfig) -> None:
    """Sets how this process's gRPC speaks, from now on. Raises ConfigError, see `read_credentials`."""
    global _active
    if settings.grpc_tls == "off":
        _active = None
        return
    renewed = RenewedFiles(grpc_files(settings))
    _active = GrpcTls(renewed, settings.grpc_tls == "mutual", settings.grpc_server_name)


def active_tls() -> GrpcTls | None:
    """Returns what `configure_tls` set; None: plain text."""
    return _active
