"""`moebius bench kernels`: milliseconds per MoE layer on the CPU, and the limit of the same cores and run.

Weights are random, in their packed form, and too many for the caches; rows choose experts at random. A layer
cannot be faster than reading the chosen experts once at full bandwidth, nor than computing all GEMMs at
the peak of the best unit; the limit is the larger of the two times.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.bench.limits import (
    BandwidthLimit,
    PeakLimit,
    cache_bytes,
    probe_bytes,
    row_type_of,
)
from app.bench.output import BenchTable, Column, or_dash, write_json
from lab.bench.kernels_inputs import ExpertShape, WorkingSet, plan_working_set
from lab.bench.kernels_measure import (
    EngineSetting,
    Times,
    calls_of,
    check_formats,
    choose_cpus,
    kernel_names,
    measure,
    measure_pairs,
    on_cpu,
)
from moebius.errors import UserError
from moebius.kernels import ExpertEngine, Isa, PlanRow
from moebius.process.limits import available_memory


@dataclass(frozen=True)
class KernelsOptions:
    """Filled by the command line."""

    shapes: Sequence[ExpertShape]
    formats: Sequence[str]
    rows: Sequence[int]
    rows_per_expert: Sequence[int] = ()  # Instead of `rows`: this many rows for every expert.
    # 0: every allowed cpu.
    threads: int = 0
    isa: Isa = "auto"
    kernel: str = "auto"  # GEMM kernel to force, by name.
    experts: int = 0  # Per layer; 0: those of the shape, or as many as fit.
    layers: int = 0  # 0: as many as the caches cannot hold.
    memory_bytes: int = 0  # For packed weights, bytes; 0: half of what is available.
    # Whether weights lie in memory that others can map, as expert servers have it. Then a second engine has
    # them in private memory and both are compared, so that each has half of `memory_bytes`.
    shared: bool = False
    seconds: float = 1.0  # Measuring time per row of the table.
    print_plan: bool = False  # Whether to print which kernel the engine takes for which number of rows.


@dataclass(frozen=True)
class Machine:
    """What figures are compared with; filled by `run`."""

    setting: EngineSetting
    memory_bytes: int
    cache_bytes: int
    bandwidth: BandwidthLimit
    peak: PeakLimit


def run(options: KernelsOptions, json_file: Path | None = None) -> list[KernelsRow]:
    """Measures every (shape, format, rows), prints a table and writes JSON rows.

    Raises:
        UserError: an option is out of range, or a shape does not fit the memory.
    """
    check_formats(options.formats)
    cpus = choose_cpus(options.threads)
    memory = (options.memory_bytes or available_memory() // 2) // (2 if options.shared else 1)
    cache = cache_bytes(cpus)
    results: list[Measured] = []
    with on_cpu(cpus[0]):
        bandwidth, peak = measure_limits(options.isa, cpus, probe_bytes(cache, memory))
        first_speed = bandwidth.best[0]
        setting = EngineSetting(cpus, options.isa, options.kernel, options.shared)
        machine = Machine(setting, memory, cache, bandwidth, peak)
        for shape in options.shapes:
            print(
                f"{shape.name}: hidden {shape.hidden_size}, intermediate {shape.intermediate_size}, ", end=""
            )
            print(f"{shape.num_experts} experts, {shape.top_k} per row")
            TABLE.print_header()
            for weight_format in options.formats:
                for measured in measure_format(options, shape, weight_format, machine):
                    results.append(measured)
                    TABLE.print_row(compare(measured, bandwidth, peak))
    rows = [compare(measured, bandwidth, peak) for measured in results]
    if bandwidth.best[0] > 1.02 * first_speed:
        print(f"the best read bandwidth rose to {bandwidth.best[0] / 1e9:.1f} GB/s meanwhile; against that:")
        print_table(rows)
    write_json(rows, json_file)
    return rows


def measure_limits(isa: str, cpus: Sequence[int], nbytes: int) -> tuple[BandwidthLimit, PeakLimit]:
    """Measures bandwidth over a buffer of `nbytes` and all peaks; prints them. Raises UserError."""
    try:
        bandwidth, peak = BandwidthLimit(isa, cpus, nbytes), PeakLimit(isa, cpus)
    except ValueError as error:
        raise UserError(str(error)) from None
    print(f"{len(cpus)} threads, cpus {','.join(map(str, cpus))}; reading {nbytes / 2**20:.0f} MiB:")
    for pattern in bandwidth.best_of_each_order():
        print(f"  {bandwidth.speeds[pattern] / 1e9:7.1f} GB/s  {pattern}")
    print("peaks:", ", ".join(f"{unit} {speed / 1e12:.3f} TFLOP/s" for unit, speed in peak.speeds.items()))
    return bandwidth, peak


def measure_format(
    options: KernelsOptions, shape: ExpertShape, weight_format: str, machine: Machine
) -> Iterator[Measured]:
    """Builds the layers of one (shape, format) and measures each number of rows on them. Raises UserError."""
    setting = machine.setting
    expert_bytes = setting.build(shape, weight_format, 1, 1).packed_expert(0, 0).nbytes
    held = plan_working_set(
        shape, expert_bytes, machine.cache_bytes, machine.memory_bytes, options.experts, options.layers
    )
    print(
        f"{weight_format}: {held.num_layers} layers of {held.num_experts} experts of "
        f"{expert_bytes / 2**20:.2f} MiB: {held.nbytes / 2**20:.0f} MiB, the caches hold "
        f"{machine.cache_bytes / 2**20:.0f} MiB" + (f" ({held.note})" if held.note else "")
    )
    engine = setting.build(shape, weight_format, held.num_experts, held.num_layers)
    if setting.kernel == "auto":
        engine.calibrate()
    private = private_twin(engine, setting, shape, weight_format, held)
    if options.print_plan:
        print("\n".join(map(plan_line, engine.plan())))
    for count in options.rows_per_expert or options.rows:
        calls = calls_of(count, shape, held, bool(options.rows_per_expert))
        machine.peak.refresh(row_type_of(weight_format))
        machine.bandwidth.refresh()
        times = measure(engine, held.num_layers, calls, options.seconds, machine.bandwidth.refresh_best)
        ratio = None
        if private is not None:
            ratio = measure_pairs((private, engine), held.num_layers, calls, options.seconds)
        yield Measured(
            shape=shape,
            weight_format=weight_format,
            isa=engine.isa,
            kernel=kernel_names(engine, times.pairs / times.distinct_experts),
            threads=engine.num_threads,
            rows=calls[0].rows,
            working_set=held,
            times=times,
            shared_over_private=ratio,
        )


def private_twin(
    engine: ExpertEngine, setting: EngineSetting, shape: ExpertShape, weight_format: str, held: WorkingSet
) -> ExpertEngine | None:
    """Returns the same experts in private memory, computed by the same kernels; None: `engine`'s
    are private.
    """
    if not setting.shared:
        return None
    twin = replace(setting, shared=False).build(shape, weight_format, held.num_experts, held.num_layers)
    if setting.kernel == "auto":
        twin.restore_plan([(row.kernel, row.nanoseconds) for row in engine.plan()])
    return twin


def print_table(rows: Sequence[KernelsRow]) -> None:
    """All rows, shape by shape."""
    for shape in dict.fromkeys(row.shape for row in rows):
        print(shape)
        TABLE.print_all([row for row in rows if row.shape == shape])


def plan_line(row: PlanRow) -> str:
    """Returns which kernel, for which rows of an expert, and what was measured."""
    rows = f"{row.rows_from} rows up" if row.rows_to is None else f"{row.rows_from} to {row.rows_to} rows"
    return (
        f"  {row.matrix} {row.format}, {row.row_type} request, {rows}: {row.kernel}"
        f" ({row.nanoseconds:.0f} ns per panel)"
    )


@dataclass(frozen=True)
class Measured:
    """One (shape, format, rows), before it is compared; filled by `kernels.measure_format`."""

    shape: ExpertShape
    weight_format: str
    isa: str
    # Of gate and up / of down, at the mean number of rows of an expert.
    kernel: str
    threads: int
    rows: int
    working_set: WorkingSet
    times: Times
    # Time of a call with weights that others can map over that with private ones; None: not asked for.
    shared_over_private: float | None = None


@dataclass(frozen=True)
class KernelsRow:
    """The keys of the JSON rows; filled by `compare`. Times are of one layer, ratios of the median."""

    shape: str
    hidden_size: int
    intermediate_size: int
    top_k: int
    format: str
    isa: str
    kernel: str
    threads: int
    experts: int
    model_experts: int
    layers: int
    working_set_bytes: int
    cache_bytes: int
    rows: int
    rows_per_expert: float
    distinct_experts: float
    iterations: int
    median_ms: float
    min_ms: float
    # Packed bytes of the distinct experts, and multiplications and additions.
    weight_bytes: float
    operations: float
    gb_per_second: float
    tflop_per_second: float
    limit_gb_per_second: float  # Best read bandwidth of the run.
    # Median of the best pattern's bandwidth in turn with the calls: what a machine shared with others, whose
    # bandwidth comes and goes, gave at that time.
    interleaved_gb_per_second: float
    limit_tflop_per_second: float
    limit_unit: str
    # max(weight_bytes / bandwidth, operations / peak)
    limit_ms: float
    ratio: float
    ratio_bandwidth: float
    ratio_peak: float
    # Against interleaved_gb_per_second, and of the fastest call.
    ratio_interleaved: float
    ratio_min_ms: float
    shared_over_private: float | None
    note: str


def compare(measured: Measured, bandwidth: BandwidthLimit, peak: PeakLimit) -> KernelsRow:
    """Sets a measurement against the best limits that the run has seen."""
    shape, held, times = measured.shape, measured.working_set, measured.times
    weight_bytes = times.distinct_experts * held.expert_bytes
    operations = shape.operations(1) * times.pairs
    bytes_per_second, _ = bandwidth.best
    operations_per_second, unit = peak.best(row_type_of(measured.weight_format))
    limit = max(weight_bytes / bytes_per_second, operations / operations_per_second)
    median, interleaved = times.median, statistics.median(times.interleaved)
    return KernelsRow(
        shape=shape.name,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        top_k=shape.top_k,
        format=measured.weight_format,
        isa=measured.isa,
        kernel=measured.kernel,
        threads=measured.threads,
        experts=held.num_experts,
        model_experts=held.model_experts,
        layers=held.num_layers,
        working_set_bytes=held.nbytes,
        cache_bytes=held.cache_bytes,
        rows=measured.rows,
        rows_per_expert=times.pairs / times.distinct_experts,
        distinct_experts=times.distinct_experts,
        iterations=len(times.seconds),
        median_ms=median * 1e3,
        min_ms=min(times.seconds) * 1e3,
        weight_bytes=weight_bytes,
        operations=operations,
        gb_per_second=weight_bytes / median / 1e9,
        tflop_per_second=operations / median / 1e12,
        limit_gb_per_second=bytes_per_second / 1e9,
        interleaved_gb_per_second=interleaved / 1e9,
        limit_tflop_per_second=operations_per_second / 1e12,
        limit_unit=unit,
        limit_ms=limit * 1e3,
        ratio=limit / median,
        ratio_bandwidth=weight_bytes / median / bytes_per_second,
        ratio_peak=operations / median / operations_per_second,
        ratio_interleaved=weight_bytes / median / interleaved,
        ratio_min_ms=limit / min(times.seconds),
        shared_over_private=measured.shared_over_private,
        note=held.note,
    )


TABLE = BenchTable[KernelsRow](
    Column("format", lambda row: row.format, 14, left=True),
    Column("rows", lambda row: f"{row.rows}", 5),
    Column("experts", lambda row: f"{row.distinct_experts:.1f}"),
    Column("median ms", lambda row: f"{row.median_ms:.3f}"),
    Column("min ms", lambda row: f"{row.min_ms:.3f}", 9),
    Column("GB/s", lambda row: f"{row.gb_per_second:.1f}", 7),
    Column("TFLOP/s", lambda row: f"{row.tflop_per_second:.3f}", 8),
    Column("limit ms", lambda row: f"{row.limit_ms:.3f}", 9),
    Column("ratio", lambda row: f"{row.ratio:.3f}", 6),
    Column("of GB/s", lambda row: f"{row.ratio_bandwidth:.3f}"),
    Column("of peak", lambda row: f"{row.ratio_peak:.3f}"),
    Column("interleaved", lambda row: f"{row.ratio_interleaved:.3f}"),
    Column("/private", lambda row: or_dash(row.shared_over_private, 3), 8),
    Column("kernel", lambda row: row.kernel, 32, left=True),
)
