"""Where `moebius serve` keeps files and batches for which no setting gives a directory."""

from __future__ import annotations

import hashlib
import os
from urllib.parse import quote

import structlog

from app.user_state import user_state_directory

_log = structlog.get_logger(__name__)
_LONGEST_NAME = 100  # characters; file systems take 255 bytes


def batch_directory(chosen: str, served_model_name: str) -> str:
    """Returns the value of `batch_dir` for the gateway of a served model.

    Without a choice it is a directory of the user for this name, not of the port: unfinished lines name the
    model that is to answer them, so that a server of the same name continues them on any port, and one of
    another name leaves them alone. Nothing is created; empty: the user has no place that can be written.
    """
    if chosen:
        return chosen
    try:
        directory = user_state_directory() / "batches" / _file_name(served_model_name)
    except RuntimeError:  # no home directory
        return _none("this user has no home directory")
    nearest = next(place for place in directory.parents if place.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        return _none(f"{nearest} cannot be written")
    return str(directory)


def _none(reason: str) -> str:
    _log.info("no files and batches are kept", reason=reason, remedy="--batch-dir DIRECTORY")
    return ""


def _file_name(served_model_name: str) -> str:
    """Returns a directory's name for a model's, which may have slashes; different for different ones."""
    digest = hashlib.sha256(served_model_name.encode()).hexdigest()[:12]
    return f"{quote(served_model_name, safe='')[:_LONGEST_NAME]}-{digest}"
