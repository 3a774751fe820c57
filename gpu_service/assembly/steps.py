"""Who runs the steps: a stream of the host, or the device with graphs where they can be captured."""

from __future__ import annotations

import structlog
import torch

from gpu_service.attention.registry import Attention, make_attention
from gpu_service.attention.warm_up import warm_up_attention
from gpu_service.cache.kv_cache import PagedCache
from gpu_service.core.parallel import ParallelContext
from gpu_service.core.request import SchedulerLimits
from gpu_service.device.graphs import CudaGraphs, GraphBackend, graph_sizes
from gpu_service.device.stream import CudaDeviceStream, DeviceStream, Uploader
from gpu_service.engine.decode_graphs import DecodeGraphs
from gpu_service.engine.device_runner import DeviceLane, DeviceRunner
from gpu_service.engine.host_runner import CpuStream, HostRunner, InlineStream
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.engine.pacing import LanePace
from gpu_service.engine.prefill_lane import PrefillLane
from gpu_service.engine.prompt_graphs import PromptGraphs
from gpu_service.engine.step_runner import StepRunner
from gpu_service.experts.streaming.make import streams
from gpu_service.memory.plan import has_lane, prompt_sizes
from gpu_service.models.common import CausalLM
from gpu_service.parallel.group import RankGroup
from gpu_service.speculation.draft_model import ModelDrafter
from gpu_service.speculation.mtp import MtpDrafter
from moebius.config import GpuConfig, MoebiusConfig
from moebius.experts.placement import make_placement
from moebius.models.config import ModelConfig
from moebius.models.layers.layer import Layers, divided
from moebius.models.served import read_served_geometry
from moebius.process.progress import phase

_log = structlog.get_logger(__name__)


