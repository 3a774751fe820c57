"""The hardware that is planned for: from options, else from this host, else from stated assumptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.planning.gpu_models import GpuModel, find_gpu_model, least_of, parse_gpus
from app.supervisor.core_division import known_cores
from moebius.config import ExpertConfig
from moebius.errors import UserError
from moebius.host.kernel_times import PanelTimes, read_times, times_file
from moebius.process.limits import available_memory

# Read bandwidth per usable core, and of a socket at most, where neither was measured: host C of
# docs/benchmarks.md gives 13 GB/s to each of 16 cores, host A 18 to each of two.
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


# Of a GPU's memory, as its maker counts it, what a driver is taken to keep from every process: about a GiB of
# 80, half of one of 24.
DRIVER_BYTES, DRIVER_PART = 450 * 2**20, 0.006


@dataclass(frozen=True, slots=True)
class Hardware:
    """Filled by `detect.hardware`; bytes, bytes per second, operations per second."""

    gpus: int
    gpu: GpuModel | None  # None: no GPU, the engine computes on the CPU.
    ram_bytes: int  # What all processes together may take of the host's memory.
    # NUMA nodes that expert servers are spread over.
    sockets: int
    cores: int
    # Of all sockets together.
    bandwidth: float
    cpu_flops: float
    isa: str  # Instruction set of the kernels; a key of ASSUMED_CORE_FLOPS.
    # Whether the engine's dense layers may stay in 16 bits on these CPUs.
    multiplies_bfloat16: bool = True
    # What expert servers measured here; empty when they did not, or when options describe other processors.
    kernel_times: tuple[PanelTimes, ...] = ()
    # Field -> "given", "detected", "measured", "table" or "assumed".
    origin: Mapping[str, str] = field(default_factory=dict)

    def rank_gpus(self, ranks: int) -> tuple[GpuModel, ...]:
        """Returns the GPU of each of this number of ranks, which take them in order."""
        assert self.gpu is not None
        kinds = self.gpu.kinds
        return kinds[:ranks] if len(kinds) >= ranks else (self.gpu,) * ranks

    def rank_bytes(self, ranks: int) -> list[int]:
        """Returns the bytes of memory of each of these GPUs."""
        return [gpu.memory_bytes for gpu in self.rank_gpus(ranks)]

    def with_gpu_memory(self, nbytes: Sequence[int]) -> Hardware:
        """Returns the same host with other sizes of memory, of each of its GPUs."""
        gpus = [
            replace(gpu, memory_bytes=each)
            for gpu, each in zip(self.rank_gpus(self.gpus), nbytes, strict=True)
        ]
        return replace(self, gpu=least_of(gpus))


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
    isa: str = "auto"  # A key of ASSUMED_CORE_FLOPS; "auto": this host's.
    measure: bool = False  # Measure bandwidth and peak where they are not given.


GIB = 2**30
_MEASURED_BYTES = 256 * 2**20


def hardware(options: HardwareOptions, root: Path = Path("/")) -> Hardware:
    """Options first, then what files under `root` say. Raises UserError naming an option that is needed."""
    origin: dict[str, str] = {}
    gpus, gpu = _gpus(options, root, origin)
    sockets, cores = _processors(options, origin)
    isa = _isa(options)
    return Hardware(
        gpus=gpus,
        gpu=gpu,
        ram_bytes=_ram(options, root, origin),
        sockets=sockets,
        cores=cores,
        bandwidth=_bandwidth(options, sockets, cores, origin),
        cpu_flops=_cpu_flops(options, cores, isa, origin),
        isa=isa,
        multiplies_bfloat16=_multiplies_bfloat16(options),
        kernel_times=_kernel_times(options, origin),
        origin=origin,
    )


def _gpus(options: HardwareOptions, root: Path, origin: dict[str, str]) -> tuple[int, GpuModel | None]:
    if options.gpus == "auto":
        origin["gpus"] = "detected"
        names = gpu_names(root)
        count, model = len(names), _known(names)
    else:
        origin["gpus"] = "given"
        count, model = parse_gpus(options.gpus)
        names = gpu_names(root)
        if model is None and count:
            model = _known(names[:count])
    if count == 0:
        return 0, None
    given = {
        "--gpu-memory": options.gpu_memory_gib,
        "--gpu-bandwidth": options.gpu_bandwidth_gbs,
        "--gpu-tflops": options.gpu_tflops,
    }
    missing = [flag for flag, value in given.items() if value is None]
    if model is None and missing:
        kind = f"GPU {names[0]!r}" if names else "the GPU's kind"
        raise UserError(f"{kind} is not in the table of known ones; needed: {', '.join(missing)}")
    origin["gpu"] = "table" if len(missing) == len(given) else "given"
    if model is not None and model.kinds:
        return count, least_of([_with_given(kind, options) for kind in model.kinds])
    return count, _with_given(model, options)


def _known(names: list[str]) -> GpuModel | None:
    """Returns the kind that all are planned as; None where one of them, or all, is not known."""
    models = [find_gpu_model(name) for name in names]
    known = [model for model in models if model is not None]
    return least_of(known) if known and len(known) == len(models) else None


def _with_given(model: GpuModel | None, options: HardwareOptions) -> GpuModel:
    """Returns the table's figures, or of a PCIe 4 GPU, where none are given."""
    base = model or GpuModel("GPU", 0, 0.0, 32e9, 0.0)
    held = DRIVER_BYTES + int(DRIVER_PART * base.memory_bytes)

    def of(value: float | None, unit: float, default: float) -> float:
        return default if value is None else value * unit

    return replace(
        base,
        memory_bytes=int(of(options.gpu_memory_gib, GIB, max(0, base.memory_bytes - held))),
        bandwidth=of(options.gpu_bandwidth_gbs, 1e9, base.bandwidth),
        link=of(options.pcie_gbs, 1e9, base.link),
        flops=of(options.gpu_tflops, 1e12, base.flops),
    )


