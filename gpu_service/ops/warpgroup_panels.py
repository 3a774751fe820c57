"""Products of many rows of an expert with packed panels: `warpgroup_panels.cu` from the host.

For prompts on GPUs of Hopper's kind, whose tensor cores take one operand from registers: weights are decoded
there while the products of the step before are under way, instead of being unpacked to memory ahead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gpu_service.device.limits import device_limits
from gpu_service.ops.grouped_panels import (
    FLOAT,
    INT,
    POINTER,
    GroupedShape,
    PanelKernels,
    constants,
    sources,
)

if TYPE_CHECKING:
    from gpu_service.device.cuda_driver import Kernel

SOURCES = ("panel_codes.cuh", "panel_results.cuh", "warpgroup_panels.cu")
# Rows of a block, many or some, and how many of these a multiprocessor has at once; a block's warps: two
# warpgroups, each of which takes all rows and half of the columns.
MANY_ROWS, SOME_ROWS = 128, 64
BLOCKS = {MANY_ROWS: 1, SOME_ROWS: 2}
WARPS = 8
# k that a block copies together, and stages of them that it has in shared memory.
STAGE_K, STAGES = 64, 4
# The one architecture with these instructions.
ARCHITECTURE = 90


def is_available(device: torch.device) -> bool:
    """Returns whether the device has the instructions. Whether code can be compiled `grouped_panels` says."""
    return device_limits(device).architecture == ARCHITECTURE


def multiplies(shape: GroupedShape) -> bool:
    """Returns whether kernels take experts that `grouped_panels` takes: rows are whole stages of k."""
    whole = shape.gate_up.k % STAGE_K == 0 == shape.down.k % STAGE_K
    return whole and shape.down.k == shape.intermediate_columns


def program(shape: GroupedShape, rows: int) -> str:
    """Returns the complete source for one kind of layer, and blocks of `rows` rows."""
    return constants(shape, WARPS, kMostRows=rows, kBlocks=BLOCKS[rows]) + sources(*SOURCES)


class WarpgroupPanels(PanelKernels):
    """Kernels for blocks of `rows` rows, in whose blocks of columns k is permuted, see `place_of` there."""

    def __init__(self, shape: GroupedShape, rows: int) -> None:
        """`rows`: `MANY_ROWS` or `SOME_ROWS`.

        Raises UserError when NVRTC is missing or compiled code cannot be kept.
        """
        from gpu_service.device.cuda_driver import Module
        from gpu_service.device.cuda_program import compiled

        super().__init__(shape, WARPS)
        source = program(shape, rows)
        module = Module(compiled(source, "warpgroup panels", f"sm_{ARCHITECTURE}a"))
        self.rows, pointers, shared = rows, (POINTER,) * 5, STAGES * rows * STAGE_K * 2
        self._permute = module.kernel("permute", POINTER, POINTER, INT)
        self._both = (
            module.kernel("gate_up_many", *pointers, INT, FLOAT, FLOAT, shared=shared),
            module.kernel("down_many", *pointers, INT, shared=shared),
        )

    def _kernels(self, rows: int) -> tuple[Kernel, Kernel]:
        assert rows == self.rows, f"blocks have {self.rows} rows, not {rows}"
        return self._both

    def _grid(self, blocks: int, columns: int) -> tuple[int, int]:
        return columns, blocks

    def _ordered(self, hidden_states: torch.Tensor) -> torch.Tensor:
        permuted, chunks = torch.empty_like(hidden_states), hidden_states.numel() // 8
        self._permute.launch(
            torch.cuda.current_stream(hidden_states.device).cuda_stream,
            -(-chunks // self._threads),
            self._threads,
            hidden_states.data_ptr(),
            permuted.data_ptr(),
            chunks,
        )
        return permuted
