"""Triton's real compiler where there is no GPU: launches become compilations for a named architecture.

Run in a process of its own without TRITON_INTERPRET. It shows what the interpreter does not: types that do
not unify, shapes that are not known, operations a GPU lacks.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.float64: "*fp64",
}
# What a multiprocessor of an H100 or H200 lends to one program.
SHARED_BYTES = 227 * 1024
_OPTIONS = {"num_warps", "num_stages", "launch_pdl"}


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _is_one(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == 1


def _is_aligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


@contextmanager
def launches_compile(architecture: int = 90) -> Iterator[list[Any]]:
    """Inside, `kernel[grid](...)` compiles and launches nothing. Yields the compiled kernels so far."""
    compiled: list[Any] = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS & set(kwargs)}
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        # Launches take whole numbers that are 1 for constants too.
        constants = {param.name for param in self.params if param.is_constexpr or _is_one(values[param.name])}
        signature = {
            name: "constexpr" if name in constants else _type(values[name]) for name in self.arg_names
        }
        # Launches know which pointers and sizes are multiples of 16, and the code depends on it.
        attributes = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(self.arg_names)
            if name not in constants and _is_aligned(values[name])
        }
        constexprs = {name: values[name] for name in constants}
        source = ASTSource(self, signature=signature, constexprs=constexprs, attrs=attributes)
        compiled.append(triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options))

    original = JITFunction.run
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = original


def stack_bytes(kernel: Any) -> int:
    """What each thread keeps in memory because registers do not hold it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        program = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    found = re.search(rf"Function {kernel.metadata.name}:\s+REG:\d+ STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1])
