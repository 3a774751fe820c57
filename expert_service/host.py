"""Where this process computes: its CPUs, and how many threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import structlog

from expert_service.loader import LoadedLayer, LoadPlan, load_experts, plan_load
from moebius.config import ExpertConfig
from moebius.expert_slices import (
    ExpertSlice,
    SliceRequest,
    checkpoint_fingerprint,
    expert_identity,
    plan_slice,
)
from moebius.kernel_times import panel_times, this_host, times_file, write_times
from moebius.kernels import ExpertEngine, FloatArray, float32_isa
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry
from moebius.placement import make_placement
from moebius.topology import Topology, pin_thread

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ThreadPlacement:
    """Filled by `place_process`."""

    # -1: not bound.
    numa_node: int
    num_threads: int
    # CPU of each compute thread; empty: threads go where this process may go.
    cpus: tuple[int, ...]


# CPUs that a server of this many or more leaves to others, at most, and still has the rest to itself.
SPARED = 2


def place_process(experts: ExpertConfig) -> ThreadPlacement:
    """Pin the calling thread, and all it starts, to the node's CPUs that this process may use.

    Without a node the process stays where its parent put it; its threads get a CPU each where the process
    has nearly as many to itself. Unless set, the number of threads is what cores and cgroup quota allow,
    divided by the number of servers when servers are not bound to nodes. Raises ValueError when the
    node does not exist or holds no usable CPU.
    """
    topology = Topology.detect()
    node = experts.numa_node
    if node < 0:
        share = max(1, topology.recommended_threads(-1) // experts.split_count)
        threads = experts.expert_threads or share
        return ThreadPlacement(-1, threads, _own_cpus(topology.usable_cpus(), threads))
    nodes = [known.id for known in topology.nodes]
    cpus = topology.usable_cpus(node) if node in nodes else ()
    if not cpus:
        raise ValueError(f"numa_node is {node}; nodes here: {nodes}, and it needs a CPU this process may use")
    pinned = pin_thread(cpus)
    if not pinned.applied:
        log.warning("not pinned to the node's CPUs", numa_node=node, reason=pinned.message)
    threads = experts.expert_threads or min(len(cpus), topology.recommended_threads(node))
    return ThreadPlacement(node, threads, tuple(cpus[:threads]) if threads <= len(cpus) else ())


def _own_cpus(cpus: Sequence[int], threads: int) -> tuple[int, ...]:
    """A CPU for each thread where these leave at most `SPARED`, else none: others may have the same CPUs.

    Threads that spin are not moved apart for milliseconds when two of them meet on a CPU.
    """
    return tuple(cpus[:threads]) if len(cpus) - SPARED <= threads <= len(cpus) and threads > SPARED else ()


class NotServing(RuntimeError):
    """Nothing is loaded yet, or the server is draining."""


class AlreadyLoaded(RuntimeError):
    """A process holds one slice for its whole life."""


class RequantiseError(ValueError):
    """Requantising changed the weights of a layer by more than the configuration allows."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How this process loads, whoever asks; filled from the configuration."""

    # Largest relative error of a layer's weights, see `LoadedLayer`.
    max_requantise_error: float = 0.15
    # Measure which kernel is fastest for how many rows before serving.
    calibrate_kernels: bool = True
    # Compute every row with the kernels of float32 rows, alike in any batch.
    batch_invariant_experts: bool = False


def make_engine(plan: LoadPlan, part: ExpertSlice, placement: ThreadPlacement, exact: bool) -> ExpertEngine:
    """An empty engine for a slice of the plan's experts; `exact`: `LoadSettings.batch_invariant_experts`."""
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
    )


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


