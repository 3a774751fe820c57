"""Pipeline stages of unequal GPUs: what layers take, what GPUs have, and the division that follows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from app.planning.capacity import DoesNotFit, Wish
from app.planning.gpu_models import GpuModel, least_of
from app.planning.hardware import Hardware
from app.planning.memory import all_resident, chosen_residency, has_placement, nothing_resident
from app.planning.stage_division import LayerNeeds, StageRoom, divide_layers, equal_division
from moebius.config import MoebiusConfig
from moebius.errors import ConfigError, UserError

if TYPE_CHECKING:
    from app.planning.planner import Planner
    from app.planning.speed import Work

# A GPU of which everything fits, to learn what a plan takes.
_EVERYTHING = 2**60


def stage_gpus(hardware: Hardware, tensor_parallel_size: int, stages: int) -> list[GpuModel]:
    """Returns the least of the GPUs of each stage."""
    gpus = hardware.rank_gpus(tensor_parallel_size * stages)
    return [
        least_of(gpus[begin : begin + tensor_parallel_size])
        for begin in range(0, len(gpus), tensor_parallel_size)
    ]


def lacks_stage_layers(planner: Planner) -> bool:
    """Returns whether there are stages on GPUs whose layers no setting numbers."""
    parallel = planner.config.parallel
    return planner.on_gpu and parallel.pipeline_parallel_size > 1 and not parallel.pipeline_layers


def with_stage_layers(
    planner: Planner, hardware: Hardware, wish: Wish | None = None, fill: bool = True
) -> Planner:
    """Returns the planner with the number of layers of each pipeline stage.

    By `divide_layers`; equal numbers where these do not fit the memory, or are predicted to be faster.
    """
    stages, count = planner.config.parallel.pipeline_parallel_size, planner.model.num_layers
    even = equal_division(count, stages)
    found = _divided(planner, hardware, wish or Wish(), fill)
    if found is None or found == even:
        return _with_layers(planner, even)
    tried = [_with_layers(planner, sizes) for sizes in (found, even)]
    return max(tried, key=lambda each: _tokens_per_second(each, hardware, wish, fill))


def _with_layers(planner: Planner, sizes: tuple[int, ...]) -> Planner:
    parallel = planner.config.parallel.model_copy(update={"pipeline_layers": sizes})
    other = type(planner)(planner.config.model_copy(update={"parallel": parallel}), planner.on_gpu)
    other.dense = planner.dense
    return other


def _tokens_per_second(planner: Planner, hardware: Hardware, wish: Wish | None, fill: bool) -> float:
    """Returns what one stream gets; -1: it does not fit."""
    try:
        return planner.plan(hardware, wish, fill, explain=False).decode[0].tokens_per_second
    except DoesNotFit:
        return -1.0


def _divided(planner: Planner, hardware: Hardware, wish: Wish, fill: bool) -> tuple[int, ...] | None:
    from gpu_service.core.partition import check_stage

    tokens = planner.wanted_tokens(hardware, wish)
    stages = planner.config.parallel.pipeline_parallel_size

    def may_be(stage: range) -> bool:
        try:
            check_stage(planner.model, stage, stages)
        except ConfigError:
            return False
        return True

    chosen = has_placement(planner.config) or not fill
    each = planner.geometry.num_experts
    shares = [1.0] if chosen or not planner.geometry.moe_layers else [n / each for n in range(each + 1)]
    try:
        rooms = _stage_rooms(planner, hardware)
        return divide_layers(_layer_needs(planner, chosen), rooms, tokens, shares, may_be)
    except UserError:  # What cannot be planned at all is refused by the plan, in its words.
        return None


def _layer_needs(planner: Planner, chosen: bool) -> list[LayerNeeds]:
    """`chosen`: settings say which experts are resident."""
    config, geometry = planner.config, planner.geometry
    residency = chosen_residency(config, geometry) if chosen else all_resident(config, geometry)
    found = []
    for layer in planner.forecast.layers(config):
        experts = planner.resident_bytes(residency, (layer.index,))[1] if layer.is_moe else 0
        read = experts * geometry.mean_top_k / geometry.num_experts if experts else 0.0
        token = layer.page_bytes / config.gpu.page_size
        fixed = layer.dense_bytes + layer.state_bytes
        found.append(LayerNeeds(fixed, token, experts, layer.read_bytes, read))
    return found


def _stage_rooms(planner: Planner, hardware: Hardware) -> list[StageRoom]:
    """Returns what is left for layers beside libraries, activations, embedding and head."""
    parallel, gpu = planner.config.parallel, planner.config.gpu
    held = planner.all_held(nothing_resident(planner.geometry), hardware)
    config = planner.with_gpu(prefill_chunk_max=0, num_pages=None, kv_cache_gib=None).config
    ledgers = planner.forecast.device_plans(config, [_EVERYTHING] * len(held), held)
    layers = planner.forecast.layers(config)
    of_layers = [0] * parallel.pipeline_parallel_size
    for layer in layers:
        of_layers[layer.stage] += layer.dense_bytes + layer.state_bytes
    bytes_of = [
        gpu.usable_bytes(own.memory_bytes) - ledger.fixed
        for own, ledger in zip(hardware.rank_gpus(len(held)), ledgers, strict=True)
    ]
    size, found = parallel.tensor_parallel_size, []
    for stage, own in enumerate(stage_gpus(hardware, size, parallel.pipeline_parallel_size)):
        ranks = slice(stage * size, (stage + 1) * size)
        ring = min(each.ring_bytes for each in held[ranks])
        found.append(StageRoom(min(bytes_of[ranks]) + of_layers[stage], ring, own.bandwidth))
    return found


def in_turn(planner: Planner, hardware: Hardware, work: Work) -> Hardware:
    """Returns the host with a GPU that is as fast as all stages in turn: with means of bytes and operations
    per second, weighted by what each stage reads for a token.
    """
    parallel = planner.config.parallel
    gpus = stage_gpus(hardware, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    if len(set(gpus)) == 1:
        return replace(hardware, gpu=gpus[0])
    reads = [0.0] * len(gpus)
    for rank in planner.forecast.ranks:
        experts = len(rank.moe_layers) * work.top_k * work.resident_share * work.resident_expert_bytes
        reads[rank.stage] = max(reads[rank.stage], rank.read_bytes + experts)
    shares = [read / sum(reads) for read in reads]

    def mean(name: str) -> float:
        return 1.0 / sum(share / float(getattr(gpu, name)) for share, gpu in zip(shares, gpus, strict=True))

    speeds = mean("bandwidth"), mean("link"), mean("flops")
    return replace(hardware, gpu=GpuModel("stages", min(gpu.memory_bytes for gpu in gpus), *speeds))


def with_all_gpus(config: MoebiusConfig, hardware: Hardware) -> MoebiusConfig:
    """Returns the settings with a pipeline stage for each GPU, for GPUs of several kinds."""
    parallel = config.parallel.model_copy(update={"pipeline_parallel_size": hardware.gpus})
    return config.model_copy(update={"parallel": parallel})
