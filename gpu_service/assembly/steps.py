"""Who runs the steps: a stream of the host, or the device with graphs where they can be captured."""

from __future__ import annotations

import structlog

from gpu_service.attention.registry import Attention, make_attention
from gpu_service.attention.warm_up import warm_up_attention
from gpu_service.cache.kv_cache import PagedCache
from gpu_service.device.graphs import CudaGraphs
from gpu_service.device.stream import CudaDeviceStream, DeviceStream, Uploader
from gpu_service.engine.decode_graphs import DecodeGraphs, graph_sizes
from gpu_service.engine.device_runner import DeviceRunner
from gpu_service.engine.host_runner import CpuStream, HostRunner, InlineStream
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.engine.step_runner import StepRunner
from gpu_service.parallel.context import ParallelContext
from gpu_service.scheduler.limits import SchedulerLimits
from moebius.config import GpuConfig, MoebiusConfig
from moebius.models.config import ModelConfig
from moebius.progress import phase

_log = structlog.get_logger(__name__)


def make_step_runner(
    config: MoebiusConfig,
    runner: ModelRunner,
    stream: DeviceStream,
    limits: SchedulerLimits,
    vocab_size: int,
    parallel: ParallelContext,
) -> StepRunner:
    """On a GPU everything is warmed up and captured when it returns: expert servers must be ready."""
    recovery_s = config.experts.expert_recovery_s
    if not isinstance(stream, CudaDeviceStream):
        host = CpuStream() if config.gpu.overlap_scheduling else InlineStream()
        return HostRunner(runner, host, recovery_s)
    uploader = Uploader(stream)
    graphs = None
    reason = graphs_unsupported_reason(config, runner)
    if reason:
        _log.warning("decode steps are not captured in graphs", because=reason)
    else:
        graphs = DecodeGraphs(
            runner,
            CudaGraphs(stream),
            uploader,
            sizes=graph_sizes(min(config.gpu.cuda_graph_max_batch_size, limits.max_num_seqs)),
            max_pages=-(-limits.context_limit // config.gpu.page_size),
            vocab_size=vocab_size if parallel.is_last_stage else 0,
        )
    steps = DeviceRunner(runner, stream, uploader=uploader, graphs=graphs, recovery_timeout_s=recovery_s)
    try:
        warm_up_attention(runner.attention, limits.context_limit)
        steps.prepare()
    except BaseException:
        steps.close()
        raise
    return steps


def attention_that_runs(
    gpu: GpuConfig, rank_config: ModelConfig, cache: PagedCache, limits: SchedulerLimits
) -> Attention:
    """Of the backends that the configuration allows, the best whose kernels run on this device.

    Every kind of step is tried, with sequences as long as the service takes. Raises UserError as
    `attention.registry.make_attention`.
    """

    def try_out(attention: Attention) -> None:
        with phase("trying attention kernels"):
            warm_up_attention(attention, limits.context_limit)

    return make_attention(rank_config, cache, cache.device, gpu.attention_backend, try_out)


def graphs_unsupported_reason(config: MoebiusConfig, runner: ModelRunner) -> str:
    """Why decode steps can not be captured; empty: they can."""
    if not config.gpu.cuda_graphs:
        return "cuda_graphs is off"
    if not runner.attention.captures:
        return f"{type(runner.attention).__name__} can not be captured"
    if runner.experts is not None and not runner.experts.is_device_driven:
        return f"{type(runner.experts).__name__} is driven by the host"
    if runner.resident is not None and not runner.resident.captures:
        return "the kernels of resident experts can not be captured"
    return ""
