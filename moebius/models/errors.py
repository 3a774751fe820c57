"""The error of a model's description."""

from __future__ import annotations

from moebius.checkpoint.errors import CheckpointError


class ModelConfigError(CheckpointError):
    """A checkpoint's config.json asks for something we do not know, do not support, or that is absurd."""
