"""`pytest --tls` (`make test-tls`): tests as they are, with mutual TLS of processes and HTTPS to clients.

Tests build their settings in many ways, and start processes of many kinds: so the defaults of the settings
are other ones, here and in every Python process that is started. HTTPS is for servers whose tests use
`https_files` or `with_https`, as most do through `running_stack` and `running_gateway`; files that speak HTTP
over their own sockets are marked `plain_http`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moebius.config import MoebiusConfig

# Where the certificates are; tells processes that are started, too.
VARIABLE = "MOEBIUS_TESTS_TLS"
ROOT = Path(__file__).resolve().parents[2]
_SITE = Path(__file__).parent / "tls_site"


class _State:
    # Whether servers that are started now speak HTTPS; set for each file.
    https = False


def change_defaults(directory: str) -> None:
    """From now on settings without a word about TLS mean mutual TLS; before `moebius.config` is imported,
    which copies the defaults."""
    assert "moebius.config" not in sys.modules
    from moebius.config.operations import SecurityConfig

    files = {"grpc_cert_file": "tls.crt", "grpc_key_file": "tls.key", "grpc_ca_file": "ca.crt"}
    defaults = {"grpc_tls": "mutual"} | {name: f"{directory}/{file}" for name, file in files.items()}
    for name, value in defaults.items():
        SecurityConfig.model_fields[name].default = value
    SecurityConfig.model_rebuild(force=True)
    assert SecurityConfig().grpc_tls == "mutual"


def switch_on(directory: Path) -> None:
    """For this process, before it has imported `moebius.config`, and those that it starts."""
    is_first = not is_on()  # else a worker of a run that has done it
    if is_first:
        _announce(directory)
    change_defaults(os.environ[VARIABLE])
    if is_first:
        _make_certificates(directory)
    follow()


def switch_on_for_others(directory: Path) -> None:
    """For the processes that this one starts; what they serve, it calls by HTTPS."""
    _announce(directory)
    _make_certificates(directory)
    use_https(True)


def follow() -> None:
    """Makes a process of tests speak as its settings say; without `--tls` nothing happens."""
    if is_on():
        from moebius.config import SecurityConfig
        from moebius.network.tls import configure_tls

        configure_tls(SecurityConfig())
        use_https(True)


@contextlib.contextmanager
def plain_grpc() -> Iterator[None]:
    """This process speaks gRPC without TLS meanwhile, as a benchmark's engine does."""
    from moebius.config import SecurityConfig
    from moebius.network.tls import configure_tls

    configure_tls(SecurityConfig(grpc_tls="off"))
    try:
        yield
    finally:
        configure_tls(SecurityConfig())


def _announce(directory: Path) -> None:
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_SITE), str(ROOT), before)))
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):  # httpx and curl; requests
        os.environ[name] = str(directory / "ca.crt")
    os.environ[VARIABLE] = str(directory)


def _make_certificates(directory: Path) -> None:
    from tests.helpers.certificates import Authority, write_secret

    authority = Authority()
    write_secret(directory, authority.issue("moebius"), authority.pem)


def is_on() -> bool:
    """Returns whether tests run with `--tls`."""
    return VARIABLE in os.environ


def use_https(wanted: bool) -> None:
    """Uses HTTPS for servers that are started from now on, if tests run with `--tls` at all."""
    _State.https = wanted and is_on()


def scheme() -> str:
    """`https` or `http`."""
    return "https" if _State.https else "http"


def https_files() -> dict[str, str]:
    """Returns the settings of HTTPS, if that is on."""
    directory = os.environ.get(VARIABLE, "")
    found = {"http_cert_file": f"{directory}/tls.crt", "http_key_file": f"{directory}/tls.key"}
    return found if _State.https else {}


def with_https(config: MoebiusConfig) -> MoebiusConfig:
    """Returns the same settings, with HTTPS if that is on and the settings have no word about it."""
    if config.security.http_cert_file:
        return config
    security = config.security.model_copy(update=https_files())
    return config.model_copy(update={"security": security})
