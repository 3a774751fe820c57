"""`triton.jit` with a type, sizes of launches, and the first of several tiles that a device can run.

Kernels annotate pointers as `tl.tensor`, because the compiler reads annotations too. Arithmetic is in
float32 whatever the tensors hold; values are rounded where the references round.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.errors import OutOfResources, PTXASError

from gpu_service.device.limits import DeviceLimits, device_limits


def jit(function: Callable[..., Any]) -> Any:
    """Returns the compiled (or, under TRITON_INTERPRET, interpreted) kernel: `kernel[grid](*args)`."""
    return triton.jit(function)


def jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator: one compiled kernel for all values of these arguments.

    Left alone, Triton compiles again when a number becomes 1, or a multiple of 16: in the middle of a
    service, when the first batch of 16 requests comes.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=names)

    return decorate


def next_power_of_2(size: int) -> int:
    """Returns the smallest power of two that is not smaller; block sizes are these."""
    return 1 << max(0, size - 1).bit_length()


def num_warps(block: int) -> int:
    """Warps for a program that reduces a row of `block` elements: eight elements a thread."""
    return min(16, max(1, block // 256))


def overlap(device: torch.device, allowed: bool = True) -> dict[str, bool]:
    """Returns launch options of a kernel with `wait_for_previous`: whether it may begin before the last one
    ends.

    Programmatic dependent launch (CUDA programming guide), from Hopper on. `allowed`: whether all that the
    kernel reads before it waits was there long before.
    """
    overlaps = allowed and device_limits(device).kernels_overlap and not triton.knobs.runtime.interpret
    return {"OVERLAPS": overlaps, "launch_pdl": overlaps}


@jit
def wait_for_previous(OVERLAPS: tl.constexpr) -> None:
    """Returns when all that was launched before is complete; the next kernel may begin from here on.

    Before it, a kernel may only read what no kernel writes.
    """
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


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
