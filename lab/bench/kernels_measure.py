"""Times calls of an `ExpertEngine` whose weights are random and too many for the caches."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.bench.kernels_inputs import ExpertShape, Routing, WorkingSet, exact, uniform
from moebius import _kernels, _kernels_testing
from moebius.errors import UserError
from moebius.kernels import ExpertEngine, Isa, SegmentError, SegmentSettings
from moebius.kernels.weight_formats import WEIGHT_FORMATS

MIN_ITERATIONS = 5
MAX_ITERATIONS = 2000
WARMUP = 3
BETWEEN_SECONDS = 0.2
SEED = 42
# Different choices per number of rows. A prime, so that one seldom meets the same layer again.
ROUTINGS = 31


@dataclass(frozen=True)
class EngineSetting:
    """How engines are built; filled by the command line."""

    cpus: Sequence[int]
    isa: Isa = "auto"
    kernel: str = "auto"  # GEMM kernel to force, by name; "auto": those that calibration finds.
    shared: bool = False  # Weights in memory that others can map, as an expert server has it; else private.

    def build(self, shape: ExpertShape, weight_format: str, experts: int, layers: int) -> ExpertEngine:
        """Returns an engine with random packed weights in every layer. Raises UserError."""
        if not self.shared:
            return self._build(shape, weight_format, experts, layers, None)
        with anonymous_segment(experts, layers) as segment:
            return self._build(shape, weight_format, experts, layers, segment)

    def _build(
        self,
        shape: ExpertShape,
        weight_format: str,
        experts: int,
        layers: int,
        segment: SegmentSettings | None,
    ) -> ExpertEngine:
        try:
            engine = ExpertEngine(
                shape.hidden_size,
                shape.intermediate_size,
                experts,
                layers,
                weight_format=weight_format,
                num_threads=len(self.cpus),
                cpus=self.cpus,
                isa=self.isa,
                kernel=self.kernel,
                segment=segment,
            )
        except (ValueError, SegmentError) as error:
            raise UserError(f"{shape.name}, {weight_format}: {error}") from None
        for layer in range(layers):
            _kernels_testing.fill_random(engine.backend, layer, SEED + layer)
        return engine


@contextmanager
def anonymous_segment(experts: int, layers: int) -> Iterator[SegmentSettings]:
    """Yields memory for every expert as `moebius serve` makes it; goes with the engine that was built
    meanwhile.
    """
    descriptor = os.memfd_create("moebius-bench", os.MFD_CLOEXEC)
    try:
        held = dict.fromkeys(range(layers), range(experts))
        yield SegmentSettings(f"/proc/self/fd/{descriptor}", "bench", held)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Times:
    """Seconds per call and what the calls were; filled by `measure`."""

    seconds: Sequence[float]
    # Means over the calls.
    distinct_experts: float
    pairs: float
    interleaved: Sequence[float] = ()  # What `between` gave, every BETWEEN_SECONDS.

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def check_formats(formats: Sequence[str]) -> None:
    """Raises UserError for a format that does not exist."""
    allowed = list(WEIGHT_FORMATS)
    for name in formats:
        if name not in allowed:
            raise UserError(f"--format: {name!r} is unknown; allowed: {', '.join(allowed)}")


def choose_cpus(threads: int) -> list[int]:
    """Returns allowed cpus, one of each core first. Raises UserError when there are fewer than `threads`."""
    kernel = _kernels.Topology.detect("/sys", "/proc", "/sys/fs/cgroup")
    leaders = list(kernel.core_leaders)
    cpus = leaders + [cpu for cpu in kernel.allowed_cpus if cpu not in set(leaders)]
    if not 0 <= threads <= len(cpus):
        raise UserError(f"--threads: {threads} is not allowed; allowed: 1 to {len(cpus)}, or 0 for all")
    return cpus[: threads or len(cpus)]


@contextmanager
def on_cpu(cpu: int) -> Iterator[None]:
    """Keeps this thread, which computes as the engine's first, on one cpu; undone at the end."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def calls_of(rows: int, shape: ExpertShape, held: WorkingSet, exact_rows_per_expert: bool) -> list[Routing]:
    """Returns different choices of experts, the same in every run; `rows` is per call, or per expert."""
    random = np.random.default_rng(SEED)
    deal = exact if exact_rows_per_expert else uniform
    # Large calls touch every expert anyway.
    touches_all = exact_rows_per_expert or rows * shape.top_k >= 16 * held.num_experts
    return [deal(rows, held.num_experts, shape.top_k, random) for _ in range(3 if touches_all else ROUTINGS)]


