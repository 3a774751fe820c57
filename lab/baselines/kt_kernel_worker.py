"""One process that times kt-kernel with one number of threads: its threads and its crashes stay its own.

Reads a `Job` as JSON from the file given, writes a `Result` as JSON to the second file. What kt-kernel prints
goes to stdout.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.baselines.kt_kernel_formats import FORMATS, PeerFormat, Source, random_source
from lab.baselines.kt_kernel_golden import from_bfloat16, layer_row
from lab.bench.kernels_inputs import ExpertShape, Routing, WorkingSet
from lab.bench.kernels_measure import (
    MAX_ITERATIONS,
    MIN_ITERATIONS,
    SEED,
    WARMUP,
    calls_of,
    random_hidden_states,
)

# Its buffers for rows come in steps of this size.
ROW_STEP = 32


@dataclass(frozen=True)
class Job:
    """Filled by compare_kt_kernel.py."""

    module: str
    format: str
    shape: ExpertShape
    working_set: WorkingSet
    rows: list[int]
    # Whether `rows` are per expert.
    exact: bool
    threads: int
    cpus: list[int]
    seconds: float

    @staticmethod
    def from_json(text: str) -> Job:
        fields = json.loads(text)
        shape, held = ExpertShape(**fields.pop("shape")), WorkingSet(**fields.pop("working_set"))
        return Job(shape=shape, working_set=held, **fields)


@dataclass(frozen=True)
class Result:
    """Filled by `main`."""

    seconds: list[list[float]]  # Of each call, one list per number of rows.
    # Of one row's result against the float32 product of the source weights: error over size.
    relative_error: float


@dataclass(frozen=True)
class Call:
    """A call's arguments in the types that the baseline reads; filled by `of`."""

    rows: NDArray[np.int32]
    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    output: NDArray[np.uint16]

    @staticmethod
    def of(routing: Routing, hidden_size: int) -> Call:
        ids = np.ascontiguousarray(routing.topk_ids, dtype=np.int64)
        output = np.empty((routing.rows, hidden_size), dtype=np.uint16)
        return Call(np.array([routing.rows], dtype=np.int32), ids, routing.topk_weights, output)


class Baseline:
    """kt-kernel with the layers of a job."""

    def __init__(self, job: Job, max_rows: int) -> None:
        self._module = load_module(Path(job.module))
        self._infer = self._module.CPUInfer(job.threads)
        self._shape = job.shape
        # It keeps the address only.
        self._map = np.arange(job.working_set.num_experts, dtype=np.int64)
        form = FORMATS[job.format]
        self._job = job
        # Kept for `relative_error`; the baseline has copies.
        self._sources = [
            random_source(form, job.working_set.num_experts, *size, np.random.default_rng(SEED))
            for size in self._matrix_sizes()
        ]
        self._layers = [
            self._load(form, self._sources, layer, job.working_set.num_experts, max_rows)
            for layer in range(job.working_set.num_layers)
        ]

    def _matrix_sizes(self) -> list[tuple[int, int]]:
        hidden, inner = self._shape.hidden_size, self._shape.intermediate_size
        return [(inner, hidden), (inner, hidden), (hidden, inner)]

    def _load(self, form: PeerFormat, sources: list[Source], layer: int, experts: int, max_rows: int) -> Any:
        shape = self._shape
        config = self._module.moe.MOEConfig(
            experts, shape.top_k, shape.hidden_size, shape.intermediate_size, 0
        )
        config.layer_idx = layer
        config.max_len = -(-max_rows // ROW_STEP) * ROW_STEP
        config.pool = self._infer.backend_
        if form.bits:
            config.quant_config.bits = form.bits
            config.quant_config.group_size = form.group_size
            config.quant_config.zero_point = False
            config.quant_config.per_channel = form.scales == "channel"
        for name, source in zip(("gate", "up", "down"), sources, strict=True):
            setattr(config, f"{name}_proj", source.weights.ctypes.data)
            if source.scales is not None:
                setattr(config, f"{name}_scale", source.scales.ctypes.data)
        layer_object = getattr(self._module.moe, form.method)(config)
        self._infer.submit(layer_object.load_weights_task(self._map.ctypes.data))
        self._infer.sync()
        return layer_object

    def forward(self, layer: int, hidden_states: NDArray[np.uint16], call: Call) -> NDArray[np.uint16]:
        """Returns [rows, hidden_size] bfloat16 bits."""
        self._infer.submit(
            self._layers[layer].forward_task(
                call.rows.ctypes.data,
                self._shape.top_k,
                call.ids.ctypes.data,
                call.weights.ctypes.data,
                hidden_states.ctypes.data,
                call.output.ctypes.data,
                False,
            )
        )
        self._infer.sync()
        return call.output

    def relative_error(self, routing: Routing) -> float:
        """Returns the relative error of one row, on the first layer."""
        form, hidden_size = FORMATS[self._job.format], self._shape.hidden_size
        hidden_states = random_hidden_states(1, hidden_size)
        given = from_bfloat16(self.forward(0, hidden_states, Call.of(routing, hidden_size))[0])
        inner = self._shape.intermediate_size
        expected = layer_row(form, self._sources, hidden_states, routing, inner)
        return float(np.linalg.norm(given - expected) / np.linalg.norm(expected))

    def time(self, routings: list[Routing], seconds: float) -> list[float]:
        """Returns the seconds of each call on changing layers, after a warm-up; the same loop as ours."""
        hidden_states = random_hidden_states(routings[0].rows, self._shape.hidden_size)
        calls = [Call.of(routing, self._shape.hidden_size) for routing in routings]

        def call(number: int) -> float:
            begin = time.perf_counter()
            self.forward(number % len(self._layers), hidden_states, calls[number % len(calls)])
            return time.perf_counter() - begin

        for number in range(WARMUP):
            call(number)
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < MIN_ITERATIONS or (time.perf_counter() < end and len(times) < MAX_ITERATIONS):
            times.append(call(WARMUP + len(times)))
        return times


def load_module(path: Path) -> ModuleType:
    """Returns the extension alone, without the package around it, which needs torch."""
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    job = Job.from_json(Path(sys.argv[1]).read_text())
    os.sched_setaffinity(0, job.cpus)
    calls = [calls_of(rows, job.shape, job.working_set, job.exact) for rows in job.rows]
    baseline = Baseline(job, max(call[0].rows for call in calls))
    error = baseline.relative_error(calls_of(1, job.shape, job.working_set, False)[0])
    result = Result([baseline.time(call, job.seconds) for call in calls], error)
    Path(sys.argv[2]).write_text(json.dumps(asdict(result)))
    sys.stdout.flush()
    # Its threads do not always end.
    os._exit(0)


if __name__ == "__main__":
    main()
