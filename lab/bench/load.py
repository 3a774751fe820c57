"""`moebius bench load`: how fast an expert server reads, requantises and packs a checkpoint.

The checkpoint is synthetic and lies in tmpfs, so that no disk is measured. Next to each load stand the speeds
at which the same files can merely be read with as many threads. Every pass is a process of its own: peak
resident size is part of the result, and memory that a process has used before is cheaper than fresh memory.

Of merely reading there are two. "reused": every thread reads into a small buffer of its own, again and
again; the bytes are gone afterwards. "kept": into fresh memory that holds all of the file, as any loader
has to; the kernel then also clears and maps that memory.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from app.bench.output import BenchTable, Column, write_json
from lab.random_model.build import shards
from lab.random_model.shapes import RandomShape
from lab.random_model.tensors import ModelDraw, write_shards
from lab.random_model.values import FORMATS, expert_format
from moebius.errors import UserError
from moebius.host.topology import Topology

DTYPES = ("keep", "int8", "int4")
WORKER = """
import sys
from lab.bench import load
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
    bytes_per_second: float  # Source bytes per second.
    # Limits, see `read_speed`, and the load's share of them.
    read_bytes_per_second: float
    kept_bytes_per_second: float
    ratio: float
    ratio_kept: float
    # Growth of the resident size at its peak, beyond the packed weights, and what a layer's source has.
    peak_beyond_packed_bytes: int
    layer_bytes: int
    relative_error: float  # Largest of all layers.


@dataclass(frozen=True)
class LoadOptions:
    """Filled by the command line."""

    shape: RandomShape
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
    source = write_checkpoint(directory, options.shape, name, threads)
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
    """Returns the last line that a process of its own prints."""
    command = [sys.executable, "-P", "-c", WORKER, *arguments]
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
    from expert_service.placement import ThreadPlacement
    from moebius.config import TelemetryConfig
    from moebius.experts.slices import SliceRequest, parse_expert_dtype
    from moebius.telemetry import configure_logging

    configure_logging(TelemetryConfig(log_level="error"), "bench")
    directory, dtype, threads = arguments[0], arguments[1], int(arguments[2])
    settings = LoadSettings(max_requantise_error=1.0, calibrate_kernels=False)
    host = ExpertHost(ThreadPlacement(-1, threads, ()), lambda *_: None, lambda: None, settings)
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
    """Returns the largest resident memory of this process, since it began."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM")
    return int(found[1]) * 1024


def parse_shape(text: str, layers: int) -> RandomShape:
    """Returns "HxIxE". Raises UserError."""
    try:
        hidden, intermediate, experts = (int(part) for part in text.split("x"))
    except ValueError:
        hidden = intermediate = experts = 0
    if min(hidden, intermediate, experts) < 1:
        raise UserError(f"--shape: {text!r} is not allowed; allowed: HxIxE, three numbers >= 1")
    return RandomShape(text, layers, hidden, 1, 1, 2, intermediate, experts, min(8, experts), 1)


def write_checkpoint(directory: Path, shape: RandomShape, name: str, threads: int = 2) -> int:
    """Writes the routed experts of a random model, and nothing else of it; bytes of tensors."""
    experts = expert_format(name)
    layers = shards(ModelDraw(shape, experts, skew=0.0, seed=0))[: shape.num_layers]
    routed = [[group for group in layer if ".experts." in group.tensors[0].name] for layer in layers]
    (directory / "config.json").write_text(json.dumps(shape.hf_config(experts.config)), encoding="utf-8")
    return write_shards(directory, routed, threads)


CHUNK_BYTES = 1 << 20


def read_speed(files: list[Path], threads: int, *, keep: bool) -> float:
    """Returns the bytes per second of one pass over all files with `threads` threads."""
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
    memory = [_fresh(size) if keep else None for size in sizes]
    chunks = itertools.chain.from_iterable(
        ((index, begin) for begin in range(0, size, CHUNK_BYTES)) for index, size in enumerate(sizes)
    )
    take = _locked(chunks)
    begin = time.perf_counter()
    try:
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            work = [pool.submit(_read_chunks, take, descriptors, memory) for _ in range(threads)]
            read = sum(future.result() for future in work)
        seconds = time.perf_counter() - begin
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        for area in memory:
            if area is not None:
                area.close()
    if read != sum(sizes):
        raise RuntimeError(f"{read} of {sum(sizes)} bytes were read")
    return read / seconds


def _fresh(size: int) -> mmap.mmap:
    """Returns untouched memory, in huge pages where allowed, as packed weights have."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    return area


def _locked(chunks: Iterator[tuple[int, int]]) -> Callable[[], tuple[int, int] | None]:
    # A generator may not be advanced by two threads at once; a list's iterator may.
    items = iter(list(chunks))
    return lambda: next(items, None)


def _read_chunks(
    take: Callable[[], tuple[int, int] | None], descriptors: list[int], memory: list[mmap.mmap | None]
) -> int:
    total = 0
    buffer = bytearray(CHUNK_BYTES)
    while (item := take()) is not None:
        index, begin = item
        area = memory[index]
        if area is None:
            total += os.preadv(descriptors[index], [buffer], begin)
            continue
        with memoryview(area) as whole, whole[begin : begin + CHUNK_BYTES] as part:
            total += os.preadv(descriptors[index], [part], begin)
    return total
