"""Hosts that figures of docs/benchmarks.md were measured on, which plans for other machines are scaled from.

A plan counts with shares of bandwidth and peak that kernels reached there, and with the bandwidth and peak of
the machine that is planned for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.planning.hardware import Hardware


@dataclass(frozen=True, slots=True)
class MeasuredHost:
    """One run of docs/benchmarks.md."""

    name: str  # As the first table there has it.
    cores: int
    isa: str  # A key of ASSUMED_CORE_FLOPS.
    bandwidth: float  # Bytes per second that its RAM was read with in that run.
    gpus: int  # That took part.
    gpu: str  # Their name in the catalogue; empty: none took part.
    date: str
    command: str

    def __str__(self) -> str:
        parts = [f"{self.cores} cores", self.isa, f"{self.bandwidth / 1e9:.0f} GB/s"]
        parts += [f"{self.gpus} x {self.gpu}"] if self.gpu else []
        return f"host {self.name} of docs/benchmarks.md ({', '.join(parts)}; {self.date}, `{self.command}`)"


MEASURED_HOSTS = (
    MeasuredHost("A", 2, "avx512", 49e9, 0, "", "2026-11-21", "moebius bench kernels --isa avx512_vnni"),
    MeasuredHost("D", 16, "avx2", 145e9, 0, "", "2026-11-26", "moebius bench kernels --isa avx2"),
    MeasuredHost("C", 16, "amx", 210e9, 0, "", "2026-11-21", "moebius bench kernels"),
    MeasuredHost("D", 16, "amx", 163.4e9, 1, "H200", "2026-11-24", "moebius bench engine DIR --device cuda"),
    MeasuredHost("E", 32, "amx", 213e9, 2, "H200", "2026-11-21", "moebius bench engine DIR --device cuda"),
)


def nearest_kernels(hardware: Hardware) -> MeasuredHost:
    """Returns the host with the same kind of units, of several the one with the nearest number of cores."""
    family = _family(hardware.isa)
    alike = [host for host in MEASURED_HOSTS if _family(host.isa) == family]
    return min(alike, key=lambda host: abs(math.log(host.cores / hardware.cores)))


def nearest_gpus(hardware: Hardware) -> MeasuredHost:
    """Returns the host with the nearest number of GPUs."""
    return min((host for host in MEASURED_HOSTS if host.gpu), key=lambda host: abs(host.gpus - hardware.gpus))


def _family(isa: str) -> str:
    """Returns the widest unit that kernels of the level use."""
    return isa.partition("_")[0] if isa != "scalar" else "avx2"


def origins(hardware: Hardware, measured_here: bool) -> list[str]:
    """Returns a sentence for each kind of cost that was not measured on the machine that is planned for."""
    found = []
    if not measured_here:
        found.append(
            f"experts in RAM are scaled by bandwidth and peak from {nearest_kernels(hardware)}, with "
            "int4 experts of Qwen3-30B-A3B's shape"
        )
    if hardware.gpu is not None:
        found.append(
            f"GPUs are scaled by bandwidth and peak from {nearest_gpus(hardware)}, with the same model"
        )
    return found
