"""Page lists as FlashInfer wants them: all requests' pages in a row, with the bounds of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton.language as tl

from gpu_service.attention.flashinfer_backend.staging import host_int32
from gpu_service.ops.triton.jit import jit_for_any, next_power_of_2

_MIN_REQUESTS = 256


@jit_for_any("num_requests", "table_stride")
def _list_pages_kernel(  # type: ignore[no-untyped-def]
    block_table, seq_lens, indices, indptr, last_page_len, num_requests, table_stride,
    PAGE_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, WRITE_BOUNDS: tl.constexpr,
):  # fmt: skip
    """Program per request: its pages go behind those of the requests before it."""
    request = tl.program_id(0)
    others = tl.arange(0, BLOCK_R)
    before = tl.load(seq_lens + others, mask=(others < request) & (others < num_requests), other=0)
    first = tl.sum((before + PAGE_SIZE - 1) // PAGE_SIZE, 0)
    length = tl.load(seq_lens + request)
    count = tl.cdiv(length, PAGE_SIZE)
    if WRITE_BOUNDS:
        if request == 0:
            tl.store(indptr, 0)
        tl.store(indptr + request + 1, first + count)
        tl.store(last_page_len + request, length - (count - 1) * PAGE_SIZE)
    for begin in range(0, count, BLOCK_P):
        column = begin + tl.arange(0, BLOCK_P)
        page = tl.load(block_table + request * table_stride + column, mask=column < count, other=0)
        tl.store(indices + first + column, page, mask=column < count)


def list_pages(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    indices: torch.Tensor,
    page_size: int,
    bounds: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Writes the pages in use of int32 `[R, max_pages]` side by side into `indices`, on the device.

    seq_lens int32 `[R]`; the host keeps no copy of the block table, and waits for nothing here. `bounds`:
    device tensors that get what `page_bounds` gives on the host, int32 `[R + 1]` and `[R]`.
    """
    num_requests = seq_lens.shape[0]
    indptr, last_page_len = bounds or (indices, indices)
    _list_pages_kernel[(num_requests,)](
        block_table, seq_lens, indices, indptr, last_page_len, num_requests, block_table.stride(0),
        PAGE_SIZE=page_size, BLOCK_R=max(_MIN_REQUESTS, next_power_of_2(num_requests)), BLOCK_P=256,
        WRITE_BOUNDS=bounds is not None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PageBounds:
    """Host tensors of one step; filled by `page_bounds`."""

    indptr: torch.Tensor  # int32 [R + 1], where each request's pages begin
    last_page_len: torch.Tensor  # int32 [R], tokens on each request's last page
    num_pages: int


def page_bounds(
    seq_lens: Sequence[int], page_size: int, device: torch.device, pinned: bool = True
) -> PageBounds:
    """From the lengths alone; an empty sequence has no page. Pinned where a device copies from it."""
    counts = [-(-length // page_size) for length in seq_lens]
    indptr = list(accumulate(counts, initial=0))
    last = [length - (count - 1) * page_size for length, count in zip(seq_lens, counts, strict=True)]
    if not pinned:
        device = torch.device("cpu")
    return PageBounds(host_int32(indptr, device), host_int32(last, device), indptr[-1])
