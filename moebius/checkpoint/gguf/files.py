"""Which files make up a GGUF model: one, a set of splits, or the only model of a directory."""

from __future__ import annotations

import re
from pathlib import Path

from moebius.checkpoint.errors import CheckpointError

SUFFIX = ".gguf"
# As llama.cpp's gguf-split names the parts.
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# Vision towers lie next to the model in files of their own.
_COMPANION = re.compile(r"(?:mmproj|mtp)[-_.].*|.*[-_.]mmproj[-_.].*", re.IGNORECASE)
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")


def is_gguf(model_path: str | Path) -> bool:
    """Returns whether the path is a `.gguf` file, or a directory that has such files but no safetensors."""
    path = Path(model_path)
    if path.suffix == SUFFIX:
        return True
    if not path.is_dir() or any((path / name).exists() for name in _SAFETENSORS):
        return False
    return next(path.glob(f"*{SUFFIX}"), None) is not None


def companion_directory(model_path: str | Path) -> Path:
    """Returns where files that describe a model lie: its directory, which of a GGUF model may be that of its
    file.
    """
    path = Path(model_path)
    return path.parent if path.suffix == SUFFIX and not path.is_dir() else path


def served_name(model_path: Path) -> str:
    """Returns the name of a model that was given none: its directory's, or its file's without the ending."""
    name = model_path.name
    match = _SPLIT.fullmatch(name)
    return match["stem"] if match else name.removesuffix(SUFFIX)


def gguf_files(model_path: str | Path) -> tuple[Path, ...]:
    """Returns all parts, ascending.

    Raises CheckpointError naming what is missing, or the models to choose from.
    """
    path = Path(model_path)
    if path.is_dir():
        path = _only_model(path)
    match = _SPLIT.fullmatch(path.name)
    files = (path,) if match is None else _parts(path, match)
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
    return files


def _parts(path: Path, match: re.Match[str]) -> tuple[Path, ...]:
    stem, count = match["stem"], int(match["count"])
    return tuple(
        path.with_name(f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}") for number in range(1, count + 1)
    )


def gguf_models(directory: Path) -> tuple[tuple[Path, ...], ...]:
    """Returns the models of a directory, each with its parts as their names count them, without towers and
    drafts.
    """
    models: dict[str, tuple[Path, ...]] = {}
    for file in sorted(directory.glob(f"*{SUFFIX}")):
        if _COMPANION.fullmatch(file.name) is None:
            match = _SPLIT.fullmatch(file.name)
            models.setdefault(
                match["stem"] if match else file.name, _parts(file, match) if match else (file,)
            )
    return tuple(models.values())


def _only_model(directory: Path) -> Path:
    models = gguf_models(directory)
    if len(models) != 1:
        names = ", ".join(files[0].name for files in models) or "none"
        raise CheckpointError(
            f"{directory} has {len(models)} GGUF models ({names}); give the path of one of them"
        )
    return models[0][0]
