"""`moebius show MODEL`: what a model is, read from headers alone."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from app.hub import HubModel, Listing
    from app.model_summary import ModelSummary


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command()
    def show(
        model: Annotated[
            str,
            typer.Argument(
                metavar="MODEL", help="Directory, GGUF file, or name on the hub (owner/name, or short)"
            ),
        ],
        as_json: Annotated[bool, typer.Option("--json", help="As JSON")] = False,
        revision: Annotated[str, typer.Option(help="Branch, tag or commit; empty: main")] = "",
        offline: Annotated[bool, typer.Option("--offline", help="Never ask the Hugging Face hub")] = False,
    ) -> None:
        """Say what a model is: parameters, types of tensors, licence.

        From headers alone: of a model on the hub no weights are downloaded.
        """
        from rich.console import Console

        from app.cli_options import log_warnings_only
        from app.model_summary import print_summary, to_json

        log_warnings_only("show")
        summary = _summary(model, revision, offline)
        if as_json:
            print(json.dumps(to_json(summary)))
        else:
            print_summary(summary, Console(highlight=False))


def _summary(given: str, revision: str, offline: bool) -> ModelSummary:
    """Returns what is known of a model, on the hub by its headers there, else by its files here.

    Raises UserError, CheckpointError or ModelConfigError.
    """
    from app.commands.models import with_checkpoint
    from app.hub import HubUnreachable, hub_model, is_offline, list_files
    from app.model_summary import stored_tensors, summarise
    from moebius.config.loader import load_config

    named = hub_model(given)
    if named is not None and not offline and not is_offline():
        with contextlib.suppress(HubUnreachable):
            return _on_hub(given, named, list_files(named, revision), revision)
    config = load_config(flags={"model": given, "revision": revision, "offline": offline})
    path = Path(with_checkpoint(config).model.model)
    return summarise(given, path, stored_tensors(path))


def _on_hub(given: str, named: HubModel, listing: Listing, revision: str) -> ModelSummary:
    """Returns a summary of what a repository has, of several quantisations as `serve` would choose.

    Raises UserError, CheckpointError or ModelConfigError.
    """
    from app.hub import HubModel, chosen_files, fetch_model, has_gguf_alone, quantisations
    from app.hub_headers import fetch_headers, safetensors_headers
    from app.model_summary import StoredTensor, stored_tensors, summarise

    names = list(listing.sizes)
    if has_gguf_alone(named, names):
        chosen = chosen_files(named, names)
        kind = next(kind for kind, files in quantisations(names).items() if files == chosen)
        with tempfile.TemporaryDirectory(prefix="moebius-show-") as directory:
            files = fetch_headers(HubModel(named.repository, kind), listing, Path(directory))[kind]
            return summarise(given, files[0], stored_tensors(files[0]), listing.licence)
    path = fetch_model(named, revision, False, lambda what, done, total: None, needs_weights=False)
    found = safetensors_headers(named, listing)
    return summarise(given, path, (StoredTensor(*each) for each in found), listing.licence)
