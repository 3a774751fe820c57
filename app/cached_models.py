"""Models in the Hugging Face hub's cache of this user: which there are, and how one is removed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moebius.errors import UserError


@dataclass(frozen=True)
class CachedModel:
    """One repository in the cache; filled by `cached_models`."""

    name: str
    size: int  # bytes on disk
    last_used: float  # Unix seconds
    is_servable: bool  # whether it has weights that can be read: safetensors or GGUF
    commits: tuple[str, ...]
    directory: Path  # of all its versions


def cached_models() -> list[CachedModel]:
    """Returns the models in the cache, those used last first; none where there is no cache."""
    scanned = _scanned()
    models = [] if scanned is None else [repo for repo in scanned.repos if repo.repo_type == "model"]
    found = [
        CachedModel(
            repo.repo_id,
            repo.size_on_disk,
            repo.last_accessed,
            any(
                file.file_name.endswith((".safetensors", ".gguf"))
                for revision in repo.revisions
                for file in revision.files
            ),
            tuple(revision.commit_hash for revision in repo.revisions),
            Path(repo.repo_path),
        )
        for repo in models
    ]
    return sorted(found, key=lambda model: -model.last_used)


def remove_model(model: CachedModel) -> None:
    """Deletes all its versions from the cache. Raises UserError for files that cannot be deleted."""
    scanned = _scanned()
    try:
        if scanned is not None:
            # Copies of a repository have its commits: no other model's are looked at.
            own = frozenset(repo for repo in scanned.repos if repo.repo_id == model.name)
            replace(scanned, repos=own).delete_revisions(*model.commits).execute()
    except OSError as error:
        raise UserError(f"{model.name}: {error.strerror}: {error.filename}") from None


def _scanned() -> Any:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None
