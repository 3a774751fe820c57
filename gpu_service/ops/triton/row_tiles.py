"""Rows of a mixed step in tiles none of which holds rows of two requests; nothing is prepared on the host."""

from __future__ import annotations

import triton.language as tl

from gpu_service.ops.triton.jit import jit


@jit
def request_of_tile(tile, query_starts, num_requests, first_row, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the rows from `first_row` on: a tile's request, and where in these rows the request's tiles begin.

    Returns the last request whose first tile is not behind `tile`, by bisection, and that first tile. Request
    r owns tiles from start // ROWS + r on: at least as many as it needs, because rounding down loses less
    than one tile per request. So many rows of R requests are in rows // ROWS + R tiles, some of them empty.
    """
    low, high = 0, num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.maximum(tl.load(query_starts + middle) - first_row, 0) // ROWS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    request = low - 1
    start = tl.maximum(tl.load(query_starts + request) - first_row, 0)
    return request, start // ROWS + request


def num_row_tiles(num_rows: int, num_requests: int, rows: int) -> int:
    """How many tiles of so many rows there are, the empty ones included."""
    return num_rows // rows + num_requests
