"""Typed face of the CPU expert kernels (`kernels/moe`): packed experts of one server and their forward pass.

numpy in, numpy out; no torch. bfloat16 travels as uint16 holding its bits. The GIL is released while experts
are packed and computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from moebius import _kernels
from moebius.kernels.source import SourceMatrix

Isa = Literal["auto", "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
SPAN_FIELDS = ("kind", "worker", "layer", "expert", "rows", "begin_ns", "end_ns")
"""Columns of `ExpertEngine.stop_trace`: kernels/moe/task_trace.h explains them."""
SPAN_KINDS = ("call", "rows", "gate_up", "activation", "down")
"""By number: a call; converting its rows; GEMMs of one expert; quantising activations; down GEMMs."""
FloatArray = NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.float16]


def isa_level() -> str:
    """Returns instruction-set level in use: MOEBIUS_ISA if set, else the highest one supported.

    Raises:
        ValueError: MOEBIUS_ISA names a level that is unknown or that this machine cannot run.
    """
    return _kernels.isa_level()


def supported_isas() -> tuple[str, ...]:
    """Levels this machine and its operating system can run, lowest first; always begins with "scalar"."""
    return tuple(_kernels.supported_isas())


def float32_isa() -> Isa:
    """Returns the highest level in use that has kernels for float32 rows.

    An engine forced to it computes bfloat16 rows as float32 ones too: a row's bits depend neither on the
    other rows of its batch nor on what a calibration measured.

    Raises:
        ValueError: as `isa_level`.
    """
    levels = supported_isas()
    usable = levels[: levels.index(isa_level()) + 1]
    if "avx512" in usable:
        return "avx512"
    return "avx2" if "avx2" in usable else "scalar"


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine's counters since its creation; filled by `ExpertEngine.stats`."""

    calls: int
    """forward calls"""
    rows: int
    """token rows of all calls, also those that chose no expert held here"""
    busy_seconds: float
    """wall time inside forward, waiting for another caller excluded"""
    nonfinite_inputs: int
    """hidden_states values that were NaN or infinite; they are computed with as they are"""
    nonfinite_outputs: int
    """output values that were NaN or infinite; they are handed on as they are"""
    damaged_experts: int
    """packed experts found to differ from their checksum, each time"""
    repaired_experts: int
    """damaged experts that were packed again from the checkpoint"""
    verified_bytes: int
    """of packed experts, compared with their checksums by `ExpertEngine.verify_expert`"""
    layer_calls: NDArray[np.uint64]
    """[num_layers]"""
    layer_rows: NDArray[np.uint64]
    """[num_layers]"""
    layer_experts: NDArray[np.uint64]
    """[num_layers], experts held here with at least one row, summed over calls: whose weights were read"""
    layer_busy_nanoseconds: NDArray[np.uint64]
    """[num_layers], of busy_seconds"""
    expert_rows: NDArray[np.uint64]
    """[num_layers, num_experts], rows computed by each expert held here"""
    cold_used: int
    """experts that calls needed, where some stay in a file (`SegmentSettings.slot_bytes`)"""
    cold_missed: int
    """of them, those that had to be read"""
    cold_read_bytes: int
    """bytes read from the file, also to fill memory at the start"""
    cold_waited_seconds: float
    """time that threads waited for reads, divided by their number"""


@dataclass(frozen=True)
class LoadError:
    """What rounding an expert to its layer's format cost; filled by `ExpertEngine.load_expert`.

    Sums over the weights of matrices that could not be packed exactly; both 0 when all could.
    """

    squared_error: float
    squared_reference: float

    @property
    def relative(self) -> float:
        """Root of the squared error over the squared weights; 0 when nothing was rounded."""
        if self.squared_error == 0:
            return 0.0
        return math.sqrt(self.squared_error / self.squared_reference) if self.squared_reference else math.inf


@dataclass(frozen=True)
class PlanRow:
    """Which kernel computes a matrix for a range of row counts; filled by `ExpertEngine.plan`."""

    # "gate" and "up" where they differ in format.
    matrix: Literal["gate_up", "gate", "up", "down"]
    format: str
    row_type: Literal["float32", "bfloat16"]
    """type of the request's rows; float16 is planned as float32"""
    rows_from: int
    rows_to: int | None
    """last row count of the range; None: no end"""
    kernel: str
    nanoseconds: float
    """measured for one panel of 16 columns and `rows_from` rows with all threads at work; 0: not measured"""


