"""Triton's real compiler where there is no GPU: launches become compilations for a named architecture.

Run in a process of its own without TRITON_INTERPRET. It shows what the interpreter does not: types that do
not unify, shapes that are not known, operations a GPU lacks, more shared memory than it has.
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
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from gpu_service.device import limits

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
# Architecture -> KiB of shared memory that a program may have, and multiprocessors of a common card: A100,
# RTX 3090, RTX 4090, H200, B200, RTX 5090 (CUDA C++ programming guide, table of technical specifications).
ARCHITECTURES = {80: (163, 108), 86: (99, 82), 89: (99, 128), 90: (227, 132), 100: (227, 148), 120: (99, 170)}
# Columns of tensor memory, which architecture 100 has.
_TENSOR_COLUMNS = 512
_OPTIONS = {"num_warps", "num_stages", "launch_pdl", "maxnreg"}


def limits_of(architecture: int) -> limits.DeviceLimits:
    """Returns what the code under test sees of the device."""
    shared_kib, num_sms = ARCHITECTURES[architecture]
    return limits.DeviceLimits(architecture, shared_kib * 1024, num_sms)


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


def _source(kernel: Any, values: dict[str, Any]) -> ASTSource:
    """Returns what a launch with these arguments compiles."""
    fixed = {param.name for param in kernel.params if param.do_not_specialize}
    # Launches take whole numbers that are 1 for constants too.
    constants = {
        param.name
        for param in kernel.params
        if param.is_constexpr or (_is_one(values[param.name]) and param.name not in fixed)
    }
    signature = {name: "constexpr" if name in constants else _type(values[name]) for name in kernel.arg_names}
    # Launches know which pointers and sizes are multiples of 16, and the code depends on it.
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name not in constants | fixed and _is_aligned(values[name])
    }
    constexprs = {name: values[name] for name in constants}
    return ASTSource(kernel, signature=signature, constexprs=constexprs, attrs=attributes)


def _check_resources(kernel: Any, shared_bytes: int) -> None:
    """What Triton does when it loads a kernel."""
    if kernel.metadata.shared > shared_bytes:
        raise OutOfResources(kernel.metadata.shared, shared_bytes, "shared memory")
    columns = getattr(kernel.metadata, "tmem_size", None) or 0
    if columns > _TENSOR_COLUMNS:
        raise OutOfResources(columns, _TENSOR_COLUMNS, "tensor memory")


@contextmanager
def launches_compile(architecture: int = 90) -> Iterator[list[Any]]:
    """Inside, `kernel[grid](...)` compiles and launches nothing, as on a device with these limits.

    Yields the compiled kernels so far, each once. A launch raises what it raises there: OutOfResources, or
    what the compiler says of a type that the architecture lacks.
    """
    compiled: list[Any] = []
    known: dict[Any, Any] = {}
    known_limits = limits_of(architecture)

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS & set(kwargs)}
        source = _source(self, dict(zip(self.arg_names, args, strict=False)) | kwargs)
        key = source.hash(), tuple(sorted(options.items()))
        if key not in known:
            known[key] = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
            if known[key].metadata.shared <= known_limits.shared_bytes:
                compiled.append(known[key])
        _check_resources(known[key], known_limits.shared_bytes)

    original, without_gpu = JITFunction.run, limits.WITHOUT_GPU
    JITFunction.run, limits.WITHOUT_GPU = compile_only, known_limits
    try:
        yield compiled
    finally:
        JITFunction.run, limits.WITHOUT_GPU = original, without_gpu


def usage(kernel: Any) -> tuple[int, int]:
    """Registers of a thread, and bytes of what it keeps in memory because registers do not hold it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        program = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    found = re.search(rf"Function {kernel.metadata.name}:\s+REG:(\d+) STACK:(\d+)", printed)
    assert found is not None, printed
    return int(found[1]), int(found[2])
