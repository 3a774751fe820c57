"""Compiles the doorbell kernels with NVRTC, which needs no compiler installed, and keeps the result."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from gpu_service.experts.doorbell.interface import program
from moebius.errors import UserError


def compiled(arch: str, directory: str) -> bytes:
    """Machine code for `arch` (as in sm_90), from `directory` when it has it; empty: the user's cache.

    Raises UserError when NVRTC is not installed or the directory can not be written.
    """
    source = program()
    place = cache_file(source, arch, directory)
    if place.exists():
        return place.read_bytes()
    code = compile_source(source, arch)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = place.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(code)
        unfinished.replace(place)
    except OSError as error:
        raise UserError(f"jit_cache_dir: can not keep compiled kernels in {place.parent}: {error}") from error
    return code


def cache_file(source: str, arch: str, directory: str) -> Path:
    """Where the code of this very source is kept."""
    root = Path(directory).expanduser() if directory else Path.home() / ".cache" / "moebius"
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    return root / "doorbell" / f"{arch}-{digest}.cubin"


def compile_source(source: str, arch: str) -> bytes:
    """A cubin. Raises UserError when NVRTC is not installed."""
    try:
        try:
            from cuda.core import Program, ProgramOptions
        except ImportError:  # its place before version 1
            from cuda.core.experimental import Program, ProgramOptions
    except ImportError as error:
        raise UserError(
            f"the doorbell kernels need cuda-core and NVRTC: pip install '.[gpu]' ({error})"
        ) from error
    code = Program(source, "c++", ProgramOptions(arch=arch, std="c++17")).compile("cubin").code
    return bytes(code)
