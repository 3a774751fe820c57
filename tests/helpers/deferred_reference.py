"""The rule of `defer_experts` in transformers' models, computed densely; nothing of the engine's is in it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def dense(experts: Any, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Every expert of every row `[T, H]`, and the weighted sum of those chosen."""
    gate, up = torch.einsum("th,eih->tei", rows, experts.gate_up_proj).chunk(2, dim=-1)
    answers = torch.einsum("tei,ehi->teh", functional.silu(gate) * up, experts.down_proj)
    return (answers.gather(1, ids.unsqueeze(-1).expand(-1, -1, rows.shape[1])) * weights.unsqueeze(-1)).sum(1)


def defer_in(reference: Any, count: int) -> None:
    """From here on `count` experts of each token in transformers' model are late."""
    blocks = [layer.mlp.experts for layer in reference.model.layers if hasattr(layer.mlp, "experts")]
    late: list[torch.Tensor] = []

    def replaced(number: int, experts: Any) -> Any:
        def forward(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            lowest = torch.zeros_like(weights).scatter(1, weights.argsort(dim=1)[:, :count], 1.0)
            if number == len(blocks) - 1:
                lowest = torch.zeros_like(weights)
            before = late.pop() if late else 0.0
            late.append(dense(experts, rows, ids, weights * lowest))
            if number == len(blocks) - 1:
                late.clear()
            return dense(experts, rows, ids, weights * (1.0 - lowest)) + before

        return forward

    for number, experts in enumerate(blocks):
        experts.forward = replaced(number, experts)
