"""Models by name: files of a checkpoint on the Hugging Face hub, downloaded once into its shared cache.

Endpoint, cache and token are where the ecosystem keeps them: HF_ENDPOINT, HF_HOME, HF_TOKEN and the token
that `hf auth login` stored; HF_HUB_OFFLINE stands for `--offline`. What broke off is continued by the same
command.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.short_names import full_name
from app.sizes import size
from moebius.errors import UserError

# `owner/name`, of GGUF files with the one that is wanted: `owner/name:Q4_K_M`.
_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?")
# What tells the quantisations of one model apart in the names of its GGUF files.
_QUANTISATION = re.compile(
    r"[-._]((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))(?:-\d{5}-of-\d{5})?\.gguf$", re.I
)
_USUAL = "Q4_K_M"
_CACHED = re.compile(r"models--(.+?)--(.+)")
_WEIGHTS = (".safetensors", ".gguf")
# Besides weights: configurations, tokenizers and templates, but no code.
_NEEDED = (".json", ".model", ".jinja", ".txt", ".tiktoken")
_REPORT_S = 1.0
Progress = Callable[[str, int, int], None]


class HubUnreachable(UserError):
    """There is no network, or no hub at the endpoint."""


def is_offline() -> bool:
    """Returns whether HF_HUB_OFFLINE says that the hub is not asked."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@dataclass(frozen=True)
class HubModel:
    """A name as it was typed; filled by `hub_model`."""

    repository: str
    quantisation: str  # of a GGUF file; empty: none was named


def hub_model(given: str) -> HubModel | None:
    """Returns what `given` names on the hub, by a short name of ours, too; None when it is a path, or no name
    that the hub could have."""
    match = _ID.fullmatch(full_name(given))
    if match is None or given.endswith(".gguf") or Path(given).expanduser().exists():
        return None
    return HubModel(match[1], match[2] or "")


def in_cache(path: Path) -> tuple[Path, str]:
    """Returns what a path into the hub's cache means: (version, name on the hub).

    Of a repository's directory there (`models--owner--name`) the version of `main`, or the only one. Any
    other path stays as it is, with an empty name.
    """
    repository = path.parent.parent if path.parent.name == "snapshots" else path
    match = _CACHED.fullmatch(repository.name)
    versions = repository / "snapshots"
    if match is None or not versions.is_dir():
        return path, ""
    if path == repository:
        main = repository / "refs" / "main"
        found = [versions / main.read_text().strip()] if main.is_file() else []
        found = [one for one in found if one.is_dir()] or sorted(versions.iterdir())
        if len(found) != 1:
            return path, ""
        path = found[0]
    return path, f"{match[1]}/{match[2]}"


