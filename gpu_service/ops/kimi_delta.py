"""Kimi Delta Attention (arXiv:2510.26692): the gated delta rule with a decay for each element of a key.

The recurrence is that of `ops.linear_attention`, but for its first step, in which row d of a head's state
has a decay of its own, `S_t = diag(exp(g_t)) S_{t-1}`. With x = a + dt_bias, `g = -exp(A_log) softplus(x)`,
or, where the model bounds it, `g = bound * sigmoid(exp(A_log) x)` with a bound below 0. All arithmetic is in
float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gpu_service.ops.linear_attention import DeltaRows, Sequences, over_requests, unit_heads
from gpu_service.ops.registry import Op

# Tokens whose mutual influence is solved at once. Decays of elements are no factors of a pair's product, so
# that it is a sum over all of them: shorter chunks than the gated delta rule's have fewer pairs.
CHUNK = 16


def kimi_delta_rows(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    bound: float | None,
    key_head_dim: int,
) -> DeltaRows:
    """From what the layer projects: qkv `[T, H * (2 * key_head_dim + value_head_dim)]`, a `[T, H * K]` with
    K the key_head_dim, b `[T, H]` (any strides); a_log float32 `[H]`, dt_bias float32 `[H * K]`. Decays are
    of elements, `[T, H, K]`.
    """
    tokens, heads = b.shape
    key_size = heads * key_head_dim
    step = (a.float() + dt_bias).view(tokens, heads, key_head_dim)
    rate = a_log.exp()[:, None]
    log_decay = -rate * functional.softplus(step) if bound is None else bound * (rate * step).sigmoid()
    return DeltaRows(
        query=unit_heads(qkv[:, :key_size], key_head_dim) * key_head_dim**-0.5,
        key=unit_heads(qkv[:, key_size : 2 * key_size], key_head_dim),
        value=qkv[:, 2 * key_size :].float().view(tokens, heads, -1),
        log_decay=log_decay,
        beta=b.float().sigmoid(),
    )


@Op
def kimi_delta_update(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    bound: float | None,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
) -> torch.Tensor:
    """Computes one token of each of R requests.

    The first six as in `kimi_delta_rows`; states float32 `[slots, H, key_head_dim, value_head_dim]`; reads
    and writes int64 `[R]`: slots of the states before and after the token, none both read and written.
    Returns `[R, H, value_head_dim]` in qkv's dtype.
    """
    rows = kimi_delta_rows(qkv, a, b, a_log, dt_bias, bound, states.shape[2])
    state = states[reads] * rows.log_decay.exp()[..., None]
    known = (rows.key[..., None] * state).sum(-2)
    change = rows.beta[..., None] * (rows.value - known)
    state = state + rows.key[..., None] * change[..., None, :]
    states[writes] = state
    return (rows.query[..., None] * state).sum(-2).to(qkv.dtype)


@Op
def kimi_delta_extend(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    bound: float | None,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Computes one or more tokens of each of R requests, whose rows `sequences` gives; else as
    `kimi_delta_update`.

    The states written are those after each request's last row. Returns `[T, H, value_head_dim]`.
    """

    def extend(
        qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = kimi_delta_rows(qkv, a, b, a_log, dt_bias, bound, states.shape[2])
        return chunked_kimi_delta(rows, others[-1])

    rows, constants, slots = (qkv, a, b), (a_log, dt_bias, bound), (states, reads, writes)
    return over_requests(kimi_delta_update, extend, rows, constants, *slots, sequences).to(qkv.dtype)


def chunked_kimi_delta(
    rows: DeltaRows, state: torch.Tensor, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the recurrence over one request's next tokens, a chunk at a time instead of a token.

    state float32 `[H, key_head_dim, value_head_dim]`, which stays as it is. Returns float32
    `[T, H, value_head_dim]` and the state after the last token. As in
    `ops.linear_attention.chunked_delta_rule`, with a product of two tokens i >= j being

        sum over d of k_i[d] k_j[d] exp(G_i[d] - G_j[d])

    whose exponents are never above 0: as two factors, exp(G_i) and exp(-G_j) would leave float32's range.
    """
    outputs = []
    for begin in range(0, rows.query.shape[0], chunk):
        query, key, value, log_decay, beta = (part[begin : begin + chunk].transpose(0, 1) for part in rows)
        total = log_decay.cumsum(-2)
        # [H, i, j, key_head_dim]: later tokens are masked afterwards, here they only must not overflow.
        decayed = (total[:, :, None] - total[:, None]).clamp_(max=0.0).exp_().mul_(key[:, None])
        system = (beta[..., None] * (decayed @ key[..., None])[..., 0]).tril(-1)
        seen = (decayed @ query[..., None])[..., 0].tril()
        within = total.exp()
        wanted = beta[..., None] * (value - (within * key) @ state)
        changes = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append((within * query) @ state + seen @ changes)
        left = (total[:, -1:] - total).exp()
        state = within[:, -1, :, None] * state + (left * key).mT @ changes
    return torch.cat(outputs, dim=1).transpose(0, 1), state
