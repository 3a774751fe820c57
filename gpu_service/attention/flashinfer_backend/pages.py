"""Page lists as FlashInfer wants them: all requests' pages in a row, with the bounds of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton.language as tl

from gpu_service.attention.flashinfer_backend.staging import host_int32
from gpu_service.ops.triton.jit import jit, next_power_of_2

_MIN_REQUESTS = 256


@jit
def _list_pages_kernel(  # type: ignore[no-untyped-def]
    block_table, seq_lens, indices, num_requests, table_stride,
    PAGE_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program per request: its pages go behind those of the requests before it."""
    request = tl.program_id(0)
    others = tl.arange(0, BLOCK_R)
    before = tl.load(seq_lens + others, mask=(others < request) & (others < num_requests), other=0)
    first = tl.sum((before + PAGE_SIZE - 1) // PAGE_SIZE, 0)
    count = tl.cdiv(tl.load(seq_lens + request), PAGE_SIZE)
    for begin in range(0, count, BLOCK_P):
        column = begin + tl.arange(0, BLOCK_P)
        page = tl.load(block_table + request * table_stride + column, mask=column < count, other=0)
        tl.store(indices + first + column, page, mask=column < count)


def list_pages(
    block_table: torch.Tensor, seq_lens: torch.Tensor, indices: torch.Tensor, page_size: int
) -> None:
    """Writes the pages in use of int32 `[R, max_pages]` side by side into `indices`, on the device.

    seq_lens int32 `[R]`; the host keeps no copy of the block table, and waits for nothing here.
    """
    num_requests = seq_lens.shape[0]
    _list_pages_kernel[(num_requests,)](
        block_table, seq_lens, indices, num_requests, block_table.stride(0),
        PAGE_SIZE=page_size, BLOCK_R=max(_MIN_REQUESTS, next_power_of_2(num_requests)), BLOCK_P=256,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PageBounds:
    """Host tensors of one step; filled by `page_bounds`."""

    indptr: torch.Tensor  # int32 [R + 1], where each request's pages begin
    last_page_len: torch.Tensor  # int32 [R], tokens on each request's last page
    num_pages: int


def page_bounds(seq_lens: Sequence[int], page_size: int, device: torch.device) -> PageBounds:
    """From the lengths alone; an empty sequence has no page."""
    counts = [-(-length // page_size) for length in seq_lens]
    indptr = list(accumulate(counts, initial=0))
    last = [length - (count - 1) * page_size for length, count in zip(seq_lens, counts, strict=True)]
    return PageBounds(host_int32(indptr, device), host_int32(last, device), indptr[-1])
