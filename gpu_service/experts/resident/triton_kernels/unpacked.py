"""Experts unpacked to 16 bits for products of many rows, and where panels of gate and up lie."""

from __future__ import annotations

from typing import Any

import torch

from gpu_service.experts.resident.experts import LayerSlots
from gpu_service.experts.resident.panels import LayerFormat
from gpu_service.ops.triton import panel_sizes
from gpu_service.ops.triton.panel_unpack import unpack


def places(kind: LayerFormat) -> dict[str, Any]:
    """Returns where kernels find panels of gate and up: constants."""
    layout = kind.layout
    return {
        "GATE": kind.gate,
        "GATE_STEP": layout.gate_step,
        "UP_AT": layout.up_offset,
        "UP_STEP": layout.up_step,
    }


def unpack_experts(
    slots: LayerSlots, first: int, count: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns gate and up in turn, or up alone, `[count, gate_up_columns, k_padded]`; down `[count, H,
    k_padded]`.
    """
    kind, layout = slots.kind, slots.kind.layout
    # What is unpacked into which matrix: the first panel, how many, and whose turn of two it is.
    parts = [(1, kind.down, slots.down, layout.down_offset, layout.down_panels, -1)]
    if layout.mixed:
        blocks = layout.intermediate_blocks
        parts.append((0, kind.gate, slots.gate, 0, blocks, 0))
        parts.append((0, kind.gate_up, slots.gate_up, layout.up_offset, blocks, 1))
    else:
        parts.append((0, kind.gate_up, slots.gate_up, 0, kind.gate_up_columns // 16, -1))
    columns = kind.gate_up_columns, 16 * layout.down_panels
    padded = kind.gate_up.k_padded, kind.down.k_padded
    gate_up, down = (
        torch.empty((count, *shape), dtype=dtype, device=slots.weights.device)
        for shape in zip(columns, padded, strict=True)
    )
    for number, panel, typed, offset, panels, turn in parts:
        unpack[(count, panels)](
            *typed.pointers,
            (gate_up, down)[number],
            first,
            EXPERT_BYTES=kind.expert_bytes,
            AT=offset,
            ORDER_AT=layout.order_offset,
            GATED=number == 0 and layout.gated and not layout.mixed,
            PANEL=panel,
            PANELS=panels,
            LINES=panel_sizes.unpacked_lines(panel),
            SCALED=False,
            TURN=turn,
            num_warps=4,
        )
    return gate_up, down
