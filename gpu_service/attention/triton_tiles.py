"""Tile sizes of the attention kernels, how many programs share a request's keys, memory for their results."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gpu_service.device.limits import device_limits
from gpu_service.ops.triton.jit import next_power_of_2

# A GEMM on tensor cores has at least this many rows.
MIN_ROWS = 16
# A tile of keys is at least one tensor-core instruction deep.
_FEWEST_KEYS = 16
MAX_SPLITS = 64
# Splits are handed out while there are fewer than two programs per multiprocessor; rounding up twice (to a
# whole number, to a power of two) can make four times as many of them.
WANTED_PROGRAMS_PER_SM = 2
MAX_PROGRAMS_PER_SM = 4 * WANTED_PROGRAMS_PER_SM


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program holds at a time; all sizes are powers of two. Filled by the functions below."""

    rows: int  # rows of queries, heads of one KV head side by side
    keys: int
    width: int  # head_dim, padded
    num_warps: int
    precision: str  # of float32 GEMMs: "ieee", or Triton's default for narrower types
    # Of the loop over keys: Triton gives half of them to page numbers, so 5 keep two tiles in flight.
    num_stages: int = 5


def decode_tile(group: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """Returns one row per query head of the group."""
    width = next_power_of_2(max(head_dim, 16))
    return Tile(
        rows=max(MIN_ROWS, next_power_of_2(group)),
        # Keys and values of two tiles in flight fit in shared memory: 64 KiB at 128 x 64 bfloat16.
        keys=max(16, min(64, (16384 if dtype.itemsize < 4 else 8192) // (width * dtype.itemsize))),
        width=width,
        num_warps=4,
        precision=_precision(dtype),
    )


def prefill_tile(group: int, head_dim: int, dtype: torch.dtype, decodes: bool = False) -> Tile:
    """Returns the rows of consecutive queries times the heads of the group; `decodes`: keys are bytes of
    8-bit floats.
    """
    width = next_power_of_2(max(head_dim, 16))
    if dtype == torch.float32:
        # No tensor cores: what a tile holds is in registers.
        rows, keys, num_warps = 2048 // width, 16, 4
    elif decodes:
        # Widened keys pass through registers.
        rows, keys, num_warps = 128 if width <= 128 else 64, 32, 8
    else:
        rows, keys, num_warps = (128, 64, 8) if width <= 128 else (64, 32, 4)
    rows = max(MIN_ROWS, rows, next_power_of_2(group))
    return Tile(rows, keys, width, num_warps, _precision(dtype), num_stages=3)


def with_smaller(tile: Tile, fewest_rows: int) -> tuple[Tile, ...]:
    """Returns the tile, then ones that take less shared memory, for devices with less of it than an H200.

    First fewer keys in flight, then fewer keys at a time, then fewer rows, of which more are read again.
    """
    tiles, stages = [tile], (3, 2) if tile.num_stages > 3 else (2,)
    rows, keys = tile.rows, tile.keys
    while True:
        tiles += [replace(tile, rows=rows, keys=keys, num_stages=each) for each in stages]
        if keys > _FEWEST_KEYS:
            keys //= 2
        elif rows > fewest_rows:
            rows //= 2
        else:
            break
        tiles.append(replace(tile, rows=rows, keys=keys))
    return *tiles, replace(tile, rows=rows, keys=keys, num_stages=1)


def streaming_multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; without one (Triton's interpreter), that of an H200."""
    return device_limits(device).num_sms


def num_splits(num_requests: int, num_kv_heads: int, max_length: int, min_split: int, num_sms: int) -> int:
    """Returns the number of programs per request and KV head: enough for two per multiprocessor, as far as
    lengths allow.

    A power of two, so that few variants are compiled. Each program finds its share of keys on the device.
    """
    wanted = -(-WANTED_PROGRAMS_PER_SM * num_sms // (num_requests * num_kv_heads))
    possible = -(-max_length // min_split)
    return next_power_of_2(max(1, min(wanted, possible, MAX_SPLITS)))


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


Partial = tuple[torch.Tensor, torch.Tensor]


class PartialResults:
    """One piece for all steps of a backend, captured or not: in stream order, no two use it at a time.

    `num_splits` bounds how many programs share keys, so the size is known before any step: 4 MiB for 8 heads
    of 128 elements on an H200.
    """

    def __init__(self, heads_per_program: int, width: int, device: torch.device) -> None:
        self._width = width
        capacity = MAX_PROGRAMS_PER_SM * streaming_multiprocessors(device) * heads_per_program
        self._results = torch.empty(capacity * width, dtype=torch.float32, device=device)
        self._lse = torch.empty(capacity, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self._results.nbytes + self._lse.nbytes

    def take(self, num_rows: int, num_heads: int, splits: int, width: int | None = None) -> Partial | None:
        """Returns float32 `[num_rows, num_heads, splits, width]` and `[num_rows, num_heads, splits]`; one:
        None.

        `width`: at most that of the whole, which it is by default.
        """
        width = width or self._width
        if splits == 1:
            return None
        count = num_rows * num_heads * splits
        results = self._results[: count * width].view(num_rows, num_heads, splits, width)
        return results, self._lse[:count].view(num_rows, num_heads, splits)
