"""Loads one slice of the experts from safetensors into the packed form: map, pack, release the pages.

Several threads load one expert each; the GIL is released while pages are read and while kernels pack.
Besides the packed weights there is at most one expert per thread, as mapped pages of its file.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from expert_service.errors import LoadCancelled
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import is_routed_expert
from moebius.checkpoint.mapped_reader import MappedReader
from moebius.checkpoint.matrix_finder import is_ignored
from moebius.experts.slices import REQUANTISED, ExpertDtype, ExpertSlice
from moebius.kernels import ExpertEngine, LoadError
from moebius.models.expert_checkpoint import ExpertCheckpoint, ExpertMatrices
from moebius.models.geometry import MoeGeometry
from moebius.process.limits import available_memory
from moebius.process.progress import Progress, phase

# Part of available memory: for an engine's weights and KV cache, and the running programs' files.
MEMORY_FOR_OTHERS = 0.2
# Bytes of the files that do not fit that stay cached: servers that pack parts of the same experts are at most
# this far apart.
CACHED_BYTES = 1 << 30


@dataclass(frozen=True)
class LoadPlan:
    """The experts of a checkpoint and their packed formats; filled by `plan_load`."""

    checkpoint: ExpertCheckpoint
    # Packed formats of every decoder layer, dense ones included (which take no memory).
    gate_up_formats: tuple[str, ...]
    down_formats: tuple[str, ...]
    has_bias: bool
    # By (layer, expert); located once, because threads that load share Python's lock.
    experts: Mapping[tuple[int, int], ExpertMatrices]
    # Multiples at which the intermediate dimension can be divided: groups and blocks stay whole.
    group: int
    keeps: bool  # Formats are those of the checkpoint.
    # What packing rounds even though formats are kept, for people; ascending.
    roundings: tuple[str, ...] = ()

    @property
    def model(self) -> MoeGeometry:
        """The geometry of the checkpoint."""
        return self.checkpoint.model

    @property
    def weight_format(self) -> str:
        """The formats of all layers, for people; most models have one."""
        names = {self._name(layer) for layer in self.model.moe_layers}
        return ", ".join(sorted(names))

    def _name(self, layer: int) -> str:
        gate_up, down = self.gate_up_formats[layer], self.down_formats[layer]
        return gate_up if gate_up == down else f"{gate_up}/{down}"


def plan_load(
    model: MoeGeometry, model_path: str, expert_dtype: ExpertDtype = "keep", expert_checkpoint: str = ""
) -> LoadPlan:
    """Finds the experts, in `expert_checkpoint` if they are separate, and checks all, this server's or not.

    Raises CheckpointError naming the first tensor that is missing, mis-shaped or of a type that cannot be
    packed, an unknown scheme, experts of one layer in different formats, or a tensor that belongs to an
    expert that the configuration does not have.
    """
    checkpoint = ExpertCheckpoint.open(model_path, model, expert_checkpoint)
    experts: dict[tuple[int, int], ExpertMatrices] = {}
    kept: dict[int, tuple[str, str]] = {}
    used: set[str] = set()
    groups: set[int] = set()
    biased: set[bool] = set()
    roundings: set[str] = set()
    for layer in model.moe_layers:
        for expert in range(model.num_experts):
            found = experts[layer, expert] = checkpoint.expert(layer, expert)
            if expert_dtype == "keep":
                found.check_kept()
            formats = found.formats
            if kept.setdefault(layer, formats) != formats and expert_dtype == "keep":
                raise CheckpointError(
                    f"{found.all[0].name!r} and the experts before it in the layer differ in format: "
                    f"{formats} and {kept[layer]}; requantise them with --expert-dtype"
                )
            groups.add(found.intermediate_multiple)
            biased.add(found.has_bias)
            for matrix in found.all:
                used.update(matrix.tensor_names)
                roundings.update({matrix.rounding} - {""} if expert_dtype == "keep" else ())
    _check_unused(checkpoint, used)
    first = kept[model.moe_layers[0]]
    target = REQUANTISED.get(expert_dtype)
    formats_of = [(target, target) if target else kept.get(n, first) for n in range(model.num_layers)]
    return LoadPlan(
        checkpoint,
        tuple(gate_up for gate_up, _ in formats_of),
        tuple(down for _, down in formats_of),
        any(biased),
        experts,
        math.lcm(*groups),
        target is None,
        tuple(sorted(roundings)),
    )


def _check_unused(checkpoint: ExpertCheckpoint, used: set[str]) -> None:
    """Raises for an unused expert tensor in a layer that the model has: configuration and file differ."""
    model, prefix = checkpoint.model, checkpoint.layout.prefix
    for name in checkpoint.layout.index.tensors:
        if name in used or not is_routed_expert(name) or not name.startswith(prefix) or is_ignored(name):
            continue
        # Transformers writes unused gates for choices without weights.
        number = re.search(r"\.experts\.(\d+)\.", name)
        without_weights = model.num_experts + model.num_zero_experts
        if number is not None and model.num_experts <= int(number[1]) < without_weights:
            continue
        # Layers after the last are multi-token prediction layers that are not served.
        if int(name.removeprefix(prefix).split(".")[0]) < model.num_layers:
            raise CheckpointError(
                f"tensor {name!r} is an expert's, but the configuration has {model.num_experts} experts "
                f"in layers {list(model.moe_layers)}: it would be left unused"
            )


@dataclass(frozen=True, slots=True)
class LoadedLayer:
    """A layer whose experts are all packed; filled by `load_experts`."""

    layer: int
    # The bytes of its source.
    source_bytes: int
    # Root of the squared error over the squared weights, of the matrices that were rounded; 0 if none was.
    relative_error: float


@dataclass
class _LayerSum:
    """The threads' progress in one layer."""

    missing: int
    source_bytes: int = 0
    squared_error: float = 0.0
    squared_reference: float = 0.0

    def add(self, packed: LoadError | None) -> None:
        """Counts one expert: packed, with this error, or still missing."""
        if packed is None:
            self.missing += 1
            return
        self.squared_error += packed.squared_error
        self.squared_reference += packed.squared_reference


