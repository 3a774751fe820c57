"""`moebius ps`, `logs`, `stop`, `list`, `rm`: what runs on this host, and which models it has downloaded."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from app.sizes import size
from moebius.errors import UserError

_StateDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Where `serve` keeps its run file")]
_Server = Annotated[str, typer.Argument(metavar="PORT|MODEL", help="Which server [default: the only one]")]
_Name = Annotated[str, typer.Argument(metavar="NAME", help="owner/name, as `moebius list` has it")]
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    _add_systems(app)
    _add_logs(app)
    _add_models(app)


def _add_systems(app: typer.Typer) -> None:
    @app.command()
    def ps(state_dir: _StateDir = None) -> None:
        """List the servers that run here."""
        from app.supervisor.plan import default_state_dir
        from app.supervisor.running_systems import running_systems

        rows = [("MODEL", "URL", "PID", "AGE", "PROCESSES", "")]
        for system in running_systems(state_dir or default_state_dir()):
            name = system.model or system.directory.name
            facts = (str(system.pid), age(system.seconds), str(len(system.processes)))
            rows.append((name, system.url, *facts, "asleep" if system.is_sleeping else ""))
        print_table(rows)

    @app.command()
    def stop(
        server: _Server = "",
        state_dir: _StateDir = None,
    ) -> None:
        """Stop a server that runs here. Running requests may finish, as for SIGTERM."""
        from app.supervisor.plan import default_state_dir
        from app.supervisor.running_systems import chosen_system, running_systems, stop_system

        system = chosen_system(running_systems(state_dir or default_state_dir()), server)
        name = f"{system.model or system.directory.name} (pid {system.pid})"
        if not stop_system(system, lambda: print(f"waiting for {name} to end", file=sys.stderr, flush=True)):
            raise UserError(f"{name} has not ended; its log says what it waits for")
        print(f"{name} has ended")


def _add_logs(app: typer.Typer) -> None:
    @app.command()
    def logs(
        server: _Server = "",
        follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the server ends")] = False,
        tail: Annotated[
            int | None, typer.Option("--tail", "-n", min=0, metavar="N", help="Only the last N lines")
        ] = None,
        state_dir: _StateDir = None,
    ) -> None:
        """Print the log lines of a server that runs here. Its last 1 to 2 MiB are kept while it runs."""
        from app.supervisor.kept_lines import following, last_lines
        from app.supervisor.plan import default_state_dir
        from app.supervisor.running_systems import chosen_system, running_systems

        system = chosen_system(running_systems(state_dir or default_state_dir()), server)
        try:
            with last_lines(system.directory, tail) as (lines, file):
                print(*lines, sep="", end="", flush=True)
                for text in following(system.directory, file, lambda: system.has_ended) if follow else ():
                    print(text, end="", flush=True)
        except FileNotFoundError:
            raise UserError(f"{system.directory} has no log lines: another version runs there") from None


def _add_models(app: typer.Typer) -> None:
    @app.command("list")
    def list_models() -> None:
        """List the downloaded models: name, size, last use."""
        from app.cached_models import cached_models

        rows = [("NAME", "SIZE", "LAST USED", "")]
        for model in cached_models():
            note = "" if model.is_servable else "no weights that can be served"
            ago = f"{age(time.time() - model.last_used)} ago"
            rows.append((model.name, size(model.size), ago, note))
        print_table(rows)

    @app.command()
    def rm(
        name: _Name,
        yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False,
        state_dir: _StateDir = None,
    ) -> None:
        """Delete a downloaded model from the Hugging Face cache."""
        from app.cached_models import cached_models, remove_model
        from app.short_names import full_name
        from app.supervisor.plan import default_state_dir
        from app.supervisor.running_systems import running_systems

        models, name = cached_models(), full_name(name)
        found = next((model for model in models if model.name == name), None)
        if found is None:
            listed = ", ".join(model.name for model in models[:20]) or "none"
            raise UserError(f"{name!r} is not downloaded; downloaded: {listed}")
        for system in running_systems(state_dir or default_state_dir()):
            if found.directory in system.model_path.parents:  # what is damaged in memory is read again
                raise UserError(f"{name} is served at {system.url}: end that first, with moebius stop")
        if not yes and not (sys.stdin.isatty() and _agreed(f"delete {name}, {size(found.size)}?")):
            raise UserError(f"{name} was not deleted; --yes does not ask")
        remove_model(found)
        print(f"{name}: {size(found.size)} deleted")


def _agreed(question: str) -> bool:
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def age(seconds: float) -> str:
    """Returns a time in the largest unit that it fills: `40 s`, `5 min`, `3 h`, `12 d`."""
    for unit, length in (("d", _DAY), ("h", _HOUR), ("min", _MINUTE)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Prints rows of which the first is the heading, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
