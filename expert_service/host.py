"""The slice of experts that this process holds: loaded once, or found packed, then computed with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt
import structlog

from expert_service.errors import AlreadyLoaded, NotServing, RequantiseError
from expert_service.integrity import CheckpointExperts, WeightsWatch
from expert_service.placement import ThreadPlacement
from expert_service.segment import (
    LoadRecord,
    checkpoint_signature,
    find_load_record,
    packed_already,
    report_slots,
)
from moebius.errors import StartupError
from moebius.experts.placement import left_out
from moebius.experts.slices import (
    ExpertSlice,
    SliceRequest,
    expert_identity,
    plan_slice,
)
from moebius.kernels import (
    ExpertEngine,
    FloatArray,
    PlanRow,
    SegmentError,
    SegmentSettings,
    float32_isa,
)
from moebius.kernels.weight_formats import PackedExpertLayout, expert_layout
from moebius.kernels.weight_segment import segment_path
from moebius.models.geometry import MoeGeometry
from moebius.models.identity import (
    CHECKPOINT,
    IdentityRecord,
    check_unchanged,
    expert_fingerprint,
    expert_parts,
    identity_part,
)
from moebius.process.progress import phase

if TYPE_CHECKING:
    from expert_service.loader import LoadedLayer, LoadPlan

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How this process loads, for every layer; filled from the configuration."""

    # Largest relative error of a layer's weights, see `LoadedLayer`.
    max_requantise_error: float = 0.15
    # Measure which kernel is fastest for how many rows before serving.
    calibrate_kernels: bool = True
    # Compute every row with the kernels of float32 rows, alike in any batch.
    batch_invariant_experts: bool = False
    # Where packed experts outlive this process, see `segment_path`; empty: in its own memory.
    expert_weights_dir: str = ""
    # `model.identity_file`.
    identity_file: str = ""
    # In which all packed experts are compared with their checksums once, s; 0: only when one is suspect.
    verify_interval_s: float = 0.0
    # Memory for some experts at a time, of a file on a disk in `expert_weights_dir`; 0: all are in memory.
    slot_bytes: int = 0


class Packing(Protocol):
    """What a `LoadPlan` and a `LoadRecord` both say of how experts are packed."""

    @property
    def model(self) -> MoeGeometry:
        """The model of the checkpoint."""

    @property
    def gate_up_formats(self) -> tuple[str, ...]:
        """The packed format of gate and up in every decoder layer."""

    @property
    def down_formats(self) -> tuple[str, ...]:
        """The same of the down matrices."""

    @property
    def has_bias(self) -> bool:
        """Returns whether experts have biases."""


def make_engine(
    plan: Packing,
    part: ExpertSlice,
    placement: ThreadPlacement,
    exact: bool,
    segment: SegmentSettings | None = None,
) -> ExpertEngine:
    """Returns an engine for a slice of the plan's experts; `exact`: `LoadSettings.batch_invariant_experts`.

    Empty, or with what a predecessor has packed in `segment`. Raises SegmentError when that cannot be used.
    """
    model = plan.model
    return ExpertEngine(
        model.hidden_size,
        part.intermediate_size,
        part.num_experts,
        model.num_layers,
        expert_begin=part.expert_begin,
        weight_format=plan.gate_up_formats,
        down_format=plan.down_formats,
        activation=model.activation,
        alpha=model.alpha,
        limit=[model.limit_of(layer) for layer in range(model.num_layers)],
        has_bias=plan.has_bias,
        num_threads=placement.num_threads,
        cpus=placement.cpus,
        numa_node=placement.numa_node,
        isa=float32_isa() if exact else "auto",
        segment=segment,
    )


def packed_layouts(plan: Packing, part: ExpertSlice) -> tuple[PackedExpertLayout, ...]:
    """Returns how an expert of each decoder layer is packed in this slice."""
    model = plan.model
    formats = zip(plan.gate_up_formats, plan.down_formats, strict=True)
    return tuple(
        expert_layout(*pair, model.hidden_size, part.intermediate_size, plan.has_bias, model.is_gated)
        for pair in formats
    )


def calibrated_rate(plan: Sequence[PlanRow], layout: PackedExpertLayout) -> float:
    """Bytes of packed weights read in a second, with one bfloat16 row for each expert; 0: not measured.

    As `ExpertEngine.calibrate` found it with all threads at work: the roofline of decoding, which is what the
    same kernels reach without routing, waiting and adding up.
    """
    blocks = layout.intermediate_blocks
    matrices = {("down", layout.down.name): layout.down_panels}
    if layout.mixed:
        matrices |= {("gate", layout.gate.name): blocks, ("up", layout.gate_up.name): blocks}
    else:
        matrices["gate_up", layout.gate_up.name] = blocks * layout.panels_per_column_block
    nanoseconds = 0.0
    for matrix, panels in matrices.items():
        measured = [
            row.nanoseconds
            for row in plan
            if (row.matrix, row.format) == matrix and row.row_type == "bfloat16" and row.rows_from == 1
        ]
        if not measured or not all(measured):
            return 0.0
        nanoseconds += panels * min(measured)
    return layout.expert_bytes / nanoseconds * 1e9


