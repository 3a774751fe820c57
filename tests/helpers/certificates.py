"""Certificates of a CA that exists for one test, in cert-manager's layout."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from moebius.config import SecurityConfig

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, PEM; filled by `Authority`."""

    certificate: bytes
    key: bytes


class Authority:
    """A CA; `issue` signs."""

    def __init__(self, name: str = "test CA") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._builder(self._name, self._key.public_key(), -1, 10)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.pem = made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, begin: float, end: float
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begin * _DAY)
            .not_valid_after(now + end * _DAY)
        )

    def issue(
        self,
        name: str,
        begin: float = -1,
        end: float = 10,
        hosts: tuple[str, ...] = ("localhost",),
        addresses: tuple[str, ...] = ("127.0.0.1",),
    ) -> Pair:
        """For these hosts and addresses, valid from `begin` to `end` days from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = [x509.DNSName(host) for host in hosts]
        names += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        made = self._builder(subject, key.public_key(), begin, end)
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = made.sign(self._key, hashes.SHA256())
        return Pair(
            certificate.public_bytes(Encoding.PEM),
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )


def write_secret(directory: Path, pair: Pair, ca: bytes) -> None:
    """`tls.crt`, `tls.key` and `ca.crt` as a kubelet shows a secret; a new version comes at once."""
    version = directory / f"..version-{len(list(directory.glob('..version-*')))}"
    version.mkdir(parents=True)
    for name, content in (("tls.crt", pair.certificate), ("tls.key", pair.key), ("ca.crt", ca)):
        (version / name).write_bytes(content)
        link = directory / name
        if not link.is_symlink():
            link.symlink_to(Path("..data") / name)
    fresh = directory / "..data_tmp"
    fresh.symlink_to(version.name)
    fresh.rename(directory / "..data")


def grpc_security(directory: Path, mode: str = "mutual") -> SecurityConfig:
    """gRPC with the files of `write_secret`."""
    return SecurityConfig.model_validate(
        {
            "grpc_tls": mode,
            "grpc_cert_file": str(directory / "tls.crt"),
            "grpc_key_file": str(directory / "tls.key"),
            "grpc_ca_file": str(directory / "ca.crt"),
        }
    )


def grpc_flags(directory: Path) -> list[str]:
    """Returns the same as flags of `moebius serve`."""
    security = grpc_security(directory).model_dump()
    wanted = ("grpc_tls", "grpc_cert_file", "grpc_key_file", "grpc_ca_file")
    return [part for name in wanted for part in (f"--{name.replace('_', '-')}", str(security[name]))]
