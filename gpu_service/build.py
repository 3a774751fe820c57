"""From the configuration to a running engine on a real model."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from gpu_service.attention.registry import make_attention
from gpu_service.cache.kv_cache import KVCache, bytes_per_page
from gpu_service.cache.page_pool import PagePool
from gpu_service.cache.radix_cache import RadixCache
from gpu_service.cache.request_cache import RequestCache
from gpu_service.engine.engine import Engine
from gpu_service.engine.input_builder import InputBuilder
from gpu_service.engine.outputs import EngineObserver, OutputDelta
from gpu_service.engine.stream import CpuStream, InlineStream
from gpu_service.engine.stream_runner import StreamRunner
from gpu_service.engine.token_pool import TokenPool
from gpu_service.experts.client import ExpertClient
from gpu_service.experts.factory import make_expert_client
from gpu_service.loader.load import load_weights
from gpu_service.model_config import ModelConfig, ModelOverrides
from gpu_service.models.registry import build_model
from gpu_service.parallel.group import RankGroup
from gpu_service.parallel.join import join_group
from gpu_service.request import Request, SamplingParams
from gpu_service.scheduler.limits import SchedulerLimits
from gpu_service.scheduler.scheduler import Scheduler
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.config import GpuConfig, MoebiusConfig
from moebius.errors import UserError
from protos import engine_pb2 as pb

_log = structlog.get_logger(__name__)
# A CPU shares its memory with the expert servers, so the pool does not take what is left.
_CPU_KV_CACHE_GIB = 1.0


@dataclass(frozen=True, slots=True)
class Built:
    """Everything `main` serves and closes; filled by `build_engine`."""

    engine: Engine
    group: RankGroup
    experts: ExpertClient | None
    model_config: ModelConfig
    num_pages: int
    context_limit: int

    def close(self) -> None:
        """Ends every request, then the engine, its experts and its rank's part in the group, in order."""
        self.engine.stop()
        if self.experts is not None:
            self.experts.close()
        self.group.close()


def build_engine(
    config: MoebiusConfig, observer: EngineObserver, on_output: Callable[[list[OutputDelta]], None]
) -> Built:
    """Loads the model and waits for the expert servers. The engine thread is not started yet."""
    device = _device(config.gpu)
    _set_threads(config.gpu)
    group = join_group(config, device)
    overrides = ModelOverrides(config.model.top_k, config.model.max_model_len, config.model.dtype)
    model_config = ModelConfig.from_dir(config.model.model, overrides)
    model = build_model(model_config, device=device, parallel=group.parallel)
    load_weights(model, config.model.model)
    dtype = model_config.torch_dtype
    rank_config = model.rank_config
    num_pages = group.minimum("num_pages", _num_pages(config.gpu, rank_config, dtype))
    limits = _limits(config.gpu, model_config, num_pages)
    kv_cache = KVCache(rank_config, num_pages, config.gpu.page_size, dtype, device)
    experts = group.experts(_experts(config, model_config), config.experts.expert_transport != "mailbox")
    runner = group.model_runner(
        model,
        kv_cache,
        make_attention(rank_config, kv_cache, device),
        experts,
        TokenPool(limits.max_num_seqs, limits.context_limit + 1, device),
        group.sampler(model_config.vocab_size, device),
    )
    stream = CpuStream() if config.gpu.overlap_scheduling else InlineStream()
    tree = RadixCache(config.gpu.page_size)
    cache = RequestCache(PagePool(num_pages), tree, config.gpu.prefix_caching)
    engine = Engine(
        Scheduler(limits, cache),
        InputBuilder(limits, config.gpu.page_size),
        group.guard(StreamRunner(runner, stream, config.experts.expert_recovery_s)),
        on_output,
        observer=observer,
        overlap=config.gpu.overlap_scheduling,
        max_waiting=config.gpu.max_waiting_requests,
        inbox=group.inbox(),
    )
    return Built(engine, group, experts, model_config, num_pages, limits.context_limit)


def warm_up(engine: Engine, vocab_size: int) -> Request:
    """One sampled request through every part, before readiness. Returns it; its end tells the caller."""
    prompt = [token % vocab_size for token in range(1, 5)]
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=2, ignore_eos=True)
    request = Request("warm-up", prompt, params, cache_namespace="warm-up")
    engine.submit([request])
    return request


