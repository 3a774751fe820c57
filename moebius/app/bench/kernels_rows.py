"""Rows of `moebius bench kernels`: what was measured, set against the limits of the same run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from moebius.app.bench.kernels_limits import BandwidthLimit, PeakLimit, row_type_of
from moebius.app.bench.kernels_measure import Times
from moebius.app.bench.kernels_shapes import ExpertShape
from moebius.app.bench.kernels_working_set import WorkingSet
from moebius.app.bench.output import BenchTable, Column


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
    # Best read bandwidth of the run.
    limit_gb_per_second: float
    # Median of the best pattern's bandwidth in turn with the calls: what a machine shared with others, whose
    # bandwidth comes and goes, gave at that time.
    beside_gb_per_second: float
    limit_tflop_per_second: float
    limit_unit: str
    # max(weight_bytes / bandwidth, operations / peak)
    limit_ms: float
    ratio: float
    ratio_bandwidth: float
    ratio_peak: float
    # Against beside_gb_per_second, and of the fastest call.
    ratio_beside: float
    ratio_min_ms: float
    note: str


def compare(measured: Measured, bandwidth: BandwidthLimit, peak: PeakLimit) -> KernelsRow:
    """Sets a measurement against the best limits that the run has seen."""
    shape, held, times = measured.shape, measured.working_set, measured.times
    weight_bytes = times.distinct_experts * held.expert_bytes
    operations = shape.operations(1) * times.pairs
    bytes_per_second, _ = bandwidth.best
    operations_per_second, unit = peak.best(row_type_of(measured.weight_format))
    limit = max(weight_bytes / bytes_per_second, operations / operations_per_second)
    median, beside = times.median, statistics.median(times.beside)
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
        beside_gb_per_second=beside / 1e9,
        limit_tflop_per_second=operations_per_second / 1e12,
        limit_unit=unit,
        limit_ms=limit * 1e3,
        ratio=limit / median,
        ratio_bandwidth=weight_bytes / median / bytes_per_second,
        ratio_peak=operations / median / operations_per_second,
        ratio_beside=weight_bytes / median / beside,
        ratio_min_ms=limit / min(times.seconds),
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
    Column("interleaved", lambda row: f"{row.ratio_beside:.3f}"),
    Column("kernel", lambda row: row.kernel, 32, left=True),
)
