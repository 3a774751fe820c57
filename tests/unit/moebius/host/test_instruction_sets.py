"""Guards what users learn of their CPU: each level's cost is named, and the start says it first."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from app.commands.running import LineView, LogView, processor_line
from gpu_service.ops.linear import multiplies_bfloat16
from moebius.host.instruction_sets import cpu_flags, has_bfloat16_products, what_it_costs
from moebius.kernels import isa_level

ZEN3 = frozenset(["fpu", "sse2", "ssse3", "avx", "f16c", "fma", "avx2", "vaes"])
SKYLAKE = ZEN3 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
ARROW_LAKE = ZEN3 | {"avx_vnni", "avx_vnni_int8", "avx_ne_convert"}


def test_what_a_cpu_costs() -> None:
    """Dense layers count where the CPU computes them; a CPU with everything costs nothing."""
    assert "AVX-512" in what_it_costs("avx2", ZEN3, on_gpu=False)
    assert "float32" in what_it_costs("avx2", ZEN3, on_gpu=False)
    assert "float32" not in what_it_costs("avx2", ZEN3, on_gpu=True)
    assert "float32" not in what_it_costs("avx2", ARROW_LAKE, on_gpu=False)
    assert "VNNI" in what_it_costs("avx512", SKYLAKE, on_gpu=False)
    assert what_it_costs("amx", SKYLAKE, on_gpu=False) == ""
    # Nothing is said of flags that are not known.
    assert "float32" not in what_it_costs("avx512_bf16", frozenset(), on_gpu=False)


def test_flags_are_the_first_processors(tmp_path: Path) -> None:
    """Flags are those that /proc/cpuinfo lists; a machine without that file has none."""
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 fma\nprocessor\t: 1\nflags\t: fpu\n"
    )
    assert cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2", "fma"}
    assert cpu_flags(tmp_path / "missing") == frozenset()


def test_the_words_are_what_one_dnn_does() -> None:
    """Flags and oneDNN agree on whether this CPU multiplies bfloat16."""
    flags = cpu_flags()
    if not flags:
        pytest.skip("/proc/cpuinfo names no flags")
    if multiplies_bfloat16() != has_bfloat16_products(flags):
        # Only a limit that was set for oneDNN may make it do less than the CPU could.
        assert has_bfloat16_products(flags)
        pytest.skip("oneDNN is limited below what this CPU has")


def test_the_start_says_it_first() -> None:
    """The start has one line for people and one record for machines."""
    lines: list[str] = []
    LineView(lines.append).on_processor("avx2", "no AVX-512")
    assert lines == ["CPU kernels: avx2: no AVX-512"]
    assert processor_line(isa_level(), "") == f"CPU kernels: {isa_level()}"
    LogView().on_processor("avx2", "no AVX-512")


def test_the_start_says_how_many_threads_compute_and_why() -> None:
    """The start has one line for every expert server; a record where logs are JSON."""
    lines: list[str] = []
    LineView(lines.append).on_threads("8 (set by expert_threads)")
    assert lines == ["expert threads: 8 (set by expert_threads)"]
    with capture_logs() as logs:
        LogView().on_threads("8")
    assert [(line["event"], line["threads"]) for line in logs] == [("expert threads", "8")]
