"""`moebius translate -- vllm serve …`: a command line of another server in our options."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

_Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="COMMAND…",
        help="Another server's command line, after --; without one it is read from stdin, as by a shell",
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
    def translate(words: _Words = None) -> None:
        """Print what another server's command line is here. moebius translate -- vllm serve …

        Knows vllm, sglang, kt, llama-server and ollama, the variables before them, and docker run of their
        images. What differs is listed on stderr, and the exit status is 1 then.
        """
        from app.commands.serve import serve_options
        from app.other_commands import translate_command
        from moebius.errors import UserError
        from moebius.other_servers.translation import servers_of_host

        given = list(words or ())
        try:
            given = given or shlex.split(sys.stdin.read().replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise UserError(f"stdin is no command line: {error}") from None
        if not given:
            raise UserError("COMMAND is missing: moebius translate -- vllm serve MODEL --tp 2")
        ours, found = translate_command(given, serve_options(), servers_of_host)
        print(shlex.join(ours))
        for text in found.notes:
            print(f"note: {text}", file=sys.stderr)
        for text in found.differences:
            print(f"differs: {text}", file=sys.stderr)
        if found.differences:
            raise typer.Exit(1)
