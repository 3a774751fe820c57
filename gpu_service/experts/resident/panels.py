"""How the experts of a layer are packed, and what large steps may take to compute them on a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from gpu_service.ops.panels import PanelFormat, panel_format
from moebius.kernels.weight_formats import (
    PANEL_COLUMNS,
    PackedExpertLayout,
    expert_layout,
    gate_up_format,
    split_gate_up,
)

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


@dataclass(frozen=True)
class LayerFormat:
    """How all resident experts of a layer are packed; filled by `layer_format`."""

    layout: PackedExpertLayout
    gate: PanelFormat
    gate_up: PanelFormat  # Of up alone where they differ.
    down: PanelFormat

    @property
    def panels(self) -> tuple[PanelFormat, ...]:
        """Gate's, up's and down's."""
        return self.gate, self.gate_up, self.down

    @property
    def formats(self) -> tuple[str, str]:
        """The names of gate's and up's format, and of down's."""
        return gate_up_format(self.gate.name, self.gate_up.name), self.down.name

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
    gate, up = (panel_format(name, hidden, has_bias) for name in split_gate_up(gate_up))
    return LayerFormat(layout, gate, up, panel_format(down, intermediate, has_bias))
