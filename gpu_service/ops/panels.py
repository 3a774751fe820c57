"""The packed layout as kernels on a device see it: plain numbers, and typed views of one memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import torch

from moebius.kernels.weight_formats import CODE_MIDDLES, GRID_UNITS, PanelLayout, grid, panel_layout

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


@dataclass(frozen=True, repr=False)
class PanelFormat(PanelLayout):
    """One kind of panel as a compile-time constant of kernels; filled by `layer_format`."""

    def __repr__(self) -> str:
        """Returns the part of the names of compiled functions."""
        return f"{self.name}_k{self.k}{'_bias' if self.has_bias else ''}"

    @property
    def low_bits(self) -> int:
        """Bits of an element that lie in its word: all, or those of the first plane. Of rows of a grid the
        lines of 32 k that have as many numbers each.
        """
        if self.is_grid:
            return 1 if self.code in ("iq2_xxs", "tq1") else 2
        return {2: 2, 3: 2, 5: 4, 6: 4}.get(self.bits, self.bits)

    @property
    def high_bits(self) -> int:
        """Bits of an element that lie in a second plane, or 0. Of rows of a grid 1 where words do not have
        all that elements need.
        """
        if self.is_grid:
            return int(self.code != "iq2_xs")
        return self.bits - self.low_bits

    @property
    def is_grid(self) -> bool:
        """Returns whether elements are parts of rows of a grid."""
        return self.code in GRID_UNITS

    @property
    def is_iq1(self) -> bool:
        """Returns whether rows are int8, an eighth more or less."""
        return self.code in ("iq1_s", "iq1_m")

    @property
    def grid_row(self) -> int:
        """Returns the elements of a row of the grid."""
        return int(grid(self.code).shape[1])

    @property
    def grid_begin(self) -> int:
        """Returns the first word of the grid in `PanelViews.grids`."""
        return int(_GRID_BEGINS[self.code])

    @property
    def grid_unit(self) -> float:
        """Returns what a row's numbers are times."""
        return GRID_UNITS[self.code]

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


@cache
def panel_format(name: str, k: int, has_bias: bool = False) -> PanelFormat:
    """Returns the panels of a format for `k` inputs. Raises ValueError for an unknown name, or k < 1."""
    return PanelFormat(**asdict(panel_layout(name, k, has_bias)))


@dataclass(frozen=True, slots=True)
class PanelViews:
    """One layer's slots, uint8 `[slots, expert_bytes]`, as the types kernels load; filled by `views`."""

    words: torch.Tensor  # int32
    # Mins, too. The format's scale type, or its bits; bfloat16, for such codes, where there are no group
    # scales.
    scales: torch.Tensor
    bytes: torch.Tensor
    floats: torch.Tensor  # float32
    grids: torch.Tensor  # int32: rows of all grids, from each one's `grid_begin` on

    @property
    def pointers(self) -> tuple[torch.Tensor, ...]:
        """All of them, in the order in which kernels of one format take them."""
        return self.words, self.scales, self.bytes, self.grids, self.floats


def views(slots: torch.Tensor, panels: PanelFormat) -> PanelViews:
    """Returns the same memory as flat tensors; in-place changes of `slots` show in them."""
    flat = slots.view(-1)
    scales = flat.view(_SCALE_VIEWS[panels.scale] if panels.scale else torch.bfloat16)
    return PanelViews(flat.view(torch.int32), scales, flat, flat.view(torch.float32), _grids(flat.device))


_GRID_WORDS = {code: grid(code).reshape(-1).view(np.int32) for code in GRID_UNITS if code != "tq1"}
_GRID_BEGINS = dict(zip(_GRID_WORDS, np.cumsum([0, *map(len, _GRID_WORDS.values())]).tolist(), strict=False))


@cache
def _grids(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(list(_GRID_WORDS.values()))).to(device)
