"""Compilation of CUDA sources by NVRTC, which needs no compiler installed; the result is kept for the next
start.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from moebius.errors import UserError
from moebius.host.kernel_times import cache_directory

# Where this process keeps compiled code, see `keep_compiled_in`.
_directory = ""


def keep_compiled_in(directory: str) -> None:
    """Keeps what this process compiles in a directory; empty: in the user's cache."""
    global _directory
    _directory = directory


def compiled(source: str, name: str, arch: str) -> bytes:
    """Returns machine code of a complete source for `arch` (as in sm_90), which is kept where
    `keep_compiled_in` says. `name`: that of its kernels, in files and messages.

    Raises UserError when NVRTC is not installed or the directory cannot be written.
    """
    try:
        place = cache_file(source, name, arch)
    except FileNotFoundError as error:
        raise UserError(f"jit_cache_dir: empty, and {error.strerror}") from error
    if place.exists():
        return place.read_bytes()
    code = compile_source(source, name, arch)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = place.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(code)
        unfinished.replace(place)
    except OSError as error:
        raise UserError(f"jit_cache_dir: cannot keep compiled kernels in {place.parent}: {error}") from error
    return code


def cache_file(source: str, name: str, arch: str) -> Path:
    """Returns the file that keeps the machine code of `source` for `arch`, named after a digest of the
    source.
    """
    root = Path(_directory).expanduser() if _directory else cache_directory()
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    return root / name.replace(" ", "_") / f"{arch}-{digest}.cubin"


def compile_source(source: str, name: str, arch: str) -> bytes:
    """Returns a cubin. Raises UserError when NVRTC is not installed."""
    try:
        try:
            from cuda.core import Program, ProgramOptions
        except ImportError:  # its place before version 1
            from cuda.core.experimental import Program, ProgramOptions
    except ImportError as error:
        raise UserError(
            f"the {name} kernels need cuda-core and NVRTC: pip install '.[gpu]' ({error})"
        ) from error
    code = Program(source, "c++", ProgramOptions(arch=arch, std="c++17")).compile("cubin").code
    return bytes(code)
