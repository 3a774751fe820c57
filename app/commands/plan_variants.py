"""Which models `moebius plan` is asked about: one, or every quantisation of a directory or repository."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from app.commands.models import DEMO, with_checkpoint
from app.hub import (
    HubModel,
    HubUnreachable,
    Listing,
    has_gguf_alone,
    hub_model,
    is_offline,
    list_files,
)
from app.hub_headers import fetch_headers
from app.planning.comparison import Variant
from moebius.checkpoint.gguf.files import gguf_models, is_gguf
from moebius.config import MoebiusConfig


@contextlib.contextmanager
def variants(config: MoebiusConfig) -> Iterator[list[Variant]]:
    """Yields the models; of those on the hub only what describes them is read, which is gone afterwards.

    Raises UserError or CheckpointError.
    """
    given = config.model.model
    named = hub_model(given) if given != DEMO else None
    listing = None if named is None else _listing(named, config)
    if named is not None and listing is not None and has_gguf_alone(named, list(listing.sizes)):
        with tempfile.TemporaryDirectory(prefix="moebius-plan-") as directory:
            kinds = fetch_headers(named, listing, Path(directory))
            yield [
                _variant(config, f"{named.repository}:{kind}" if kind else given, kind, files)
                for kind, files in kinds.items()
            ]
        return
    path = Path(given).expanduser()
    models = gguf_models(path) if path.is_dir() and is_gguf(path) else ()
    if len(models) > 1:
        yield [_variant(config, str(files[0]), files[0].name, files) for files in models]
        return
    yield [Variant("", config, with_checkpoint(config, needs_weights=False), 0)]


def _listing(named: HubModel, config: MoebiusConfig) -> Listing | None:
    """Returns what the hub has under that name; None where it is not asked or does not answer.

    Raises UserError.
    """
    if config.model.offline or is_offline():
        return None
    try:
        return list_files(named, config.model.revision)
    except HubUnreachable:
        return None


def _variant(config: MoebiusConfig, asked: str, name: str, files: Sequence[Path]) -> Variant:
    def with_model(model: str) -> MoebiusConfig:
        return config.model_copy(update={"model": config.model.model_copy(update={"model": model})})

    nbytes = sum(file.stat().st_size for file in files)
    return Variant(name, with_model(asked), with_checkpoint(with_model(str(files[0]))), nbytes)
