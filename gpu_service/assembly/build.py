"""From the configuration to a running engine on a real model; each concern's part is in `assembly`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
import torch

from gpu_service.assembly.ahead import AheadOfWake
from gpu_service.assembly.built import Built, model_info
from gpu_service.assembly.draft_model import load_draft_model
from gpu_service.assembly.elastic import EngineCache, make_engine_cache, make_page_supply, make_pool
from gpu_service.assembly.experts import (
    check_experts,
    connect_experts,
    expert_memory,
    load_fetcher,
    load_resident,
    load_streamer,
    make_recorder,
    make_watch,
    rank_moe,
    rank_streaming,
)
from gpu_service.assembly.identity import EngineIdentity, read_identity
from gpu_service.assembly.kept_experts import wait_for_memory
from gpu_service.assembly.kernels import install_kernels
from gpu_service.assembly.kv_memory import KvMemory, cache_shape, scheduler_limits
from gpu_service.assembly.kv_tiers import OPEN_TIERS, check_tiers, follow_prefixes, make_tiers
from gpu_service.assembly.placement import known_routing, make_adaptive, routing_record
from gpu_service.assembly.process import prepare_process
from gpu_service.assembly.rank_plan import has_room_to_stream, make_kv_memory, with_dense_weights
from gpu_service.assembly.speculation import (
    check_speculation,
    make_choice_samples,
    make_draft_pace,
    make_drafter,
    make_speculation,
)
from gpu_service.assembly.steps import (
    attention_that_runs,
    make_lane,
    make_lane_stream,
    make_step_runner,
    may_have_lane,
)
from gpu_service.assembly.tables import with_tables
from gpu_service.assembly.vision import Vision, load_vision, vision_memory
from gpu_service.assembly.warm_up import WarmUpGate, warm_up_tokens
from gpu_service.cache.fp8 import STORAGE_DTYPES
from gpu_service.cache.request_cache import make_request_cache
from gpu_service.cache.request_states import allocate_states
from gpu_service.cache.state_cache import StateSlots
from gpu_service.core.constraint import PREPARE, ConstraintCompiler, make_compiler
from gpu_service.core.interface import Emission, EngineObserver
from gpu_service.core.partition import rank_layers
from gpu_service.core.request import SchedulerLimits
from gpu_service.core.step import TokenPool
from gpu_service.device import TORCH_DTYPES
from gpu_service.device.stream import DeviceStream, device_stream
from gpu_service.engine.engine import Engine
from gpu_service.engine.input_builder import InputBuilder
from gpu_service.engine.late_graphs import LateGraphs
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.engine.prefill_lane import PrefillLane
from gpu_service.engine.step_check import MEASURE_AGAIN, StepCheck, make_check, report_failure
from gpu_service.engine.step_runner import StepRunner
from gpu_service.experts.adaptive.placement import AdaptivePlacement
from gpu_service.experts.costs import RankMoe
from gpu_service.experts.fetching.fetcher import ExpertFetcher
from gpu_service.experts.recorder import recorder_operations
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.streaming.make import StreamingPlan, open_streamer, profiled_stream
from gpu_service.experts.streaming.step import StreamedExperts
from gpu_service.experts.streaming.streamer import ExpertStreamer
from gpu_service.layers.deferral import deferral_rule
from gpu_service.loader.load import dense_form, load_weights
from gpu_service.memory.plan import DENSE, DRAFTING, GRAPHS, KV, LANE, RESIDENT, RING, STATES, VISION
from gpu_service.models.common import CausalLM
from gpu_service.models.compose import build_model
from gpu_service.ops.example_sizes import sizes_of
from gpu_service.parallel.group import RankGroup
from gpu_service.parallel.join import join_group
from gpu_service.scheduler.scheduler import Scheduler
from moebius.config import MoebiusConfig
from moebius.experts.rank_division import with_expert_split
from moebius.grammar.process import BudgetedCompiler
from moebius.models.config import ModelConfig
from moebius.models.registry import family_of
from moebius.models.served import read_served_model, with_drafts
from moebius.models.small_model import check_tokenizers
from moebius.process.limits import available_memory
from moebius.process.progress import phase

_log = structlog.get_logger(__name__)
__all__ = ["Built", "WarmUpGate", "build_engine", "model_info"]


def build_engine(
    config: MoebiusConfig,
    observer: EngineObserver,
    on_output: Callable[[Emission], None],
    ahead: AheadOfWake | None = None,
) -> Built:
    """Loads the model and waits for the expert servers. The engine thread is not started yet. `ahead`: of an
    engine that wakes.

    What raises half-way closes what was made: a thread left in a library would abort the process at its end.

    On a GPU everything happens on the stream that steps run on later: what torch's allocator holds belongs
    to the stream it was made on.
    """
    config = with_expert_split(with_drafts(config))
    with ThreadPoolExecutor(1, "identity") as beside:
        reading = beside.submit(read_identity, config)
        device = prepare_process(config)
        model_config = read_served_model(config)
        identity = reading.result()
    if model_config.dtype == "float16" and family_of(model_config.model_type).overflows_float16:
        _log.warning(
            "dtype float16: models of this family are known to exceed 65504, the largest number it holds; "
            "requests in which that happens end with an error, and bfloat16 has no such limit",
            model_type=model_config.model_type,
        )
    check_speculation(config.gpu, config.parallel)
    check_tokenizers(config.model.model, model_config)
    check_tiers(config)
    has_lane = may_have_lane(config, model_config, device)
    group = join_group(config, device, identity=identity.text, has_lane=has_lane)
    config = with_tables(config, model_config, [group.parallel], device, available_memory())
    layers = rank_layers(model_config, group.parallel)
    sizes = sizes_of(model_config, layers, STORAGE_DTYPES[config.gpu.kv_cache_dtype])
    shape = cache_shape(config.gpu, model_config, layers, device)
    install_kernels(config, device, shape, sizes)
    stream = device_stream(device)
    with stream.active(), ExitStack() as undo:
        built = _assemble(config, model_config, identity, group, stream, observer, on_output, undo, ahead)
        identity.confirm()
        undo.pop_all()
        return replace(built, identity=identity.parts)


def _assemble(
    config: MoebiusConfig,
    model_config: ModelConfig,
    identity: EngineIdentity,
    group: RankGroup,
    stream: DeviceStream,
    observer: EngineObserver,
    on_output: Callable[[Emission], None],
    undo: ExitStack,
    ahead: AheadOfWake | None,
) -> Built:
    device, dtype, fingerprint = stream.device, TORCH_DTYPES[model_config.dtype], identity.experts
    compiler = _compiler(model_config, identity, device, ahead)
    model, moe = _shaped_model(config, model_config, device, group), rank_moe(config, model_config, group)
    memory, config, streaming = _plan_memory(config, model, moe, group)
    gpu, shape = config.gpu, cache_shape(config.gpu, model.config, model.rank_layers, device)
    loaded = _load(config, model, model_config, fingerprint, moe, streaming, group, memory, undo)
    vision, resident, streamer, adaptive, fetcher = loaded
    # Before the pool is sized: a CPU allocates counts at first use, a GPU all of them now.
    sampler = group.sampler(model_config.vocab_size, device, gpu.num_seqs if _is_gpu(device) else 0)
    states = allocate_states(gpu, model.rank_layers, model.dtype, device)
    memory.reached(STATES)
    profiled = profiled_stream(streaming, streamer)
    lane_stream = None if profiled is None else make_lane_stream(config, device, group.parallel)
    num_pages = _num_pages(memory, model, moe, resident, states, profiled, lane_stream, group)
    kv = make_engine_cache(config, shape, model_config, num_pages, adaptive)
    limits, kv_cache = scheduler_limits(gpu, model_config, kv.num_pages), kv.cache
    memory.reached(KV)
    experts = connect_experts(config, moe, group, undo, fingerprint, adaptive, fetcher)
    self_test = check_experts(config, moe, experts, resident, stream, dtype, group)
    runner = group.model_runner(
        model,
        kv_cache,
        attention_that_runs(gpu, model.rank_layers, kv_cache, limits),
        experts,
        TokenPool(limits.max_num_seqs, limits.context_limit + 1, device),
        sampler,
        resident=resident,
        streamer=streamer,
        recorder=make_recorder(config, moe, stream),
        encoder=None if vision is None else vision.encoder,
        has_mrope=model_config.has_mrope,
        states=states,
        watch=make_watch(config, resident, group, undo),
        is_float16=dtype == torch.float16,
        placement=adaptive,
        fetcher=fetcher,
    )
    steps, lane = _step_runners(config, runner, moe, stream, lane_stream, limits, group, memory, undo, ahead)
    withdraw, close = (_nothing, _nothing) if fetcher is None else (fetcher.withdraw, fetcher.close)
    open_streamer(config, streaming, streamer, experts, stream, dtype, undo, fingerprint, withdraw)
    undo.callback(close)
    check = make_check(observer, config, moe, runner, stream, dtype)
    parts = identity, group, runner, steps, lane, limits, kv, stream, check, on_output, compiler, memory
    engine = _engine(config, *parts)
    return Built(
        *(engine, group, experts, runner.recorder, memory, model_config, kv.num_pages, limits.context_limit),
        warm_up_tokens(device, gpu.num_batched_tokens, limits.context_limit),
        *(self_test, vision, streamer, adaptive, resident, check, runner.watch, compiler),
        *(fetcher, kv_cache.nbytes),
    )


def _nothing() -> None:
    """There are no copies of experts to withdraw or to end."""


def _compiler(
    model: ModelConfig, identity: EngineIdentity, device: torch.device, ahead: AheadOfWake | None
) -> ConstraintCompiler | None:
    found = None if ahead is None else ahead.compiler(model, identity.parts)
    if found is not None:
        return found
    confirm = None if _is_gpu(device) else identity.confirm
    return make_compiler(Path(identity.model), model.vocab_size, model.eos_token_ids, confirm)


def _shaped_model(
    config: MoebiusConfig, model_config: ModelConfig, device: torch.device, group: RankGroup
) -> CausalLM:
    """Returns this rank's part, without weights."""
    rule = deferral_rule(config, model_config)
    model = build_model(model_config, device=device, parallel=group.parallel)
    model.model.deferral = rule
    return model


