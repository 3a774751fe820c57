"""From logits and probabilities to what a sampler draws from, and the numbers by which it draws.

Uniform numbers depend on (seed, output position) and nothing else, so a sampled token is the same in any
batch, after a preemption and when a step is run again. The mixer is the finaliser of SplitMix64 (Steele,
Lea, Flood: "Fast splittable pseudorandom number generators", 2014), applied twice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
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


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """Returns a bijection of 64-bit integers whose output bits each depend on all input bits."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) with 24 random bits (exact in float32)."""
    return (mix64(mix64(seed & _MASK) ^ mix64(position)) >> 40) / (1 << 24)


def derive_seed(seed: int, *parts: int | str) -> int:
    """Returns a seed in [0, 2^63) for a sub-stream, e.g. one of a request's outputs."""
    state = mix64(seed & _MASK)
    for part in parts:
        for byte in str(part).encode():
            state = mix64(state ^ byte)
        state = mix64(state ^ 0x100)
    return state >> 1


def uniforms(
    mixed_seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Returns `uniform` of N seeds, each of which `mix64` was applied to, and N positions, float64 `[N]`."""
    numbers = _mix64s(mixed_seeds ^ _mix64s(positions.astype(np.uint64))) >> np.uint64(40)
    return numbers.astype(np.float64) / (1 << 24)


def _mix64s(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mix64` of an array, whose integers wrap around."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
