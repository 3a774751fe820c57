"""What experts compute between their products, by the names of `MoeGeometry.activation`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from moebius.checkpoint.moe_config import MoeGeometry


def _silu(gate: torch.Tensor, up: torch.Tensor, geometry: MoeGeometry) -> torch.Tensor:
    return functional.silu(gate) * up


def _silu_clamped(gate: torch.Tensor, up: torch.Tensor, geometry: MoeGeometry) -> torch.Tensor:
    return functional.silu(gate.clamp(max=geometry.limit)) * up.clamp(-geometry.limit, geometry.limit)


def _gpt_oss(gate: torch.Tensor, up: torch.Tensor, geometry: MoeGeometry) -> torch.Tensor:
    gate = gate.clamp(max=geometry.limit)
    up = up.clamp(-geometry.limit, geometry.limit)
    return (up + 1) * gate * torch.sigmoid(geometry.alpha * gate)


# Of gate and up, float32 of one shape.
EXPERT_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor, torch.Tensor, MoeGeometry], torch.Tensor]] = {
    "silu": _silu,
    "silu_clamped": _silu_clamped,
    "gpt_oss": _gpt_oss,
}
