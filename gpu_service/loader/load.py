"""Fills a model and its vision tower from a checkpoint, and checks that nothing is missing or left over.

Which rows a name fills comes from the declared weights (`loader/names.py`), which tensors hold them from the
checkpoint (`find_sources`). Peak memory is the model plus one tensor: nothing is mapped, and routed experts
are never read. A rank of several reads its rows and columns only; what is left over is found by all stages
together. Towers stay in floating point in every published checkpoint.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import structlog
import torch

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.core.partition import stage_layers
from gpu_service.device import TORCH_DTYPES, dtype_name
from gpu_service.device.stream import stream_of
from gpu_service.layers.linear import PackedMaker, StoredWeight
from gpu_service.loader.declared import declared_forms
from gpu_service.loader.file_tables import FileForm, file_forms
from gpu_service.loader.held import HeldWeights, KeptForm, KeptForms, ScaledForm, held_weights
from gpu_service.loader.names import Target, expected_names, module_of, wanted_name
from gpu_service.loader.packed_sources import PackedSource, RoundedSource, keep_packed
from gpu_service.loader.sources import (
    INTEGERS,
    LoadContext,
    PlainSource,
    QuantisedSource,
    WeightSource,
    ZeroSource,
    as_torch,
    keep_stored_fp8,
)
from gpu_service.models.common import CausalLM
from gpu_service.models.vision.registry import build_tower
from gpu_service.models.vision.tower import VisionTower
from gpu_service.ops import host_kernels
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import is_routed_expert
from moebius.checkpoint.index import CheckpointIndex, TensorInfo, has_weights
from moebius.checkpoint.matrix_finder import MatrixFinder, is_ignored, side_name
from moebius.checkpoint.quantisation import read_schemes
from moebius.checkpoint.reader import SliceReader, read_slice
from moebius.checkpoint.stored_values import check_values
from moebius.checkpoint.weight_schemes import FLOATS, WeightScheme
from moebius.config import ModelConfigSection
from moebius.models import eagle3
from moebius.models.checkpoint import check_mtp_layers, open_index
from moebius.models.config import ModelConfig
from moebius.models.layers.ranks import ShardRange
from moebius.models.registry import vision_family
from moebius.models.tied_head import is_stored_as_head
from moebius.models.weights import model_weights
from moebius.process.progress import Progress, phase

_log = structlog.get_logger(__name__)

# Memory takes no more, and each holds a tensor.
_MAX_THREADS = 16
# How many names an error lists before it only counts the rest.
_MAX_LISTED = 20


def find_sources(
    directory: Path,
    present: Mapping[str, TensorInfo],
    expected: Mapping[str, Target],
    schemes: tuple[WeightScheme, ...],
) -> dict[str, WeightSource]:
    """Returns a source for every expected name; `present` has the checkpoint's tensors by canonical name.

    What is stored decides: floats under the expected name are taken as they are, anything else must fit one
    of `schemes`. Raises CheckpointError listing every name that is missing, unused, mis-shaped, of a wrong
    type, or quantised in a way that can not be read.
    """
    search = _Search(MatrixFinder(present, directory, schemes), expected)
    for name, target in expected.items():
        search.locate(name, target)
    search.check_unused()
    lines = [f"{len(names)} {kind}: {listed(names)}" for kind, names in search.problems.items() if names]
    if lines:
        raise CheckpointError(f"{directory} does not fit its config.json: {'; '.join(lines)}")
    return search.sources


def listed(items: Iterable[str]) -> str:
    """Returns the first names in order, and how many more there are, for messages."""
    names = sorted(items)
    more = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _no_problems() -> dict[str, list[str]]:
    return {kind: [] for kind in ("missing", "unused", "mis-shaped", "mis-typed", "unreadable")}


@dataclass
class _Search:
    finder: MatrixFinder
    expected: Mapping[str, Target]
    # Filled by `locate`.
    sources: dict[str, WeightSource] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=_no_problems)
    used: set[str] = field(default_factory=set)  # The checkpoint's own names of tensors that a source reads.

    def locate(self, name: str, target: Target) -> None:
        """Find the source of one expected name, or note what is wrong with it."""
        info = self.finder.tensors.get(name)
        weight = target.weight
        is_fp8 = weight.scale in self.expected
        allowed_types = _ALLOWED.get(weight.dtype, (FP8,) if is_fp8 else FLOATS)
        if info is not None and info.dtype in allowed_types:
            self._take_plain(name, info, target)
        elif len(target.shape) == 2 and self._is_quantised(name):
            self._take_quantised(name, target)
        elif info is None and weight.may_be_missing:
            self.sources[name] = ZeroSource()
        elif info is None:
            self.problems["missing"].append(name)
        else:
            self.used.add(info.name)
            allowed = ", ".join(allowed_types)
            self.problems["mis-typed"].append(f"{info.name} {info.dtype} (allowed {allowed})")

    def _take_plain(self, name: str, info: TensorInfo, target: Target) -> None:
        self.used.add(info.name)
        if info.shape != target.shape:
            self.problems["mis-shaped"].append(
                f"{info.name} {list(info.shape)} (expected {list(target.shape)})"
            )
        self.sources[name] = PlainSource(info)

    def _is_quantised(self, name: str) -> bool:
        return name in self.finder.tensors or any(self._side_tensors(name))

    def _take_quantised(self, name: str, target: Target) -> None:
        rows, cols = target.shape
        try:
            # A bias is a parameter of its own.
            matrix = replace(self.finder.find(name, (rows, cols)), bias=None)
        except CheckpointError as error:
            self.problems["unreadable"].append(str(error))
            self.used.update(info.name for info in self._side_tensors(name))
            return
        self.used.update(matrix.tensor_names)
        self.sources[name] = QuantisedSource(matrix)

    def _side_tensors(self, name: str) -> Iterator[TensorInfo]:
        """Tensors that some scheme would read for the matrix."""
        for scheme in self.finder.schemes:
            for stored in scheme.roles:
                info = self.finder.tensors.get(side_name(name, stored.suffix))
                if info is not None:
                    yield info

    def check_unused(self) -> None:
        """Note every tensor that no source reads, but for those that quantisers leave over."""
        for name, info in self.finder.tensors.items():
            if info.name in self.used or (self.finder.schemes and is_ignored(name)):
                continue
            if not self._is_empty_bias(name, info):
                self.problems["unused"].append(info.name)

    def _is_empty_bias(self, name: str, info: TensorInfo) -> bool:
        """GPTQ quantisers write zero biases for matrices that never had a bias."""
        matrix = name.removesuffix(".bias") + ".weight"
        is_bias = name.endswith(".bias") and isinstance(self.sources.get(matrix), QuantisedSource)
        return is_bias and info.dtype in FLOATS and not read_slice(info).any()


FP8 = "F8_E4M3"
_EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")
# Stored types of weights that are no numbers of activations.
_ALLOWED = {"int32": INTEGERS, "e8m0": ("F8_E8M0", "U8")}
_FLOAT_DTYPES = ("F32", "F16", "BF16")


def load_tower(tower: VisionTower, directory: str | Path, model_type: str) -> None:
    """Give every parameter its values, converted to its dtype.

    Raises CheckpointError as `check_tower` does, and naming a tensor that holds NaN or infinity.
    """
    located = check_tower(tower, directory, model_type)
    tensors = tower.state_dict(keep_vars=True)
    with SliceReader() as reader:
        for name, info in located:
            array = reader.read(info)
            for parameter, values in tower.parts(name, as_torch(array, info.dtype)):
                rounded = dtype_name(tensors[parameter].dtype)
                check_values(array, info.dtype, info.name, rounded)
                tensors[parameter].data.copy_(values)


def check_tower(
    tower: VisionTower, directory: str | Path, model_type: str
) -> tuple[tuple[str, TensorInfo], ...]:
    """Returns what fills a tower, which may be without memory, from headers alone; names are the tower's.

    Raises CheckpointError naming the tensors that are missing, unknown, mis-shaped or not floating-point.
    """
    index = open_index(directory)
    shapes = {name: tensor.shape for name, tensor in tower.state_dict().items()}
    missing, family = set(shapes), vision_family(model_type)
    located: list[tuple[str, TensorInfo]] = []
    for info in index.tensors.values():
        name = family.tower_name(info.name)
        if name is None:
            continue
        if info.dtype not in _FLOAT_DTYPES:
            allowed = ", ".join(_FLOAT_DTYPES)
            raise CheckpointError(f"vision tensor {info.name} is {info.dtype}; allowed: {allowed}")
        for parameter, values in _parts(tower, name, info, directory):
            if parameter not in missing:
                raise CheckpointError(f"{directory}: the vision tower has no use for {info.name}")
            if shapes[parameter] != values.shape:
                found = f"{list(values.shape)}, expected {list(shapes[parameter])}"
                raise CheckpointError(f"{directory}: vision tensor {info.name} gives {found}")
            missing.remove(parameter)
        located.append((name, info))
    if missing:
        raise CheckpointError(f"{directory}: the vision tower lacks {', '.join(sorted(missing)[:20])}")
    return tuple(located)


def _parts(
    tower: VisionTower, name: str, info: TensorInfo, directory: str | Path
) -> list[tuple[str, torch.Tensor]]:
    """Returns the tower's parameters that a tensor fills, as tensors without memory.

    Raises CheckpointError.
    """
    try:
        return list(tower.parts(name, torch.empty(info.shape, device="meta")))
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{directory}: vision tensor {info.name} of shape {list(info.shape)} can not be divided: {error}"
        ) from error


# What becomes of quantised weights of dense layers: values in the parameters' type; or all stay that a packed
# format holds exactly, on a CPU with those in bfloat16, or as panels of a GPU, fp8 as `ops.linear.fp8_linear`
# has it.
DenseForm = Literal["dequantised", "packed", "panels"]


def dense_form(chosen: ModelConfigSection, device: torch.device) -> DenseForm:
    """Returns what `dense_weights` means for a model on a device; one on "meta" is planned for a GPU.

    `auto` on a GPU is dequantised: it is the form whose room decides between both (`assembly.rank_plan`).
    """
    on_cpu = device.type == "cpu"
    if chosen.dense_weights == "dequantise" or (chosen.dense_weights == "auto" and not on_cpu):
        return "dequantised"
    return "packed" if on_cpu else "panels"


def load_weights(
    model: CausalLM, directory: str | Path, form: DenseForm = "dequantised", *, in_files: bool = False
) -> None:
    """Give every parameter memory on `model.device` and its values from the checkpoint.

    Values are converted to each parameter's dtype, quantised ones as `form` says. `in_files`: tables of
    embeddings are not loaded, and their rows read from the checkpoint's files. Raises CheckpointError
    listing every name that is missing, unused, mis-shaped, of a wrong type or quantised in an unknown way,
    before the first weight is read; the model is unusable after an error.
    """
    found = _find(model.config, model.parallel, directory, form, in_files=in_files)
    for parameter, kept in found.forms.items():
        kept.hold(module_of(model, parameter))
    work = [
        (target, found.sources[name])
        for name, target in found.expected.items()
        if not isinstance(found.forms.get(target.parameter), FileForm)
    ]
    rows = {target.parameter: _row_bytes(model, target) for target, _ in work}
    weights = sum(target.rows.size * rows[target.parameter] for target, _ in work)
    with phase("loading dense weights", weights, "GB") as progress:
        _fill_all(work, model, rows, form, progress)
    _check_no_meta(model)
    loaded_bytes = _held_bytes(model)
    with phase("packing dense weights"):
        model.pack()
    more = _held_bytes(model) - loaded_bytes
    if more > 0:
        text = "this CPU does not multiply bfloat16: dense layers are kept in float32"
        _log.info(text, more_mib=more >> 20)


def _held_bytes(model: CausalLM) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _row_bytes(model: CausalLM, target: Target) -> int:
    """Returns the bytes of the part that this process has of a row of the parameter."""
    module, name = module_of(model, target.parameter), target.parameter.rpartition(".")[2]
    parameter = module.get_parameter(name)
    if isinstance(module, StoredWeight) and module.packed_parts and name == "weight":
        return parameter.nbytes // module.weight_shape[0]
    return parameter[:1].nbytes


def _packed_maker(form: DenseForm, device: torch.device) -> PackedMaker:
    """Returns what computes with kept weights of a form."""
    return device if form == "panels" else host_kernels.dense_threads(torch.get_num_threads())


def _fill_all(
    work: Sequence[tuple[Target, WeightSource]],
    model: CausalLM,
    rows: Mapping[str, int],
    form: DenseForm,
    progress: Progress,
) -> None:
    """Largest first, a tensor per thread: they decode and round. Raises what a thread raises.

    `rows`: bytes of a row of each parameter.
    """
    device = model.device
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    is_kept = any(isinstance(source, PackedSource | RoundedSource) for _, source in work)
    maker = _packed_maker(form, device) if is_kept else None
    sizes = {id(target): target.rows.size * rows[target.parameter] for target, _ in work}
    left = iter(sorted(work, key=lambda pair: -sizes[id(pair[0])]))
    lock, active = threading.Lock(), stream_of(device)

    def fill_some(workers: ThreadPoolExecutor) -> None:
        with active(), SliceReader() as reader:
            context = LoadContext(reader, partial(module_of, model), workers, threads, maker)
            while True:
                with lock:
                    item = next(left, None)
                if item is None:
                    return
                target, source = item
                try:
                    source.fill(target, context, device)
                except BaseException:
                    with lock:  # the other threads need not read the rest
                        list(left)
                    raise
                progress.advance(sizes[id(target)])

    # Two pools: a thread that fills waits for those that dequantise blocks of one matrix for it.
    with ThreadPoolExecutor(threads, "dense") as fillers, ThreadPoolExecutor(threads, "blocks") as workers:
        for done in [fillers.submit(fill_some, workers) for _ in range(threads)]:
            done.result()


def plan_weights(
    chosen: ModelConfigSection, config: ModelConfig, parallel: ParallelContext, device: torch.device
) -> HeldWeights:
    """Returns what a rank's weights will take on a device once `load_weights` has loaded them, from headers
    alone; without files of weights, on a CPU all as values, on a GPU by what the configuration says.
    Raises as `load_weights` does.
    """
    form, on_cpu = dense_form(chosen, device), device.type == "cpu"
    declared = list(model_weights(config, stage_layers(config, parallel)))
    forms: KeptForms = {}
    in_files = chosen.embedding_tables == "disk"
    may_keep = form != "dequantised" or in_files or any(weight.scale for weight in declared)
    if may_keep and has_weights(chosen.model):
        found = _find(config, parallel, chosen.model, form, in_files=in_files)
        forms, declared = found.forms, [target.weight for target in found.expected.values()]
    elif form == "panels":
        forms = declared_forms(expected_names(config, parallel), chosen.model, config.dtype)
    return held_weights(config, parallel, declared, forms, on_cpu=on_cpu)


def check_weights(config: ModelConfig, directory: str | Path) -> None:
    """Raises as `load_weights` and `load_tower` do before they read any value: from headers alone."""
    _find(config, SOLO, directory, "dequantised")
    if config.vision is not None:
        check_tower(build_tower(config, directory, "meta"), directory, config.model_type)


@dataclass(frozen=True, slots=True)
class _Found:
    """All that a rank reads; by canonical name, but forms by that of the parameter."""

    expected: Mapping[str, Target]
    sources: Mapping[str, WeightSource]
    forms: KeptForms


def _find(
    config: ModelConfig,
    parallel: ParallelContext,
    directory: str | Path,
    form: DenseForm,
    *,
    in_files: bool = False,
) -> _Found:
    """Returns every weight's target and the source of its values. Raises CheckpointError."""
    index = open_index(directory)
    present = _present(index, config, parallel)
    expected = expected_names(config, parallel)
    scaled = _scaled(expected, present)
    for target in scaled:
        scale = target.weight.scales
        rows = target.rows if target.weight.scale_columns else ShardRange.whole(1)
        expected[scale.name] = Target(scale, rows, None, 0)
    forms: dict[str, KeptForm] = {target.parameter: ScaledForm() for target in scaled}
    of_head = eagle3.head_tensors(config) if config.draft_model else {}
    head = f"model.layers.{config.num_decoder_layers}."
    apart = {name: expected[name] for name in expected if of_head and name.startswith(head)}
    own = {name: expected[name] for name in expected if name not in apart}
    sources = find_sources(index.directory, present, own, read_schemes(directory))
    if apart:
        sources |= find_sources(Path(config.draft_model), of_head, apart, ())
    if in_files:
        forms |= file_forms(expected, sources, TORCH_DTYPES[config.dtype], bool(scaled))
    if form == "panels":
        forms |= keep_stored_fp8(expected, sources)
    if form != "dequantised":
        rank = parallel.tp_rank, parallel.tp_size
        forms |= keep_packed(expected, sources, rank, config.dtype, on_cpu=form == "packed")
    return _Found(expected, sources, forms)


