"""Linear attention: a causal convolution, then the gated delta rule (Yang et al. 2024, arXiv:2412.06464).

The rule is a recurrence over a matrix per head:

    S_t = exp(g_t) S_{t-1};  S_t += k_t (beta_t (v_t - k_t^T S_t))^T;  o_t = q_t^T S_t / sqrt(key_head_dim)

with queries and keys of length 1, decay g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b). Key head
i serves the value heads i r to (i + 1) r - 1, r of them. All arithmetic is in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from gpu_service.ops.registry import Op


class Neighbours(NamedTuple):
    """Consecutive requests of one token each, or one request of several tokens."""

    requests: slice
    rows: slice
    is_single_token: bool  # Whether each request computes one token.


class Sequences(NamedTuple):
    """R requests' consecutive rows, on the host and on the device.

    In slices, because a list of rows would have to travel to the device while the host waits.
    """

    neighbours: list[Neighbours]  # all requests, in order
    starts: torch.Tensor  # int32 [R + 1], first row of each request


def make_sequences(starts: Sequence[int], starts_tensor: torch.Tensor) -> Sequences:
    """From the first row of each request and the number of rows, `[R + 1]`, twice the same."""
    found: list[Neighbours] = []
    for request, (begin, end) in enumerate(itertools.pairwise(starts)):
        first, row, single = request, begin, end - begin == 1
        if single and found and found[-1].is_single_token:
            last = found.pop()
            first, row = last.requests.start, last.rows.start
        found.append(Neighbours(slice(first, request + 1), slice(row, end), single))
    return Sequences(found, starts_tensor)


def over_requests(
    update: Callable[..., torch.Tensor],
    extend: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    rows: tuple[torch.Tensor, ...],
    constants: tuple[object, ...],
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """An op over a mixed step's requests, made of those for single tokens and for tokens of one request.

    `update(*rows, *constants, states, reads, writes)` computes rows that are each another request's.
    `extend(*rows, *constants, state)` computes rows of one request from its state; it returns what comes out
    and the state after them, which is written here. Returns what comes out of all rows.
    """
    outputs = []
    for requests, own_rows, is_single_token in sequences.neighbours:
        read, write = reads[requests], writes[requests]
        own = *(part[own_rows] for part in rows), *constants
        if is_single_token:
            outputs.append(update(*own, states, read, write))
            continue
        output, state = extend(*own, states[read][0])
        states[write] = state[None]
        outputs.append(output)
    return torch.cat(outputs)


def causal_conv(
    rows: torch.Tensor,
    recent: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activates: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `y[t, c] = silu(sum_j weight[c, j] x[t - width + 1 + j, c] + bias[c])` over one request's next
    tokens.

    rows `[T, C]`; recent `[width - 1, C]`, the inputs before them, oldest first; weight `[C, width]`; bias
    `[C]` or None, no bias; `activates` False: without the silu. Sums in float32. Returns `[T, C]` in the
    rows' dtype, and the recent inputs of the tokens to come.
    """
    length, width = rows.shape[0], weight.shape[1]
    inputs = torch.cat((recent, rows))
    total = rows.new_zeros(rows.shape, dtype=torch.float32)
    if bias is not None:
        total += bias
    for tap in range(width):
        total.addcmul_(inputs[tap : tap + length].float(), weight[:, tap].float())
    return (functional.silu(total) if activates else total).to(rows.dtype), inputs[length:]


@Op
def causal_conv_update(
    rows: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    bias: torch.Tensor | None = None,
    activates: bool = True,
) -> torch.Tensor:
    """Computes `causal_conv` of one token of each of R requests.

    rows `[R, C]` (columns contiguous); states `[slots, width - 1, C]`; weight `[C, width]`; reads and writes
    int64 `[R]`: slots of the recent inputs before and after the token, none both read and written; bias `[C]`
    or None; `activates` as there. Returns `[R, C]`.
    """
    inputs = torch.cat((states[reads], rows[:, None]), dim=1)
    states[writes] = inputs[:, 1:]
    total = (inputs.float() * weight.t().float()).sum(1)
    if bias is not None:
        total += bias
    return (functional.silu(total) if activates else total).to(rows.dtype)


@Op
def causal_conv_extend(
    rows: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    sequences: Sequences,
    bias: torch.Tensor | None = None,
    activates: bool = True,
) -> torch.Tensor:
    """Computes one or more tokens of each of R requests, whose rows `sequences` gives; else as
    `causal_conv_update`.

    The recent inputs written are those after each request's last row. Returns `[T, C]`.
    """
    return over_requests(
        lambda own, states, reads, writes: causal_conv_update(
            own, states, weight, reads, writes, bias, activates
        ),
        lambda own, recent: causal_conv(own, recent, weight, bias, activates),
        (rows,),
        (),
        states,
        reads,
        writes,
        sequences,
    )


