"""N-grams of tokens as rows of a table: hashes of each token together with those before it (Qwen4).

Token t of n-gram order m has the hash `x_0 f_0 ^ x_1 f_1 ^ ... ^ x_(m-1) f_(m-1)`, where x_i is the token i
places before t (the end token from the first end token on, going back) and f are odd factors that follow
from a seed. Each of an order's heads takes it modulo a prime of its own and has its own part of the table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from gpu_service.ops.registry import Op
from moebius.models.layers.ngrams import NGramConfig, hash_factors, hash_primes


class NGramTable(NamedTuple):
    """How a layer hashes; made by `ngram_table`, all int64."""

    factors: torch.Tensor  # [size], of a token and of those before it
    primes: torch.Tensor  # [num_hashes], rows of each hash
    offsets: torch.Tensor  # [num_hashes], its first row


def ngram_table(sizes: NGramConfig, place: int, vocab_size: int, device: torch.device | str) -> NGramTable:
    """Returns the table of the `place`-th layer that embeds n-grams."""
    factors, primes = hash_factors(sizes, place, vocab_size), hash_primes(sizes, place)
    offsets = [sum(primes[:i]) for i in range(len(primes))]
    lists = factors, primes, offsets
    of_tokens, sizes_of_hashes, first_rows = (torch.tensor(numbers, device=device) for numbers in lists)
    return NGramTable(of_tokens, sizes_of_hashes, first_rows)


@Op
def ngram_rows(
    ids: torch.Tensor,
    positions: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    query_starts: torch.Tensor,
    factors: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    end_token_id: int,
    ends: bool = True,
) -> torch.Tensor:
    """Returns the rows of the table for the n-grams that end with each new token, int64 `[T, num_hashes]`.

    ids, positions int64 `[T]` and query_starts int32 `[R + 1]` as in `ForwardInputs`; states int64 `[slots,
    size - 1]`: each request's latest tokens before the step, oldest first, in slots `reads` int64 `[R]`;
    afterwards those after it, in slots `writes`. What a slot holds of positions before the first is not
    read: the end token stands for them. factors, primes, offsets as in `NGramTable`. ends: no n-gram reaches
    beyond an end token among the tokens. Nothing is asked of the host.
    """
    kept, rows = states.shape[1], torch.arange(ids.shape[0], device=ids.device)
    requests = torch.searchsorted(query_starts[1:], rows.to(query_starts.dtype), right=True)
    requests.clamp_(max=reads.shape[0] - 1)
    before = _earlier(ids, rows, states, reads, query_starts, requests, range(1, kept + 1))
    inside = positions[:, None] >= torch.arange(1, kept + 1, device=ids.device)
    before = torch.where(inside, before, end_token_id)
    if ends:
        ended = (before == end_token_id).cumsum(1) > 0
        before = torch.where(ended, end_token_id, before)
    # The latest tokens as they will be: those `kept - 1`, ..., 0 before each request's last row.
    latest, every = query_starts[1:].long() - 1, torch.arange(reads.shape[0], device=ids.device)
    own = (ids, latest, states, reads, query_starts, every)
    states[writes] = _earlier(*own, range(kept - 1, -1, -1))
    tokens = torch.cat((ids[:, None], before), dim=1) * factors
    hashes, mixed = [], tokens[:, 0]
    heads = primes.shape[0] // kept
    for order in range(kept):
        mixed = mixed ^ tokens[:, order + 1]
        own_primes = primes[order * heads : (order + 1) * heads]
        hashes.append(mixed[:, None] % own_primes)
    return torch.cat(hashes, dim=1) + offsets


def _earlier(
    ids: torch.Tensor,
    rows: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    query_starts: torch.Tensor,
    requests: torch.Tensor,
    places: range,
) -> torch.Tensor:
    """Returns the tokens `places` before some rows, `[len(rows), len(places)]`, as far as they are kept."""
    at = rows[:, None] - torch.arange(places.start, places.stop, places.step, device=ids.device)
    first = query_starts[requests].long()[:, None]
    kept = states.shape[1]
    from_state = states[reads[requests]].gather(1, (at - first + kept).clamp_(0, kept - 1))
    return torch.where(at >= first, ids[at.clamp(min=0)], from_state)


@Op
def table_rows(
    rows: torch.Tensor, table: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the rows of a table, `[T, n, D]` in `dtype`; zeros for rows that it does not have.

    rows int64 `[T, n]`; table `[R, D]`, on the rows' device or in page-locked memory of its host: in `dtype`,
    or in e4m3 with a scale: float32 `[1]` on the rows' device, or of equal parts of each row uint8 `[R, S]`
    next to the table, which stand for powers of two (e8m0).
    """
    is_held = (rows >= 0) & (rows < table.shape[0])
    # As bytes, because torch indexes no 8-bit floats.
    stored = table if scale is None else table.view(torch.uint8)
    places = rows.masked_fill(~is_held, 0).to(table.device)
    found = functional.embedding(places, stored).to(rows.device)
    if scale is not None:
        values = found.view(table.dtype).float()
        if scale.dtype == torch.uint8:
            exponents = functional.embedding(places, scale).to(rows.device).float() - 127
            scale = exponents.exp2().repeat_interleave(table.shape[1] // scale.shape[1], dim=-1)
        found = (values * scale).to(dtype)
    return found.masked_fill(~is_held[..., None], 0)
