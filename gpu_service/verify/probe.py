"""Rows that go to chosen experts only, and what each expert's answer to them differs by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpu_service.verify.errors import relative_error

# Rows that choose one expert alone, and rows that choose all of a probe's experts together.
ROWS_EACH = 4
ROWS_TOGETHER = 2
# What computes `[T, H]` rows with int32 `[T, K]` ids and float32 weights of a layer: float32 `[T, H]`.
Compute = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Probe:
    """Inputs for one layer; filled by `make_probe`. All tensors are on the CPU."""

    layer: int
    experts: tuple[int, ...]
    hidden_states: torch.Tensor  # [T, H]
    topk_ids: torch.Tensor  # int32 [T, K]
    topk_weights: torch.Tensor  # float32 [T, K]

    def run(self, compute: Compute, device: torch.device) -> torch.Tensor:
        """What `compute` answers, float32 `[T, H]`, on the device still."""
        return compute(
            self.layer,
            self.hidden_states.to(device),
            self.topk_ids.to(device),
            self.topk_weights.to(device),
        )

    def errors(self, found: torch.Tensor, wanted: torch.Tensor) -> list[tuple[tuple[int, ...], float]]:
        """Of each expert alone, then of rows that chose several together; both `[T, H]` on the CPU."""
        together = sorted(expert for expert in self.topk_ids[-1].tolist() if expert >= 0)
        groups: list[tuple[tuple[int, ...], int]] = [((expert,), ROWS_EACH) for expert in self.experts]
        groups.append((tuple(together), ROWS_TOGETHER))
        errors, begin = [], 0
        for experts, rows in groups:
            part = slice(begin, begin + rows)
            errors.append((experts, relative_error(found[part], wanted[part])))
            begin += rows
        return errors


def make_probe(layer: int, experts: Sequence[int], hidden_size: int, top_k: int, dtype: torch.dtype) -> Probe:
    """Rows of variance 1, the same on every rank and in every process."""
    generator = torch.Generator().manual_seed(layer)
    single = ROWS_EACH * len(experts)
    rows = single + ROWS_TOGETHER
    hidden_states = torch.randn(rows, hidden_size, generator=generator).to(dtype)
    ids = torch.full((rows, top_k), -1, dtype=torch.int32)
    weights = torch.zeros(rows, top_k)
    for row in range(single):
        # Every column of the choice is looked at.
        ids[row, row % top_k] = experts[row // ROWS_EACH]
        weights[row, row % top_k] = 1.0
    chosen = list(experts)[:top_k]
    for row in range(single, rows):
        ids[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        weights[row, : len(chosen)] = torch.rand(len(chosen), generator=generator) + 0.5
    return Probe(layer, tuple(experts), hidden_states, ids, weights)


def spread(items: Sequence[int], count: int) -> tuple[int, ...]:
    """Up to `count` of the items, evenly spread: the first, the last (for 2 or more), some between."""
    if count >= len(items):
        return tuple(items)
    if count <= 1:
        return tuple(items[:count])
    last = len(items) - 1
    return tuple(dict.fromkeys(items[round(i * last / (count - 1))] for i in range(count)))