class ExpertHost:
    """Holds the engine. Thread safe: loading, computing and draining may come from different threads.

    `on_engine` is called with the still empty engine and the identity of what will be loaded before
    weights are read, so that a mailbox that does not fit is refused at once; `on_progress` after each expert,
    from any thread; `on_loaded` when all weights are packed.
    """

    def __init__(
        self,
        placement: ThreadPlacement,
        on_engine: Callable[[ExpertEngine, MoeGeometry, SliceRequest, str], None],
        on_loaded: Callable[[], None],
        settings: LoadSettings | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.placement = placement
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
        """Whether `forward` computes."""
        return self._loaded is not None and not self._draining

    def load(self, request: SliceRequest) -> LoadedSlice:
        """Pack a slice and begin to serve. Blocks for as long as the disk takes.

        Raises AlreadyLoaded, CheckpointError or ValueError naming the tensor, key or setting,
        MailboxError when the mailbox does not fit, RequantiseError naming the layer, LoadCancelled.
        """
        if not self._loading.acquire(blocking=False):
            raise AlreadyLoaded("a load is running or has run; a process holds one slice for its whole life")
        try:
            self._loaded = self._load(request)
            self._on_loaded()
        except BaseException:
            self._loaded = None
            self._loading.release()
            raise
        return self._loaded

    def _load(self, request: SliceRequest) -> LoadedSlice:
        begin = time.monotonic()
        model = read_geometry(request.model_path, request.top_k)
        if not model.moe_layers:
            raise ValueError(f"{request.model_path} has no mixture-of-experts layers")
        plan = plan_load(model, request.model_path, request.weight_dtype)
        for rounding in plan.roundings:
            log.warning("packing rounds", what=rounding, exact="--expert-dtype float32, at 32 bits a weight")
        part = plan_slice(model, request, plan.group)
        engine = make_engine(plan, part, self.placement, self._settings.batch_invariant_experts)
        fingerprint = checkpoint_fingerprint(plan.checkpoint.layout.index)
        identity = expert_identity(request, model, fingerprint, self._settings.batch_invariant_experts)
        self._on_engine(engine, model, request, identity)
        threads, resident = self.placement.num_threads, make_placement(request.placement, model).resident
        layers = load_experts(
            engine, plan, part, lambda: self._cancelled, threads, resident, self._on_progress
        )
        errors = {done.layer: done.relative_error for done in layers if self._accept(done, engine, plan)}
        if self.placement.numa_node >= 0 and not engine.numa_bound:
            log.warning("memory could not be bound to the NUMA node", numa_node=self.placement.numa_node)
        if self._settings.calibrate_kernels:
            self._calibrate(engine, model.hidden_size, part.intermediate_size)
        seconds = time.monotonic() - begin
        return LoadedSlice(request, model, part, plan.weight_format, engine, seconds, errors, identity)

    def _accept(self, done: LoadedLayer, engine: ExpertEngine, plan: LoadPlan) -> bool:
        """Log the layer. Raises RequantiseError when its weights were changed too much; NaN is too much."""
        log.info(
            "layer packed",
            layer=done.layer,
            of=plan.model.num_layers,
            format=plan.gate_up_formats[done.layer],
            relative_error=round(done.relative_error, 6),
            source_bytes=done.source_bytes,
            packed_bytes=engine.packed_bytes,
        )
        limit = self._settings.max_requantise_error
        if not done.relative_error <= limit:
            raise RequantiseError(
                f"layer {done.layer}: requantising to {plan.gate_up_formats[done.layer]} changed its "
                f"experts by {done.relative_error:.4f} (relative, root mean square); "
                f"--max-requantise-error allows {limit}"
            )
        return True

    def _calibrate(self, engine: ExpertEngine, hidden_size: int, intermediate_size: int) -> None:
        begin = time.monotonic()
        engine.calibrate()
        log.info("kernels calibrated", seconds=round(time.monotonic() - begin, 3))
        plan = engine.plan()
        on = this_host(engine.num_threads, engine.isa)
        try:
            write_times(times_file(), panel_times(on, plan, hidden_size, intermediate_size))
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
        """`ExpertEngine.forward` of the loaded slice. Raises NotServing, or ValueError for a bad request."""
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
        with self._idle:
            self._draining = True
            self.cancel_load()
            return self._idle.wait_for(lambda: self._in_flight == 0, timeout_s)
