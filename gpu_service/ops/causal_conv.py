"""Causal convolution of each channel with its own few weights, then SiLU; what precedes linear attention."""

from __future__ import annotations

import torch
from torch.nn import functional

from gpu_service.ops.registry import Op
from gpu_service.ops.sequences import Sequences


def causal_conv(
    rows: torch.Tensor, recent: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`y[t, c] = silu(sum_j weight[c, j] x[t - width + 1 + j, c])` over one request's next tokens.

    rows `[T, C]`; recent `[width - 1, C]`, the inputs before them, oldest first; weight `[C, width]`. Sums in
    float32. Returns `[T, C]` in the rows' dtype, and the recent inputs of the tokens to come.
    """
    length, width = rows.shape[0], weight.shape[1]
    inputs = torch.cat((recent, rows))
    total = rows.new_zeros(rows.shape, dtype=torch.float32)
    for tap in range(width):
        total.addcmul_(inputs[tap : tap + length].float(), weight[:, tap].float())
    return functional.silu(total).to(rows.dtype), inputs[length:]


@Op
def causal_conv_update(
    rows: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
) -> torch.Tensor:
    """`causal_conv` of one token of each of R requests.

    rows `[R, C]` (columns contiguous); states `[slots, width - 1, C]`; weight `[C, width]`; reads and writes
    int64 `[R]`: slots of the recent inputs before and after the token, none both read and written. Returns
    `[R, C]`.
    """
    inputs = torch.cat((states[reads], rows[:, None]), dim=1)
    states[writes] = inputs[:, 1:]
    total = (inputs.float() * weight.t().float()).sum(1)
    return functional.silu(total).to(rows.dtype)


@Op
def causal_conv_extend(
    rows: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """One or more tokens of each of R requests, whose rows `sequences` tells; else as `causal_conv_update`.

    The recent inputs written are those behind each request's last row. Returns `[T, C]`.
    """
    outputs = []
    for neighbours in sequences.neighbours:
        own, read, write = rows[neighbours.rows], reads[neighbours.requests], writes[neighbours.requests]
        if neighbours.is_single_token:
            outputs.append(causal_conv_update(own, states, weight, read, write))
            continue
        output, recent = causal_conv(own, states[read][0], weight)
        states[write] = recent[None]
        outputs.append(output)
    return torch.cat(outputs)