def _step_runners(
    config: MoebiusConfig,
    runner: ModelRunner,
    moe: RankMoe | None,
    stream: DeviceStream,
    lane_stream: DeviceStream | None,
    limits: SchedulerLimits,
    group: RankGroup,
    memory: KvMemory,
    undo: ExitStack,
    ahead: AheadOfWake | None,
) -> tuple[StepRunner, PrefillLane | None]:
    """Returns the step runners of the main lane and, where there is one, of the prefill lane; residents are
    watched from then on.
    """
    assert isinstance(runner.model, CausalLM)
    if runner.experts is None and runner.model.model.deferral is not None:
        _log.warning("defer_experts changes answers and saves no time: no layer asks an expert server")
    vocab_size = runner.model.config.vocab_size
    runner.samples = make_choice_samples(config.gpu, moe, limits, stream.device)
    runner.drafter = make_drafter(config.gpu, runner, memory.drafting, limits, group.parallel)
    later = ahead is not None and _may_capture_later(config, memory, group)
    steps = make_step_runner(config, runner, stream, limits, vocab_size, group.parallel, later)
    undo.callback(steps.close)
    memory.reached(GRAPHS)
    lane = make_lane(config, runner, lane_stream, stream, limits, group)
    if lane is not None:
        memory.reached(LANE)
    if runner.watch is not None:
        runner.watch.start()
    return steps, lane


