"""From settings to loaded resident experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.device.virtual_memory import PhysicalPool
from gpu_service.experts.resident.experts import (
    LayerSlots,
    ResidentExperts,
    ResidentKernels,
    TorchResidentKernels,
    make_slots,
)
from gpu_service.experts.resident.load import PackedMemory, load_slots
from gpu_service.experts.resident.source import PackedExpertSource
from gpu_service.experts.resident.warm_start import Residents, most_chosen, most_saving
from moebius.config import MoebiusConfig
from moebius.errors import brief
from moebius.experts.placement import Placement, make_placement
from moebius.experts.rank_division import rank_residents
from moebius.models.geometry import MoeGeometry
from moebius.process.progress import phase

_log = structlog.get_logger(__name__)


def make_resident_experts(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    device: torch.device,
    compute_dtype: torch.dtype,
    parallel: ParallelContext = SOLO,
    layers: Sequence[int] | None = None,
    known: Mapping[int, NDArray[np.int64]] | None = None,
    pool: PhysicalPool | None = None,
    packed: PackedMemory | None = None,
) -> ResidentExperts | None:
    """Loads the experts that `config.placement` puts on this rank's device; None when it puts none there.

    `layers`: the decoder layers of this rank; None: all. `known`: how often experts were chosen, by layer:
    then as many bytes are loaded as the placement takes, of those that were chosen most. `pool`: what memory
    of layers that are not placed as a whole comes from, and goes to while serving. `packed`: where whole
    experts may be packed already; a rank that has channels of each finds none there. Raises UserError naming
    a setting, CheckpointError naming a tensor.
    """
    placed = _chosen(make_placement(config.placement, geometry), layers)
    if not placed:
        return None
    source = expert_source(config, geometry, compute_dtype, parallel)
    chosen = _begun_with(placed, known or {}, config, source)
    own = _rank_part(chosen, parallel)
    slots = {
        layer: make_slots(
            source.format_of(layer),
            len(own[layer]),
            geometry.num_experts,
            device,
            geometry.limit_of(layer),
            pool if len(placed[layer]) < geometry.num_experts else None,
            tuple(expert for expert in experts if expert not in own[layer]),
        )
        for layer, experts in chosen.items()
    }
    load_slots(source, slots, own, config.experts.max_requantise_error, packed)
    kernels = make_kernels(geometry, device)
    return warmed_up(source, slots, kernels, config.gpu.num_batched_tokens, compute_dtype)


def make_kernels(geometry: MoeGeometry, device: torch.device) -> ResidentKernels:
    """Returns Triton's on a GPU, torch's elsewhere and, with a warning, where Triton is not installed."""
    if device.type != "cuda":
        return TorchResidentKernels(geometry)
    try:
        from gpu_service.experts.resident.triton_kernels.backend import TritonResidentKernels
    except ImportError as error:
        _log.warning(
            "no Triton: resident experts are computed by torch, slowly and eagerly", error=str(error)
        )
        return TorchResidentKernels(geometry)
    return TritonResidentKernels(geometry)


def warmed_up(
    source: PackedExpertSource,
    slots: dict[int, LayerSlots],
    kernels: ResidentKernels,
    max_rows: int,
    dtype: torch.dtype,
) -> ResidentExperts:
    """With these kernels, or with torch's and a warning where they do not run on the device."""
    resident = ResidentExperts(source, slots, kernels)
    try:
        with phase("trying kernels of resident experts"):
            resident.warm_up(max_rows, dtype)
    except Exception as error:  # a compiler, a driver or a kernel may raise anything
        if isinstance(kernels, TorchResidentKernels):
            raise
        _log.warning(
            "kernels of resident experts do not run on this device; torch computes them",
            error=brief(error),
            cost="one expert after another, and steps without graphs: many times slower",
        )
        return ResidentExperts(source, slots, TorchResidentKernels(source.geometry))
    return resident


def resident_bytes(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    compute_dtype: torch.dtype,
    parallel: ParallelContext = SOLO,
    layers: Sequence[int] | None = None,
) -> int:
    """Device memory that `make_resident_experts` will take, known before anything is read."""
    placed = _chosen(make_placement(config.placement, geometry), layers)
    if not placed:
        return 0
    source, chosen = expert_source(config, geometry, compute_dtype, parallel), _rank_part(placed, parallel)
    return sum(len(experts) * source.format_of(layer).expert_bytes for layer, experts in chosen.items())


def expert_source(
    config: MoebiusConfig, geometry: MoeGeometry, compute_dtype: torch.dtype, parallel: ParallelContext
) -> PackedExpertSource:
    """Returns the experts in the format that the configuration asks for: whole, or this rank's intermediate
    channels of each.
    """
    tp_rank, tp_size = (0, 1) if parallel.holds_whole_experts else (parallel.tp_rank, parallel.tp_size)
    return PackedExpertSource(
        config.model.model,
        geometry,
        config.experts.expert_dtype,
        expert_checkpoint=config.model.expert_checkpoint,
        widest="bfloat16" if compute_dtype == torch.bfloat16 else "float32",
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


def _rank_part(resident: Residents, parallel: ParallelContext) -> dict[int, tuple[int, ...]]:
    """Returns the experts of which this rank holds something: all, or where ranks hold whole ones its own."""
    if not parallel.holds_whole_experts:
        return {layer: tuple(experts) for layer, experts in resident.items()}
    return rank_residents(resident, parallel.tp_rank, parallel.tp_size)


def _chosen(placement: Placement, layers: Sequence[int] | None) -> dict[int, tuple[int, ...]]:
    return {
        layer: experts
        for layer, experts in placement.resident.items()
        if experts and (layers is None or layer in layers)
    }


def _begun_with(
    placed: Residents,
    known: Mapping[int, NDArray[np.int64]],
    config: MoebiusConfig,
    source: PackedExpertSource,
) -> dict[int, tuple[int, ...]]:
    """Returns what is loaded where requests are known.

    Settings of a number for each layer are kept to; with a share of all experts layers that gain more get
    more.
    """
    if not known or config.placement.gpu_experts is not None:
        return most_chosen(placed, known)
    nbytes = {layer: source.format_of(layer).expert_bytes for layer in placed}
    return most_saving(placed, known, nbytes, source.geometry.top_k)
