"""Products of some rows with a dense layer's packed panels: `dense_panels.cu` from the host.

For decode steps of a few requests to short prompts, where Triton's tiles exchange what they unpacked and wait
at barriers: there every lane unpacks the operands of its own tensor-core instructions in registers, as for
experts (`grouped_panels`).
"""

from __future__ import annotations

from functools import cache

import structlog
import torch

from gpu_service.device.limits import device_limits
from gpu_service.ops.grouped_panels import (
    INT,
    POINTER,
    TILE_ROWS,
    TILES,
    is_available,
    multiplies,
    names,
    sources,
    structure,
)
from gpu_service.ops.panels import PanelFormat
from moebius.errors import UserError

_log = structlog.get_logger(__name__)

SOURCES = ("panel_codes.cuh", "panel_products.cuh", "dense_panels.cu")
# Warps of a block, which share k, and the columns that it computes.
WARPS, COLUMNS = 8, 32
# Bits of each weight that a warp loads ahead.
BITS_AHEAD = 16
# Bytes that a row of activations begins at a multiple of.
ALIGNMENT = 16


def program(panels: PanelFormat) -> str:
    """Returns the complete source for one kind of panels."""
    return names(WARPS) + structure("Panel", panels, BITS_AHEAD) + sources(*SOURCES)


def takes(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Returns whether kernels can read such rows `[T, k]`, and such a bias."""
    is_aligned = x.data_ptr() % ALIGNMENT == 0 == x.stride(0) * x.element_size() % ALIGNMENT
    has_type = bias is None or bias.dtype in (torch.bfloat16, torch.float32)
    return x.dtype == torch.bfloat16 and is_aligned and has_type


class DensePanels:
    """Kernels of one kind of panels on one device."""

    def __init__(self, panels: PanelFormat, device: torch.device) -> None:
        """Raises UserError when NVRTC is missing or compiled code cannot be kept."""
        from gpu_service.device.cuda_driver import Module
        from gpu_service.device.cuda_program import compiled

        limits = device_limits(device)
        module = Module(compiled(program(panels), "dense panels", f"sm_{limits.architecture}"))
        self._overlaps = limits.kernels_overlap
        types = (*(POINTER,) * 4, *(INT,) * 5)
        self._by_tiles = {tiles: module.kernel(f"dense_{tiles}", *types) for tiles in TILES}

    def linear(
        self,
        x: torch.Tensor,
        panels: torch.Tensor,
        bias: torch.Tensor | None,
        output: torch.Tensor,
        is_fixed: bool,
    ) -> None:
        """Writes `x W^T + b` to `output`, bfloat16 `[T, out]`, whose rows may be apart.

        `x`: as `takes` says; `panels`: uint8, W's; `bias`: `[out]`; `is_fixed`: whether no kernel writes
        panels and bias, which are read while the last kernel is running.
        """
        rows, features = output.shape
        tiles = next((tiles for tiles in TILES if rows <= tiles * TILE_ROWS), TILES[-1])
        self._by_tiles[tiles].launch(
            torch.cuda.current_stream(x.device).cuda_stream,
            (-(-rows // (tiles * TILE_ROWS)), -(-features // COLUMNS)),
            32 * WARPS,
            *(each.data_ptr() for each in (x, panels, x if bias is None else bias, output)),
            rows,
            features,
            x.stride(0),
            output.stride(0),
            0 if bias is None else bias.element_size(),
            overlaps=self._overlaps and is_fixed,
        )


@cache
def dense_panels(panels: PanelFormat, device: torch.device) -> DensePanels | None:
    """Returns the kernels, compiled when a kind of panels is first met: when a service warms up.

    None: Triton computes such products, here or of such panels.
    """
    if not is_available(device) or panels.has_bias or not multiplies(panels, panels.k):
        return None
    try:
        return DensePanels(panels, device)
    except (UserError, RuntimeError) as error:  # no place for compiled code; a compiler's or a driver's
        _log.warning("Triton computes packed dense layers, more slowly", because=str(error))
        return None
