"""`moebius models download`: a checkpoint's files into one directory, with their digests compared."""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moebius.errors import UserError

_Hub = Annotated[
    str, typer.Option("--hub", metavar="NAME", help="Model of the Hugging Face hub, which has the digests")
]
_Checksums = Annotated[
    Path | None, typer.Option(help="Their SHA-256 and names, as sha256sum writes them", metavar="FILE")
]
_Wait = Annotated[
    bool, typer.Option("--wait", help="Fetch nothing: return once another process has fetched all of it")
]

# SHA-256, or git's SHA-1.
_DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Wanted:
    """What is fetched; filled by `_listed` and `_on_hub`."""

    base_url: str
    digests: dict[str, str]  # by name of file


def download(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files are kept")],
    base_url: Annotated[str, typer.Option(help="URL of the directory that holds them")] = "",
    checksums: _Checksums = None,
    hub: _Hub = "",
    revision: Annotated[str, typer.Option(help="With --hub: branch, tag or commit; empty: main")] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="File with a bearer token for that host", metavar="FILE")
    ] = None,
    wait: _Wait = False,
) -> None:
    """Download a checkpoint's files into a directory. From the hub with --hub, else by URL and list.

    Goes on where a download broke off, and compares digests.
    """
    from app.checkpoint_download import note_complete, note_incomplete, wait_until_complete

    if bool(hub) == bool(base_url) or bool(base_url) != (checksums is not None):
        raise UserError("allowed: --hub NAME, or --base-url URL with --checksums FILE")
    if revision and not hub:
        raise UserError("--revision is of a model on the hub: it needs --hub")
    source = _source(hub, revision, base_url, checksums)
    if wait:
        wait_until_complete(
            directory, source, lambda: _say(f"{directory}: waiting until {hub or base_url} is there")
        )
        print(f"{directory}: {hub or base_url} is there")
        return
    token = _token(token_file)
    wanted = _on_hub(hub, revision, token) if hub else _listed(base_url, checksums)
    note_incomplete(directory, source)
    fetched = _fetch(directory, wanted, token)
    note_complete(directory, source)
    print(f"{directory}: {len(wanted.digests)} files, {fetched} of them fetched now")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _token(token_file: Path | None) -> str:
    try:
        return token_file.read_text(encoding="utf-8").strip() if token_file else ""
    except OSError as error:
        raise UserError(f"--token-file {token_file}: {error.strerror}") from None


def _source(hub: str, revision: str, base_url: str, checksums: Path | None) -> str:
    """Returns what tells one choice of files from another. Raises UserError."""
    if hub:
        return f"{hub}@{revision or 'main'}"
    digests = "\n".join(
        f"{digest}  {name}" for name, digest in sorted(_listed(base_url, checksums).digests.items())
    )
    return f"{base_url} {hashlib.sha256(digests.encode()).hexdigest()}"


def _listed(base_url: str, checksums: Path | None) -> Wanted:
    from app.checkpoint_download import read_checksums

    return Wanted(base_url, {} if checksums is None else read_checksums(checksums))


def _on_hub(name: str, revision: str, token: str) -> Wanted:
    """Returns the files that `serve` would download, of the commit that the revision is now. Raises
    UserError."""
    from huggingface_hub import constants

    from app.hub import chosen_files, hub_model, list_files

    named = hub_model(name)
    if named is None:
        raise UserError(f"--hub {name!r} is no name on the hub; allowed: owner/name, or owner/name:Q4_K_M")
    listing = list_files(named, revision, token)
    chosen = chosen_files(named, list(listing.sizes))
    base_url = f"{constants.ENDPOINT}/{named.repository}/resolve/{listing.commit}"
    digests = {file: listing.digests[file] for file in chosen}
    for file, digest in digests.items():
        if not _DIGEST.fullmatch(digest):
            raise UserError(
                f"{constants.ENDPOINT} lists no digest of {file}; give --base-url {base_url} and --checksums"
            )
    return Wanted(base_url, digests)


def _fetch(directory: Path, wanted: Wanted, token: str) -> int:
    """Returns how many files were fetched. Raises UserError."""
    from app.checkpoint_download import Download
    from app.demo_model import rich_progress

    with rich_progress() as progress:
        run = Download(directory, wanted.base_url, token, progress).run
        return run(
            wanted.digests, lambda: _say(f"{directory}: another process downloads there; waiting for it")
        )
