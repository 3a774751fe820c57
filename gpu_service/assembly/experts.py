"""Who computes routed experts: the device those that live on it, expert servers all others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_service.assembly.kept_experts import given_back, kept_experts
from gpu_service.assembly.process import local_rank, resolve_device
from gpu_service.core.partition import stage_layers
from gpu_service.device.stream import DeviceStream, stream_of
from gpu_service.device.virtual_memory import PhysicalPool
from gpu_service.experts.adaptive.placement import AdaptivePlacement
from gpu_service.experts.costs import ExpertCosts, RankMoe
from gpu_service.experts.factory import make_expert_client
from gpu_service.experts.fetching.fetcher import ExpertFetcher
from gpu_service.experts.fetching.make import FetchPlan, make_fetcher, plan_fetching
from gpu_service.experts.recorder import ExpertRecorder
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.resident.make import make_resident_experts, resident_bytes
from gpu_service.experts.resident.watch import ResidentWatch
from gpu_service.experts.servers import CheckedExperts
from gpu_service.experts.streaming.make import StreamingPlan, make_streamer, plan_streaming
from gpu_service.experts.streaming.opening import open_packed
from gpu_service.experts.streaming.ring import transfer_device
from gpu_service.experts.streaming.streamer import ExpertStreamer
from gpu_service.memory.plan import ExpertMemory
from gpu_service.parallel.group import RankGroup
from gpu_service.verify.self_test import ExpertsUnderTest, SelfTestReport, check_again, run_self_test
from moebius.config import MoebiusConfig
from moebius.experts.placement import make_placement
from moebius.models.config import ModelConfig
from moebius.models.served import read_served_geometry
from moebius.process.progress import phase


def rank_moe(config: MoebiusConfig, model: ModelConfig, group: RankGroup) -> RankMoe | None:
    """Returns this rank's part of the MoE layers; None for a model without them."""
    if not model.moe_layer_ids:
        return None
    geometry = read_served_geometry(config)
    held = stage_layers(model, group.parallel)
    layers = tuple(layer for layer in geometry.moe_layers if layer in held)
    return RankMoe(geometry, layers, ExpertCosts(geometry.num_experts, geometry.mean_top_k))


def rank_streaming(config: MoebiusConfig, moe: RankMoe | None, device: torch.device) -> StreamingPlan | None:
    """Returns what this rank streams of its layers; None: nothing."""
    return None if moe is None else plan_streaming(config, moe.geometry, moe.layers, device)