def _scaled(expected: Mapping[str, Target], present: Mapping[str, TensorInfo]) -> list[Target]:
    """Returns the weights that stay in 8 bits with scales: all that may, where one is stored so."""
    found = [target for target in expected.values() if target.weight.scale]
    infos = (present.get(target.weight.name) for target in found)
    return found if any(info is not None and info.dtype == FP8 for info in infos) else []


def _present(index: CheckpointIndex, config: ModelConfig, parallel: ParallelContext) -> dict[str, TensorInfo]:
    """Returns the checkpoint's tensors that this process reads, by canonical name."""
    present: dict[str, TensorInfo] = {}
    check_mtp_layers(index, config.model_type, config.num_stored_layers)
    swapped = config.tie_word_embeddings and is_stored_as_head(
        index, config.model_type, config.num_stored_layers
    )
    # Of routed experts one of each layer is asked for: there are tens of thousands of names.
    left_out: set[str] = set()
    for name, info in index.tensors.items():
        alike = _EXPERT_NUMBER.sub(".experts.*.", name, count=1) if is_routed_expert(name) else ""
        if alike in left_out:
            continue
        canonical = wanted_name(name, config, parallel, head_is_embedding=swapped)
        if canonical is None:
            if alike:
                left_out.add(alike)
            continue
        if canonical in present:
            raise CheckpointError(
                f"{index.directory}: {present[canonical].name} and {name} are both {canonical}"
            )
        present[canonical] = info
    return present


def _check_no_meta(model: CausalLM) -> None:
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise CheckpointError(f"parameters without values after loading: {listed(empty)}")