def random_hidden_states(rows: int, hidden_size: int) -> NDArray[np.uint16]:
    """Returns [rows, hidden_size] normally distributed bfloat16 values, as bits."""
    values = np.random.default_rng(SEED).standard_normal((rows, hidden_size), dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def timed_calls(engine: ExpertEngine, layers: int, calls: Sequence[Routing]) -> Callable[[int], float]:
    """Returns a function that makes the call of a number, on changing layers, and returns its seconds."""
    rows, hidden_size = calls[0].rows, engine.backend.hidden_size
    hidden_states = random_hidden_states(rows, hidden_size)
    output = np.empty((rows, hidden_size), dtype=np.float32)

    def call(number: int) -> float:
        chosen = calls[number % len(calls)]
        begin = time.perf_counter()
        engine.forward(number % layers, hidden_states, chosen.topk_ids, chosen.topk_weights, output=output)
        return time.perf_counter() - begin

    return call


def measure(
    engine: ExpertEngine,
    layers: int,
    calls: Sequence[Routing],
    seconds: float,
    between: Callable[[], float] | None = None,
) -> Times:
    """Times bfloat16 calls on changing layers for about `seconds`, after a warm-up.

    `between` is called every now and then in the same time, e.g. to measure what the machine gives just then.
    """
    call = timed_calls(engine, layers, calls)
    for number in range(WARMUP):
        call(number)
    times: list[float] = []
    interleaved: list[float] = []
    begin = time.perf_counter()
    while len(times) < MIN_ITERATIONS or (
        time.perf_counter() < begin + seconds and len(times) < MAX_ITERATIONS
    ):
        if between and time.perf_counter() >= begin + len(interleaved) * BETWEEN_SECONDS:
            interleaved.append(between())
            call(WARMUP + len(times))  # wakes the engine's threads again
        times.append(call(WARMUP + len(times)))
    used = [calls[(WARMUP + number) % len(calls)] for number in range(len(times))]
    return Times(
        times,
        statistics.fmean(chosen.distinct_experts for chosen in used),
        statistics.fmean(chosen.pairs for chosen in used),
        interleaved,
    )


def measure_pairs(
    engines: tuple[ExpertEngine, ExpertEngine], layers: int, calls: Sequence[Routing], seconds: float
) -> float:
    """Returns the second engine's time for a call over the first's: the median of pairs, for about `seconds`.

    Both do the same call one right after the other, and take turns to be first: what a machine gives to its
    other tenants meets both alike.
    """
    timed = tuple(timed_calls(engine, layers, calls) for engine in engines)
    ratios: list[float] = []
    begin = time.perf_counter()
    while len(ratios) < MIN_ITERATIONS or (
        time.perf_counter() < begin + seconds and len(ratios) < MAX_ITERATIONS
    ):
        number = len(ratios)
        seconds_of = {i: timed[i](number) for i in ((0, 1) if number % 2 == 0 else (1, 0))}
        ratios.append(seconds_of[1] / seconds_of[0])
    return statistics.median(ratios)


def kernel_names(engine: ExpertEngine, rows_per_expert: float) -> str:
    """Returns the kernels of gate and up / of down at that many rows of a bfloat16 request; one name when
    they agree.
    """
    wanted = max(1, round(rows_per_expert))
    names = {
        row.matrix: row.kernel
        for row in engine.plan()
        if row.row_type == "bfloat16"
        and row.rows_from <= wanted
        and (row.rows_to is None or wanted <= row.rows_to)
    }
    return " / ".join(dict.fromkeys(names.values()))
