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
    down = packed[layout.down_offset : layout.order_offset].view(-1, layer.down.panel_bytes)
    matrices = [(layer.gate_up, layout.up_offset, layout.up_step)]
    if layout.gated:
        matrices.insert(0, (layer.gate, 0, layout.gate_step))
    gate_up = []
    for kind, begin, step in matrices:
        panels = packed[begin:].as_strided((layout.intermediate_blocks, kind.panel_bytes), (step, 1))
        gate_up.append(unpack_panels(kind, panels.contiguous(), layer.intermediate_size))
    if layer.gate_up.ordered:
        # Back to the order of the rows.
        order = packed[layout.order_offset :].view(torch.int32)[: layer.hidden_size]
        places = torch.argsort(order)
        gate_up = [UnpackedMatrix(matrix.weight[:, places], matrix.bias) for matrix in gate_up]
    return *gate_up, unpack_panels(layer.down, down.contiguous(), layer.hidden_size)
