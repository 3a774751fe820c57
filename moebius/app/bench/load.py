"""`moebius bench load`: how fast an expert server reads, requantises and packs a checkpoint.

The checkpoint is synthetic and lies in tmpfs, so that no disk is measured. Beside each load stand the speeds
at which the same files can merely be read with as many threads. Every pass is a process of its own: peak
resident size is part of the result, and memory that a process has used before is cheaper than fresh memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from moebius.app.bench.load_checkpoint import FORMATS, LoadShape, write_checkpoint
from moebius.app.bench.load_limits import read_speed
from moebius.app.bench.output import BenchTable, Column, write_json
from moebius.errors import UserError
from moebius.topology import Topology

DTYPES = ("keep", "int8", "int4")
WORKER = """
import sys
from moebius.app.bench import load
getattr(load, sys.argv[1])(sys.argv[2:])
"""


@dataclass(frozen=True)
class LoadRow:
    """One load; filled by `run`."""

    source_format: str
    expert_dtype: str
    threads: int
    source_bytes: int
    packed_bytes: int
    # Best of the repeats, planning included; and the time that all threads computed in it.
    seconds: float
    cpu_seconds: float
    # Source bytes per second.
    bytes_per_second: float
    # Limits, see load_limits.py, and the load's share of them.
    read_bytes_per_second: float
    kept_bytes_per_second: float
    ratio: float
    ratio_kept: float
    # Growth of the resident size at its peak, beyond the packed weights, and what a layer's source has.
    peak_beyond_packed_bytes: int
    layer_bytes: int
    # Largest of all layers.
    relative_error: float


@dataclass(frozen=True)
class LoadOptions:
    """Filled by the command line."""

    shape: LoadShape
    formats: tuple[str, ...]
    dtypes: tuple[str, ...] = DTYPES
    threads: int = 0  # 0: as many as cores and quota allow
    repeats: int = 3
    directory: Path = Path("/dev/shm")


def run(options: LoadOptions, json_file: Path | None = None) -> list[LoadRow]:
    """Measures and prints every format and type; also writes JSON rows to `json_file` when given.

    Raises:
        UserError: an unknown format or type, or a directory without room.
    """
    _check("--format", options.formats, tuple(FORMATS))
    _check("--expert-dtype", options.dtypes, ("keep", "float32", "bfloat16", "int8", "int4"))
    threads = options.threads or Topology.detect().recommended_threads()
    print(f"{threads} threads, checkpoint under {options.directory}; GB/s of source bytes")
    _TABLE.print_header()
    rows: list[LoadRow] = []
    for name in options.formats:
        try:
            with tempfile.TemporaryDirectory(prefix="moebius-bench-", dir=options.directory) as directory:
                rows += _measure_format(options, name, Path(directory), threads)
        except OSError as error:
            raise UserError(f"--directory {options.directory}: {error.strerror}") from error
    print(
        "read: the same files into small buffers; kept: into fresh memory that holds them, as a loader must"
    )
    write_json(rows, json_file)
    return rows


def _check(option: str, values: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise UserError(f"{option}: {value!r} is not allowed; allowed: {', '.join(allowed)}")


def _measure_format(options: LoadOptions, name: str, directory: Path, threads: int) -> list[LoadRow]:
    source = write_checkpoint(directory, options.shape, name)
    read, kept = (
        max(_read(directory, threads, kind) for _ in range(options.repeats)) for kind in ("reused", "kept")
    )
    rows = []
    for dtype in options.dtypes:
        loads = [_load(directory, dtype, threads) for _ in range(options.repeats)]
        best = min(loads, key=lambda load: load.seconds)
        seconds = best.seconds
        row = LoadRow(
            source_format=name,
            expert_dtype=dtype,
            threads=threads,
            source_bytes=source,
            packed_bytes=loads[0].packed_bytes,
            seconds=seconds,
            cpu_seconds=best.cpu_seconds,
            bytes_per_second=source / seconds,
            read_bytes_per_second=read,
            kept_bytes_per_second=kept,
            ratio=source / seconds / read,
            ratio_kept=source / seconds / kept,
            peak_beyond_packed_bytes=max(load.peak_growth - load.packed_bytes for load in loads),
            layer_bytes=source // options.shape.num_layers,
            relative_error=loads[0].relative_error,
        )
        rows.append(row)
        _TABLE.print_row(row)
    return rows


_TABLE = BenchTable[LoadRow](
    Column("source", lambda row: row.source_format, 10),
    Column("as", lambda row: row.expert_dtype, 9),
    Column("GB", lambda row: f"{row.source_bytes / 1e9:.2f}", 6),
    Column("load", lambda row: f"{row.bytes_per_second / 1e9:.2f}", 7),
    Column("read", lambda row: f"{row.read_bytes_per_second / 1e9:.2f}", 7),
    Column("ratio", lambda row: f"{row.ratio:.2f}", 6),
    Column("kept", lambda row: f"{row.kept_bytes_per_second / 1e9:.2f}", 7),
    Column("ratio", lambda row: f"{row.ratio_kept:.2f}", 6),
    Column("peak-packed", lambda row: f"{row.peak_beyond_packed_bytes / 1e6:.0f} MB"),
    Column("layer", lambda row: f"{row.layer_bytes / 1e6:.0f} MB", 9),
    Column("error", lambda row: f"{row.relative_error:.4f}", 8),
)


@dataclass(frozen=True)
class LoadTimes:
    """What one process reports; filled by `worker`."""

    seconds: float
    cpu_seconds: float
    packed_bytes: int
    peak_growth: int
    relative_error: float


def _load(directory: Path, dtype: str, threads: int) -> LoadTimes:
    return LoadTimes(**json.loads(_run_worker("worker", str(directory), dtype, str(threads))))


def _read(directory: Path, threads: int, kind: str) -> float:
    return float(_run_worker("read_worker", str(directory), kind, str(threads)))


def _run_worker(*arguments: str) -> str:
    """The last line that a process of its own prints."""
    command = [sys.executable, "-c", WORKER, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{process.stderr}")
    return process.stdout.splitlines()[-1]


def read_worker(arguments: list[str]) -> None:
    """Reads once and prints bytes per second. `arguments`: directory, "reused" or "kept", threads."""
    files = sorted(Path(arguments[0]).glob("*.safetensors"))
    print(read_speed(files, int(arguments[2]), keep=arguments[1] == "kept"))


def worker(arguments: list[str]) -> None:
    """Loads once and prints `LoadTimes` as JSON. `arguments`: directory, expert_dtype, threads."""
    from expert_service.host import ExpertHost, LoadSettings
    from expert_service.placement import Placement
    from moebius.config import TelemetryConfig
    from moebius.expert_dtype import parse_expert_dtype
    from moebius.expert_slices import SliceRequest
    from moebius.telemetry import configure_logging

    configure_logging(TelemetryConfig(log_level="error"), "bench")
    directory, dtype, threads = arguments[0], arguments[1], int(arguments[2])
    settings = LoadSettings(max_requantise_error=1.0, calibrate_kernels=False)
    host = ExpertHost(Placement(-1, threads, ()), lambda *_: None, lambda: None, settings)
    before = peak_resident_bytes()
    cpu_begin = time.process_time()
    loaded = host.load(SliceRequest(directory, weight_dtype=parse_expert_dtype(dtype)))
    times = LoadTimes(
        seconds=loaded.seconds,
        cpu_seconds=time.process_time() - cpu_begin,
        packed_bytes=loaded.engine.packed_bytes,
        peak_growth=peak_resident_bytes() - before,
        relative_error=max(loaded.relative_errors.values()),
    )
    print(json.dumps(asdict(times)))


def peak_resident_bytes() -> int:
    """Of this process, since it began."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM")
    return int(found[1]) * 1024
