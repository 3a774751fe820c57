"""From settings to a fetcher: which layers have fetch slots, how many, and whether the kernels run here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import structlog
import torch

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.experts.costs import ExpertCosts
from gpu_service.experts.fetching.agreement import FetchAgreement
from gpu_service.experts.fetching.fetcher import ExpertFetcher
from gpu_service.experts.fetching.kernels import FetchKernels, TorchFetchKernels
from gpu_service.experts.fetching.slots import FetchState, make_state
from gpu_service.experts.resident.panels import LayerFormat
from gpu_service.experts.streaming.make import ServedPart
from gpu_service.experts.streaming.streamer import ExpertStreamer
from moebius.config import MoebiusConfig
from moebius.errors import brief
from moebius.models.geometry import MoeGeometry

_log = structlog.get_logger(__name__)
# Slots of a layer: experts of this many tokens, at most; fewer than the least are not worth their memory.
_TOKENS_KEPT, _LEAST_SLOTS = 4, 4
# The part of a GPU's memory that all take, at most; of small ones, whose requests need it more.
_MOST_OF_DEVICE, _MOST_OF_SMALL, _SMALL_BYTES = 24, 48, 40 * 10**9


def fetches(config: MoebiusConfig, device_type: str) -> bool:
    """Returns whether the settings ask decode steps on such a device ("cuda", "cpu") to fetch experts.

    Pipeline stages do not: while one computes, servers work for none of the others.
    """
    stages = config.parallel.pipeline_parallel_size
    return config.gpu.fetch_experts == "auto" and device_type == "cuda" and stages == 1


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """What a rank's fetch slots will be; filled by `plan_fetching`."""

    # By layer, of each group of parts: an expert that servers divide by channels has a part in each. Ranks
    # have whole experts, too.
    kinds: Mapping[int, tuple[LayerFormat, ...]]
    num_slots: int  # of each layer

    @property
    def nbytes(self) -> int:
        """The bytes of all slots."""
        return self.num_slots * sum(kind.expert_bytes for found in self.kinds.values() for kind in found)


def plan_fetching(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    parts: Mapping[int, Sequence[ServedPart]],
    device_type: str,
    device_bytes: int | None,
    layers: Collection[int] | None = None,
) -> FetchPlan | None:
    """Known before anything is loaded. None: nothing is fetched, or too few slots have room.

    `parts`: as servers divide the layers; `device_bytes`: of the GPU's memory, None: no limit. `layers`:
    whose experts kernels may read where they are; None: all.
    """
    if not fetches(config, device_type):
        return None
    kinds = {}
    for layer in geometry.passed_layers:
        held = [part.kind for part in parts.get(layer, ()) if part.num_experts]
        if held and (layers is None or layer in layers):
            # Servers that have whole experts have them in one format.
            kinds[layer] = tuple(held if config.experts.expert_split == "tensor" else held[:1])
    each = FetchPlan(kinds, 1).nbytes
    count = min(geometry.num_experts, _TOKENS_KEPT * geometry.top_k)
    if device_bytes is not None and each:
        part = _MOST_OF_SMALL if device_bytes < _SMALL_BYTES else _MOST_OF_DEVICE
        count = min(count, device_bytes // part // each)
    return FetchPlan(kinds, count) if each and count >= min(_LEAST_SLOTS, geometry.num_experts) else None


def make_fetcher(
    plan: FetchPlan,
    geometry: MoeGeometry,
    streamer: ExpertStreamer,
    costs: ExpertCosts,
    parallel: ParallelContext = SOLO,
) -> ExpertFetcher | None:
    """With empty slots, and kernels that have run, in a graph, too; None, with a warning: they did not.

    None as well where all layers are resident as a whole.

    `streamer`: whose kernels multiply what is in slots; `plan`: the same on all ranks of `parallel`.
    """
    device = streamer.device.device
    # A start that knows what is chosen may have made all experts of a layer resident.
    resident = {layer: len(streamer.resident_of(layer)) for layer in plan.kinds}
    kinds = {layer: kind for layer, kind in plan.kinds.items() if resident[layer] < geometry.num_experts}
    if not kinds:
        return None
    limits = {layer: geometry.limit_of(layer) for layer in kinds}
    ranks = parallel.tp_rank, parallel.tp_size
    state = make_state(kinds, plan.num_slots, geometry.num_experts, limits, device, *ranks)
    try:
        kernels = _kernels_that_run(state, geometry, streamer)
    except Exception as error:  # a compiler, a driver or a kernel may raise anything
        _log.warning("experts are not fetched: the kernels do not run on this device", error=brief(error))
        return None
    _log.info(
        "decode steps may fetch experts once their memory is registered",
        slots_per_layer=plan.num_slots,
        gib=round(plan.nbytes / 2**30, 2),
    )
    group = parallel.tensor_group
    agreement = None if parallel.tp_size == 1 else FetchAgreement(state, group, parallel.tp_size)
    return ExpertFetcher(state, kernels, streamer, costs, agreement)


def _kernels_that_run(state: FetchState, geometry: MoeGeometry, streamer: ExpertStreamer) -> FetchKernels:
    device = streamer.device.device
    if device.type != "cuda":
        return TorchFetchKernels()
    if not streamer.kernels.captures:
        raise RuntimeError("products of resident experts are torch's, which no graph can hold")
    from gpu_service.experts.fetching.triton_kernels import TritonFetchKernels

    kernels = TritonFetchKernels(device)
    ids = torch.full((1, geometry.top_k), -1, dtype=torch.int32, device=device)

    def run() -> None:
        for layer in state.layers.values():
            kernels.choose(layer, ids)
            kernels.copy(layer)
            kernels.join()

    run()
    # A driver that does not capture the fork would else fail the capture of every decode step.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    graph.replay()
    torch.cuda.synchronize(device)
    graph.reset()
    return kernels
