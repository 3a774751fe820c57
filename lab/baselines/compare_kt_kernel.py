"""Milliseconds per MoE layer of kt-kernel and of Moebius, in turn, on the same cores; see README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from app.bench.limits import cache_bytes
from app.cli_options import parse_counts
from lab.baselines.kt_kernel_formats import FORMATS, find_module
from lab.baselines.kt_kernel_worker import Job, Result
from lab.bench.kernels_inputs import (
    ExpertShape,
    WorkingSet,
    parse_isa,
    parse_shapes,
    plan_working_set,
)
from lab.bench.kernels_measure import (
    EngineSetting,
    Times,
    calls_of,
    choose_cpus,
    kernel_names,
    measure,
    on_cpu,
)
from moebius.errors import UserError
from moebius.kernels import supported_isas
from moebius.process.limits import available_memory

WORKER = "lab.baselines.kt_kernel_worker"
# Its INT4, the worst, is off by 29 % for normally distributed weights.
LARGEST_ERROR = 0.5
DEFAULT_FORMATS = "BF16,FP8,INT8,RAWINT4,MXFP4"


@dataclass(frozen=True)
class ComparisonRow:
    """The keys of the JSON rows, one per shape, format and rows; filled by `comparison`. Times per layer."""

    shape: str
    baseline_format: str
    our_format: str
    baseline_build: str
    rows: int
    experts: int
    layers: int
    # Packed bytes of ours; the baseline holds as many experts and layers.
    working_set_bytes: int
    cache_bytes: int
    distinct_experts: float
    # Medians by number of threads; the best of them counts.
    baseline_median_ms: dict[int, float]
    baseline_threads: int
    baseline_ms: float
    baseline_min_ms: float
    our_threads: int
    our_kernel: str
    our_ms: float
    our_min_ms: float
    # Of one of its rows against the float32 product of the weights it was given.
    baseline_relative_error: float
    # Baseline's time over ours: above 1 we are faster.
    ratio: float
    ratio_min: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, compares and prints; wrong options end with one line."""
    options = parse(arguments)
    try:
        rows = run(options)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    except (UserError, OSError) as error:
        sys.exit(f"compare_kt_kernel: error: {error}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--wheel-dir", type=Path, help="folder with an unpacked kt-kernel wheel")
    where.add_argument("--module", type=Path, help="one _kt_kernel_ext_<variant>.so")
    parser.add_argument("--format", default=DEFAULT_FORMATS, help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="names or HxIxExK, comma separated")
    parser.add_argument("--rows", default="1,4,16,64,512")
    parser.add_argument("--rows-per-expert", default="", help="instead of --rows")
    parser.add_argument("--threads", type=int, default=0, help="ours; 0: one per allowed cpu")
    parser.add_argument("--baseline-threads", default="", help="theirs to try; default: N, N-1, N-2")
    parser.add_argument(
        "--isa", default="auto", help="level for ours, and the highest for the baseline's build"
    )
    parser.add_argument("--experts", type=int, default=0, help="per layer; 0: the model's, or what fits")
    parser.add_argument("--layers", type=int, default=0, help="0: more than the caches can hold")
    parser.add_argument(
        "--memory", type=float, default=0, help="GiB for weights; 0: a quarter of what is free"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time per row and thread count")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> list[ComparisonRow]:
    """Compares every (shape, format, rows). Raises UserError."""
    isa = parse_isa(options.isa)
    levels = supported_isas() if isa == "auto" else supported_isas()[: supported_isas().index(isa) + 1]
    tag = f"cpython-{sysconfig.get_config_var('py_version_nodot')}"
    module = options.module or find_module(options.wheel_dir, levels, tag)
    unknown = [name for name in options.format.split(",") if name not in FORMATS]
    if unknown:
        raise UserError(f"--format: {unknown[0]!r} is unknown; allowed: {', '.join(FORMATS)}")
    cpus = choose_cpus(options.threads)
    print(f"kt-kernel build {module.name}, {len(cpus)} cpus")
    print(HEADER)
    rows = []
    for shape in parse_shapes(options.shape):
        for name in options.format.split(","):
            rows += compare(options, shape, name, module, EngineSetting(cpus, isa))
    return rows


HEADER = (
    f"{'shape':<16} {'format':<28} {'rows':>5} {'experts':>8} {'kt ms':>9} {'threads':>7} {'ours ms':>9}"
    f" {'ratio':>6} {'of minima':>9}  kt by threads; our kernel"
)


def compare(
    options: argparse.Namespace, shape: ExpertShape, name: str, module: Path, setting: EngineSetting
) -> list[ComparisonRow]:
    """Returns all rows of one (shape, format): the baseline with each number of threads, then ours."""
    form, cpus = FORMATS[name], setting.cpus
    expert_bytes = setting.build(shape, form.ours, 1, 1).packed_expert(0, 0).nbytes
    memory = int(options.memory * 2**30) or available_memory() // 4
    held = plan_working_set(shape, expert_bytes, cache_bytes(cpus), memory, options.experts, options.layers)
    per_expert = bool(options.rows_per_expert)
    counts = parse_counts(options.rows_per_expert or options.rows, "--rows")
    baseline = {}
    for threads in baseline_threads(options.baseline_threads, len(cpus)):
        job = Job(str(module), name, shape, held, counts, per_expert, threads, list(cpus), options.seconds)
        baseline[threads] = run_baseline(job)
    engine = setting.build(shape, form.ours, held.num_experts, held.num_layers)
    engine.calibrate()
    error = max(found.relative_error for found in baseline.values())
    print(f"{name}: kt-kernel's layer is off by {error:.2%}")
    rows = []
    with on_cpu(cpus[0]):
        for index, count in enumerate(counts):
            calls = calls_of(count, shape, held, per_expert)
            times = measure(engine, held.num_layers, calls, options.seconds)
            seconds = {threads: found.seconds[index] for threads, found in baseline.items()}
            rows.append(
                comparison(
                    shape, name, module, held, calls[0].rows, seconds, error, times, len(cpus),
                    kernel_names(engine, times.pairs / times.distinct_experts),
                )
            )  # fmt: skip
            print(line(rows[-1]), flush=True)
    return rows


def baseline_threads(text: str, cpus: int) -> list[int]:
    """N threads need N + 1 cores there, so fewer can be faster."""
    if text:
        return parse_counts(text, "--baseline-threads")
    return [threads for threads in (cpus, cpus - 1, cpus - 2) if threads >= 1]


def run_baseline(job: Job) -> Result:
    """Returns the times from a process of its own.

    Raises UserError when it fails, or computes something else.
    """
    with tempfile.TemporaryDirectory() as directory:
        question, answer = Path(directory) / "job.json", Path(directory) / "times.json"
        question.write_text(json.dumps(asdict(job)))
        done = subprocess.run(
            [sys.executable, "-P", "-m", WORKER, str(question), str(answer)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if done.returncode != 0 or not answer.exists():
            words = " | ".join(done.stdout.strip().splitlines()[-3:])
            raise UserError(
                f"kt-kernel {job.format} with {job.threads} threads ended {done.returncode}: {words}"
            )
        result = Result(**json.loads(answer.read_text()))
        if not result.relative_error < LARGEST_ERROR:
            raise UserError(
                f"kt-kernel {job.format} with {job.threads} threads is wrong by {result.relative_error:.0%}"
            )
        return result


def comparison(
    shape: ExpertShape, name: str, module: Path, held: WorkingSet, rows: int,
    baseline: dict[int, list[float]], error: float, ours: Times, threads: int, kernel: str,
) -> ComparisonRow:  # fmt: skip
    """Returns the arithmetic of a row: the baseline's best number of threads, by median, against ours."""
    medians = {count: statistics.median(times) for count, times in baseline.items()}
    best = min(medians, key=medians.__getitem__)
    baseline_min = min(min(times) for times in baseline.values())
    return ComparisonRow(
        shape=shape.name,
        baseline_format=name,
        our_format=FORMATS[name].ours,
        baseline_build=module.name.split(".")[0],
        rows=rows,
        experts=held.num_experts,
        layers=held.num_layers,
        working_set_bytes=held.nbytes,
        cache_bytes=held.cache_bytes,
        distinct_experts=ours.distinct_experts,
        baseline_median_ms={count: value * 1e3 for count, value in medians.items()},
        baseline_threads=best,
        baseline_ms=medians[best] * 1e3,
        baseline_min_ms=baseline_min * 1e3,
        our_threads=threads,
        our_kernel=kernel,
        our_ms=ours.median * 1e3,
        our_min_ms=min(ours.seconds) * 1e3,
        baseline_relative_error=error,
        ratio=medians[best] / ours.median,
        ratio_min=baseline_min / min(ours.seconds),
    )


def line(row: ComparisonRow) -> str:
    """Returns the row under `HEADER`."""
    by_threads = ", ".join(f"{threads}: {ms:.2f}" for threads, ms in row.baseline_median_ms.items())
    formats = f"{row.baseline_format} / {row.our_format}"
    return (
        f"{row.shape:<16} {formats:<28} {row.rows:>5} {row.distinct_experts:>8.1f} {row.baseline_ms:>9.3f}"
        f" {row.baseline_threads:>7} {row.our_ms:>9.3f} {row.ratio:>6.2f} {row.ratio_min:>9.2f}"
        f"  {by_threads}; {row.our_kernel}"
    )


if __name__ == "__main__":
    main()