def fetch_model(
    model: HubModel,
    revision: str,
    offline: bool,
    progress: Progress,
    needs_weights: bool = True,
    check: Callable[[Path], None] = lambda directory: None,
) -> Path:
    """Returns the checkpoint's directory, or its (first) GGUF file, in the cache; downloads what is missing
    there.

    `revision`: branch, tag or commit; empty: main. Without `needs_weights` only what describes the model.
    `check` raises where it is of no use; it is asked when all is there but the safetensors that are missing.

    Raises:
        UserError: naming what is missing, and what can be done; and what `check` raises.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_CACHE.startswith("~"):
        raise UserError("models have no place: this user has no home directory; set HOME or HF_HOME")
    if offline or is_offline():
        return _cached(model, revision, needs_weights, "--offline (or HF_HUB_OFFLINE) is set, and ")
    try:
        listed = _listed(model, revision)
    except _unreachable() as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = re.sub(r"^\[Errno -?\d+\] ", "", reason)
        return _cached(
            model, revision, needs_weights, f"{constants.ENDPOINT} cannot be reached ({reason}), and "
        )
    chosen = chosen_files(model, [file.rfilename for file in listed.siblings], needs_weights)
    sizes = {file.rfilename: file.size or 0 for file in listed.siblings if file.rfilename in chosen}
    described = {name: size for name, size in sizes.items() if not name.endswith(_WEIGHTS)}
    missing = _missing(model, listed.sha, sizes)
    if "config.json" in described and any(name.endswith(_WEIGHTS) for name in missing):
        check(_fetch(model, revision, described, _missing(model, listed.sha, described), progress))
    return _place(_fetch(model, revision, sizes, missing, progress), chosen)


def chosen_files(model: HubModel, names: Sequence[str], needs_weights: bool = True) -> list[str]:
    """Returns the names of those files of a repository that are needed: none twice in another format.

    Raises:
        UserError: there are no weights that can be read, or several quantisations and none was chosen.
    """
    safetensors = _safetensors(names)
    if safetensors and not model.quantisation:
        described = [name for name in names if "/" not in name and name.endswith(_NEEDED)]
        return sorted(described + (safetensors if needs_weights else []))
    kinds = quantisations(names)
    if not kinds:
        what = "no GGUF files" if model.quantisation else "neither safetensors nor GGUF files"
        raise UserError(f"{model.repository} has {what}")
    wanted = model.quantisation.upper() or (next(iter(kinds)) if len(kinds) == 1 else _USUAL)
    if wanted not in kinds:
        listed = ", ".join(sorted(kind for kind in kinds if kind))
        which = f"no {wanted}" if model.quantisation else "several quantisations"
        raise UserError(f"{model.repository} has {which}: give one as {model.repository}:NAME, of {listed}")
    return kinds[wanted]


def has_gguf_alone(model: HubModel, names: Sequence[str]) -> bool:
    """Whether `chosen_files` of these names are GGUF files."""
    return bool(quantisations(names)) and (bool(model.quantisation) or not _safetensors(names))


def _safetensors(names: Sequence[str]) -> list[str]:
    """Returns the weights of the model itself: directories hold other formats of them (original/, onnx/)."""
    top = [name for name in names if "/" not in name]
    return [n for n in top if n.endswith(".safetensors") and not n.startswith("consolidated")]


def quantisations(names: Sequence[str]) -> dict[str, list[str]]:
    """Returns the GGUF files among `names` by quantisation (empty where a name has none), without vision
    towers.
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        if name.endswith(".gguf") and not Path(name).name.lower().startswith("mmproj"):
            match = _QUANTISATION.search(name)
            kinds.setdefault(match[1].upper() if match else "", []).append(name)
    return {kind: sorted(files) for kind, files in kinds.items()}


@dataclass(frozen=True)
class Listing:
    """What a repository has; filled by `list_files`."""

    commit: str
    sizes: dict[str, int]  # Bytes of each file, by its name.
    licence: str = ""  # As the model's card has it; empty: it says none.
    # Of each file the SHA-256, or of those that the hub keeps in git the SHA-1 of the blob; hexadecimal.
    digests: dict[str, str] = field(default_factory=dict)


def list_files(model: HubModel, revision: str, token: str = "") -> Listing:
    """Returns the files of a repository. `token`: empty: that of the environment.

    Raises UserError where there is none, or it must not be read; HubUnreachable without a network.
    """
    try:
        listed = _listed(model, revision, token)
    except _unreachable() as error:
        raise HubUnreachable(f"the hub cannot be reached ({type(error).__name__})") from None
    sizes = {file.rfilename: file.size or 0 for file in listed.siblings}
    digests = {
        file.rfilename: str(file.lfs["sha256"] if file.lfs else file.blob_id) for file in listed.siblings
    }
    return Listing(listed.sha, sizes, str(getattr(listed.card_data, "license", None) or ""), digests)


