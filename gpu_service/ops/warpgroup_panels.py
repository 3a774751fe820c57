"""Products of many rows of an expert with packed panels: `warpgroup_panels.cu` from the host.

For prompts on GPUs of Hopper's kind, whose tensor cores take one operand from registers: weights are decoded
there while the products of the step before are under way, instead of being unpacked to memory ahead.
"""

from __future__ import annotations

import torch

from gpu_service.device.limits import device_limits
from gpu_service.ops.grouped_panels import FLOAT, INT, POINTER, GroupedShape, constants, sources

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


class WarpgroupPanels:
    """The kernels of one kind of layer on one device, for blocks of `rows` rows."""

    def __init__(self, shape: GroupedShape, rows: int, jit_cache_dir: str = "") -> None:
        """`rows`: `MANY_ROWS` or `SOME_ROWS`; `jit_cache_dir`: where compiled code is kept; empty: the user's
        cache.

        Raises UserError when NVRTC is missing or compiled code cannot be kept.
        """
        from gpu_service.device.cuda_driver import Module
        from gpu_service.device.cuda_program import compiled

        source = program(shape, rows)
        module = Module(compiled(source, "warpgroup panels", f"sm_{ARCHITECTURE}a", jit_cache_dir))
        self.rows, pointers, shared = rows, (POINTER,) * 5, STAGES * rows * STAGE_K * 2
        self._permute = module.kernel("permute", POINTER, POINTER, INT)
        self._gate_up = module.kernel("gate_up_many", *pointers, INT, FLOAT, FLOAT, shared=shared)
        self._down = module.kernel("down_many", *pointers, INT, shared=shared)
        channels = 16 if shape.gated else 32
        self._gate_up_blocks = -(-shape.intermediate_columns // (channels * WARPS))
        self._down_blocks = -(-shape.hidden // (32 * WARPS))

    def gate_up(
        self,
        hidden_states: torch.Tensor,
        slots: torch.Tensor,
        pairs: torch.Tensor,
        block_slots: torch.Tensor,
        intermediate: torch.Tensor,
        alpha: float,
        limit: float,
    ) -> None:
        """Writes activations of all pairs to `intermediate`, bfloat16 `[pairs, intermediate_columns]`, in the
        order of columns that `down` reads.

        Others as `GroupedPanels.gate_up`, in blocks of `rows` pairs.
        """
        stream = torch.cuda.current_stream(slots.device).cuda_stream
        permuted, chunks = torch.empty_like(hidden_states), hidden_states.numel() // 8
        threads = 32 * WARPS
        self._permute.launch(
            stream, -(-chunks // threads), threads, hidden_states.data_ptr(), permuted.data_ptr(), chunks
        )
        self._gate_up.launch(
            stream,
            (self._gate_up_blocks, block_slots.shape[0]),
            threads,
            *(tensor.data_ptr() for tensor in (permuted, slots, pairs, block_slots, intermediate)),
            intermediate.shape[0],
            alpha,
            limit,
        )

    def down(
        self,
        intermediate: torch.Tensor,
        slots: torch.Tensor,
        pairs: torch.Tensor,
        block_slots: torch.Tensor,
        outputs: torch.Tensor,
    ) -> None:
        """Writes products of all pairs to `outputs`, float32 `[pairs, hidden]`, without their weights."""
        self._down.launch(
            torch.cuda.current_stream(slots.device).cuda_stream,
            (self._down_blocks, block_slots.shape[0]),
            32 * WARPS,
            *(tensor.data_ptr() for tensor in (intermediate, slots, pairs, block_slots, outputs)),
            outputs.shape[0],
        )
