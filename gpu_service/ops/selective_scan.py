"""Mamba's selective state space (Gu & Dao 2023, arXiv:2312.00752), with a state for each channel.

A recurrence over a vector per channel c, all arithmetic in float32:

    S_t = exp(step_t A) S_{t-1} + step_t B_t x_t;  y_t = (C_t . S_t + D x_t) silu(gate_t)

with step = softplus(dt) of the channel, A = -exp(A_log) `[channels, state_dim]`, and B and C of all channels.
Mamba-2's (`ops.state_space`) has a decay for each head instead of one for each element of the states, so that
only it can be computed by GEMMs of chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gpu_service.ops.linear_attention import Sequences, over_requests
from gpu_service.ops.registry import Op

# Tokens whose factors are computed together, which bounds what they take.
CHUNK = 32


@Op
def selective_scan_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
) -> torch.Tensor:
    """Computes one token of each of R requests.

    x, dt and gate `[R, C]`, b and c `[R, state_dim]` (any row strides); a_log float32 `[C, state_dim]`, d
    float32 `[C]`; states float32 `[slots, C, state_dim, 1]`; reads and writes int64 `[R]`: slots of the
    states before and after the token, none both read and written. Returns `[R, C]` in x's dtype.
    """
    step, values = functional.softplus(dt.float()), x.float()
    decay = (step[..., None] * -a_log.exp()).exp()
    state = states[reads][..., 0] * decay + b.float()[:, None] * (step * values)[..., None]
    states[writes] = state[..., None]
    output = (state * c.float()[:, None]).sum(-1) + d * values
    return (output * functional.silu(gate.float())).to(x.dtype)


@Op
def selective_scan_extend(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Computes one or more tokens of each of R requests, whose rows `sequences` gives.

    Else as `selective_scan_update`. The states written are those after each request's last row. Returns
    `[T, C]`.
    """

    def extend(
        x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, gate: torch.Tensor, *others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, state = [], others[-1]
        for begin in range(0, x.shape[0], CHUNK):
            own = slice(begin, begin + CHUNK)
            output, state = scan(x[own], dt[own], b[own], c[own], gate[own], a_log, d, state)
            outputs.append(output)
        return torch.cat(outputs), state

    rows, constants, slots = (x, dt, b, c, gate), (a_log, d), (states, reads, writes)
    return over_requests(selective_scan_update, extend, rows, constants, *slots, sequences)


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the recurrence over one request's next tokens, whose factors take T times as much as the
    state.

    state float32 `[C, state_dim, 1]`, which stays as it is. Returns `[T, C]` and the state after the last.
    """
    step, values = functional.softplus(dt.float()), x.float()
    decay = (step[..., None] * -a_log.exp()).exp_()
    # What a token writes becomes the state after it.
    after = b.float()[:, None] * (step * values)[..., None]
    before = state[..., 0]
    for token in range(after.shape[0]):
        before = after[token].addcmul_(decay[token], before)
    output = (after @ c.float()[..., None])[..., 0] + d * values
    return (output * functional.silu(gate.float())).to(x.dtype), before[..., None].clone()
