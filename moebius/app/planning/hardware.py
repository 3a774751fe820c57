"""The hardware that is planned for: from options, else from this host, else from stated assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moebius.app.planning.gpu_table import GpuModel
from moebius.kernel_times import PanelTimes

# Read bandwidth per usable core, and of a socket at most, where nobody measured: host C of docs/benchmarks.md
# gives 13 GB/s to each of 16 cores, host A 18 to each of two.
ASSUMED_CORE_BANDWIDTH = 13e9
ASSUMED_SOCKET_BANDWIDTH = 250e9
# bfloat16 operations per second and core by instruction set. AMX: the best of host C over its 16 cores.
# Others: two units of 16 (8) float32 lanes that multiply and add, at 2.5 GHz.
ASSUMED_CORE_FLOPS: Mapping[str, float] = {
    "amx": 2.9e12,
    "avx512_bf16": 320e9,
    "avx512": 160e9,
    "avx2": 80e9,
    "scalar": 5e9,
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """Filled by `detect.hardware`; bytes, bytes per second, operations per second."""

    gpus: int
    # None: no GPU, the engine computes on the CPU.
    gpu: GpuModel | None
    # What all processes together may take of the host's memory.
    ram_bytes: int
    # NUMA nodes that expert servers are spread over.
    sockets: int
    cores: int
    # Of all sockets together.
    bandwidth: float
    cpu_flops: float
    # Instruction set of the kernels; a key of ASSUMED_CORE_FLOPS.
    isa: str
    # What expert servers measured here; empty when they did not, or when options describe other processors.
    kernel_times: tuple[PanelTimes, ...] = ()
    # Field -> "given", "detected", "measured", "table" or "assumed".
    origin: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """What the user says of the hardware; None and "auto": ask this host. Filled by the command line."""

    gpus: str = "auto"
    gpu_memory_gib: float | None = None
    gpu_bandwidth_gbs: float | None = None
    gpu_tflops: float | None = None
    pcie_gbs: float | None = None
    ram_gib: float | None = None
    sockets: int | None = None
    cores: int | None = None
    bandwidth_gbs: float | None = None
    cpu_tflops: float | None = None
    # A key of ASSUMED_CORE_FLOPS; "auto": this host's.
    isa: str = "auto"
    # Measure bandwidth and peak where they are not given.
    measure: bool = False
