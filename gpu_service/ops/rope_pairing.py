"""One step's rotary table for heads whose pairs lie otherwise than those it was made for."""

from __future__ import annotations

import torch

from gpu_service.ops.rope import RopeTable


def half_split(table: RopeTable) -> RopeTable:
    """The same angles with element j paired with j + rotary_dim / 2; a table of such pairs comes back as is.

    No copy of FlashInfer's factors: those are by pair, wherever its elements lie.
    """
    if not table.interleaved:
        return table
    cos, sin = table.cos[..., ::2], table.sin[..., 1::2]
    return table._replace(
        cos=torch.cat((cos, cos), dim=-1), sin=torch.cat((-sin, sin), dim=-1), interleaved=False
    )
