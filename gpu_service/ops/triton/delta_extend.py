"""The gated delta rule of a mixed step: single tokens in one launch, chunks of several in two more."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpu_service.device.limits import DeviceLimits, device_limits
from gpu_service.ops.delta_rule import CHUNK
from gpu_service.ops.sequences import Sequences
from gpu_service.ops.triton.delta_chunks import prepare_kernel, scan_kernel
from gpu_service.ops.triton.fitting import launch_fitting
from gpu_service.ops.triton.jit import next_power_of_2
from gpu_service.ops.triton.linear_attention import launch_update
from gpu_service.ops.triton.row_tiles import num_row_tiles

# What a program of the first kernel holds of a head; no model's heads are larger.
MAX_HEAD_DIM = 128
# One request alone should fill the device, however many columns of a state its programs carry then.
_WANTED_PROGRAMS, _MAX_COLUMNS, _FEW_COLUMNS = 128, 64, 32
# A product on tensor cores has at least this many of everything.
_MIN_BLOCK = 16


def supports_extend(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    *_: object,
) -> bool:
    """Whether heads are so small that a program can hold what it needs of them."""
    return max(states.shape[2:]) <= MAX_HEAD_DIM


class _Tile(NamedTuple):
    """What a program holds at a time; powers of two. Filled by `_tiles`."""

    chunk: int
    # Of a state, carried along a request by one program.
    columns: int
    # Of the scan: with 3, one chunk is read while another one is computed.
    num_stages: int
    num_warps: int


def _tiles(dtype: torch.dtype, value_heads: int, value_dim: int, limits: DeviceLimits) -> tuple[_Tile, ...]:
    """For a type of rows and the sizes of a model, best first: it takes one variant of each kernel."""
    if dtype == torch.float32:
        # No tensor cores: what a product takes is in registers, and as many instructions as sums.
        return (_Tile(_MIN_BLOCK, _MIN_BLOCK, 1, 4),)
    fitting = next_power_of_2(value_heads * value_dim // _WANTED_PROGRAMS)
    fitting = max(_MIN_BLOCK, min(fitting, _MAX_COLUMNS, next_power_of_2(value_dim)))
    few = min(fitting, _FEW_COLUMNS)
    smaller = (_Tile(CHUNK, few, 3, 8), _Tile(CHUNK, few, 2, 8), _Tile(CHUNK, few, 1, 8))
    if not limits.multiplies_from_shared_memory:
        # Both operands of a product pass through registers: more columns would not stay in them.
        return *smaller, _Tile(CHUNK, _MIN_BLOCK, 1, 4)
    return _Tile(CHUNK, fitting, 3, 4), _Tile(CHUNK, fitting, 2, 4), *smaller


def gated_delta_extend(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """See `ops.delta_rule.gated_delta_extend`; single tokens are one launch of the update's kernel."""
    num_rows, (_, heads, _, value_dim) = qkv.shape[0], states.shape
    output = torch.empty(num_rows, heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    # Each leaves the other's requests out. Both are launched in any step, so that the first one compiles all.
    launch_update(qkv, a, b, a_log, dt_bias, states, reads, writes, output, sequences.starts)
    _launch_chunks(qkv, (a, b, a_log, dt_bias), states, reads, writes, output, sequences.starts)
    return output


def _launch_chunks(
    qkv: torch.Tensor,
    gates: tuple[torch.Tensor, ...],
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    output: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    num_rows, num_requests, (heads, key_dim, value_dim) = qkv.shape[0], reads.shape[0], states.shape[1:]
    tiles = _tiles(qkv.dtype, heads, value_dim, device_limits(qkv.device))
    (chunk,) = {tile.chunk for tile in tiles}
    state_weights = torch.empty(num_rows, heads, key_dim, dtype=qkv.dtype, device=qkv.device)
    products = torch.empty(num_rows, heads, chunk, dtype=qkv.dtype, device=qkv.device)
    factors = torch.empty(3, heads, num_rows, dtype=torch.float32, device=qkv.device)
    a, b, a_log, dt_bias = gates
    sizes: dict[str, object] = {
        "NUM_HEADS": heads,
        "REPEATS": 2 * heads * key_dim // (qkv.shape[1] - heads * value_dim),
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "CHUNK": chunk,
        "BLOCK_K": max(_MIN_BLOCK, next_power_of_2(key_dim)),
        "PRECISION": "ieee" if qkv.dtype == torch.float32 else "tf32",
    }
    prepare_kernel[(heads, num_row_tiles(num_rows, num_requests, chunk))](
        qkv, a, b, a_log, dt_bias, starts, output, state_weights, products, factors, num_requests, num_rows,
        qkv.stride(0), a.stride(0), b.stride(0), SCALE=key_dim**-0.5, LEVELS=chunk.bit_length() - 1,
        BLOCK_V=max(_MIN_BLOCK, next_power_of_2(value_dim)), **sizes,
    )  # fmt: skip

    def scan(tile: _Tile) -> None:
        scan_kernel[(-(-value_dim // tile.columns), heads, num_requests)](
            qkv, state_weights, products, factors, states, reads, writes, starts, output, num_rows,
            qkv.stride(0), BLOCK_V=tile.columns, num_stages=tile.num_stages, num_warps=tile.num_warps,
            **sizes,
        )  # fmt: skip

    launch_fitting("scan", (qkv.dtype, *sizes.values()), qkv.device, tiles, scan)
