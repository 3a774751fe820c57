"""Mamba-2's selective state space, a linear attention without softmax (Dao & Gu 2024, arXiv:2405.21060).

A recurrence over a matrix `[state_dim, head_dim]` per head, all arithmetic in float32:

    S_t = exp(step_t A) S_{t-1} + B_t (step_t x_t)^T;  y_t = C_t^T S_t + D x_t

with step = softplus(dt + dt_bias) and A = -exp(A_log). Group i serves the heads i r to (i + 1) r - 1, r of
them. The convolution before it is `ops.linear_attention.causal_conv_*`, the states are kept as there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from gpu_service.ops.linear_attention import CHUNK, Sequences, over_requests
from gpu_service.ops.registry import Op


class StateSpaceRows(NamedTuple):
    """One token in each row: what the recurrence reads; float32. H = heads."""

    read: torch.Tensor  # C, [T, H, state_dim]
    write: torch.Tensor  # B, [T, H, state_dim]
    value: torch.Tensor  # step x, [T, H, head_dim]
    log_decay: torch.Tensor  # step A, [T, H], at most 0
    skip: torch.Tensor  # D x, [T, H, head_dim]


def state_space_rows(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    state_dim: int,
    head_dim: int,
) -> StateSpaceRows:
    """Returns the rows of what the layer projects and convolves: xbc `[T, H * head_dim + 2 * groups *
    state_dim]`, dt `[T, H]` (any strides), a_log, dt_bias and d float32 `[H]`.
    """
    tokens, heads = dt.shape
    inner = heads * head_dim
    size = (xbc.shape[1] - inner) // 2
    repeats = heads * state_dim // size

    def per_head(columns: torch.Tensor) -> torch.Tensor:
        groups = columns.float().view(tokens, -1, state_dim)
        return groups[:, :, None].expand(-1, -1, repeats, -1).flatten(1, 2)

    x = xbc[:, :inner].float().view(tokens, heads, head_dim)
    step = functional.softplus(dt.float() + dt_bias)
    return StateSpaceRows(
        read=per_head(xbc[:, inner + size :]),
        write=per_head(xbc[:, inner : inner + size]),
        value=x * step[..., None],
        log_decay=-a_log.exp() * step,
        skip=x * d[:, None],
    )


@Op
def state_space_update(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
) -> torch.Tensor:
    """Computes one token of each of R requests.

    The first five as in `state_space_rows`; states float32 `[slots, H, state_dim, head_dim]`; reads and
    writes int64 `[R]`: slots of the states before and after the token, none both read and written. Returns
    float32 `[R, H, head_dim]`: what follows is a norm, which rounds once.
    """
    rows = state_space_rows(xbc, dt, a_log, dt_bias, d, *states.shape[2:])
    state = states[reads] * rows.log_decay.exp()[..., None, None]
    state = state + rows.write[..., None] * rows.value[..., None, :]
    states[writes] = state
    return (rows.read[..., None] * state).sum(-2) + rows.skip


@Op
def state_space_extend(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Computes one or more tokens of each of R requests, whose rows `sequences` gives; else as
    `state_space_update`.

    The states written are those after each request's last row. Returns float32 `[T, H, head_dim]`.
    """

    def extend(*own: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *projected, state = own
        return chunked_state_space(state_space_rows(*projected, *states.shape[2:]), state)

    rows, constants, slots = (xbc, dt), (a_log, dt_bias, d), (states, reads, writes)
    return over_requests(state_space_update, extend, rows, constants, *slots, sequences)


def chunked_state_space(
    rows: StateSpaceRows, state: torch.Tensor, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the recurrence over one request's next tokens, a chunk at a time instead of a token (section 6
    of the source).

    state float32 `[H, state_dim, head_dim]`, which stays as it is. Returns float32 `[T, H, head_dim]` and the
    state after the last token.
    """
    outputs = []
    for begin in range(0, rows.read.shape[0], chunk):
        read, write, value, log_decay, skip = (part[begin : begin + chunk].transpose(0, 1) for part in rows)
        total = log_decay.cumsum(-1)
        decay = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
        decayed = total.exp()[..., None]
        outputs.append(decayed * (read @ state) + (read @ write.mT * decay) @ value + skip)
        left = (total[:, -1:] - total).exp()[..., None]
        state = decayed[:, -1:] * state + (left * write).mT @ value
    return torch.cat(outputs, dim=1).transpose(0, 1), state
