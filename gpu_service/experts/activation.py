"""What experts compute between their products, by the names of `MoeGeometry.activation`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional


def _silu(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return functional.silu(gate) * up


def _silu_clamped(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _gpt_oss(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


# Of gate and up, float32 of one shape, `MoeGeometry.alpha`, and the layer's `MoeGeometry.limit_of`.
EXPERT_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]] = {
    "silu": _silu,
    "silu_clamped": _silu_clamped,
    "gpt_oss": _gpt_oss,
}