@dataclass(frozen=True, slots=True)
class LoadedSlice:
    """What is loaded; filled by `ExpertHost.load`."""

    request: SliceRequest
    model: MoeGeometry
    part: ExpertSlice
    # Packed formats, as kernels/format/weight_format.h names them.
    weight_format: str
    engine: ExpertEngine
    seconds: float
    # Relative error of requantising, by layer; 0 for layers packed exactly.
    relative_errors: Mapping[int, float]
    # As `expert_identity` writes it.
    identity: str
    # How an expert of each decoder layer is packed here.
    layouts: tuple[PackedExpertLayout, ...]
    # Packed weights that the kernels read in a second where each expert has one row, see `calibrated_rate`.
    calibrated_bytes_per_second: float


class ExpertHost:
    """Holds the engine. Thread safe: loading, computing and draining may come from different threads.

    `on_engine` is called with the still empty engine and the identity of what will be loaded before
    weights are read, so that a mailbox that does not fit is refused at once; `on_progress` after each expert,
    from any thread; `on_loaded` when all weights are packed; `on_damage` and `on_problem`, from another
    thread, as `WeightsWatch` says.
    """

    def __init__(
        self,
        placement: ThreadPlacement,
        on_engine: Callable[[ExpertEngine, MoeGeometry, SliceRequest, str], None],
        on_loaded: Callable[[], None],
        settings: LoadSettings | None = None,
        on_progress: Callable[[], None] = lambda: None,
        on_damage: Callable[[], None] = lambda: None,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        self.placement = placement
        self._on_damage, self._on_problem = on_damage, on_problem
        self._watch: WeightsWatch | None = None
        self._on_progress = on_progress
        self._settings = settings or LoadSettings()
        self._on_engine = on_engine
        self._on_loaded = on_loaded
        self._loading = threading.Lock()
        self._idle = threading.Condition()
        self._in_flight = 0
        self._draining = False
        self._cancelled = False
        self._loaded: LoadedSlice | None = None

    @property
    def loaded(self) -> LoadedSlice | None:
        """The slice, once all of it is packed."""
        return self._loaded

    @property
    def is_serving(self) -> bool:
        """Returns whether `forward` computes."""
        return self._loaded is not None and not self._draining

    @property
    def problem(self) -> str:
        """Returns which damaged expert cannot be packed again, and why; empty: there is none."""
        return "" if self._watch is None else self._watch.problem

    @property
    def damages(self) -> int:
        """Experts found damaged: what was answered before the latest of them may be wrong."""
        return 0 if self._watch is None else self._watch.damages

    @property
    def verify_pass_seconds(self) -> float:
        """The seconds of the latest comparison of all experts with their checksums; 0: there was none yet."""
        return 0.0 if self._watch is None else self._watch.pass_seconds

    def load(self, request: SliceRequest) -> LoadedSlice:
        """Pack a slice and begin to serve. Blocks for as long as the disk takes.

        Raises AlreadyLoaded, CheckpointError or ValueError naming the tensor, key or setting,
        MailboxError when the mailbox does not fit, RequantiseError naming the layer, LoadCancelled,
        StartupError when packed experts cannot lie where the configuration wants them.
        """
        if not self._loading.acquire(blocking=False):
            raise AlreadyLoaded("a load is running or has run; a process holds one slice for its whole life")
        try:
            self._loaded = self._load(request)
            if self._watch is not None:
                self._watch.start()
            self._on_loaded()
        except BaseException as error:
            if self._watch is not None:
                self._watch.stop()
            self._loaded = self._watch = None
            self._loading.release()
            if isinstance(error, SegmentError):
                raise StartupError(str(error)) from error
            raise
        return self._loaded

    def _load(self, request: SliceRequest) -> LoadedSlice:
        begin = time.monotonic()
        directory = self._settings.expert_weights_dir
        path = segment_path(directory, request.split_index) if directory else None
        if path is not None:
            record = find_load_record(path, request, self._settings.batch_invariant_experts)
            loaded = self._attach(request, record, path, begin) if record is not None else None
            if loaded is not None:
                return loaded
        return self._read(request, path, begin)

    def _attach(
        self, request: SliceRequest, record: LoadRecord, path: Path, begin: float
    ) -> LoadedSlice | None:
        """Serve what a predecessor has packed; None when it has to be loaded after all."""
        model, part = record.model, plan_slice(record.model, request, record.group)
        fingerprint = identity_part(record.identity, CHECKPOINT)
        identity = expert_identity(request, model, fingerprint, self._settings.batch_invariant_experts)
        engine, held = self._make_engine(record, part, request, identity, path)
        if engine.segment_state != "complete":
            return None
        self._on_engine(engine, model, request, identity)
        for layer, error in record.relative_errors.items():
            self._check_error(layer, error, record.gate_up_formats[layer])
        self._choose_kernels(engine, record, part)
        errors, seconds = record.relative_errors, time.monotonic() - begin
        form, layouts = record.weight_format, packed_layouts(record, part)
        self._watch = self._make_watch(request, record, part, engine, held, packed_already(engine, held))
        rate = calibrated_rate(engine.plan(), layouts[model.moe_layers[0]])
        return LoadedSlice(request, model, part, form, engine, seconds, errors, identity, layouts, rate)

    def _read(self, request: SliceRequest, path: Path | None, begin: float) -> LoadedSlice:
        """Pack from the checkpoint what no predecessor has packed in the segment."""
        # Here, because a process that uses what a predecessor has packed is waited for, and needs none of it.
        from expert_service import loader
        from moebius.models.read import read_geometry

        # Before any of it is read: what is written meanwhile is not what was looked at.
        signature = checkpoint_signature(request) if path is not None else ""
        model = read_geometry(request.model_path, request.top_k, request.mtp_heads)
        if not model.moe_layers:
            raise ValueError(f"{request.model_path} has no mixture-of-experts layers")
        with phase("reading headers"):
            plan = loader.plan_load(
                model, request.model_path, request.weight_dtype, request.expert_checkpoint
            )
        for rounding in plan.roundings:
            log.warning("packing rounds", what=rounding, exact="--expert-dtype float32, at 32 bits a weight")
        part = plan_slice(model, request, plan.group)
        index = plan.checkpoint.layout.index
        parts = expert_parts(index, request.model_path, request.expert_checkpoint)
        IdentityRecord(self._settings.identity_file).check(parts)
        fingerprint = expert_fingerprint(parts)
        identity = expert_identity(request, model, fingerprint, self._settings.batch_invariant_experts)
        engine, held = self._make_engine(plan, part, request, identity, path)
        self._on_engine(engine, model, request, identity)
        kept = packed_already(engine, held)
        layers = loader.load_experts(
            engine,
            plan,
            part,
            lambda: self._cancelled,
            self.placement.num_threads,
            held,
            self._on_progress,
            num_servers=request.split_count,
        )
        errors = {done.layer: done.relative_error for done in layers if self._accept(done, engine, plan)}
        check_unchanged(parts, lambda: expert_parts(index, request.model_path, request.expert_checkpoint))
        if self.placement.numa_node >= 0 and not engine.numa_bound:
            log.warning("memory could not be bound to the NUMA node", numa_node=self.placement.numa_node)
        self._choose_kernels(engine, None, part)
        if path is not None:
            engine.finish_load(LoadRecord.of(plan, identity, signature, request, errors, engine).to_json())
        self._watch = self._make_watch(request, plan, part, engine, held, kept)
        seconds = time.monotonic() - begin
        form, layouts = plan.weight_format, packed_layouts(plan, part)
        rate = calibrated_rate(engine.plan(), layouts[model.moe_layers[0]])
        return LoadedSlice(request, model, part, form, engine, seconds, errors, identity, layouts, rate)

    def _make_engine(
        self, plan: Packing, part: ExpertSlice, request: SliceRequest, identity: str, path: Path | None
    ) -> tuple[ExpertEngine, Mapping[int, Sequence[int]]]:
        """Returns the engine, and which experts of each layer it is to hold."""
        exact, model = self._settings.batch_invariant_experts, plan.model
        dropped = left_out(request.placement, model)
        held = {layer: part.held(dropped.get(layer, ())) for layer in model.moe_layers}
        if path is None:
            return make_engine(plan, part, self.placement, exact), held
        slot_bytes = self._settings.slot_bytes
        segment = SegmentSettings(str(path), identity, held, part.intermediate_begin, slot_bytes)
        engine = make_engine(plan, part, self.placement, exact, segment)
        if engine.cold_slots is not None:
            report_slots(engine, held, path)
        elif not engine.segment_in_memory:
            log.warning(
                "packed experts lie in a file on a disk, which the system writes and may drop from memory",
                path=str(path),
                remedy="--expert-weights-dir on tmpfs or hugetlbfs",
            )
        if engine.segment_difference:
            log.warning("experts are packed again", path=str(path), reason=engine.segment_difference)
        elif engine.segment_state != "new":
            log.info("packed experts are there already", path=str(path), which=engine.segment_state)
        return engine, held

    def _make_watch(
        self,
        request: SliceRequest,
        plan: Packing,
        part: ExpertSlice,
        engine: ExpertEngine,
        held: Mapping[int, Sequence[int]],
        unchecked: Sequence[tuple[int, int]],
    ) -> WeightsWatch:
        """Over all experts of the engine; `unchecked`: those that a predecessor has packed."""
        layouts = packed_layouts(plan, part)
        sizes = {(layer, expert): layouts[layer].expert_bytes for layer in held for expert in held[layer]}
        source = CheckpointExperts(request, plan.model, part)
        interval_s = self._settings.verify_interval_s
        return WeightsWatch(engine, source, sizes, unchecked, interval_s, self._on_damage, self._on_problem)

    def _accept(self, done: LoadedLayer, engine: ExpertEngine, plan: LoadPlan) -> bool:
        """Logs the layer. Raises RequantiseError when its weights were changed too much; NaN is too
        much.
        """
        log.debug(
            "layer packed",
            layer=done.layer,
            of=plan.model.num_layers,
            format=plan.gate_up_formats[done.layer],
            relative_error=round(done.relative_error, 6),
            source_bytes=done.source_bytes,
            packed_bytes=engine.packed_bytes,
        )
        self._check_error(done.layer, done.relative_error, plan.gate_up_formats[done.layer])
        return True

    def _check_error(self, layer: int, relative_error: float, packed_as: str) -> None:
        limit = self._settings.max_requantise_error
        if not relative_error <= limit:
            raise RequantiseError(
                f"layer {layer}: requantising to {packed_as} changed its "
                f"experts by {relative_error:.4f} (relative, root mean square); "
                f"--max-requantise-error allows {limit}"
            )

    def _choose_kernels(self, engine: ExpertEngine, record: LoadRecord | None, part: ExpertSlice) -> None:
        """Those of the predecessor, so that a row's bits stay the same; else the fastest ones now."""
        if engine.cold_slots is not None:
            with phase("reading experts"):
                engine.fill_slots()
        if not self._settings.calibrate_kernels:
            return
        if record is None or not record.fits(engine) or not engine.restore_plan(record.kernels):
            self._calibrate(engine, part.intermediate_size)

    def _calibrate(self, engine: ExpertEngine, intermediate_size: int) -> None:
        from moebius.host.kernel_times import panel_times, this_host, times_file, write_times

        with phase("measuring kernels"):
            engine.calibrate()
        plan = engine.plan()
        on = this_host(engine.num_threads, engine.isa)
        try:
            write_times(times_file(), panel_times(on, plan, engine.backend.hidden_size, intermediate_size))
        except OSError as error:
            log.warning("kernel times are not kept for `moebius plan`", reason=str(error))
        for row in plan:
            log.debug(
                "kernel plan",
                matrix=row.matrix,
                format=row.format,
                row_type=row.row_type,
                rows=[row.rows_from, row.rows_to],
                kernel=row.kernel,
                nanoseconds=round(row.nanoseconds),
            )

    def forward(
        self,
        layer: int,
        hidden_states: FloatArray,
        topk_ids: npt.NDArray[Any],
        topk_weights: npt.NDArray[Any],
    ) -> npt.NDArray[Any]:
        """Returns `ExpertEngine.forward` of the loaded slice.

        Raises NotServing, DamagedExpert, or ValueError for a bad request.
        """
        with self._working() as loaded:
            return loaded.engine.forward(layer, hidden_states, topk_ids, topk_weights)

    @contextmanager
    def _working(self) -> Iterator[LoadedSlice]:
        with self._idle:
            if self._loaded is None or self._draining:
                raise NotServing("draining" if self._draining else "no experts are loaded")
            self._in_flight += 1
            loaded = self._loaded
        try:
            yield loaded
        finally:
            with self._idle:
                self._in_flight -= 1
                self._idle.notify_all()

    def cancel_load(self) -> None:
        """Let a running load end with LoadCancelled at the next expert. Safe in a signal handler."""
        self._cancelled = True

    def drain(self, timeout_s: float | None) -> bool:
        """Accept nothing more, cancel a running load, wait for what is in flight; False: not idle in time."""
        if self._watch is not None:
            self._watch.stop()
        with self._idle:
            self._draining = True
            self.cancel_load()
            return self._idle.wait_for(lambda: self._in_flight == 0, timeout_s)