def _may_capture_later(config: MoebiusConfig, memory: KvMemory, group: RankGroup) -> bool:
    """Returns whether graphs of steps with prompts may be captured once the engine serves.

    Not of several ranks: one that cannot capture would leave the others waiting in a collective. A recorder
    that runs from the start is to be in all graphs, and where the planned memory is not free, a start says so
    before it serves.
    """
    records = config.placement.expert_recorder != "off"
    return group.parallel.size == 1 and not records and memory.has_room(GRAPHS)


@phase("planning memory")
def _plan_memory(
    config: MoebiusConfig, model: CausalLM, moe: RankMoe | None, group: RankGroup
) -> tuple[KvMemory, MoebiusConfig, StreamingPlan | None]:
    """Plans memory before anything is loaded; also returns the settings with what is chosen, and what will be
    streamed.
    """
    device, dtype = model.device, TORCH_DTYPES[model.config.dtype]
    streaming = rank_streaming(config, moe, device)
    held = expert_memory(config, moe, dtype, group, streaming)
    vision = vision_memory(config, model.config)
    config = with_dense_weights(config, model, held, group, device, vision)
    fetches = streaming is not None and held.ring_bytes > streaming.layout.nbytes
    if fetches and not has_room_to_stream(config, model, held, group, device, vision):
        _log.info("decode steps fetch no experts: the GPU has no room for their slots")
        gpu = config.gpu.model_copy(update={"fetch_experts": "off"})
        config = config.model_copy(update={"gpu": gpu})
        held = expert_memory(config, moe, dtype, group, streaming)
    if config.gpu.prefill_experts == "auto" and not has_room_to_stream(
        config, model, held, group, device, vision
    ):
        _log.warning(
            "experts are not streamed: the GPU has no room for their ring; `prefill_experts: stream` says "
            "what would make room",
            ring_gib=round(held.ring_bytes / 2**30, 2),
        )
        streaming, held = None, replace(held, ring_bytes=0)
    return *make_kv_memory(config, model, held, group, device, vision), streaming


