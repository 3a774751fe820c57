"""`moebius update`, `disk`: another version in the place of this one, and what lies where."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from app.sizes import size
from moebius.errors import UserError


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    _add_update(app)
    _add_disk(app)


def _add_update(app: typer.Typer) -> None:
    @app.command()
    def update(
        wheel: Annotated[
            str,
            typer.Argument(
                metavar="WHEEL", help="File of another version, with [gpu] for an extra", show_default=False
            ),
        ] = "",
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Say what runs here and what would be run; run nothing")
        ] = False,
    ) -> None:
        """Install another version, by what installed this one. Never touches a clone, models or settings."""
        from app.installation import installation, read_wheel, update_command
        from app.supervisor.plan import default_state_dir
        from app.supervisor.running_systems import running_systems

        found = installation()
        chosen = read_wheel(wheel) if wheel else None
        command = update_command(found, chosen)
        print(f"{found}; {shlex.join(command)}", file=sys.stderr, flush=True)
        if dry_run:
            return
        running = [system.model or system.directory.name for system in running_systems(default_state_dir())]
        if running:
            raise UserError(f"stop what runs first, with moebius stop: {', '.join(running)}")
        if shutil.which(command[0]) is None:
            raise UserError(f"{command[0]} is not on the PATH, and it installed this version")
        raise typer.Exit(subprocess.run(command, check=False).returncode)


def _add_disk(app: typer.Typer) -> None:
    @app.command()
    def disk(
        as_json: Annotated[bool, typer.Option("--json", help="As JSON, sizes in bytes")] = False,
        state_dir: Annotated[
            Path | None, typer.Option(metavar="DIR", help="Where `serve` keeps its run file")
        ] = None,
    ) -> None:
        """List what is kept on this host, and what removes it."""
        from app.commands.daily import print_table
        from app.disk_use import disk_places
        from app.supervisor.plan import default_state_dir

        places = disk_places(state_dir or default_state_dir())
        if as_json:
            found = [
                {"what": p.what, "path": str(p.path), "bytes": p.nbytes, "remove": p.remedy} for p in places
            ]
            print(json.dumps(found))
            return
        rows = [("SIZE", "WHAT", "WHERE", "REMOVED BY")]
        rows += [(size(place.nbytes), place.what, str(place.path), place.remedy) for place in places]
        print_table([*rows, (size(sum(place.nbytes for place in places)), "sum", "", "")])
