"""Probes of the machine's limits: every unit a level offers gives a positive figure, a wider level keeps the
narrower one's units, and what this machine cannot run is refused by name before it is executed."""

from __future__ import annotations

import itertools
import os

import pytest

from moebius import _kernels
from moebius import _kernels_testing as testing

MIB = 1 << 20


@pytest.fixture(scope="module")
def cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))[:2]


def test_every_unit_of_this_machine_computes(cpus: list[int]) -> None:
    units = testing.peak_units("auto")
    assert units[0] == ("float32_scalar", "float32")
    assert {row_type for _, row_type in units} <= {"float32", "bfloat16", "int8"}
    for name, _ in units:
        assert testing.measure_peak(name, cpus=cpus, seconds=0.005) > 0


def test_units_grow_with_the_level() -> None:
    """A level offers its own units and those below it, so a forced level never runs anything above it."""
    levels = _kernels.supported_isas()
    units = [testing.peak_units(level) for level in levels]
    for lower, higher in itertools.pairwise(units):
        assert higher[: len(lower)] == lower
        assert len(higher) > len(lower)
    assert units[0] == [("float32_scalar", "float32")]


def test_unit_of_another_machine_is_refused(cpus: list[int]) -> None:
    here = {name for name, _ in testing.peak_units(_kernels.supported_isas()[-1])}
    missing = {"int8_avx512_vnni", "bfloat16_amx", "int8_amx"} - here
    for name in {"int8_tensor_core"} | missing:
        with pytest.raises(ValueError, match=f"'{name}' is not one of this machine; allowed: float32_scalar"):
            testing.measure_peak(name, cpus=cpus, seconds=0.005)


def test_level_of_another_machine_is_refused(cpus: list[int]) -> None:
    levels = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
    missing = set(levels) - set(_kernels.supported_isas())
    for level in missing | {"neon"}:
        with pytest.raises(ValueError, match="allowed: scalar"):
            testing.peak_units(level)
        with pytest.raises(ValueError, match="allowed: scalar"):
            testing.BandwidthProbe(isa=level, cpus=cpus, nbytes=4 * MIB, huge_pages=False)


@pytest.mark.parametrize("isa", _kernels.supported_isas())
@pytest.mark.parametrize(
    ("block_bytes", "prefetch_bytes"), [(0, 0), (0, 1024), (16384, 0), (65536, 4096), (256, 256)]
)
def test_every_pattern_reads(cpus: list[int], isa: str, block_bytes: int, prefetch_bytes: int) -> None:
    probe = testing.BandwidthProbe(isa=isa, cpus=cpus, nbytes=5 * MIB, huge_pages=True)
    assert probe.nbytes >= 5 * MIB
    for hint in ("t0", "t1", "nta"):
        speed = probe.measure(block_bytes=block_bytes, prefetch_bytes=prefetch_bytes, hint=hint, passes=1)
        assert 1e6 < speed < 1e14


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_bytes": 1000}, "block_bytes is 1000; allowed: 0, or a power of two from 256 to 1048576"),
        (
            {"block_bytes": 2 * MIB},
            "block_bytes is 2097152; allowed: 0, or a power of two from 256 to 1048576",
        ),
        ({"block_bytes": 1024, "prefetch_bytes": 2048}, "prefetch_bytes is 2048; .* up to 1024"),
        ({"prefetch_bytes": 100}, "prefetch_bytes is 100; it must be a multiple of 256"),
        ({"hint": "t3"}, "hint='t3' is unknown; allowed: t0, t1, nta"),
        ({"passes": 0}, "passes is 0"),
    ],
)
def test_bad_pattern_is_named(cpus: list[int], arguments: dict[str, int | str], message: str) -> None:
    probe = testing.BandwidthProbe(isa="scalar", cpus=cpus, nbytes=2 * MIB, huge_pages=False)
    pattern = {"block_bytes": 0, "prefetch_bytes": 0, "hint": "t0", "passes": 1, **arguments}
    with pytest.raises(ValueError, match=message):
        probe.measure(**pattern)  # type: ignore[arg-type]


def test_bad_cpus_and_sizes_are_named(cpus: list[int]) -> None:
    def probe(cpus: list[int], nbytes: int = 4 * MIB) -> object:
        return testing.BandwidthProbe(isa="scalar", cpus=cpus, nbytes=nbytes, huge_pages=False)

    with pytest.raises(ValueError, match="cpus is empty"):
        probe([])
    with pytest.raises(ValueError, match="cpu -1 is negative"):
        probe([-1])
    with pytest.raises(ValueError, match="cpu 1023 can not be used"):
        probe([1023])
    with pytest.raises(ValueError, match="nbytes is 1000; it must be at least 1 MiB per cpu"):
        probe(cpus, 1000)
    with pytest.raises(ValueError, match=r"seconds is 0\.000000; allowed: 0\.001 to 60"):
        testing.measure_peak("float32_scalar", cpus=cpus, seconds=0)
