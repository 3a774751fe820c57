"""`moebius sleep`, `wake` and `reload`: what a running server's models have in memory."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import urlencode

import typer

from app.cli_options import ApiKey, ApiKeyFile, CaFile, ClientCertFile, ClientKeyFile, GatewayServer
from app.server_address import server_url

_Model = Annotated[str, typer.Option("--model", help="Of several models, which [default: all, or the first]")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""

    @app.command()
    def sleep(
        server: GatewayServer = "",
        model: _Model = "",
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
        tls = (ca_file, client_cert_file, client_key_file)
        mode = "abort" if force else "wait"
        server = server_url(server)
        seconds = _posted(server, "/sleep", {"mode": mode, "model": model}, (api_key, api_key_file), tls)
        print(f"{server}: asleep after {seconds:.1f} s")

    @app.command()
    def wake(
        server: GatewayServer = "",
        model: _Model = "",
        api_key: ApiKey = "",
        api_key_file: ApiKeyFile = "",
        ca_file: CaFile = "",
        client_cert_file: ClientCertFile = "",
        client_key_file: ClientKeyFile = "",
    ) -> None:
        """Wake a sleeping server. Returns once its model is loaded."""
        tls = (ca_file, client_cert_file, client_key_file)
        server = server_url(server)
        seconds = _posted(server, "/wake_up", {"model": model}, (api_key, api_key_file), tls)
        print(f"{server}: awake after {seconds:.1f} s")

    @app.command()
    def reload(
        server: GatewayServer = "",
        model: _Model = "",
        api_key: ApiKey = "",
        api_key_file: ApiKeyFile = "",
        ca_file: CaFile = "",
        client_cert_file: ClientCertFile = "",
        client_key_file: ClientKeyFile = "",
    ) -> None:
        """Read a model's changed files again. For servers of a file with `models`.

        Running requests end with the old weights, later ones wait for the new ones.
        """
        tls = (ca_file, client_cert_file, client_key_file)
        server = server_url(server)
        seconds = _posted(server, "/reload", {"model": model}, (api_key, api_key_file), tls)
        print(f"{server}: reloaded after {seconds:.1f} s")


def _posted(
    server: str, path: str, query: dict[str, str], key: tuple[str, str], tls: tuple[str, str, str]
) -> float:
    """Returns after how many seconds the server has answered. Raises UserError."""
    from app.client import ApiClient, ClientTls
    from moebius.network.api_keys import client_key

    client, begin = ApiClient(server, client_key(*key), tls=ClientTls(*tls)), time.monotonic()
    try:
        client.post_json(f"{path}?{urlencode({name: value for name, value in query.items() if value})}")
        return time.monotonic() - begin
    finally:
        client.close()
