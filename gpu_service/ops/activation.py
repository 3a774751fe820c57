"""Gated activations of MLPs."""

from __future__ import annotations

import torch
from torch.nn import functional

from gpu_service.ops.registry import Op


@Op
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's inner product: gate_up `[..., 2 * I]`, gate first; returns `silu(gate) * up`, `[..., I]`.

    May overwrite its input.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


GATED_ACTIVATIONS: dict[str, Op[[torch.Tensor], torch.Tensor]] = {"silu": silu_and_mul}
