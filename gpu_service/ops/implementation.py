"""One op as one library computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Implementation:
    """Filled by a backend's table."""

    function: Callable[..., Any]  # the op's signature
    # Whether the op's arguments are within what the library can do; the next backend takes those that are
    # not. None: it takes everything.
    supports: Callable[..., bool] | None = None
