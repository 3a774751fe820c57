"""The one error of this package."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is unreadable, incomplete or mis-shaped; the message names the file or tensor."""
