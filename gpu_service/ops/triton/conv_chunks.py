"""The causal convolution of a mixed step, all requests' rows in one launch."""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.sequences import Sequences
from gpu_service.ops.triton.jit import jit_for_any
from gpu_service.ops.triton.row_tiles import num_row_tiles, request_of_tile

# Rows and channels of a program; a row is read by `width` programs' rows, out of the cache but once.
_ROWS, _CHANNELS = 16, 128


@jit_for_any("num_requests")
def causal_conv_extend_kernel(  # type: ignore[no-untyped-def]
    rows, states, weight, reads, writes, query_starts, output, num_requests, row_stride, channels,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of channels, tile of a request's rows). Who has a request's last rows, or where there
    are fewer of them than a state holds its first one, writes that part of the state.
    """
    tile, channel = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request, first_tile = request_of_tile(tile, query_starts, num_requests, 0, ROWS)
    start = tl.load(query_starts + request)
    length = tl.load(query_starts + request + 1) - start
    first = (tile - first_tile) * ROWS
    if first >= length:
        return
    inside = channel < channels
    local = first + tl.arange(0, ROWS)
    held = (local < length)[:, None] & inside[None, :]
    before = states + tl.load(reads + request) * (WIDTH - 1) * channels + channel
    after = states + tl.load(writes + request) * (WIDTH - 1) * channels + channel
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for position in tl.static_range(WIDTH):
        source = local + (position - WIDTH + 1)
        earlier = (source < 0)[:, None]
        at_row = rows + (start + source).to(tl.int64)[:, None] * row_stride + channel[None, :]
        value = tl.load(at_row, mask=held & (source >= 0)[:, None], other=0.0).to(tl.float32)
        at_state = before[None, :] + (source + WIDTH - 1)[:, None] * channels
        value += tl.load(at_state, mask=held & earlier, other=0.0).to(tl.float32)
        tap = tl.load(weight + channel * WIDTH + position, mask=inside, other=0.0).to(tl.float32)
        total += value * tap[None, :]
        if position == WIDTH - 1:
            # The newest inputs, where they are in the state: the last row's at its end.
            place = local - length + WIDTH - 1
            newest = value.to(states.dtype.element_ty)
            tl.store(after[None, :] + place[:, None] * channels, newest, mask=held & (place >= 0)[:, None])
    result = (total * tl.sigmoid(total)).to(output.dtype.element_ty)
    at_output = output + (start + local).to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(at_output, result, mask=held)
    if first == 0:
        for index in tl.static_range(WIDTH - 1):
            kept = inside & (index + length < WIDTH - 1)
            shifted = tl.load(before + (index + length) * channels, mask=kept, other=0.0)
            tl.store(after + index * channels, shifted, mask=kept)


def causal_conv_extend(
    rows: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """See `ops.causal_conv.causal_conv_extend`."""
    (num_rows, channels), num_requests = rows.shape, reads.shape[0]
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    causal_conv_extend_kernel[(-(-channels // _CHANNELS), num_row_tiles(num_rows, num_requests, _ROWS))](
        rows, states, weight, reads, writes, sequences.starts, output, num_requests, rows.stride(0), channels,
        WIDTH=weight.shape[1], ROWS=_ROWS, BLOCK=_CHANNELS,
    )  # fmt: skip
    return output
