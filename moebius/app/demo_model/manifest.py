"""The checksum manifest of a built checkpoint: how a later start knows in milliseconds that it is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moebius.app.demo_model import recipe
from moebius.app.demo_model.errors import DemoModelError
from moebius.app.demo_model.fetch import sha256_file

MANIFEST_NAME = "demo_manifest.json"
RECIPE_VERSION = 1
"""Raised whenever the builder would write different files, so that old checkpoints are rebuilt."""

SMALL_FILE = 1 << 20
"""Files up to this size (bytes) are hashed even by the quick check; larger ones are compared by size."""


def recipe_identity() -> dict[str, Any]:
    """Return what determines the built files: recipe version and the checksums of both inputs."""
    return {
        "version": RECIPE_VERSION,
        "gguf_sha256": recipe.SOURCE_GGUF_SHA256,
        "split_sha256": recipe.SPLIT_SHA256,
    }


def write_manifest(directory: Path) -> None:
    """Record size (bytes) and SHA-256 of every file in `directory`."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(directory.iterdir())
        if path.name != MANIFEST_NAME
    }
    content = {"recipe": recipe_identity(), "files": files}
    (directory / MANIFEST_NAME).write_text(json.dumps(content, indent=2) + "\n")


def has_manifest(directory: Path) -> bool:
    """Whether `directory` was written by this builder (whole or not, current or not)."""
    return (directory / MANIFEST_NAME).is_file()


def verify_checkpoint(directory: Path, full: bool = False) -> None:
    """Raise DemoModelError naming what is wrong unless `directory` holds a whole, current demo checkpoint.

    The quick check compares sizes, and checksums of small files; `full` compares every checksum.
    """
    path = directory / MANIFEST_NAME
    try:
        content = json.loads(path.read_text())
        found_recipe, files = content["recipe"], dict(content["files"])
    except FileNotFoundError as error:
        raise DemoModelError(f"{directory} holds no demo model ({MANIFEST_NAME} is missing)") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DemoModelError(f"{path} is not a valid manifest: {error}") from error
    if found_recipe != recipe_identity():
        raise DemoModelError(f"{directory} was built by another version of the recipe")
    for name, expected in files.items():
        _verify_file(directory / name, expected, full)


def _verify_file(path: Path, expected: dict[str, Any], full: bool) -> None:
    if not path.is_file():
        raise DemoModelError(f"{path} is missing")
    size = path.stat().st_size
    if size != expected["size"]:
        raise DemoModelError(f"{path} has {size} bytes, expected {expected['size']}")
    if (full or size <= SMALL_FILE) and sha256_file(path) != expected["sha256"]:
        raise DemoModelError(f"{path} does not have the recorded SHA-256 {expected['sha256']}")
