"""`moebius sleep`, `wake` and `reload`: what a running server's models have in memory."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import urlencode

import typer

from app.access_options import Access, with_access
from app.cli_options import GatewayServer
from app.server_address import server_url

_Model = Annotated[str, typer.Option("--model", help="Of several models, which [default: all, or the first]")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""

    @app.command()
    @with_access
    def sleep(
        server: GatewayServer = "",
        model: _Model = "",
        force: Annotated[bool, typer.Option("--force", help="End running requests with an error")] = False,
        *,
        access: Access,
    ) -> None:
        """Give back a server's GPU memory. Experts stay in RAM.

        Running requests are waited for. The next request wakes it, or `moebius wake`.
        """
        _post(server, "/sleep", {"mode": "abort" if force else "wait", "model": model}, access, "asleep")

    @app.command()
    @with_access
    def wake(
        server: GatewayServer = "",
        model: _Model = "",
        *,
        access: Access,
    ) -> None:
        """Wake a sleeping server. Returns once its model is loaded."""
        _post(server, "/wake_up", {"model": model}, access, "awake")

    @app.command()
    @with_access
    def reload(
        server: GatewayServer = "",
        model: _Model = "",
        *,
        access: Access,
    ) -> None:
        """Read a model's changed files again. For servers of a file with `models`.

        Running requests end with the old weights, later ones wait for the new ones.
        """
        _post(server, "/reload", {"model": model}, access, "reloaded")


def _post(server: str, path: str, query: dict[str, str], access: Access, done: str) -> None:
    """Prints what it is and after how many seconds, once the server has answered. Raises UserError."""
    server = server_url(server)
    client, begin = access.client(server), time.monotonic()
    try:
        client.post_json(f"{path}?{urlencode({name: value for name, value in query.items() if value})}")
    finally:
        client.close()
    print(f"{server}: {done} after {time.monotonic() - begin:.1f} s")
