"""What this host has, without a driver library and, unless asked, without measuring."""

from __future__ import annotations

from pathlib import Path

from moebius.app.planning.gpu_table import GpuModel, find_gpu_model, parse_gpus
from moebius.app.planning.hardware import (
    ASSUMED_CORE_BANDWIDTH,
    ASSUMED_CORE_FLOPS,
    ASSUMED_SOCKET_BANDWIDTH,
    Hardware,
    HardwareOptions,
)
from moebius.errors import UserError
from moebius.kernel_times import PanelTimes, read_times, times_file

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
        kernel_times=_kernel_times(options, origin),
        origin=origin,
    )


def _gpus(options: HardwareOptions, root: Path, origin: dict[str, str]) -> tuple[int, GpuModel | None]:
    if options.gpus == "auto":
        origin["gpus"] = "detected"
        names = gpu_names(root)
        count, model = len(names), find_gpu_model(names[0]) if names else None
    else:
        origin["gpus"] = "given"
        count, model = parse_gpus(options.gpus)
        names = gpu_names(root)
        if model is None and count and names:
            model = find_gpu_model(names[0])
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
    return count, _with_given(model, options)


def _with_given(model: GpuModel | None, options: HardwareOptions) -> GpuModel:
    """The table's figures, or of a PCIe 4 GPU, where none are given."""
    base = model or GpuModel("GPU", 0, 0.0, 32e9, 0.0)

    def of(value: float | None, unit: float, default: float) -> float:
        return default if value is None else value * unit

    return GpuModel(
        base.name,
        int(of(options.gpu_memory_gib, GIB, base.memory_bytes)),
        of(options.gpu_bandwidth_gbs, 1e9, base.bandwidth),
        of(options.pcie_gbs, 1e9, base.link),
        of(options.gpu_tflops, 1e12, base.flops),
    )


def gpu_names(root: Path = Path("/")) -> list[str]:
    """Of every GPU that may be opened; "" where the driver's files do not say."""
    from moebius.app.supervisor.gpus import find_gpus

    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    names = []
    for file in files:
        lines = [line.partition(":") for line in file.read_text(errors="replace").splitlines()]
        names.append(next((value.strip() for key, _, value in lines if key.strip() == "Model"), ""))
    count = len(find_gpus(root))
    # A container may hold fewer than the machine; all of one kind as far as can be seen.
    return names[:count] if len(names) >= count else [*names, *[""] * (count - len(names))]


def _processors(options: HardwareOptions, origin: dict[str, str]) -> tuple[int, int]:
    from moebius.topology import Topology

    topology = Topology.detect()
    origin["sockets"] = "given" if options.sockets else "detected"
    origin["cores"] = "given" if options.cores else "detected"
    return options.sockets or len(topology.server_nodes()), options.cores or topology.recommended_threads()


def _ram(options: HardwareOptions, root: Path, origin: dict[str, str]) -> int:
    """Given, or what can be had now: the kernel's estimate, at most what the cgroup leaves."""
    from moebius.app.bench.kernels_limits import available_memory

    if options.ram_gib is not None:
        origin["ram"] = "given"
        return int(options.ram_gib * GIB)
    origin["ram"] = "detected"
    available = available_memory(root / "proc/meminfo")
    limit, used = (_number(root / "sys/fs/cgroup" / name) for name in ("memory.max", "memory.current"))
    return available if limit is None else min(available, max(0, limit - (used or 0)))


def _number(path: Path) -> int | None:
    """None: no such file, or no limit ("max")."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None


def _bandwidth(options: HardwareOptions, sockets: int, cores: int, origin: dict[str, str]) -> float:
    if options.bandwidth_gbs is not None:
        origin["bandwidth"] = "given"
        return options.bandwidth_gbs * 1e9 * sockets
    if options.measure:
        from moebius.app.bench.memory import read_bandwidth

        origin["bandwidth"] = "measured"
        return read_bandwidth(_MEASURED_BYTES * max(1, cores))
    origin["bandwidth"] = "assumed"
    return min(cores * ASSUMED_CORE_BANDWIDTH, sockets * ASSUMED_SOCKET_BANDWIDTH)


def _isa(options: HardwareOptions) -> str:
    """Given, or the widest that this host's kernels use. Raises UserError for one that is not known."""
    from moebius.kernels import isa_level

    if options.isa in ASSUMED_CORE_FLOPS:
        return options.isa
    if options.isa != "auto":
        known = ", ".join(ASSUMED_CORE_FLOPS)
        raise UserError(f"--isa: {options.isa!r} is not allowed; allowed: auto, {known}")
    level = isa_level()
    return next((name for name in ASSUMED_CORE_FLOPS if level.startswith(name)), "scalar")


def _kernel_times(options: HardwareOptions, origin: dict[str, str]) -> tuple[PanelTimes, ...]:
    """Measured here; none where options describe other processors than this host's."""
    given = (options.sockets, options.cores, options.bandwidth_gbs, options.cpu_tflops)
    if options.isa != "auto" or any(value is not None for value in given):
        return ()
    try:
        return read_times(times_file())
    except (OSError, ValueError) as error:
        origin["kernel_times"] = f"can not be read: {error}"
        return ()


def _cpu_flops(options: HardwareOptions, cores: int, isa: str, origin: dict[str, str]) -> float:
    if options.cpu_tflops is not None:
        origin["cpu_flops"] = "given"
        return options.cpu_tflops * 1e12
    if options.measure:
        from moebius.app.bench.kernels_limits import PeakLimit
        from moebius.kernels import isa_level
        from moebius.topology import Topology

        origin["cpu_flops"] = "measured"
        cpus = Topology.detect().usable_cpus()[:cores]
        return PeakLimit(isa_level(), cpus).best("bfloat16")[0]
    origin["cpu_flops"] = "assumed"
    return cores * ASSUMED_CORE_FLOPS[isa]
