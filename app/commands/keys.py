"""`moebius keys add|list|revoke`: the file of `--api-key-file`, which holds hashes of keys."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Make and revoke the API keys of a key file.", no_args_is_help=True)

KeyFile = Annotated[str, typer.Argument(metavar="FILE", help="The file that --api-key-file names")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is; in logs, too")]
Limit = Annotated[int | None, typer.Option(min=1, help="Limit of this key [default: the gateway's]")]


@app.command()
def add(
    file: KeyFile,
    name: Name,
    requests_in_flight: Limit = None,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
) -> None:
    """Make a key and print it. Only this once: the file gets its hash. A running gateway notices."""
    from moebius.network.api_keys import KeyLimits, add_key

    print(add_key(file, name, KeyLimits(requests_in_flight, requests_per_minute, tokens_per_minute)))


@app.command(name="list")
def show(file: KeyFile) -> None:
    """Names and limits of the keys."""
    from moebius.network.api_keys import read_keys

    for key in read_keys(file):
        limits = [f"{name}={value}" for name, value in vars(key.limits).items() if value is not None]
        kind = "hashed" if key.salt is not None else "readable in the file"
        print("  ".join([key.name, kind, *limits]))


@app.command()
def revoke(file: KeyFile, name: Name) -> None:
    """Take a key out of the file. A running gateway notices with the next request."""
    from moebius.network.api_keys import revoke_key

    revoke_key(file, name)
    print(f"revoked {name}")
