"""Products of few rows with packed panels, a (row, choice) pair at a time: `pair_panels.cu` from the host.

For the decode steps of one to a few requests, where the time is that of reading weights and of one kernel
waiting for the other.
"""

from __future__ import annotations

import torch

from gpu_service.device.limits import device_limits
from gpu_service.ops import grouped_panels
from gpu_service.ops.grouped_panels import (
    FLOAT,
    INT,
    POINTER,
    GroupedShape,
    constants,
    sources,
)

SOURCES = (*grouped_panels.SOURCES, "pair_panels.cu")
# Of a block of gate and up, and of one of down, more where it has more pairs of choices.
WARPS, DOWN_WARPS = 4, 8
# A block of down has a warp for each two choices, and registers for no more of them.
MOST_CHOICES = 32
# Bits of each weight that a warp loads ahead: in 4 bits half of what it takes of 2048 k, and of down all that
# it takes of 768, before gate and up end: beside the next kernel's weights, which are many, it comes late.
BITS_AHEAD, DOWN_BITS_AHEAD = 32, 48
# Bytes of a line of the cache, and of down products' weights that are brought into it: of the cache that
# devices with one for them have.
CACHE_LINE, MAX_PREFETCHED = 128, 16 << 20


def multiplies(shape: GroupedShape) -> bool:
    """Returns whether kernels take experts that `grouped_panels` takes."""
    return shape.top_k <= MOST_CHOICES


def program(shape: GroupedShape) -> str:
    """Returns the complete source for one kind of layer."""
    return constants(shape, WARPS, BITS_AHEAD, DOWN_BITS_AHEAD, kDownWarps=DOWN_WARPS) + sources(*SOURCES)


class PairPanels:
    """Kernels of one kind of layer on one device."""

    def __init__(self, shape: GroupedShape, device: torch.device) -> None:
        """Raises UserError when NVRTC is missing or compiled code cannot be kept."""
        from gpu_service.device.cuda_driver import Module
        from gpu_service.device.cuda_program import compiled

        limits = device_limits(device)
        module = Module(compiled(program(shape), "pair panels", f"sm_{limits.architecture}"))
        self._overlaps = limits.kernels_overlap
        self._strips = -(-shape.intermediate_columns // (16 if shape.gated else 32))
        self._panels = -(-shape.hidden // 16)
        self._down_bytes = self._panels * shape.down.panel_bytes
        twos = -(-shape.top_k // 2)
        self._down_threads = 32 * twos * max(1, DOWN_WARPS // twos)
        self._columns = shape.intermediate_columns
        self._gate_up = module.kernel("gate_up_pairs", *(POINTER,) * 5, INT, INT, FLOAT, FLOAT)
        self._down = {
            dtype: module.kernel(f"down_pairs{name}", *(POINTER,) * 7)
            for dtype, name in ((None, ""), (torch.float32, "_float32"), (torch.bfloat16, "_bfloat16"))
        }

    def forward(
        self,
        hidden_states: torch.Tensor,
        slots: torch.Tensor,
        topk_ids: torch.Tensor,
        slot_of_expert: torch.Tensor,
        topk_weights: torch.Tensor,
        partial: torch.Tensor | None,
        result: torch.Tensor,
        alpha: float,
        limit: float,
    ) -> None:
        """Writes `partial` plus the weighted sum of each row's experts to `result`, float32 `[rows, hidden]`.

        `hidden_states`: bfloat16 `[rows, hidden]`; `slots`: uint8 `[slots, expert_bytes]`; `topk_ids` int32
        and `topk_weights` float32 `[rows, top_k]`; `slot_of_expert`: int32 `[experts]`, negative for those
        that count for nothing; `partial`: float32 or bfloat16 `[rows, hidden]`, `result` itself too, or None.
        """
        rows, pairs = topk_ids.shape[0], topk_ids.numel()
        intermediate = hidden_states.new_empty((pairs, self._columns))
        stream = torch.cuda.current_stream(slots.device).cuda_stream
        is_cached = pairs * self._down_bytes <= MAX_PREFETCHED
        self._gate_up.launch(
            stream,
            (pairs, self._strips),
            32 * WARPS,
            *(each.data_ptr() for each in (hidden_states, slots, topk_ids, slot_of_expert, intermediate)),
            pairs,
            self._down_bytes // self._strips // CACHE_LINE if is_cached else 0,
            alpha,
            limit,
            overlaps=self._overlaps,
        )
        before = result if partial is None else partial
        tensors = intermediate, slots, topk_ids, slot_of_expert, topk_weights, before, result
        self._down[None if partial is None else partial.dtype].launch(
            stream,
            (rows, self._panels),
            self._down_threads,
            *(each.data_ptr() for each in tensors),
            overlaps=self._overlaps,
        )
