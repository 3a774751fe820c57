"""Packed experts back to plain float32 matrices, by torch on any device: the reference of the kernels."""

from __future__ import annotations

import torch

from gpu_service.experts.resident.panels import LayerFormat
from gpu_service.ops.unpack_panels import UnpackedMatrix, unpack_panels


def unpack_expert(layer: LayerFormat, packed: torch.Tensor) -> tuple[UnpackedMatrix, ...]:
    """Returns gate, if there is one, and up `[I, H]`, down `[H, I]` of an expert's bytes, uint8
    `[expert_bytes]`.
    """
    layout = layer.layout
    blocks = packed[: layout.down_offset].view(-1, layout.panels_per_column_block, layer.gate_up.panel_bytes)
    down = packed[layout.down_offset : layout.order_offset].view(-1, layer.down.panel_bytes)
    gate_up = [
        unpack_panels(layer.gate_up, panels.contiguous(), layer.intermediate_size)
        for panels in blocks.unbind(1)
    ]
    if layer.gate_up.ordered:
        # Back to the order of the rows.
        order = packed[layout.order_offset :].view(torch.int32)[: layer.hidden_size]
        places = torch.argsort(order)
        gate_up = [UnpackedMatrix(matrix.weight[:, places], matrix.bias) for matrix in gate_up]
    return *gate_up, unpack_panels(layer.down, down.contiguous(), layer.hidden_size)