# Tokens whose mutual influence is solved at once; longer chunks cost larger GEMMs, shorter ones more steps.
CHUNK = 64
# Added to the squares of a head, as the models were trained.
_EPSILON = 1e-6


class DeltaRows(NamedTuple):
    """One token in each row: what the recurrence reads; float32. H = value heads."""

    query: torch.Tensor  # [T, H, key_head_dim], of length 1 / sqrt(key_head_dim)
    key: torch.Tensor  # [T, H, key_head_dim], of length 1
    value: torch.Tensor  # [T, H, value_head_dim]
    log_decay: torch.Tensor  # [T, H], at most 0; of `ops.kimi_delta` [T, H, key_head_dim]
    beta: torch.Tensor  # [T, H]


def unit_heads(columns: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Returns `[T, heads * head_dim]` as float32 `[T, heads, head_dim]` of length 1."""
    rows = columns.float().view(columns.shape[0], -1, head_dim)
    return rows * (rows.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


def delta_rows(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_head_dim: int,
    value_head_dim: int,
) -> DeltaRows:
    """From what the layer projects: qkv `[T, 2 * key heads * key_head_dim + H * value_head_dim]`, a and b
    `[T, H]` (any strides), a_log and dt_bias float32 `[H]`.
    """
    tokens, heads = b.shape
    value_size = heads * value_head_dim
    key_size = (qkv.shape[1] - value_size) // 2
    repeats = heads * key_head_dim // key_size

    def unit(columns: torch.Tensor) -> torch.Tensor:
        rows = unit_heads(columns, key_head_dim)
        return rows[:, :, None].expand(-1, -1, repeats, -1).flatten(1, 2)

    return DeltaRows(
        query=unit(qkv[:, :key_size]) * key_head_dim**-0.5,
        key=unit(qkv[:, key_size : 2 * key_size]),
        value=qkv[:, 2 * key_size :].float().view(tokens, heads, value_head_dim),
        log_decay=-a_log.exp() * functional.softplus(a.float() + dt_bias),
        beta=b.float().sigmoid(),
    )


@Op
def gated_delta_update(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
) -> torch.Tensor:
    """Computes one token of each of R requests.

    The first five as in `delta_rows`; states float32 `[slots, H, key_head_dim, value_head_dim]`; reads and
    writes int64 `[R]`: slots of the states before and after the token, none both read and written. Returns
    `[R, H, value_head_dim]` in qkv's dtype.
    """
    rows = delta_rows(qkv, a, b, a_log, dt_bias, *states.shape[2:])
    state = states[reads] * rows.log_decay.exp()[..., None, None]
    known = (rows.key[..., None] * state).sum(-2)
    change = rows.beta[..., None] * (rows.value - known)
    state = state + rows.key[..., None] * change[..., None, :]
    states[writes] = state
    return (rows.query[..., None] * state).sum(-2).to(qkv.dtype)


@Op
def gated_delta_extend(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Computes one or more tokens of each of R requests, whose rows `sequences` gives; else as
    `gated_delta_update`.

    The states written are those after each request's last row. Returns `[T, H, value_head_dim]`.
    """

    def extend(*own: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *projected, state = own
        return chunked_delta_rule(delta_rows(*projected, *states.shape[2:]), state)

    rows, constants, slots = (qkv, a, b), (a_log, dt_bias), (states, reads, writes)
    return over_requests(gated_delta_update, extend, rows, constants, *slots, sequences).to(qkv.dtype)


def chunked_delta_rule(
    rows: DeltaRows, state: torch.Tensor, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the recurrence over one request's next tokens, a chunk at a time instead of a token.

    state float32 `[H, key_head_dim, value_head_dim]`, which stays as it is. Returns float32
    `[T, H, value_head_dim]` and the state after the last token.

    Within a chunk, the changes u_i = beta_i (v_i - k_i^T S_i) that its tokens write to the state depend on
    each other through a triangular system (section 3.3 of the source): with G the sum of the log decays,

        u_i + beta_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) k_i^T S)
    """
    outputs = []
    for begin in range(0, rows.query.shape[0], chunk):
        query, key, value, log_decay, beta = (part[begin : begin + chunk].transpose(0, 1) for part in rows)
        total = log_decay.cumsum(-1)
        between = (total[:, :, None] - total[:, None, :]).tril()
        decay = between.exp().tril()
        decayed = total.exp()[..., None]
        system = (key @ key.mT * decay * beta[..., None]).tril(-1)
        wanted = beta[..., None] * (value - decayed * (key @ state))
        changes = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append(decayed * (query @ state) + (query @ key.mT * decay) @ changes)
        left = (total[:, -1:] - total).exp()[..., None]
        state = decayed[:, -1:] * state + (left * key).mT @ changes
    return torch.cat(outputs, dim=1).transpose(0, 1), state
