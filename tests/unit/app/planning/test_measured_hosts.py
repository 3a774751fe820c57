"""Guards where costs of machines that are not here come from: the nearest measured host, which is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.planning.measured_hosts import MEASURED_HOSTS, MeasuredHost, nearest_gpus, nearest_kernels, origins
from tests.helpers.chart import ROOT
from tests.helpers.plan_models import hardware

HOST = hardware("4090", sockets=1, cores=16, bandwidth=80e9, cpu_flops=2e12, isa="avx2")


@pytest.mark.parametrize("host", MEASURED_HOSTS, ids=str)
def test_rows_are_in_the_benchmarks(host: MeasuredHost) -> None:
    """Each has a host, a date and a command that docs/benchmarks.md has as well."""
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    assert f"| {host.name} |" in text
    assert host.date in text
    assert host.command in text


@pytest.mark.parametrize(
    ("isa", "cores", "name"),
    [("avx2", 8, "D"), ("scalar", 4, "D"), ("avx512_bf16", 64, "A"), ("amx", 16, "C"), ("amx", 64, "E")],
)
def test_the_nearest_host_has_the_same_units(isa: str, cores: int, name: str) -> None:
    """AMX is scaled from AMX, AVX-512 from AVX-512, with the nearest number of cores."""
    assert nearest_kernels(replace(HOST, isa=isa, cores=cores)).name == name


def test_a_plan_names_what_it_is_scaled_from() -> None:
    """Kernels that were measured here need no other host; a GPU's figures have one always."""
    assert nearest_gpus(HOST).gpus == 1
    assert nearest_gpus(replace(HOST, gpus=4)).gpus == 2
    both = origins(HOST, measured_here=False)
    assert [text.split(" are ")[0] for text in both] == ["experts in RAM", "GPUs"]
    assert "2026-11-26, `moebius bench kernels --isa avx2`" in both[0]
    assert "1 x H200; 2026-11-24" in both[1]
    assert origins(replace(HOST, gpus=0, gpu=None), measured_here=True) == []
