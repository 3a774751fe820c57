"""`moebius top`: figures of a running server, refreshed; `status`: once; `profile`: a trace of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.access_options import Access, with_access
from app.cli_options import GatewayServer, LiveServer, LookInterval, ReplicaIndex, SecurityFile
from app.server_address import server_url
from moebius.errors import UserError

if TYPE_CHECKING:
    from app.top.run import Source


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    _add_top(app)
    _add_status(app)
    _add_profile(app)


def _add_top(app: typer.Typer) -> None:
    @app.command()
    @with_access
    def top(
        server: LiveServer = "",
        interval: LookInterval = 2.0,
        once: Annotated[bool, typer.Option("--once", help="Print the figures of one interval, end")] = False,
        json: Annotated[bool, typer.Option("--json", help="With --once: as JSON, with all layers")] = False,
        replica: ReplicaIndex = 0,
        *,
        access: Access,
        config: SecurityFile = None,
    ) -> None:
        """Watch a running server in the terminal. q: end.

        Tokens/s, queue, KV cache, experts by layer, what limits a step.
        """
        from app.top import run

        if json and not once:
            raise UserError("--json is for one print: add --once")
        with live_source(server, config, replica, access) as source:
            if once or not sys.stdout.isatty():
                run.print_once(source, interval, json)
            else:
                run.watch(source, interval)


def _add_status(app: typer.Typer) -> None:
    @app.command()
    @with_access
    def status(
        server: GatewayServer = "",
        as_json: Annotated[bool, typer.Option("--json", help="As JSON")] = False,
        replica: ReplicaIndex = 0,
        *,
        access: Access,
    ) -> None:
        """Say whether a server is ready, and what it does, in ten lines. Exit status 1: it is not ready."""
        from app.top.status import ask, lines

        server = server_url(server)
        client = access.client(server)
        try:
            found = ask(client, replica)
        finally:
            client.close()
        print(json.dumps(found) if as_json else "\n".join(lines(found, server)))
        raise typer.Exit(0 if found["ready"] else 1)


def _add_profile(app: typer.Typer) -> None:
    @app.command()
    def profile(
        address: Annotated[
            str,
            typer.Argument(
                metavar="ADDRESS",
                help="gRPC address of gpu_service [default: that of the `moebius serve` running here]",
            ),
        ] = "",
        seconds: Annotated[float, typer.Option(min=0.01, max=60, help="How long to look")] = 3.0,
        output: Annotated[
            Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write; .gz: compressed")
        ] = Path("trace.json"),
        config: SecurityFile = None,
    ) -> None:
        """Write a trace of a running engine and its experts. For https://ui.perfetto.dev.

        GPU kernels or CPU operations, calls to expert servers, what each of their threads computes.
        """
        from app.profile import check_output, summary, write_trace
        from protos import engine_pb2 as pb

        if address.startswith(("http://", "https://")):
            raise UserError(
                "profiles are for operators and not served over HTTP: give the gRPC address of gpu_service "
                "(HOST:PORT or unix:PATH), or none on the host of `moebius serve`"
            )
        check_output(output)
        if sys.stderr.isatty():
            print(f"watching for {seconds:g} s …", file=sys.stderr, flush=True)
        with _engine(address, config) as engine:
            # A first profile of a GPU loads CUPTI, and a busy process takes its time.
            answer = engine.Profile(pb.ProfileRequest(seconds=seconds), timeout=2 * seconds + 300)
        write_trace(answer, output)
        for line in summary(answer):
            print(f"  {line}")
        print(f"{output}: open it at https://ui.perfetto.dev or chrome://tracing")


@contextmanager
def live_source(server: str, config: str | None, replica: int, access: Access) -> Iterator[Source]:
    """Yields the source of figures at a gateway's URL or port, or at an engine's gRPC address, reached as
    `config` says; empty: of the gateway that runs here.
    """
    from app.top.run import EngineSource, GatewaySource

    if not server or server.isdecimal():
        server = server_url(server)
    if not server.startswith(("http://", "https://")):
        with _engine(server, config) as engine:
            yield EngineSource(engine, server)
        return
    client = access.client(server)
    try:
        yield GatewaySource(client, replica)
    finally:
        client.close()


def _engine(address: str, config: str | None) -> AbstractContextManager[Any]:
    """Returns a stub of the engine, reached as the configuration file says, or as the system that runs here
    is.
    """
    from app.commands.experts import engine_stub
    from moebius.config.loader import load_config
    from moebius.network.tls import configure_tls

    if config is not None:
        configure_tls(load_config(config).security)
    return engine_stub(address)
