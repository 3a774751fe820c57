"""Dense layers whose weights a device keeps as their checkpoint stores them, in the packed panels of experts.

A fused projection has parts, each a stored matrix in a format of its own whose outputs follow those of the
part before. The references here dequantise; kernels read the panels at their packed size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_service.ops.linear import linear
from gpu_service.ops.packed_weight import PackedPart
from gpu_service.ops.panels import PanelFormat, panel_format
from gpu_service.ops.registry import Op
from gpu_service.ops.unpack_panels import unpack_panels
from moebius.kernels.weight_formats import PANEL_COLUMNS

# From this many rows on kernels unpack weights to the rows' type, at most this many bytes at a time, which a
# plan's slack has: on an H200 what that costs was gained by the faster product from about here on.
UNPACK_FROM_ROWS = 128
UNPACKED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PanelPart:
    """Outputs of a weight that are stored in one format; filled by `panel_parts`."""

    panels: PanelFormat
    rows: int
    first_row: int  # Of the weight.
    first_byte: int  # Of the weight's memory.

    @property
    def num_panels(self) -> int:
        """Panels, the last of which may be filled in part."""
        return -(-self.rows // PANEL_COLUMNS)

    @property
    def nbytes(self) -> int:
        """Bytes of all panels."""
        return self.num_panels * self.panels.panel_bytes

    def memory(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the part's own bytes of the weight's, uint8."""
        return memory[self.first_byte : self.first_byte + self.nbytes]


def panel_parts(in_features: int, parts: tuple[PackedPart, ...]) -> tuple[PanelPart, ...]:
    """Returns where the parts of a weight `[out, in]` lie, one after the other."""
    found, row, byte = list[PanelPart](), 0, 0
    for part in parts:
        found.append(PanelPart(panel_format(part.format, in_features), part.rows, row, byte))
        row, byte = row + part.rows, byte + found[-1].nbytes
    return tuple(found)


def dequantise_panels(memory: torch.Tensor, parts: tuple[PanelPart, ...]) -> torch.Tensor:
    """Returns float32 `[out, in]`; arguments as `panel_linear`'s."""
    packed = (part.memory(memory).view(-1, part.panels.panel_bytes) for part in parts)
    found = [unpack_panels(part.panels, own, part.rows) for part, own in zip(parts, packed, strict=True)]
    return torch.cat([matrix.weight for matrix in found])


@Op
def panel_linear(
    hidden_states: torch.Tensor,
    memory: torch.Tensor,
    parts: tuple[PanelPart, ...],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Computes `x W^T + b`: hidden_states `[T, in]`, bias `[out]`; `[T, out]` in the dtype of
    `hidden_states`.

    memory: uint8, the packed panels of the `parts`, which together have `out` rows.
    """
    # Rounded to the model's dtype, as weights are that are dequantised while they are loaded.
    weight = dequantise_panels(memory, parts).to(hidden_states.dtype)
    return linear(hidden_states, weight, bias)


@Op
def panel_rows(
    ids: torch.Tensor, memory: torch.Tensor, parts: tuple[PanelPart, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Returns the rows of a weight, dequantised: ids int64 `[T]` to `[T, in]` of `dtype`; zeros for unknown
    ids.

    memory and parts: as `panel_linear`'s.
    """
    output = torch.zeros(ids.shape[0], parts[0].panels.k, dtype=dtype, device=ids.device)
    for part in parts:
        row = ids - part.first_row
        inside = (row >= 0) & (row < part.rows)
        row = row.clamp(0, part.rows - 1)
        packed = part.memory(memory).view(-1, part.panels.panel_bytes)[row // PANEL_COLUMNS]
        columns = unpack_panels(part.panels, packed, PANEL_COLUMNS * len(packed)).weight
        places = torch.arange(len(row), device=ids.device) * PANEL_COLUMNS + row % PANEL_COLUMNS
        output = torch.where(inside[:, None], columns[places].to(dtype), output)
    return output
