"""The first of several tiles that a device can run, found at a kernel's first launch and kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from gpu_service.device.limits import DeviceLimits, device_limits

T = TypeVar("T")

# (kernel, device, what its compiled form depends on) -> place of the tile that fits.
_fitting: dict[tuple[str, DeviceLimits, Hashable], int] = {}


def launch_fitting(
    kernel: str, variant: Hashable, device: torch.device, tiles: Sequence[T], launch: Callable[[T], None]
) -> T:
    """Calls `launch` with the first of `tiles` (the best one first) that the device can run; returns it.

    How much shared memory a tile takes is known only once it is compiled, and differs by architecture.
    `variant`: whatever else decides that. A launch that does not fit must have written nothing that the next
    one does not write again. Raises what the last tile failed with when none fits.
    """
    key = kernel, device_limits(device), variant
    first = _fitting.get(key, 0)
    for place, tile in enumerate(tiles[first:], first):
        try:
            launch(tile)
        except (OutOfResources, PTXASError):
            if place == len(tiles) - 1:
                raise
        else:
            _fitting[key] = place
            return tile
    raise ValueError(f"{kernel}: no tiles to choose from")
