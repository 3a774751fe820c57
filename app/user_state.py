"""Where programs of this user keep what outlives them, by the XDG base directories."""

from __future__ import annotations

import os
from pathlib import Path


def user_state_directory() -> Path:
    """Returns Moebius's directory below the user's state, whether it is there or not; a relative
    `XDG_STATE_HOME` counts as none.

    Raises RuntimeError where neither that nor a home directory is known.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "moebius"