@dataclass
class _Progress:
    """The state shared by loading threads; everything but `cancelled` under `changed`."""

    cancelled: Callable[[], bool]
    work: Iterator[tuple[int, int]]
    layers: dict[int, _LayerSum]
    running: int
    # Called, without a lock, for each expert that is packed.
    on_packed: Callable[[], None]
    # Counts bytes of the checkpoint.
    read: Progress
    changed: threading.Condition = field(default_factory=threading.Condition)
    error: BaseException | None = None
    stopped: bool = False

    def take(self) -> tuple[int, int] | None:
        """Returns the next (layer, expert); None at the end, after an error, or when cancelled."""
        with self.changed:
            if self.cancelled():
                self.error = self.error or LoadCancelled()
            return None if self.error is not None or self.stopped else next(self.work, None)

    def add(self, layer: int, source_bytes: int, error: LoadError) -> None:
        """Counts one packed expert."""
        with self.changed:
            total = self.layers[layer]
            total.missing -= 1
            total.source_bytes += source_bytes
            total.add(error)
            self.changed.notify_all()
        self.read.advance(source_bytes)
        self.on_packed()

    def finish(self, error: BaseException | None) -> None:
        """Notes that a thread has ended."""
        with self.changed:
            self.running -= 1
            self.error = self.error or error
            self.changed.notify_all()

    def stop(self) -> None:
        """Lets the threads end at their next expert."""
        with self.changed:
            self.stopped = True

    def wait(self, layer: int) -> LoadedLayer:
        """Waits until the layer is complete. Raises a thread's exception, or LoadCancelled."""
        total = self.layers[layer]
        with self.changed:
            self.changed.wait_for(lambda: total.missing == 0 or self.running == 0)
            if total.missing:
                # Its traceback refers to this frame and to the engine, which would keep its segment's lock.
                error, self.error = self.error or LoadCancelled(), None
                try:
                    raise error
                finally:
                    del error
        rounding = LoadError(total.squared_error, total.squared_reference)
        return LoadedLayer(layer, total.source_bytes, rounding.relative)


def load_experts(
    engine: ExpertEngine,
    plan: LoadPlan,
    part: ExpertSlice,
    cancelled: Callable[[], bool],
    num_threads: int = 1,
    held: Mapping[int, Sequence[int]] | None = None,
    on_packed: Callable[[], None] = lambda: None,
    num_servers: int = 1,
) -> Iterator[LoadedLayer]:
    """Packs the experts of the slice, yielding each layer, in order, when it is complete.

    `held`: by layer, the ids of the experts to load, ascending (`ExpertSlice.held`), None: all; no other
    one is read or given memory. Experts already packed in the engine's segment are not read again.
    `on_packed` is called by the threads that load, after each expert: a layer may take minutes.
    `num_servers` load at the same time, about the same amount each.
    Raises CheckpointError naming a tensor, ValueError, or LoadCancelled. Closing it ends the threads.
    """
    layers = plan.model.moe_layers
    totals = {layer: _LayerSum(0) for layer in layers}
    missing: list[tuple[int, int]] = []
    for layer in layers:
        wanted = held.get(layer, ()) if held is not None else part.held(())
        if wanted and engine.segment_state is None:
            engine.reserve(layer, len(wanted))
        for expert in wanted:
            packed = engine.segment_error(layer, expert)
            if packed is None:
                missing.append((layer, expert))
            totals[layer].add(packed)
    # More threads than experts in a layer would hold sources of several layers.
    count = max(1, min(num_threads, part.num_experts))
    source_bytes = sum(_source_bytes(plan.experts[item], part, plan) for item in missing)
    cached_bytes = None if _fits_beside(source_bytes * num_servers) else CACHED_BYTES // count
    with phase("packing experts", source_bytes, "GB") as read:
        progress = _Progress(cancelled, iter(missing), totals, count, on_packed, read)
        threads = [
            threading.Thread(
                target=_load, args=(engine, plan, part, progress, cached_bytes), name=f"load-{number}"
            )
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        try:
            for layer in layers:
                yield progress.wait(layer)
        finally:
            progress.stop()
            for thread in threads:
                thread.join()


def _fits_beside(source_bytes: int) -> bool:
    """Returns whether the experts' files may stay cached beside the packed experts, which are as large."""
    return 2 * source_bytes < available_memory() * (1 - MEMORY_FOR_OTHERS)


def _load(
    engine: ExpertEngine, plan: LoadPlan, part: ExpertSlice, progress: _Progress, cached_bytes: int | None
) -> None:
    """Runs one thread: loads the next expert until none is left."""
    try:
        with MappedReader(cached_bytes) as reader:
            while (item := progress.take()) is not None:
                layer, expert = item
                reader.reset()
                found = plan.experts[layer, expert]
                matrices = found.read(reader, part.intermediate_begin, part.intermediate_end, plan.keeps)
                error = engine.load_expert(layer, expert, *matrices)
                progress.add(layer, _source_bytes(found, part, plan), error)
    except BaseException as error:
        progress.finish(error)
    else:
        progress.finish(None)


def _source_bytes(found: ExpertMatrices, part: ExpertSlice, plan: LoadPlan) -> int:
    return math.ceil(found.nbytes * part.intermediate_size / plan.model.moe_intermediate_size)
