"""What the sampler does to whole rows of logits, each read once, by several programs."""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.triton.jit import jit, next_power_of_2

# Logits of a row that one program looks at.
_CHUNK = 4096


@jit
def chunk_best_kernel(
    logits_ptr: tl.tensor,
    values_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    finite_ptr: tl.tensor,
    size: int,
    row_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    """Program (r, c) finds the best logit of chunk c of row r, its id, and whether all are finite."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    logits = tl.load(logits_ptr + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    finite = tl.min(tl.where(tl.abs(logits) < float("inf"), 1, 0), axis=0)
    # NaN compares false, so it loses; so does the padding.
    logits = tl.where(mask & (logits > float("-inf")), logits, float("-inf"))
    best, place = tl.max(logits, axis=0, return_indices=True)
    found = row * tl.num_programs(1) + chunk
    tl.store(values_ptr + found, best)
    tl.store(ids_ptr + found, chunk * BLOCK + place)
    tl.store(finite_ptr + found, finite)


@jit
def join_chunks_kernel(
    values_ptr: tl.tensor,
    chunk_ids_ptr: tl.tensor,
    chunk_finite_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    finite_ptr: tl.tensor,
    num_chunks: int,
    BLOCK: tl.constexpr,
) -> None:
    """Program r joins the chunks of row r; the first chunk wins a tie, and it holds the lower ids."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    mask = chunk < num_chunks
    values = tl.load(values_ptr + row * num_chunks + chunk, mask=mask, other=float("-inf"))
    finite = tl.load(chunk_finite_ptr + row * num_chunks + chunk, mask=mask, other=1)
    best = tl.argmax(values, axis=0)
    tl.store(ids_ptr + row, tl.load(chunk_ids_ptr + row * num_chunks + best).to(tl.int64))
    tl.store(finite_ptr + row, tl.min(finite, axis=0).to(tl.int1))


@jit
def mask_logits_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    words_ptr: tl.tensor,
    size: int,
    row_stride: int,
    num_words: int,
    BLOCK: tl.constexpr,
) -> None:
    """Program (n, c) writes minus infinity into chunk c of row `rows[n]` where a bit of its mask is clear."""
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    word = tl.load(words_ptr + entry * num_words + column // 32, mask=inside, other=-1)
    is_banned = ((word >> (column % 32)) & 1) == 0
    row = tl.load(rows_ptr + entry)
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(logits_ptr + row * row_stride + column, nothing, mask=inside & is_banned)


def mask_logits(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Computes `ops.sampling.mask_logits`; `logits` without gaps between columns."""
    assert logits.stride(1) == 1, "logits of a row lie next to one another"
    size, words = logits.shape[1], words.contiguous()
    if rows.shape[0]:
        grid = (rows.shape[0], -(-size // _CHUNK))
        stride, num_words = logits.stride(0), words.shape[1]
        mask_logits_kernel[grid](logits, rows, words, size, stride, num_words, BLOCK=_CHUNK, num_warps=8)


def argmax_and_finite(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `ops.sampling.argmax_and_finite`; the lowest id wins a tie."""
    values = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, size = values.shape
    num_chunks = -(-size // _CHUNK)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        best = torch.empty(rows, num_chunks, dtype=torch.float32, device=logits.device)
        chunk_ids = torch.empty(2, rows, num_chunks, dtype=torch.int32, device=logits.device)
        grid = (rows, num_chunks)
        chunk_best_kernel[grid](values, best, *chunk_ids, size, values.stride(0), BLOCK=_CHUNK, num_warps=8)
        block = next_power_of_2(num_chunks)
        join_chunks_kernel[(rows,)](best, *chunk_ids, ids, finite, num_chunks, BLOCK=block, num_warps=1)
    return ids, finite
