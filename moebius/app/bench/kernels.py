"""`moebius bench kernels`: milliseconds per MoE layer on the CPU, beside the limit of the same cores and run.

Weights are random, in their packed form, and too many for the caches; rows choose experts at random. A layer
can not be faster than reading the chosen experts once at full bandwidth, nor than computing all products at
the peak of the best unit; the limit is the larger of the two times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moebius.app.bench.kernels_limits import (
    BandwidthLimit,
    PeakLimit,
    available_memory,
    cache_bytes,
    probe_bytes,
    row_type_of,
)
from moebius.app.bench.kernels_measure import (
    EngineSetting,
    calls_of,
    check_formats,
    choose_cpus,
    kernel_names,
    measure,
    on_cpu,
)
from moebius.app.bench.kernels_rows import TABLE, KernelsRow, Measured, compare
from moebius.app.bench.kernels_shapes import ExpertShape
from moebius.app.bench.kernels_working_set import plan_working_set
from moebius.app.bench.output import write_json
from moebius.errors import UserError
from moebius.kernels import Isa, PlanRow


@dataclass(frozen=True)
class KernelsOptions:
    """Filled by the command line."""

    shapes: Sequence[ExpertShape]
    formats: Sequence[str]
    rows: Sequence[int]
    # Instead of `rows`: so many rows for every expert.
    rows_per_expert: Sequence[int] = ()
    # 0: every allowed cpu.
    threads: int = 0
    isa: Isa = "auto"
    # Product kernel to force, by name.
    kernel: str = "auto"
    # Per layer; 0: those of the shape, or as many as fit.
    experts: int = 0
    # 0: as many as the caches can not hold.
    layers: int = 0
    # For packed weights, bytes; 0: half of what is available.
    memory_bytes: int = 0
    # Measuring time per row of the table.
    seconds: float = 1.0
    # Whether to print which kernel the engine takes for which number of rows.
    print_plan: bool = False


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
    memory = options.memory_bytes or available_memory() // 2
    cache = cache_bytes(cpus)
    results: list[Measured] = []
    with on_cpu(cpus[0]):
        bandwidth, peak = measure_limits(options.isa, cpus, probe_bytes(cache, memory))
        first_speed = bandwidth.best[0]
        machine = Machine(EngineSetting(cpus, options.isa, options.kernel), memory, cache, bandwidth, peak)
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
    if options.print_plan:
        print("\n".join(map(plan_line, engine.plan())))
    for count in options.rows_per_expert or options.rows:
        calls = calls_of(count, shape, held, bool(options.rows_per_expert))
        machine.peak.refresh(row_type_of(weight_format))
        machine.bandwidth.refresh()
        times = measure(engine, held.num_layers, calls, options.seconds, machine.bandwidth.refresh_best)
        yield Measured(
            shape=shape,
            weight_format=weight_format,
            isa=engine.isa,
            kernel=kernel_names(engine, times.pairs / times.distinct_experts),
            threads=engine.num_threads,
            rows=calls[0].rows,
            working_set=held,
            times=times,
        )


def print_table(rows: Sequence[KernelsRow]) -> None:
    """All rows, shape by shape."""
    for shape in dict.fromkeys(row.shape for row in rows):
        print(shape)
        TABLE.print_all([row for row in rows if row.shape == shape])


def plan_line(row: PlanRow) -> str:
    """Which kernel, for which rows of an expert, and what was measured."""
    rows = f"{row.rows_from} rows up" if row.rows_to is None else f"{row.rows_from} to {row.rows_to} rows"
    return (
        f"  {row.matrix} {row.format}, {row.row_type} request, {rows}: {row.kernel}"
        f" ({row.nanoseconds:.0f} ns per panel)"
    )