@dataclass(frozen=True)
class SegmentSettings:
    """Packed experts in a file that outlives the process and that others map; kernels/moe/weight_segment.h.

    Filled by the caller that makes an `ExpertEngine`.
    """

    path: str
    """made where there is none; in memory: tmpfs, hugetlbfs or a memfd"""
    identity: str
    """lines "name=value" that say which weights; another identity is replaced"""
    held: Mapping[int, Sequence[int]]
    """ids of the experts held here, ascending, by layer"""
    intermediate_begin: int = 0
    """first channel of every expert that is held here"""
    slot_bytes: int = 0
    """0: all of it is mapped; else it stays in the file, with so much memory for some experts at a time"""


SegmentError = _kernels.SegmentError
DamagedExpert = _kernels.DamagedExpert
SegmentState = Literal["new", "complete", "partial", "replaced"]


class ExpertEngine:
    """Experts [expert_begin, expert_begin + num_experts) of every MoE layer, or a slice of each.

    Computes, for each row, `sum over chosen experts e held here of
    weight[e] * (activation(x @ gate[e].T, x @ up[e].T) @ down[e].T)` with float32 accumulation, biases added
    where there are any. Requests in float32 and float16 are computed in float32 throughout: a row's result
    has the same bits whatever other rows are in the call and however many threads compute it; it may differ
    between instruction sets. Requests in bfloat16 may round the activation to bfloat16, and which kernel
    computes a row may depend on how many rows chose its expert.

    Activations, of gate g and up u:
        silu: silu(g) * u
        silu_clamped: min(silu(g), limit) * clamp(u, -limit, limit); with an infinite limit, silu
        gpt_oss: (clamp(u, -limit, limit) + 1) * m * sigmoid(alpha * m), m = min(g, limit)
        relu2: max(u, 0)^2; experts have no gate
        gelu_tanh: gelu(g) * u, by the tanh form of GELU
        clamped_silu: silu(min(g, limit)) * clamp(u, -limit, limit)

    Args:
        hidden_size: width of a row.
        intermediate_size: rows of gate and up held here (the local slice).
        num_experts: experts held here.
        num_layers: layers of the model; memory is only taken for layers that are loaded.
        expert_begin: global id of the first expert held here.
        weight_format: name of the packed format, or one name per layer; see kernels/format/weight_format.h.
            Gate and up may have one each: `moebius.kernels.weight_formats.gate_up_format`.
        down_format: the same for the down matrices; None takes weight_format.
        activation: one of those above.
        alpha: factor of gpt_oss.
        limit: clamp of silu_clamped, gpt_oss and clamped_silu, or one per layer.
        has_bias: experts have biases, one per row of gate, up and down.
        num_threads: 0 takes one per cpu in `cpus`, else per cpu this thread may use. The thread that calls
            `forward` is one of them.
        cpus: cpu of each thread; the first is left to the caller, whose thread is not pinned here.
        numa_node: node that packed weights are bound to; -1 for none. See `numa_bound`.
        isa: forces an instruction-set level, for tests: only kernels of just that level are used, or of the
            next lower one where it has none. "auto" is `isa_level()` and all levels below it.
        kernel: name of a GEMM kernel to use wherever it can be, or one of a test; "auto": by the plan.
        segment: where packed experts lie; None: in memory of this process alone. Those that a former server
            packed there are loaded at once, see `segment_state`.

    Raises:
        ValueError: an argument is out of range, named with its value and what is allowed.
        SegmentError: the segment is another server's, no file of ours, or has no room; names it.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_layers: int,
        *,
        expert_begin: int = 0,
        weight_format: str | Sequence[str],
        down_format: str | Sequence[str] | None = None,
        activation: str = "silu",
        alpha: float = 1.702,
        limit: float | Sequence[float] = 7.0,
        has_bias: bool = False,
        num_threads: int = 0,
        cpus: Sequence[int] = (),
        numa_node: int = -1,
        isa: Isa = "auto",
        kernel: str | _kernels.GemmKernel = "auto",
        segment: SegmentSettings | None = None,
    ) -> None:
        gate_up = [weight_format] if isinstance(weight_format, str) else list(weight_format)
        down = [down_format] if isinstance(down_format, str) else list(down_format or gate_up)
        self._engine = _kernels.ExpertEngine(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            num_layers=num_layers,
            expert_begin=expert_begin,
            weight_format=gate_up,
            down_format=down,
            activation=activation,
            alpha=alpha,
            limit=[limit] if isinstance(limit, int | float) else list(limit),
            has_bias=has_bias,
            num_threads=num_threads,
            cpus=list(cpus),
            numa_node=numa_node,
            isa=isa,
            kernel=kernel,
            segment_path=segment.path if segment else "",
            segment_identity=segment.identity if segment else "",
            intermediate_begin=segment.intermediate_begin if segment else 0,
            held=[list(segment.held.get(layer, ())) for layer in range(num_layers)] if segment else [],
            slot_bytes=segment.slot_bytes if segment else 0,
        )

    def reserve(self, layer: int, count: int) -> None:
        """Take memory for `count` experts of a layer only, whichever are loaded; before the first is.

        Raises:
            ValueError: unknown layer, a count that is not possible, or the layer has memory already.
        """
        self._engine.reserve(layer, count)

    def load_expert(
        self,
        layer: int,
        expert: int,
        gate: NDArray[Any] | SourceMatrix | None,
        up: NDArray[Any] | SourceMatrix,
        down: NDArray[Any] | SourceMatrix,
    ) -> LoadError:
        """Pack one expert; the arrays may be freed afterwards. Callable from several threads.

        A matrix whose codes and scales the layer's format can hold is packed exactly, any other is rounded.

        Args:
            layer: model layer.
            expert: global expert id.
            gate: [intermediate_size, hidden_size]; an array of float32, float16 or uint16 (bfloat16 bits),
                or a `SourceMatrix`. None for the activation relu2.
            up: like gate.
            down: [hidden_size, intermediate_size].

        Raises:
            ValueError: wrong shape or dtype, layer or expert not held here, or loaded before.
            SegmentError: there is no memory for the layer.
        """
        return LoadError(*self._engine.load_expert(layer, expert, gate, up, down))

    def packed_expert(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """Returns read-only view of an expert's packed bytes, which keeps the engine alive.

        kernels/format/panel_layout.h says what they mean.

        Raises:
            ValueError: layer or expert not held here, or not loaded.
        """
        return self._engine.packed_expert(layer, expert)

    @property
    def segment_state(self) -> SegmentState | None:
        """What was found under the segment's path; None: there is no segment.

        "complete": every expert is loaded. "partial": those that a broken-off load had packed are, see
        `segment_error`. "replaced": `segment_difference` says why nothing of it was used.
        """
        found = self._engine.segment_found
        return None if found is None else cast(SegmentState, found[0])

    @property
    def segment_difference(self) -> str:
        """Returns why what the segment held is replaced; empty: it is not."""
        found = self._engine.segment_found
        return found[1] if found is not None and found[0] == "replaced" else ""

    @property
    def segment_in_memory(self) -> bool:
        """False: the segment is a file of a disk's file system, which the system writes back; else true."""
        found = self._engine.segment_found
        return found is None or found[2]

    def segment_error(self, layer: int, expert: int) -> LoadError | None:
        """Returns what rounding an expert of the segment cost; None: it is not packed, or there is no
        segment.

        Raises:
            ValueError: layer or expert not held here.
        """
        found = self._engine.segment_error(layer, expert)
        return None if found is None else LoadError(*found)

    def fill_slots(self) -> None:
        """Read experts from the file into the memory that is still free for them; not during `forward`.

        Nothing where all experts are in memory.
        """
        self._engine.fill_slots()

    @property
    def cold_slots(self) -> tuple[tuple[int, ...], bool] | None:
        """Returns how many experts of each layer are in memory at a time, and whether the file is read past
        the page cache; None: all are in memory."""
        found = self._engine.cold_slots
        return None if found is None else (tuple(found[0]), found[1])

    @property
    def read_problem(self) -> str:
        """Returns why an expert in the file was found damaged, or could not be read, last; empty: none."""
        return self._engine.read_problem

    def finish_load(self, load_record: str) -> None:
        """Tell readers and successors that all is packed; from here on the segment is read-only here.

        Nothing without a segment. `load_record` is for a successor, see `WeightSegment.load_record`.

        Raises:
            ValueError: an expert is not loaded, or the text is too long.
        """
        self._engine.finish_load(load_record.encode())

    def verify_expert(self, layer: int, expert: int) -> bool:
        """Returns whether an expert's bytes are those that were packed; at low priority.

        When they are not, `wait_for_damage` names the expert, and the process that opens the segment
        next takes it for not packed. True for an expert that is not loaded.

        Raises:
            ValueError: layer or expert not held here.
        """
        return self._engine.verify_expert(layer, expert)

    def expect_repairs(self, expected: bool) -> None:
        """Say whether a thread waits for damage and repairs it; else `forward` raises instead of waiting."""
        self._engine.expect_repairs(expected)

    def wait_for_damage(self, seconds: float) -> tuple[int, int] | None:
        """(layer, expert) of the next one that any thread found damaged; None: none within the time.

        `interrupt_damage_wait` ends the wait, too.
        """
        return self._engine.wait_for_damage(seconds)

    def interrupt_damage_wait(self) -> None:
        """End the wait of `wait_for_damage` under way, or the next one; from any thread."""
        self._engine.interrupt_damage_wait()

    def repair_expert(
        self,
        layer: int,
        expert: int,
        gate: NDArray[Any] | SourceMatrix | None,
        up: NDArray[Any] | SourceMatrix,
        down: NDArray[Any] | SourceMatrix,
    ) -> bool:
        """Pack a damaged expert once more; calls that wait for it go on. Arguments as of `load_expert`.

        False, and nothing changes, when the matrices do not give what was packed before.

        Raises:
            ValueError: the matrices do not fit, or the expert is not damaged.
            DamagedExpert: the memory does not keep what is written to it.
        """
        return self._engine.repair_expert(layer, expert, gate, up, down)

    def give_up_expert(self, layer: int, expert: int, reason: str) -> None:
        """Have calls that need a damaged expert raise, naming the reason, until it is repaired after all."""
        self._engine.give_up_expert(layer, expert, reason)

    def calibrate(self) -> None:
        """Measure the kernels and use the fastest for each number of rows; see `plan`.

        Measures on loaded experts, for up to about 0.3 s per distinct pair of formats; forward calls wait.
        Formats of which no expert is loaded keep their first candidates.
        """
        self._engine.calibrate()

    def plan(self) -> list[PlanRow]:
        """Returns the kernels in use, for every distinct pair of formats, matrix, type of request and range
        of rows.

        Until `calibrate` these are the first candidates: the highest level's kernels for the request's type.
        """
        return [PlanRow(*row) for row in self._engine.plan()]

    def restore_plan(self, choices: Sequence[tuple[str, float]]) -> bool:
        """Use the kernels of an earlier `plan`: `(kernel, nanoseconds)` of each of its rows, in order.

        False, and nothing changes, when they do not fit this engine.
        """
        return self._engine.restore_plan(list(choices))

    def forward(
        self,
        layer: int,
        hidden_states: FloatArray,
        topk_ids: NDArray[np.int32],
        topk_weights: NDArray[np.float32],
        output: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Weighted sum of the chosen experts held here; rows that chose none are zero.

        Args:
            layer: model layer.
            hidden_states: [rows, hidden_size], float32, float16 or uint16 (bfloat16 bits); rows may be 0.
            topk_ids: [rows, top_k] global expert ids; ids not held here, also -1, are skipped.
            topk_weights: [rows, top_k] router weights.
            output: [rows, hidden_size], C-contiguous, to write to; None: a new array.

        Returns:
            [rows, hidden_size] float32: output, or the new array.

        Raises:
            ValueError: wrong shape or dtype, unknown layer, or a chosen expert that is not loaded.
            DamagedExpert: a chosen expert is damaged in memory and is not packed again.
        """
        return self._engine.forward(layer, hidden_states, topk_ids, topk_weights, output)

    def stats(self) -> EngineStats:
        """Returns counters since creation; may be called while forward runs."""
        return EngineStats(**self._engine.stats())

    def start_trace(self, most: int) -> None:
        """Note what each thread computes from the next call on; at most `most` spans of each.

        Raises:
            ValueError: it is traced already.
        """
        self._engine.start_trace(most)

    def stop_trace(self) -> tuple[NDArray[np.int64], int]:
        """Spans since `start_trace`, `[n, 7]` with columns `SPAN_FIELDS`, and how many more there were."""
        return self._engine.stop_trace()

    def huge_page_bytes(self) -> int:
        """Returns how much of `packed_bytes` lies in 2 MiB pages now; 0 where the system does not tell.

        Reads the page tables of the process: milliseconds, so not for every scrape.
        """
        return self._engine.huge_page_bytes()

    @property
    def backend(self) -> _kernels.ExpertEngine:
        """The C++ object, for `MailboxServer`; it lives as long as either holds it."""
        return self._engine

    @property
    def weights_digest(self) -> int:
        """A 64-bit digest of every packed byte that `load_expert` made, in any order; 0: nothing loaded."""
        return self._engine.weights_digest

    @property
    def packed_bytes(self) -> int:
        """Memory mapped for packed weights so far, bytes."""
        return self._engine.packed_bytes

    @property
    def numa_bound(self) -> bool:
        """False when the kernel refused to bind packed weights to `numa_node` (they work, but elsewhere)."""
        return self._engine.numa_bound

    @property
    def isa(self) -> str:
        """Instruction-set level in use."""
        return self._engine.isa

    @property
    def num_threads(self) -> int:
        """Threads that compute, the caller's included."""
        return self._engine.num_threads

    @property
    def spin_microseconds(self) -> int:
        """Returns how long threads without work spin before they sleep; longer while a device calls."""
        return self._engine.spin_microseconds
