"""The packed layout as kernels on a device see it: plain numbers, and typed views of one memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moebius.packed_layout import ExpertLayout, PanelLayout
from moebius.weight_formats import CODE_BITS, weight_format

# Types that a kernel may load scales as; e8m0 and e4m3 are decoded from their bits.
_SCALE_VIEWS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "e8m0": torch.uint8,
    "e4m3": torch.uint8,
}


@dataclass(frozen=True)
class PanelFormat:
    """One kind of panel (`moebius.packed_layout` describes it); a compile-time constant of kernels.

    Filled by `panel_format`. Offsets are in bytes from the panel's begin.
    """

    name: str
    code: str
    bits: int
    k: int
    k_padded: int
    # 0: no group scales.
    group: int
    scale: str
    panel_scale: bool
    zeros: bool
    minimums: bool
    column_scale: bool
    bias: bool
    scales_at: int
    zeros_at: int
    minimums_at: int
    column_scale_at: int
    bias_at: int
    panel_bytes: int

    def __repr__(self) -> str:
        """Part of the names of compiled functions."""
        return f"{self.name}_k{self.k}{'_bias' if self.bias else ''}"

    @property
    def chunk(self) -> int:
        """k that a GEMM tile takes at once: within one group, and no less than tensor cores want."""
        return min(self.group or 64, 64)


@dataclass(frozen=True)
class LayerFormat:
    """How all resident experts of a layer are packed; filled by `layer_format`."""

    layout: ExpertLayout
    gate_up: PanelFormat
    down: PanelFormat

    @property
    def expert_bytes(self) -> int:
        """Of one slot."""
        return self.layout.expert_bytes

    @property
    def hidden_size(self) -> int:
        """Width of a row."""
        return self.layout.gate_up.k

    @property
    def intermediate_size(self) -> int:
        """Intermediate channels of each expert held here."""
        return self.layout.down.k

    @property
    def intermediate_columns(self) -> int:
        """`intermediate_size` in whole panels."""
        return self.layout.intermediate_blocks * 16


def panel_format(name: str, k: int, has_bias: bool) -> PanelFormat:
    """The panels of a packed format. Raises ValueError for an unknown name."""
    kind = weight_format(name)
    layout = PanelLayout(kind, k, has_bias)
    return PanelFormat(
        name=name,
        code=kind.code,
        bits=CODE_BITS[kind.code],
        k=k,
        k_padded=layout.k_padded,
        group=kind.group_size,
        scale=kind.scale or "",
        panel_scale=kind.panel_scale,
        zeros=kind.zeros,
        minimums=kind.minimums,
        column_scale=kind.column_scale,
        bias=has_bias,
        scales_at=layout.scales_offset,
        zeros_at=layout.zeros_offset,
        minimums_at=layout.minimums_offset,
        column_scale_at=layout.column_scale_offset,
        bias_at=layout.bias_offset,
        panel_bytes=layout.panel_bytes,
    )


def layer_format(gate_up: str, down: str, hidden: int, intermediate: int, has_bias: bool) -> LayerFormat:
    """Experts with gate, up and down. Raises ValueError for an unknown format."""
    layout = ExpertLayout(
        PanelLayout(weight_format(gate_up), hidden, has_bias),
        PanelLayout(weight_format(down), intermediate, has_bias),
    )
    return LayerFormat(
        layout, panel_format(gate_up, hidden, has_bias), panel_format(down, intermediate, has_bias)
    )


@dataclass(frozen=True, slots=True)
class PanelViews:
    """One layer's slots, uint8 `[slots, expert_bytes]`, as the types kernels load; filled by `views`."""

    words: torch.Tensor  # int32
    # Minimums, too. The format's scale type, or its bits; bfloat16, for such codes, where there are no group
    # scales.
    scales: torch.Tensor
    bytes: torch.Tensor
    floats: torch.Tensor  # float32


def views(slots: torch.Tensor, panels: PanelFormat) -> PanelViews:
    """The same memory as flat tensors; in-place changes of `slots` show in them."""
    flat = slots.view(-1)
    scales = flat.view(_SCALE_VIEWS[panels.scale] if panels.scale else torch.bfloat16)
    return PanelViews(flat.view(torch.int32), scales, flat, flat.view(torch.float32))
