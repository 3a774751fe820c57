"""Files built for one instruction set hand out nothing but their table: a shared inline or template function
in one of them could be the copy the linker keeps, and would crash on older CPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ISA_FILES = sorted((ROOT / "kernels").rglob("*_avx*.cc"))
# `utility` for std::integer_sequence, a type without code; the table's header has declarations only.
ALLOWED_INCLUDES = {"immintrin.h", "utility", "kernels/moe/kernel_table.h", "kernels/moe/panel_kernels.inc.h"}


def test_every_vector_level_has_a_file() -> None:
    assert [path.name for path in ISA_FILES] == ["moe_avx2.cc", "moe_avx512.cc"]


@pytest.mark.parametrize("path", ISA_FILES, ids=lambda path: path.name)
def test_only_the_table_is_visible(path: Path) -> None:
    """All code stands in an anonymous namespace, except the accessor after it."""
    text = path.read_text()
    assert set(re.findall(r'#include [<"]([^>"]+)[>"]', text)) <= ALLOWED_INCLUDES
    anonymous_end = text.index("}  // namespace\n")
    assert text.index("namespace {") < text.index("struct Vec") < anonymous_end
    assert text.index("panel_kernels.inc.h") < anonymous_end
    level = path.stem.removeprefix("moe_")
    accessor = f"const KernelTable& kernel_table_{level}() {{ return kTable; }}"
    assert text[anonymous_end:].split("\n\n")[1] == accessor


def test_shared_header_has_no_functions() -> None:
    """kernel_table.h is read at every level, so it may declare but not define."""
    header = (ROOT / "kernels/moe/kernel_table.h").read_text()
    assert not re.search(r"\binline\b(?! functions)|\btemplate\b|\)\s*(const\s*)?\{", header)


def test_flags_are_on_those_files_only() -> None:
    """The baseline is x86-64-v2; -mavx flags are attached by file name, and fast-math to nothing."""
    cmake = (ROOT / "CMakeLists.txt").read_text()
    baseline = re.search(r"target_compile_options\(([^)]*)\)", cmake)
    assert baseline is not None
    assert "-march=x86-64-v2" in baseline[1]
    assert "-mavx" not in baseline[1]
    assert not re.search(r"^[^#]*-ffast-math", cmake, re.MULTILINE)
