"""Mixed steps of linear attention at any size, and the recurrence token by token in float64 as the answer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from gpu_service.ops.kimi_delta import kimi_delta_rows
from gpu_service.ops.linear_attention import DeltaRows, Sequences, delta_rows, make_sequences


@dataclass(frozen=True)
class LinearSizes:
    """Heads and their widths; of a key head there are queries as well."""

    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128

    @property
    def conv_size(self) -> int:
        """Columns of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


QWEN3_NEXT = LinearSizes(16, 32)
QWEN3_5_LARGE = LinearSizes(16, 64)
KIMI_LINEAR = LinearSizes(32, 32)


class DeltaCase(NamedTuple):
    """Arguments of `gated_delta_extend`, in its order; filled by `make_delta_case`."""

    qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    states: torch.Tensor
    reads: torch.Tensor
    writes: torch.Tensor
    sequences: Sequences


class KimiCase(NamedTuple):
    """Arguments of `kimi_delta_extend`, in its order; filled by `make_kimi_case`."""

    qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    bound: float | None
    states: torch.Tensor
    reads: torch.Tensor
    writes: torch.Tensor
    sequences: Sequences


def slots(lengths: list[int], device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Request r reads slot r and writes the one as far from the end; the middle one is unused."""
    count = len(lengths)
    return torch.arange(count, device=device), torch.arange(2 * count, count, -1, device=device)


def sequences_of(lengths: list[int], device: torch.device | str) -> Sequences:
    """Returns requests with the given numbers of new tokens."""
    starts = [0, *accumulate(lengths)]
    return make_sequences(starts, torch.tensor(starts, dtype=torch.int32, device=device))


def make_delta_case(
    sizes: LinearSizes, lengths: list[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> DeltaCase:
    """Returns random rows, decays from almost none to almost all, states that are not zero."""
    generator = torch.Generator().manual_seed(len(lengths))

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device)

    tokens, heads = sum(lengths), sizes.value_heads
    gates = random(tokens, 2 * heads, scale=2.0).to(dtype)
    return DeltaCase(
        random(tokens, sizes.conv_size).to(dtype),
        gates[:, :heads],
        gates[:, heads:],
        random(heads),
        random(heads) - 2,
        random(2 * len(lengths) + 1, heads, sizes.key_dim, sizes.value_dim),
        *slots(lengths, device),
        sequences_of(lengths, device),
    )


def make_kimi_case(
    sizes: LinearSizes,
    lengths: list[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    bound: float | None = None,
) -> KimiCase:
    """Returns the same with decays of elements, from almost none to almost all within one head."""
    case = make_delta_case(sizes, lengths, dtype, device)
    generator, size = torch.Generator().manual_seed(1), sizes.value_heads * sizes.key_dim
    a = (2 * torch.randn(sum(lengths), size, generator=generator)).to(device, dtype)
    dt_bias = (torch.randn(size, generator=generator) - 2).to(device)
    return KimiCase(case.qkv, a, case.b, case.a_log, dt_bias, bound, *case[5:])


def naive_delta(case: DeltaCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[T, H, value_dim]` and all states afterwards, float64."""
    return _naive(delta_rows(*case[:5], *case.states.shape[2:]), case)


def naive_kimi(case: KimiCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the same with decays of elements."""
    return _naive(kimi_delta_rows(*case[:6], case.states.shape[2]), case)


def _naive(rows: DeltaRows, case: DeltaCase | KimiCase) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, log_decay, beta = (part.double() for part in rows)
    # Of heads, or of elements.
    decay = log_decay.exp().view(*log_decay.shape[:2], -1, 1)
    states, outputs = case.states.double(), torch.empty_like(value)
    for request, (begin, end) in enumerate(pairwise(case.sequences.starts.tolist())):
        state = states[case.reads[request]].clone()
        for row in range(begin, end):
            state *= decay[row]
            change = beta[row, :, None] * (value[row] - (key[row, :, :, None] * state).sum(1))
            state += key[row, :, :, None] * change[:, None]
            outputs[row] = (query[row, :, :, None] * state).sum(1)
        states[case.writes[request]] = state
    return outputs, states