class WarmUpGate:
    """An output callback that waits for the warm-up's end, then passes everything on."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._target: Callable[[list[OutputDelta]], None] | None = None

    def on_output(self, deltas: list[OutputDelta]) -> None:
        """Called by the engine thread."""
        if self._target is not None:
            self._target(deltas)
        elif any(delta.finish_reason is not None for delta in deltas):
            self._ended.set()

    def run(self, engine: Engine, vocab_size: int, timeout_s: float) -> None:
        """Raises UserError when the warm-up request does not end well."""
        request = warm_up(engine, vocab_size)
        if not self._ended.wait(timeout_s):
            raise UserError(f"the warm-up step did not end within {timeout_s:.0f} s")
        if request.error_message:
            raise UserError(f"the warm-up step failed: {request.error_message}")
        engine.flush().result(timeout_s)

    def open(self, target: Callable[[list[OutputDelta]], None]) -> None:
        """From now on outputs go to `target`."""
        self._target = target


def model_info(config: MoebiusConfig, built: Built) -> pb.GetModelInfoResponse:
    """Static facts for clients."""
    directory = Path(config.model.model)
    model = built.model_config
    raw = json.loads((directory / "config.json").read_text())
    defaults = directory / "generation_config.json"
    generation = json.loads(defaults.read_text()) if defaults.exists() else {}
    kept = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    sampling = {key: generation[key] for key in kept if generation.get(key) is not None}
    pad = raw.get("pad_token_id")
    return pb.GetModelInfoResponse(
        model_path=str(directory),
        is_generation=True,
        max_context_length=built.context_limit,
        vocab_size=model.vocab_size,
        served_model_name=config.model.served_model_name or directory.resolve().name,
        tokenizer_path=str(directory),
        model_type=model.model_type,
        architectures=raw.get("architectures") or [],
        eos_token_ids=model.eos_token_ids,
        pad_token_id=-1 if pad is None else pad,
        bos_token_id=-1 if model.bos_token_id is None else model.bos_token_id,
        max_req_input_len=built.context_limit - 1,
        default_sampling_params_json=json.dumps(sampling),
    )


def _device(gpu: GpuConfig) -> torch.device:
    if gpu.device == "cuda":
        raise UserError("device: 'cuda' has no attention backend in this version; allowed: auto, cpu")
    return torch.device("cpu")


def _set_threads(gpu: GpuConfig) -> None:
    """Leaves a core to the engine's and the event loop's threads where there is more than one."""
    allowed = len(os.sched_getaffinity(0))
    torch.set_num_threads(gpu.gpu_threads or max(1, allowed - 1))


def _num_pages(gpu: GpuConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    if gpu.num_pages is not None:
        return gpu.num_pages
    per_page = bytes_per_page(model, gpu.page_size, dtype)
    # More pages than all slots at full length can use would only cost memory.
    useful = 1 + 2 * gpu.max_num_seqs * -(-model.max_model_len // gpu.page_size)
    kv_cache_gib = _CPU_KV_CACHE_GIB if gpu.kv_cache_gib is None else gpu.kv_cache_gib
    pages = min(int(kv_cache_gib * 2**30) // per_page, useful)
    if pages < 2:
        raise UserError(f"kv_cache_gib: {kv_cache_gib} is too small; two pages take {2 * per_page} bytes")
    return pages


def _limits(gpu: GpuConfig, model: ModelConfig, num_pages: int) -> SchedulerLimits:
    pool_tokens = (num_pages - 1) * gpu.page_size
    context_limit = min(model.max_model_len, pool_tokens)
    if context_limit < model.max_model_len:
        _log.warning(
            "the KV pool is smaller than one context of the model; longer requests are refused",
            context_limit=context_limit,
            max_model_len=model.max_model_len,
        )
    return SchedulerLimits(
        max_num_seqs=gpu.max_num_seqs,
        max_num_batched_tokens=gpu.max_num_batched_tokens,
        context_limit=context_limit,
        watermark_pages=max(1, num_pages // 100),
        eos_token_ids=frozenset(model.eos_token_ids),
    )


def _experts(config: MoebiusConfig, model: ModelConfig) -> ExpertClient | None:
    if not model.moe_layer_ids:
        return None
    geometry = MoeGeometry.from_config(config.model.model, config.model.top_k)
    experts = make_expert_client(config, geometry)
    experts.wait_ready(config.supervisor.ready_timeout_s)
    return experts