def make_step_runner(
    config: MoebiusConfig,
    runner: ModelRunner,
    stream: DeviceStream,
    limits: SchedulerLimits,
    vocab_size: int,
    parallel: ParallelContext,
    captures_later: bool = False,
) -> StepRunner:
    """On a GPU everything is warmed up and captured when it returns: expert servers must be ready.

    `captures_later`: steps with prompts are captured by `LateGraphs` instead.
    """
    recovery_s = config.experts.expert_recovery_s
    if not isinstance(stream, CudaDeviceStream):
        host = CpuStream() if config.gpu.overlap_scheduling else InlineStream()
        return HostRunner(runner, host, recovery_s)
    uploader = Uploader(stream)
    graphs = prompts = None
    reason = graphs_unsupported_reason(config, runner)
    if reason:
        _log.warning("decode steps are not captured in graphs", because=reason)
    else:
        backend = CudaGraphs(stream)
        prompts = prompt_graphs(config.gpu, runner, backend, uploader, parallel)
        graphs = DecodeGraphs(
            runner,
            backend,
            uploader,
            sizes=graph_sizes(min(config.gpu.cuda_graph_max_batch_size, config.gpu.num_rows)),
            max_pages=-(-limits.context_limit // config.gpu.page_size),
            vocab_size=vocab_size if parallel.is_last_stage else 0,
        )
    steps = DeviceRunner(
        runner,
        stream,
        uploader=uploader,
        graphs=graphs,
        prompt_graphs=prompts,
        recovery_timeout_s=recovery_s,
        captures_later=captures_later,
    )
    try:
        with phase("warming attention up"):
            warm_up_attention(runner.attention, limits.context_limit)
        steps.prepare()
    except BaseException:
        steps.close()
        raise
    return steps


def prompt_graphs(
    gpu: GpuConfig, runner: ModelRunner, backend: GraphBackend, uploader: Uploader, parallel: ParallelContext
) -> PromptGraphs | None:
    """Returns what will capture steps with prompts; None: they run without graphs."""
    moves = runner.experts, runner.streamer, runner.fetcher
    assert isinstance(runner.model, CausalLM)
    sizes = prompt_sizes(runner.model.config, gpu, parallel, all(part is None for part in moves))
    return PromptGraphs(runner, backend, uploader, sizes=sizes) if sizes else None


def may_have_lane(config: MoebiusConfig, model: ModelConfig, device: torch.device) -> bool:
    """Whether ranks may have a prefill lane; what fits on the device is not known yet.

    Raises UserError as `streams`, and for a placement that cannot be.
    """
    chunk, parallel = config.gpu.prefill_chunk_max, config.parallel
    is_longer = chunk is None or chunk > config.gpu.num_batched_tokens
    if parallel.pipeline_parallel_size > 1 or not (is_longer and model.moe_layer_ids):
        return False
    if parallel.tensor_parallel_size > 1 and config.gpu.prefill_lane_min_tokens is None:
        return False
    placement = make_placement(config.placement, read_served_geometry(config))
    return streams(config, device.type) and not placement.covers_everything


def make_lane_stream(
    config: MoebiusConfig, device: torch.device, parallel: ParallelContext
) -> DeviceStream | None:
    """Returns the stream of the prefill lane; None: there is none.

    It is made before memory is measured, which includes the stream's own.
    """
    if device.type != "cuda" or not has_lane(config.gpu, parallel):
        return None
    return CudaDeviceStream(device)


def make_lane(
    config: MoebiusConfig,
    runner: ModelRunner,
    stream: DeviceStream | None,
    main: DeviceStream,
    limits: SchedulerLimits,
    group: RankGroup,
) -> PrefillLane | None:
    """Returns a second step in flight for long prompts: `runner` again, with all that steps write to of its
    own.

    None: nothing can be streamed, or there is no `stream`.
    """
    streamer, cache = runner.streamer, runner.kv_cache
    if stream is None or streamer is None:
        return None
    gpu, model = config.gpu, runner.model
    assert isinstance(model, CausalLM)
    with stream.active():
        attention = attention_that_runs(gpu, model.rank_layers, cache, limits)
        drafter = runner.drafter
        apart = drafts_attention(gpu, model, cache, limits)
        if isinstance(drafter, ModelDrafter | MtpDrafter) and apart is not None:
            drafter = drafter.with_attention(apart)
    own = group.lane_runner(
        model,
        cache,
        attention,
        None,
        runner.token_pool,
        runner.sampler.for_another_stream(),
        resident=runner.resident,
        streamer=streamer,
        has_mrope=runner.has_mrope,
        states=runner.states,
        watch=runner.watch,
        is_float16=runner.is_float16,
        drafter=drafter,
    )
    recorder = runner.recorder
    lane = DeviceLane(
        own,
        stream,
        main,
        # What the recorder gathers layer by layer is one step's.
        is_ready=lambda: streamer.can_stream and not (recorder is not None and recorder.is_recording),
        min_tokens=lambda: lane_min_tokens(gpu, streamer.break_even_rows),
        step_tokens=lambda wait_s: max(
            gpu.num_batched_tokens, streamer.chooser.step_tokens(limits.prefill_chunk_max, wait_s)
        ),
        guard=group.guard,
    )
    group.open_lane(stream)
    bound = None if gpu.max_itl_ms is None else gpu.max_itl_ms / 1e3
    _log.info("long prompts have a step of their own", max_tokens=limits.prefill_chunk_max)
    return PrefillLane(lane, LanePace(bound))


def lane_min_tokens(gpu: GpuConfig, break_even_rows: int) -> tuple[int, int]:
    """Returns the bounds as `LaneRunner.min_tokens` does: while no other request runs, link and servers
    together take what fits one usual step.
    """
    if gpu.prefill_lane_min_tokens is not None:
        return gpu.prefill_lane_min_tokens, gpu.prefill_lane_min_tokens
    return break_even_rows, max(break_even_rows, gpu.num_batched_tokens + 1)


def attention_that_runs(
    gpu: GpuConfig, rank_layers: Layers, cache: PagedCache, limits: SchedulerLimits
) -> Attention:
    """Returns the best backend of those that the configuration allows whose kernels run on this device.

    Every kind of step is tried, with sequences as long as the service takes. Raises UserError as
    `attention.registry.make_attention`.
    """

    def try_out(attention: Attention) -> None:
        with phase("trying attention kernels"):
            warm_up_attention(attention, limits.context_limit)

    return make_attention(rank_layers, cache, cache.device, gpu.attention_backend, try_out)


def drafts_attention(
    gpu: GpuConfig, model: CausalLM, cache: PagedCache, limits: SchedulerLimits
) -> Attention | None:
    """Returns the same for what drafts with a cache beside the model's: a draft model, or an EAGLE-3 head."""
    if cache.beside is None:
        return None
    small, (_, apart) = model.config.small_model, divided(model.rank_layers)
    return attention_that_runs(gpu, apart if small is None else small.config.layers, cache.beside, limits)


def graphs_unsupported_reason(config: MoebiusConfig, runner: ModelRunner) -> str:
    """Returns why decode steps cannot be captured; empty: they can."""
    if not config.gpu.cuda_graphs:
        return "cuda_graphs is off"
    if not runner.attention.captures:
        return f"{type(runner.attention).__name__} cannot be captured"
    if runner.experts is not None and not runner.experts.is_device_driven:
        return f"{type(runner.experts).__name__} is driven by the host"
    if runner.resident is not None and not runner.resident.captures:
        return "the kernels of resident experts cannot be captured"
    return ""
