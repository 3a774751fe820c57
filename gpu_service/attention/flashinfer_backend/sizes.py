"""How much memory FlashInfer's planner takes for the results of split requests.

Its kernels hand out tiles of rows; where keys are split, every tile's results are kept as float32 with one
more number per row. The planner refuses a plan that does not fit, so the memory is sized for the largest
one (`PrefillPlan` and `FA2DetermineCtaTileQ` of 0.6.13).
"""

from __future__ import annotations

import torch

MIB = 2**20
# Latent attention takes 70 MiB on an H200, decode without tensor cores less.
SMALLEST = 128 * MIB
# The planner splits while there are fewer than two programs per multiprocessor and KV head.
_PROGRAMS_PER_SM = 2


def tile_rows(rows_per_request: int, head_dim: int) -> int:
    """Rows of a tile, query heads of a group counting as rows."""
    if rows_per_request > 64 and head_dim < 256:
        return 128
    return 64 if rows_per_request > 16 else 16


def _bytes(num_tiles: int, rows: int, num_heads: int, head_dim: int) -> int:
    return num_tiles * rows * num_heads * (head_dim + 1) * 4 + MIB


def eager_bytes(num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> int:
    """For any step that is not captured."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    num_tiles = _PROGRAMS_PER_SM * sms // num_kv_heads
    return max(SMALLEST, _bytes(num_tiles, 64 if head_dim >= 256 else 128, num_heads, head_dim))


def captured_bytes(num_requests: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """For a captured step: every request has its own tiles, all of them as if they were split."""
    group = num_heads // num_kv_heads
    rows = tile_rows(group, head_dim)
    num_tiles = -(-num_requests * group // rows) + num_requests - 1
    return _bytes(num_tiles, rows, num_heads, head_dim)
