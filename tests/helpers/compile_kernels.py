"""Compiles Triton kernels for a GPU that is not here: `python -m tests.helpers.compile_kernels`.

Triton's compiler needs no device for this, but must not be in interpreter mode; hence a process of its own.
Prints a line per kernel; fails on the first that does not compile or does not fit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpu_service.attention.flashinfer_backend import pages
from gpu_service.attention.mla import triton_decode as mla
from gpu_service.attention.triton_kernels import decode, prefill
from gpu_service.attention.triton_kernels.shapes import Tile, decode_tile, prefill_tile

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INDICES = ("block_table", "seq_lens", "query_starts", "indices")
FLOATS = ("score_scale", "value_scale")


def compile_kernel(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], num_warps: int = 4
) -> None:
    """`pointers`: element type by name; what is neither there nor constant is an int32 or a float32."""
    names = kernel.arg_names
    signature = {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = "*" + pointers[name]
        elif name in INDICES:
            signature[name] = "*i32"
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    aligned = [name for name in names if signature[name].startswith("*") or "stride" in name]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": num_warps})
    assert compiled.metadata.shared <= SHARED_BYTES, (
        f"{names}: {compiled.metadata.shared} bytes of shared memory"
    )
    print(kernel.__name__, pointers, compiled.metadata.shared, flush=True)


def compile_attention(query: str, cache: str, group: int, kv_heads: int, head_dim: int) -> None:
    """Decode in splits, their combination, chunks."""

    def shape(tile: Tile) -> dict[str, Any]:
        return {"BLOCK_D": tile.width, "BLOCK_N": tile.keys}

    tile = decode_tile(group, head_dim, TORCH_TYPES[query])
    heads = {"GROUP": group, "NUM_KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "PAGE_SIZE": 16}
    pointers = {"query": query, "cache": cache, "output": query}
    partial = {"partial_output": "fp32", "partial_lse": "fp32"}
    options = {"BLOCK_G": tile.rows, "MINIMUM": 256, "SINGLE_SPLIT": False, "PRECISION": tile.precision}
    compile_kernel(decode._split_kernel, pointers | partial, heads | shape(tile) | options, tile.num_warps)
    combine = {"NUM_HEADS": group * kv_heads, "HEAD_DIM": head_dim, "BLOCK_S": 16, "MINIMUM": 256}
    compile_kernel(decode._combine_kernel, {"output": query} | partial, combine | shape(tile))
    tile = prefill_tile(group, head_dim, TORCH_TYPES[query])
    options = {"BLOCK_M": tile.rows, "BLOCK_Q": tile.rows // group, "PRECISION": tile.precision}
    compile_kernel(prefill._prefill_kernel, pointers, heads | shape(tile) | options, tile.num_warps)


def compile_mla(query: str, cache: str, num_heads: int) -> None:
    """The absorbed kernel at the sizes of DeepSeek-V2 and V3."""
    tile = mla.mla_tile(TORCH_TYPES[query])
    pointers = {"q_latent": query, "q_rope": query, "cache": cache, "output": query}
    partial = {"partial_output": "fp32", "partial_lse": "fp32"}
    constants = {
        "NUM_HEADS": num_heads, "LATENT": 512, "ROPE": 64, "PAGE_SIZE": 64, "BLOCK_H": tile.rows,
        "BLOCK_L": 512, "BLOCK_R": 64, "BLOCK_N": tile.keys, "MINIMUM": 256, "SINGLE_SPLIT": False,
        "PRECISION": tile.precision,
    }  # fmt: skip
    compile_kernel(mla._mla_kernel, pointers | partial, constants, tile.num_warps)


def main() -> None:
    """Everything that a model of the table in `support.py` or a fallback would launch."""
    compile_attention("bf16", "bf16", 8, 4, 128)
    compile_attention("bf16", "fp8e4nv", 12, 8, 128)
    compile_attention("fp32", "fp32", 4, 2, 64)
    compile_attention("fp16", "fp16", 8, 2, 256)
    compile_mla("bf16", "bf16", 16)
    compile_kernel(pages._list_pages_kernel, {}, {"PAGE_SIZE": 16, "BLOCK_R": 256, "BLOCK_P": 256})


if __name__ == "__main__":
    main()
