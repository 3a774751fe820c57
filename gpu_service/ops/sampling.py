"""From logits and probabilities to what a sampler draws from."""

from __future__ import annotations

import numpy as np
import torch

from gpu_service.ops.registry import Op

# For each byte of a mask plus infinity for each token that it allows, minus infinity for others.
_BOUNDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") > 0, np.inf, -np.inf
).astype(np.float32)


@Op
def argmax_and_finite(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the greedy token of each row, and whether the row can be trusted, in one reading of the logits.

    logits float32 `[R, V]`, not changed. Returns ids int64 `[R]`, which are valid whatever the row holds,
    and bool `[R]`: no NaN and no Inf. Of equal logits the lowest id wins.
    """
    # NaN is both the largest and the smallest.
    finite = torch.isfinite(logits.amax(dim=-1)) & torch.isfinite(logits.amin(dim=-1))
    return logits.argmax(dim=-1), finite


@Op
def mask_logits(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Minus infinity, in place, for the tokens that a row's mask leaves out.

    logits float32 `[R, V]`; rows int64 `[N]`, each at most once; words int32 `[N, W]`, W at least V / 32:
    bit b of word w says whether token 32 w + b is allowed.
    """
    # For each byte the bounds of its eight tokens: no processor foresees branches that depend on single bits.
    if logits.device.type == "cpu":  # numpy takes rows of eight in a fifth of torch's time
        bounds_of_row = np.empty((4 * words.shape[1], 8), dtype=np.float32)  # stays in the core's cache
        bound = torch.from_numpy(bounds_of_row).flatten()[: logits.shape[1]]
        for row, its_bytes in zip(rows.numpy(), words.numpy().view(np.uint8), strict=True):
            np.take(_BOUNDS, its_bytes, axis=0, out=bounds_of_row, mode="clip")  # unbuffered in this mode
            torch.minimum(logits[row], bound, out=logits[row])
        return
    byte = torch.arange(256, device=words.device).unsqueeze(1)
    bits = byte >> torch.arange(8, device=words.device) & 1
    bounds = (bits * 2 - 1).float() * torch.inf
    parts = words.contiguous().view(torch.uint8).flatten().int()
    bound = bounds.index_select(0, parts).view(words.shape[0], 32 * words.shape[1])
    logits[rows] = torch.minimum(logits.index_select(0, rows), bound[:, : logits.shape[1]])


@Op
def truncate_probabilities(
    probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Keeps the `top_k` likeliest tokens, then the fewest of those whose share reaches `top_p`.

    probabilities float32 `[N, V]`, not negative, of any sum; top_k int64 `[N]`, 0 keeps all; top_p
    float64 `[N]`, 1 keeps all. Returns a new `[N, V]`: the kept probabilities unchanged at their ids, 0
    elsewhere. The likeliest token is always kept. Of equal probabilities the lower ids are kept; a
    backend that decides by a threshold may keep all of them.
    """
    ordered, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    vocab_size = ordered.shape[-1]
    limit = torch.where(top_k > 0, top_k, vocab_size).unsqueeze(1)
    rank = torch.arange(vocab_size, device=ordered.device)
    ordered = torch.where(rank < limit, ordered, 0.0)
    share = ordered.double()
    before = share.cumsum(dim=-1) - share
    reached = before >= top_p.unsqueeze(1) * share.sum(dim=-1, keepdim=True)
    reached &= top_p.unsqueeze(1) < 1.0
    reached[:, 0] = False
    ordered.masked_fill_(reached, 0.0)
    return torch.zeros_like(probabilities).scatter_(1, ids, ordered)
