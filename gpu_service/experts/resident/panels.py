"""The packed layout as kernels on a device see it: plain numbers, and typed views of one memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

import torch

from moebius.kernels.weight_formats import (
    CODE_MIDDLES,
    PANEL_COLUMNS,
    PackedExpertLayout,
    PanelLayout,
    expert_layout,
)

# Types that a kernel may load scales as; e8m0 and e4m3 are decoded from their bits.
_SCALE_VIEWS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "e8m0": torch.uint8,
    "e4m3": torch.uint8,
    # Their factors.
    "products": torch.float16,
}


# From this many (row, choice) pairs an expert on, weights are unpacked to 16 bits once, not by every tile
# that reads them.
UNPACK_FROM = 64
# Memory that steps of many rows take: unpacked weights of some experts at a time, and what the pairs of some
# rows at a time leave between the two products and after them. Larger steps are computed in parts.
UNPACKED_BYTES = 640 * 2**20
PAIRS_BYTES = 512 * 2**20


def pair_bytes(intermediate_columns: int, hidden_size: int, item: int) -> int:
    """Returns the bytes of one (row, choice) pair: its activations and, in float32, its output."""
    return intermediate_columns * item + hidden_size * 4


@dataclass(frozen=True, repr=False)
class PanelFormat(PanelLayout):
    """One kind of panel as a compile-time constant of kernels; filled by `layer_format`."""

    def __repr__(self) -> str:
        """Returns the part of the names of compiled functions."""
        return f"{self.name}_k{self.k}{'_bias' if self.has_bias else ''}"

    @property
    def low_bits(self) -> int:
        """Bits of an element that lie in its word: all, or those of the first plane."""
        return {2: 2, 3: 2, 5: 4, 6: 4}.get(self.bits, self.bits)

    @property
    def high_bits(self) -> int:
        """Bits of an element that lie in a second plane, or 0."""
        return self.bits - self.low_bits

    @property
    def is_small_integer(self) -> bool:
        """Returns whether elements are integers of fewer than 8 bits."""
        return self.code in CODE_MIDDLES

    @property
    def middle(self) -> int:
        """Returns what integer codes of fewer than 8 bits have subtracted, unless by zero points; 0 of
        others.
        """
        return 0 if self.mins else CODE_MIDDLES.get(self.code, 0)


@dataclass(frozen=True)
class LayerFormat:
    """How all resident experts of a layer are packed; filled by `layer_format`."""

    layout: PackedExpertLayout
    gate_up: PanelFormat
    down: PanelFormat

    @property
    def expert_bytes(self) -> int:
        """The bytes of one slot."""
        return self.layout.expert_bytes

    @property
    def hidden_size(self) -> int:
        """Width of a row."""
        return self.layout.gate_up.k

    @property
    def gate_up_columns(self) -> int:
        """Output features of gate and up together, or of up alone, in whole panels."""
        return self.intermediate_columns * self.layout.panels_per_column_block

    @property
    def intermediate_size(self) -> int:
        """Intermediate channels of each expert held here."""
        return self.layout.down.k

    @property
    def intermediate_columns(self) -> int:
        """`intermediate_size` in whole panels."""
        return self.layout.intermediate_blocks * PANEL_COLUMNS


@cache  # a plan asks for each layer of each number of residents that it tries
def layer_format(
    gate_up: str, down: str, hidden: int, intermediate: int, has_bias: bool, gated: bool = True
) -> LayerFormat:
    """Returns experts with up and down and, if `gated`, gate. Raises ValueError for an unknown format."""
    layout = expert_layout(gate_up, down, hidden, intermediate, has_bias, gated)
    return LayerFormat(layout, PanelFormat(**asdict(layout.gate_up)), PanelFormat(**asdict(layout.down)))


@dataclass(frozen=True, slots=True)
class PanelViews:
    """One layer's slots, uint8 `[slots, expert_bytes]`, as the types kernels load; filled by `views`."""

    words: torch.Tensor  # int32
    # Mins, too. The format's scale type, or its bits; bfloat16, for such codes, where there are no group
    # scales.
    scales: torch.Tensor
    bytes: torch.Tensor
    floats: torch.Tensor  # float32


def views(slots: torch.Tensor, panels: PanelFormat) -> PanelViews:
    """Returns the same memory as flat tensors; in-place changes of `slots` show in them."""
    flat = slots.view(-1)
    scales = flat.view(_SCALE_VIEWS[panels.scale] if panels.scale else torch.bfloat16)
    return PanelViews(flat.view(torch.int32), scales, flat, flat.view(torch.float32))
