"""Files built for one instruction set hand out nothing but their accessors: a shared inline or template
function in one of them could be the copy the linker keeps, and would crash on older CPUs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEVELS = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
ISA_FILE = re.compile(rf"_({'|'.join(LEVELS)}|amx_emulated)\.cc$")
ISA_FILES = sorted(path for path in (ROOT / "kernels").rglob("*.cc") if ISA_FILE.search(path.name))
# Symbols that another file may bind to: what nm prints in capitals, and u, v, w.
SHARED_SYMBOL = re.compile(r"^[0-9a-f]* +([A-TV-Zuvw]) (.*)$", re.MULTILINE)


def newest_object(source: Path) -> Path:
    """Returns the object file of a source in the build directories that `make setup` and `make kernels`
    leave.
    """
    name = source.relative_to(ROOT).as_posix() + ".o"
    objects = list((ROOT / "build").glob(f"*/CMakeFiles/*kernels*.dir/{name}"))
    assert objects, f"no build of {name}: run make setup"
    return max(objects, key=lambda path: path.stat().st_mtime)


def test_every_level_has_gemms() -> None:
    names = {path.name for path in ISA_FILES}
    assert {f"gemm_{level}.cc" for level in (*LEVELS, "amx_emulated")} <= names


@pytest.mark.parametrize("path", ISA_FILES, ids=lambda path: path.name)
def test_only_accessors_are_visible(path: Path) -> None:
    """An object defines functions named after its level and no other code that an object could bind to."""
    command = ["nm", "--demangle", "--defined-only", newest_object(path)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True)
    level = ISA_FILE.search(path.name)
    assert level is not None
    shared = SHARED_SYMBOL.findall(symbols.stdout)
    assert shared
    for kind, name in shared:
        if name.startswith("DW.ref."):  # a pointer that unwinding needs, the same in every file
            continue
        assert kind == "T", f"{name} could replace another file's copy"
        assert re.fullmatch(rf"moebius::(\w+::)*\w+_{level[1]}\(\)", name), name


@pytest.mark.parametrize("header", ["gemm/gemm.h", "format/panel_layout.h", "format/weight_format.h"])
def test_shared_headers_have_no_functions(header: str) -> None:
    """Read at every level, so they may declare but not define."""
    text = (ROOT / "kernels" / header).read_text()
    assert not re.search(r"^(?!\s*//).*(\binline\b|\btemplate\b|\)\s*(const\s*)?\{)", text, re.MULTILINE)


def test_flags_are_on_those_files_only() -> None:
    """The baseline is x86-64-v2; -mavx flags are attached by file name, and fast-math to nothing."""
    cmake = (ROOT / "CMakeLists.txt").read_text()
    baseline = re.search(r"target_compile_options\(([^)]*)\)", cmake)
    assert baseline is not None
    assert "-march=x86-64-v2" in baseline[1]
    assert "-mavx" not in baseline[1]
    assert not re.search(r"^[^#]*-ffast-math", cmake, re.MULTILINE)