def _listed(model: HubModel, revision: str, token: str = "") -> Any:
    """Returns the hub's list of a repository's files. Raises UserError, or what `_unreachable` names."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{model.repository}"
    try:
        return HfApi(token=token or None).model_info(
            model.repository, revision=revision or None, files_metadata=True
        )
    except GatedRepoError:
        raise UserError(f"{model.repository}: accept its conditions at {page}, and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"MODEL {model.repository!r}: there is no such directory here, and no such model at "
            f"{constants.ENDPOINT} (a private one needs HF_TOKEN)"
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"{model.repository} has no revision {revision!r}: see {page}") from None
    except HfHubHTTPError as error:
        raise UserError(f"{page}: {str(error).splitlines()[0]}") from None


def _missing(model: HubModel, commit: str, sizes: dict[str, int]) -> dict[str, int]:
    """Returns those files that are not in the cache yet."""
    from huggingface_hub import try_to_load_from_cache

    return {
        name: size
        for name, size in sizes.items()
        if not isinstance(try_to_load_from_cache(model.repository, name, revision=commit), str)
    }


def _fetch(
    model: HubModel, revision: str, sizes: dict[str, int], missing: dict[str, int], progress: Progress
) -> Path:
    """Downloads what is missing of the files in `sizes`. Raises UserError."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    cache = Path(constants.HF_HUB_CACHE)
    blobs = cache / f"models--{model.repository.replace('/', '--')}" / "blobs"
    total = sum(missing.values())
    try:
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
        if total - _size(blobs, ".incomplete") > free:
            raise UserError(
                f"{model.repository} takes {size(total)} more, but {cache} has {size(free)} "
                "free: HF_HOME chooses another place"
            )
        disable_progress_bars()
        with _watched(blobs, total, lambda done: progress(f"downloading {model.repository}", done, total)):
            # By the branch's name, which the cache remembers then for who comes without a network.
            snapshot = snapshot_download(
                model.repository, revision=revision or None, allow_patterns=sorted(sizes)
            )
    except _unreachable() as error:
        raise UserError(
            f"{model.repository}: the download broke off ({type(error).__name__}); the same command goes on "
            "where it stopped"
        ) from None
    except HfHubHTTPError as error:
        raise UserError(f"{model.repository}: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise UserError(f"{model.repository}: cannot be written to {cache}: {error}") from None
    return Path(snapshot)


@contextlib.contextmanager
def _watched(blobs: Path, total: int, report: Callable[[int], None]) -> Iterator[None]:
    """Reports how much of `total` bytes has come, while the library downloads."""
    before = _size(blobs) - _size(blobs, ".incomplete")
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_REPORT_S):
            report(min(total, max(0, _size(blobs) - before)))

    watcher = threading.Thread(target=watch, daemon=True)
    if total:
        watcher.start()
    try:
        yield
    finally:
        ended.set()
        if total:
            watcher.join()
    if total:
        report(total)


def _size(directory: Path, suffix: str = "") -> int:
    """Returns bytes on disk of the files there; they may vanish meanwhile."""
    found = 0
    for path in directory.glob(f"*{suffix}"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found += min(status.st_size, status.st_blocks * 512)
    return found


def _cached(model: HubModel, revision: str, needs_weights: bool, why: str) -> Path:
    """Returns what was downloaded before. Raises UserError with the ways out."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with contextlib.suppress(CacheNotFound, UserError):
        for repository in scan_cache_dir().repos:
            for found in repository.revisions if repository.repo_id == model.repository else ():
                if (revision or "main") in (*found.refs, found.commit_hash):
                    snapshot = found.snapshot_path
                    names = [str(each.file_path.relative_to(snapshot)) for each in found.files]
                    return _place(snapshot, chosen_files(model, names, needs_weights))
    raise UserError(
        f"{why}{model.repository} has not been downloaded: give the directory of a copy as MODEL, or run "
        "this once with network access (HF_ENDPOINT names a mirror)"
    )


def _place(snapshot: Path, chosen: Sequence[str]) -> Path:
    """Returns a directory, or of GGUF files the first."""
    gguf = [name for name in chosen if name.endswith(".gguf")]
    return snapshot / min(gguf) if gguf else snapshot


def _unreachable() -> tuple[type[BaseException], ...]:
    """Returns what the library raises without a network, and when one breaks off."""
    import httpx2
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    return (
        httpx2.TransportError,
        OfflineModeIsEnabled,
        LocalEntryNotFoundError,
        ConnectionError,
        TimeoutError,
    )
