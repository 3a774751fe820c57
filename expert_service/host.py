"""One server's experts and everybody who computes with them: the mailbox thread and `Compute` streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import structlog

from expert_service.loader import load_experts, open_layout, stored_dtype
from expert_service.placement import Placement
from expert_service.slicing import ExpertSlice, SliceRequest, plan_slice
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.kernels import ExpertEngine, FloatArray

log = structlog.get_logger(__name__)


class NotServing(RuntimeError):
    """Nothing is loaded yet, or the server is draining."""


class AlreadyLoaded(RuntimeError):
    """A process holds one slice for its whole life."""


@dataclass(frozen=True, slots=True)
class LoadedSlice:
    """What is loaded; filled by `ExpertHost.load`."""

    request: SliceRequest
    model: MoeGeometry
    part: ExpertSlice
    weight_dtype: str
    engine: ExpertEngine
    seconds: float


class ExpertHost:
    """Holds the engine. Thread safe: loading, computing and draining may come from different threads.

    `on_engine` is called with the still empty engine before weights are read, so that a mailbox that does
    not fit is refused at once; `on_loaded` when all weights are packed.
    """

    def __init__(
        self,
        placement: Placement,
        on_engine: Callable[[ExpertEngine, MoeGeometry, SliceRequest], None],
        on_loaded: Callable[[], None],
    ) -> None:
        self.placement = placement
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
        MailboxError when the mailbox does not fit, LoadCancelled.
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
        model = MoeGeometry.from_config(request.model_path, request.top_k)
        if not model.moe_layers:
            raise ValueError(f"{request.model_path} has no mixture-of-experts layers")
        part = plan_slice(model, request)
        layout = open_layout(model, request.model_path)
        dtype = stored_dtype(model, layout) if request.weight_dtype == "keep" else request.weight_dtype
        engine = ExpertEngine(
            model.hidden_size,
            part.intermediate_size,
            part.num_experts,
            model.num_layers,
            expert_begin=part.expert_begin,
            weight_format="bfloat16" if dtype == "bfloat16" else "float32",
            activation=model.activation,
            num_threads=self.placement.num_threads,
            cpus=self.placement.cpus,
            numa_node=self.placement.numa_node,
        )
        self._on_engine(engine, model, request)
        for layer in load_experts(engine, model, part, layout, lambda: self._cancelled):
            log.debug("layer packed", layer=layer, packed_bytes=engine.packed_bytes)
        if self.placement.numa_node >= 0 and not engine.numa_bound:
            log.warning("memory could not be bound to the NUMA node", numa_node=self.placement.numa_node)
        seconds = time.monotonic() - begin
        return LoadedSlice(request, model, part, dtype, engine, seconds)

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