def _load(
    config: MoebiusConfig,
    model: CausalLM,
    model_config: ModelConfig,
    fingerprint: str,
    moe: RankMoe | None,
    streaming: StreamingPlan | None,
    group: RankGroup,
    memory: KvMemory,
    undo: ExitStack,
) -> tuple[
    Vision | None,
    ResidentExperts | None,
    ExpertStreamer | None,
    AdaptivePlacement | None,
    ExpertFetcher | None,
]:
    """Everything that is read from the checkpoint, to the model's device, and room for what is copied later.

    `undo` closes what moves experts in and out of it.
    """
    device, dtype = model.device, TORCH_DTYPES[model_config.dtype]
    vision = load_vision(config, model_config, device)
    memory.reached(VISION)
    in_files = config.model.embedding_tables == "disk"
    load_weights(model, config.model.model, dense_form(config.model, device), in_files=in_files)
    memory.reached(DENSE)
    memory.drafting = load_draft_model(config, model_config, device)
    memory.reached(DRAFTING)
    record = routing_record(config, moe, group, device, fingerprint)
    known = {} if moe is None else known_routing(config, moe, record, group)
    shape = cache_shape(config.gpu, model.config, model.rank_layers, device)
    memory.pool = make_pool(config, shape, group, record is not None)
    resident = load_resident(config, moe, device, dtype, group, known, memory.pool, fingerprint)
    if memory.pool is not None and not memory.pool.size:  # no layer's memory moves
        memory.pool = None
    memory.reached(RESIDENT)
    streamer = load_streamer(config, moe, streaming, device, dtype, resident, group)
    fetcher = load_fetcher(config, moe, streaming, streamer, group)
    memory.reached(RING)
    adaptive = make_adaptive(moe, resident, streamer, record, known, group)
    if adaptive is not None:
        undo.callback(adaptive.close)
    return vision, resident, streamer, adaptive, fetcher


def _num_pages(
    memory: KvMemory,
    model: CausalLM,
    moe: RankMoe | None,
    resident: ResidentExperts | None,
    states: StateSlots | None,
    streamed: StreamedExperts | None,
    lane_stream: DeviceStream | None,
    group: RankGroup,
) -> int:
    """Returns the number of pages of the KV pool, which is the same on all ranks."""
    geometry = None if moe is None else moe.geometry
    wanted = memory.num_pages(model, geometry, resident, states, streamed, lane_stream)
    return group.minimum("num_pages", wanted)


def _engine(
    config: MoebiusConfig,
    identity: EngineIdentity,
    group: RankGroup,
    runner: ModelRunner,
    steps: StepRunner,
    lane: PrefillLane | None,
    limits: SchedulerLimits,
    kv: EngineCache,
    stream: DeviceStream,
    check: StepCheck,
    on_output: Callable[[Emission], None],
    compiler: ConstraintCompiler | None,
    memory: KvMemory,
) -> Engine:
    """Returns scheduler and loops around what runs the steps."""
    gpu, recorder = config.gpu, runner.recorder
    operations = {} if recorder is None else dict(recorder_operations(recorder))
    if compiler is not None:
        operations[PREPARE] = compiler.prepare

    def measure_again(_: str) -> None:
        engine.settle()
        check.measure_again()

    operations[MEASURE_AGAIN] = measure_again
    late = LateGraphs(steps, lambda: engine.settle(), partial(memory.later, GRAPHS))
    operations |= late.operations
    wait_for_memory(group)
    cache, inbox = make_request_cache(gpu, runner.states, kv.num_pages, kv.absent), group.inbox(compiler)
    operations |= make_tiers(config, identity.text, cache, kv.cache, runner.states, inbox, check, group)
    follow_prefixes(config, identity.text, cache, group)
    operations[OPEN_TIERS] = lambda _: cache.open_tiers()
    scheduler = Scheduler(limits, cache, make_speculation(gpu, limits, runner))
    scheduler.supply = make_page_supply(kv, cache, runner.placement, stream, check)
    builder = InputBuilder(limits, gpu.page_size, has_mrope=runner.has_mrope)
    engine = Engine(
        scheduler,
        builder,
        group.guard(steps),
        on_output,
        observer=check,
        overlap=gpu.overlap_scheduling,
        max_waiting=gpu.max_waiting_requests,
        inbox=inbox,
        operations=operations,
        lane=lane,
        max_added_s=None if gpu.max_itl_ms is None else gpu.max_itl_ms / 1e3,
        draft_pace=make_draft_pace(gpu),
    )
    if steps.may_capture:
        engine.between_steps = late.due
    if group.parallel.rank == 0:
        check.on_too_slow = lambda: engine.call(MEASURE_AGAIN).add_done_callback(report_failure)
    if compiler is not None and group.parallel.rank == 0:
        compiler.vet = BudgetedCompiler().compiled
        if group.parallel.size > 1:
            compiler.announce = partial(engine.call, PREPARE)
    return engine


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
