"""`moebius sleep` and `moebius wake`: give back the memory of a running server's GPUs, and load it again."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from app.cli_options import ApiKey, ApiKeyFile, CaFile, ClientCertFile, ClientKeyFile

_Url = Annotated[str, typer.Argument(metavar="URL", help="Gateway")]
_DEFAULT_URL = "http://127.0.0.1:8000"


def register(app: typer.Typer) -> None:
    """Adds the commands."""

    @app.command()
    def sleep(
        server: _Url = _DEFAULT_URL,
        force: Annotated[bool, typer.Option("--force", help="End running requests with an error")] = False,
        api_key: ApiKey = "",
        api_key_file: ApiKeyFile = "",
        ca_file: CaFile = "",
        client_cert_file: ClientCertFile = "",
        client_key_file: ClientKeyFile = "",
    ) -> None:
        """Give back a server's GPU memory. Experts stay in RAM.

        Running requests are waited for. The next request wakes it, or `moebius wake`.
        """
        path = f"/sleep?mode={'abort' if force else 'wait'}"
        tls = (ca_file, client_cert_file, client_key_file)
        _, seconds = _posted(server, path, (api_key, api_key_file), tls)
        print(f"{server}: asleep after {seconds:.1f} s")

    @app.command()
    def wake(
        server: _Url = _DEFAULT_URL,
        api_key: ApiKey = "",
        api_key_file: ApiKeyFile = "",
        ca_file: CaFile = "",
        client_cert_file: ClientCertFile = "",
        client_key_file: ClientKeyFile = "",
    ) -> None:
        """Wake a sleeping server. Returns once its model is loaded."""
        tls = (ca_file, client_cert_file, client_key_file)
        _, seconds = _posted(server, "/wake_up", (api_key, api_key_file), tls)
        print(f"{server}: awake after {seconds:.1f} s")


def _posted(
    server: str, path: str, key: tuple[str, str], tls: tuple[str, str, str]
) -> tuple[dict[str, Any], float]:
    """Returns what the server answers, and after how many seconds. Raises UserError."""
    from app.client import ApiClient, ClientTls
    from moebius.network.api_keys import client_key

    client, begin = ApiClient(server, client_key(*key), tls=ClientTls(*tls)), time.monotonic()
    try:
        return client.post_json(path), time.monotonic() - begin
    finally:
        client.close()
