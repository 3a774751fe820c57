"""Weights in packed panels on a device, of every format that dense layers may be stored in."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from gpu_service.ops.packed_weight import PackedPart
from gpu_service.ops.panel_weight import PanelWeight
from moebius.kernels.weight_formats import WEIGHT_FORMATS
from tests.helpers.quantised_sources import ENCODERS, Quantised, random_weights

COLUMNS = 160
# No multiples of a panel's 16 rows, but of the 8 that some encoders need.
PART_ROWS = (72, 40)
FORMATS = [
    name
    for name, encode in ENCODERS.items()
    if not WEIGHT_FORMATS[encode(np.ones((8, 32), np.float32)).format].quantised_rows
]


def encoded(*names: str, columns: int = COLUMNS, rows: tuple[int, ...] = PART_ROWS) -> list[Quantised]:
    """Returns random parts of one weight, one for each encoder."""
    rng = np.random.default_rng(zlib.crc32("".join(names).encode()))
    return [
        ENCODERS[name](random_weights(rng, count, columns)) for name, count in zip(names, rows, strict=False)
    ]


def panel_weight(
    sources: list[Quantised], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> PanelWeight:
    """Returns the parts packed, each in two pieces, as a loader packs a large one."""
    parts = tuple(PackedPart(source.format, len(source.weights)) for source in sources)
    weight = PanelWeight(sources[0].weights.shape[1], parts, torch.device(device), dtype)
    for number, source in enumerate(sources):
        rows = len(source.weights)
        for begin, end in ((0, 32), (32, rows)):
            weight.pack(number, begin, source.source.take_rows(begin, end))
    return weight


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the norm of the difference over that of what is expected."""
    return float((found.double().cpu() - expected.cpu()).norm() / expected.cpu().norm())