def expert_memory(
    config: MoebiusConfig,
    moe: RankMoe | None,
    dtype: torch.dtype,
    group: RankGroup,
    streaming: StreamingPlan | None = None,
) -> ExpertMemory:
    """What resident experts, the ring of streamed ones and fetch slots will take, before any is read."""
    if moe is None:
        return ExpertMemory(is_everything=True)
    ring = 0 if streaming is None else streaming.layout.nbytes + _fetch_bytes(config, moe, streaming)
    total = resident_bytes(config, moe.geometry, dtype, group.parallel, moe.layers)
    placement = make_placement(config.placement, moe.geometry)
    count = sum(len(placement.resident.get(layer, ())) for layer in moe.layers)
    return ExpertMemory(count, total // count if count else 0, ring, placement.covers_everything)


def _fetch_plan(config: MoebiusConfig, moe: RankMoe, streaming: StreamingPlan) -> FetchPlan | None:
    device_type = "cpu" if streaming.device_bytes is None else "cuda"
    sizes = device_type, streaming.device_bytes, streaming.layers_in_place
    return plan_fetching(config, moe.geometry, streaming.parts, *sizes)


def _fetch_bytes(config: MoebiusConfig, moe: RankMoe, streaming: StreamingPlan) -> int:
    plan = _fetch_plan(config, moe, streaming)
    return 0 if plan is None else plan.nbytes


def load_fetcher(
    config: MoebiusConfig,
    moe: RankMoe | None,
    streaming: StreamingPlan | None,
    streamer: ExpertStreamer | None,
    group: RankGroup,
) -> ExpertFetcher | None:
    """Returns the fetcher with its slots, made before graphs are captured, which hold its kernels; None:
    decode steps copy nothing. All ranks decide alike, and have the slots that the smallest has room for.
    """
    plan = None
    if moe is not None and streaming is not None and streamer is not None:
        plan = _fetch_plan(config, moe, streaming)
    num_slots = group.minimum("fetch slots", 0 if plan is None else plan.num_slots)
    fetcher = None
    if plan is not None and moe is not None and streamer is not None and num_slots:
        plan = replace(plan, num_slots=num_slots)
        fetcher = make_fetcher(plan, moe.geometry, streamer, moe.costs, group.parallel)
    return fetcher if group.minimum("fetcher", int(fetcher is not None)) else None


def load_streamer(
    config: MoebiusConfig,
    moe: RankMoe | None,
    streaming: StreamingPlan | None,
    device: torch.device,
    dtype: torch.dtype,
    resident: ResidentExperts | None,
    group: RankGroup,
) -> ExpertStreamer | None:
    """Returns the streamer with its ring; None: nothing is streamed. All ranks decide alike."""
    streamer = None
    if moe is not None and streaming is not None:
        shared = group.parallel, group.elementwise_largest, moe.costs
        streamer = make_streamer(config, streaming, moe.geometry, device, dtype, resident, *shared)
    return streamer if group.minimum("streamer", int(streamer is not None)) else None


def load_resident(
    config: MoebiusConfig,
    moe: RankMoe | None,
    device: torch.device,
    dtype: torch.dtype,
    group: RankGroup,
    known: Mapping[int, NDArray[np.int64]],
    pool: PhysicalPool | None = None,
    fingerprint: str = "",
) -> ResidentExperts | None:
    """Returns experts on this rank's device, by layer those that were chosen most where it is known; None:
    none.

    They are copied from where they are packed already: what an engine kept over its sleep, or the memory of
    expert servers that have loaded them. `pool`: as in `make_resident_experts`; `fingerprint`:
    `EngineIdentity.experts`.
    """
    kept = kept_experts(config, fingerprint, group.parallel)
    if moe is None:
        return None
    placed = make_placement(config.placement, moe.geometry).resident
    layers = [layer for layer in moe.layers if placed.get(layer)]
    parts = config, moe.geometry, device, dtype, group.parallel, moe.layers
    if kept is not None:
        with given_back(kept):
            return make_resident_experts(*parts, known, pool, kept)
    segments = open_packed(config.experts, layers, fingerprint, group.parallel)
    try:
        return make_resident_experts(*parts, known, pool, segments)
    finally:
        if segments is not None:
            segments.close()


def make_watch(
    config: MoebiusConfig, resident: ResidentExperts | None, group: RankGroup, undo: ExitStack
) -> ResidentWatch | None:
    """Over this rank's resident experts, not started yet; None: there are none. `undo` ends it.

    Only the first rank can have what was computed forgotten: another one that finds damage ends the group.
    """
    if resident is None:
        return None
    device = next(iter(resident.slots.values())).weights.device
    watch = ResidentWatch(
        resident,
        transfer_device(device),
        config.experts.verify_interval_s,
        (lambda reason: None) if group.parallel.rank == 0 else group.fail,
        stream_of(device),
    )
    undo.callback(watch.close)
    return watch


def connect_experts(
    config: MoebiusConfig,
    moe: RankMoe | None,
    group: RankGroup,
    undo: ExitStack,
    fingerprint: str,
    placement: AdaptivePlacement | None,
    fetcher: ExpertFetcher | None,
) -> CheckedExperts | None:
    """Returns a client whose servers are ready; None where no layer of any rank needs one. `undo` closes it.

    `fingerprint`: `EngineIdentity.experts`. `placement` and `fetcher` are to know when servers find an expert
    damaged.

    Ranks decide alike: they agree on failures through their clients, so all have one or none.
    """
    if moe is None:
        return None
    placed = make_placement(config.placement, moe.geometry).resident
    if all(len(placed.get(layer, ())) == moe.geometry.num_experts for layer in moe.geometry.moe_layers):
        return None
    device = resolve_device(config.gpu, local_rank(config.parallel))
    client = make_expert_client(config, moe.geometry, device, fingerprint)
    shared = group.experts(client, divides_rows=config.experts.expert_transport != "mailbox")
    assert shared is not None
    experts = CheckedExperts(shared)
    undo.callback(experts.close)
    with phase("waiting for expert servers"):
        experts.wait_ready(config.supervisor.ready_timeout_s)
    if placement is not None:
        placement.damages = experts.damages
    if placement is not None and fetcher is not None:
        placement.fetched_share = lambda: fetcher.share
    if fetcher is not None:
        fetcher.damages = experts.damages
    return experts


def check_experts(
    config: MoebiusConfig,
    moe: RankMoe | None,
    experts: CheckedExperts | None,
    resident: ResidentExperts | None,
    stream: DeviceStream,
    dtype: torch.dtype,
    group: RankGroup,
) -> SelfTestReport | None:
    """Returns the self-test: all ranks at once. Servers that return later have to pass it again.

    Raises SelfTestFailed.
    """
    if moe is None:
        return None
    tested = ExpertsUnderTest(moe.geometry, moe.layers, experts, resident, stream, dtype, group.parallel)
    with phase("testing experts"):
        report = run_self_test(config, tested)
    if experts is not None:
        experts.check_with(None if report is None else partial(check_again, tested, report))
    return report


def make_recorder(config: MoebiusConfig, moe: RankMoe | None, stream: DeviceStream) -> ExpertRecorder | None:
    """Ready to be started; started already where the settings say so, before graphs are captured."""
    if moe is None or not moe.layers:
        return None
    # A graph may be larger than a small token budget.
    gpu = config.gpu
    largest_graph = min(gpu.cuda_graph_max_batch_size, gpu.num_rows)
    max_rows = max(gpu.num_batched_tokens, largest_graph, gpu.prefill_chunk_max or 0)
    recorder = ExpertRecorder(moe.geometry, stream, max_rows, moe.layers)
    if config.placement.expert_recorder != "off":
        recorder.start(config.placement.expert_recorder)
    return recorder