def gpu_names(root: Path = Path("/")) -> list[str]:
    """Returns the product name of every GPU that may be opened; "" where the driver's files do not say."""
    from app.supervisor.placement import find_gpus

    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    names = []
    for file in files:
        lines = [line.partition(":") for line in file.read_text(errors="replace").splitlines()]
        names.append(next((value.strip() for key, _, value in lines if key.strip() == "Model"), ""))
    count = len(find_gpus(root))
    # A container may hold fewer than the machine; all of one kind as far as can be seen.
    return names[:count] if len(names) >= count else [*names, *[""] * (count - len(names))]


def _processors(options: HardwareOptions, origin: dict[str, str]) -> tuple[int, int]:
    from moebius.host.topology import Topology

    topology = Topology.detect()
    origin["sockets"] = "given" if options.sockets else "detected"
    origin["cores"] = "given" if options.cores else "detected"
    return options.sockets or len(topology.server_nodes()), options.cores or topology.recommended_threads()


def _ram(options: HardwareOptions, root: Path, origin: dict[str, str]) -> int:
    """Given, or what can be had now."""
    if options.ram_gib is not None:
        origin["ram"] = "given"
        return int(options.ram_gib * GIB)
    origin["ram"] = "detected"
    return available_memory(root)


def _bandwidth(options: HardwareOptions, sockets: int, cores: int, origin: dict[str, str]) -> float:
    if options.bandwidth_gbs is not None:
        origin["bandwidth"] = "given"
        return options.bandwidth_gbs * 1e9 * sockets
    if options.measure:
        from app.bench.limits import read_bandwidth

        origin["bandwidth"] = "measured"
        return read_bandwidth(_MEASURED_BYTES * max(1, cores))
    if options.sockets is None and options.cores is None and options.isa == "auto":
        # By the first start of `serve` here.
        curves = [node.curve for node in known_cores(ExpertConfig()).nodes.values()]
        if all(curves):
            origin["bandwidth"] = "measured"
            return sum(curve.best for curve in curves if curve)
    origin["bandwidth"] = "assumed"
    return min(cores * ASSUMED_CORE_BANDWIDTH, sockets * ASSUMED_SOCKET_BANDWIDTH)


def _isa(options: HardwareOptions) -> str:
    """Returns the given level, or the widest that this host's kernels use.

    Raises UserError for one that is not known.
    """
    from moebius.kernels import isa_level

    if options.isa in ASSUMED_CORE_FLOPS:
        return options.isa
    if options.isa != "auto":
        known = ", ".join(ASSUMED_CORE_FLOPS)
        raise UserError(f"--isa: {options.isa!r} is not allowed; allowed: auto, {known}")
    level = isa_level()
    return next((name for name in ASSUMED_CORE_FLOPS if level.startswith(name)), "scalar")


def _multiplies_bfloat16(options: HardwareOptions) -> bool:
    """Returns whether bfloat16 is multiplied, as this host's oneDNN or the given instruction set says."""
    if options.isa != "auto":
        return options.isa not in ("avx2", "scalar")
    from gpu_service.ops.linear import multiplies_bfloat16

    return multiplies_bfloat16()


def _kernel_times(options: HardwareOptions, origin: dict[str, str]) -> tuple[PanelTimes, ...]:
    """Returns the times measured here; none where options describe other processors than this host's."""
    given = (options.sockets, options.cores, options.bandwidth_gbs, options.cpu_tflops)
    if options.isa != "auto" or any(value is not None for value in given):
        return ()
    try:
        return read_times(times_file())
    except (OSError, ValueError) as error:
        origin["kernel_times"] = f"cannot be read: {error}"
        return ()


def _cpu_flops(options: HardwareOptions, cores: int, isa: str, origin: dict[str, str]) -> float:
    if options.cpu_tflops is not None:
        origin["cpu_flops"] = "given"
        return options.cpu_tflops * 1e12
    if options.measure:
        from app.bench.limits import PeakLimit
        from moebius.host.topology import Topology
        from moebius.kernels import isa_level

        origin["cpu_flops"] = "measured"
        cpus = Topology.detect().usable_cpus()[:cores]
        return PeakLimit(isa_level(), cpus).best("bfloat16")[0]
    origin["cpu_flops"] = "assumed"
    return cores * ASSUMED_CORE_FLOPS[isa]
