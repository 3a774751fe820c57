"""How many KV pages an engine gets: planned and measured on a GPU, a fixed size on a CPU."""

from __future__ import annotations

import gc
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from gpu_service.attention.registry import make_attention
from gpu_service.cache.elastic_pages import ElasticPages
from gpu_service.cache.fp8 import E4M3
from gpu_service.cache.kv_cache import Allocate, PagedCache, make_cache, page_bytes, zeros
from gpu_service.cache.state_cache import StateSlots
from gpu_service.core.request import SchedulerLimits
from gpu_service.device import TORCH_DTYPES
from gpu_service.device.stream import DeviceStream, stream_of
from gpu_service.device.virtual_memory import PhysicalPool
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.streaming.step import StreamedExperts
from gpu_service.memory.device_memory import make_device_memory
from gpu_service.memory.ledger import MemoryLedger
from gpu_service.memory.plan import LANE, StepSize, size_kv_pool, useful_pages
from gpu_service.memory.profile import profile_activations
from gpu_service.models.common import CausalLM
from gpu_service.speculation.draft_model import DraftModel
from gpu_service.speculation.profiled import WithHeads
from moebius.config import GpuConfig, MoebiusConfig
from moebius.errors import UserError
from moebius.models.config import ModelConfig
from moebius.models.geometry import MoeGeometry
from moebius.models.layers.layer import Layers, mixers
from moebius.process.progress import phase

_log = structlog.get_logger(__name__)
# A CPU shares its memory with the expert servers, so the pool does not take what is left.
_CPU_KV_CACHE_GIB = 1.0
# So that an echoed prompt still computes chunks worth a step, however small the model below its head is.
_MOST_SCORED_COST = 8


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Form of this rank's KV pages; filled by `cache_shape`."""

    layers: Layers  # the rank's own
    page_size: int
    dtype: torch.dtype
    storage_dtype: torch.dtype
    device: torch.device
    beside: Layers = ()  # A draft model's, which every rank has whole.

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        layers = (*self.layers, *self.beside)
        return page_bytes(layers, self.page_size, self.storage_dtype, self.dtype)

    def attention_modules(self) -> list[Any]:
        """Returns what FlashInfer has to compile for attention over such pages. Imports FlashInfer."""
        from gpu_service.attention.flashinfer_plan import attention_modules

        types = self.dtype, self.storage_dtype
        found = attention_modules(self.layers, *types)
        if self.beside:
            found += attention_modules(self.beside, *types)
        return list({module.name: module for module in found}.values()) if self.beside else found

    def make(self, num_pages: int, allocate: Allocate = zeros) -> PagedCache:
        """Allocates a cache of `num_pages` pages."""
        sizes = self.layers, num_pages, self.page_size, self.dtype, self.device, self.storage_dtype
        return make_cache(*sizes, allocate, self.beside)

    def row_bytes(self) -> list[int]:
        """Returns the bytes of a page in each of the cache's tensors."""
        rows: list[int] = []

        def note(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            rows.append(math.prod(shape[1:]) * dtype.itemsize)
            return torch.empty(tuple(shape), dtype=dtype, device="meta")

        self.make(2, note)
        return [row for row in rows if row]

    def make_pool(self, num_pages: int) -> PagedCache:
        """Returns the same for the service: a phase of the start."""
        with phase("allocating the KV pool"):
            return self.make(num_pages)


def cache_shape(gpu: GpuConfig, model: ModelConfig, layers: Layers, device: torch.device) -> CacheShape:
    """The cache's shape by the settings, of a rank's own layers.

    Raises UserError for 8 bits of a model that has no such cache.
    """
    dtype = TORCH_DTYPES[model.dtype]
    beside = () if model.small_model is None else model.small_model.config.layers
    if gpu.kv_cache_dtype != "auto" and not all(mixer.stores_8_bits for mixer in mixers(layers)):
        raise UserError(
            f"kv_cache_dtype: {gpu.kv_cache_dtype!r} is not supported for {model.model_type}, whose "
            "entries stand for several tokens each; allowed: auto"
        )
    storage = E4M3 if gpu.kv_cache_dtype == "fp8_e4m3" else dtype
    return CacheShape(layers, gpu.page_size, dtype, storage, device, beside)


def shared_kv_bytes(gpu: GpuConfig, shape: CacheShape) -> int:
    """Returns the most bytes of a KV cache on a CPU: as many as the settings say, or a modest default."""
    if gpu.num_pages is not None:
        return gpu.num_pages * shape.page_bytes
    return int((_CPU_KV_CACHE_GIB if gpu.kv_cache_gib is None else gpu.kv_cache_gib) * 2**30)


class KvMemory(ABC):
    """Accompanies loading; `num_pages` is asked once everything else that lives for ever is loaded."""

    ledger: MemoryLedger | None = None  # None where memory is not ours to divide.
    pool: PhysicalPool | None = None  # What pages and experts will share; None: each has its own.
    drafting: DraftModel | None = None  # Once it is loaded; None: no other model drafts tokens.

    def reached(self, part: str) -> None:
        """Called when a phase of loading has ended."""
        if self.ledger is not None:
            self.ledger.reached(part)

    def has_room(self, part: str) -> bool:
        """Returns whether what is planned for a part can be allocated once the engine serves."""
        return self.ledger is None or self.ledger.has_room(part)

    def later(self, part: str) -> AbstractContextManager[None]:
        """Returns a context in which a part is allocated while the engine serves."""
        return nullcontext() if self.ledger is None else self.ledger.later(part)

    def seal(self) -> None:
        """Everything is allocated. Raises UserError when it is more than was planned with."""
        if self.ledger is not None:
            self.ledger.seal()

    @abstractmethod
    def num_pages(
        self,
        model: CausalLM,
        geometry: MoeGeometry | None,
        resident: ResidentExperts | None,
        states: StateSlots | None = None,
        streamed: StreamedExperts | None = None,
        lane_stream: DeviceStream | None = None,
    ) -> int:
        """Returns the number of pages of the pool, after what is on the device already.

        UserError: there is no room for two.
        """


class SharedKvMemory(KvMemory):
    """On a CPU: as much as the settings say, or a modest default."""

    def __init__(self, config: MoebiusConfig, shape: CacheShape) -> None:
        self._config = config
        self._shape = shape

    def num_pages(
        self,
        model: CausalLM,
        geometry: MoeGeometry | None,
        resident: ResidentExperts | None,
        states: StateSlots | None = None,
        streamed: StreamedExperts | None = None,
        lane_stream: DeviceStream | None = None,
    ) -> int:
        return self.pages_for(model.config)

    def pages_for(self, model: ModelConfig) -> int:
        """Returns the number of pages of the pool. Raises UserError for a size of less than two pages."""
        gpu = self._config.gpu
        if gpu.num_pages is not None:
            return gpu.num_pages
        per_page = self._shape.page_bytes
        nbytes = shared_kv_bytes(gpu, self._shape)
        pages = min(nbytes // per_page, useful_pages(self._config, model))
        if pages < 2:
            kv_cache_gib = _CPU_KV_CACHE_GIB if gpu.kv_cache_gib is None else gpu.kv_cache_gib
            raise UserError(f"kv_cache_gib: {kv_cache_gib} is too small; two pages take {2 * per_page} bytes")
        return pages


class DeviceKvMemory(KvMemory):
    """On a GPU: what the plan and a profiled step leave."""

    def __init__(self, config: MoebiusConfig, shape: CacheShape, ledger: MemoryLedger) -> None:
        self._config = config
        self._shape = shape
        self.ledger: MemoryLedger = ledger

    def num_pages(
        self,
        model: CausalLM,
        geometry: MoeGeometry | None,
        resident: ResidentExperts | None,
        states: StateSlots | None = None,
        streamed: StreamedExperts | None = None,
        lane_stream: DeviceStream | None = None,
    ) -> int:
        """Returns the number of pages that fit after a run of the largest step, and of the prefill lane's
        largest on its stream.
        """
        config, gpu, shape = self._config, self._config.gpu, self._shape
        memory = make_device_memory(shape.device)
        assert memory is not None
        on_this_stream = stream_of(shape.device)

        def make_cache(num_pages: int) -> PagedCache:
            # Its memory is the main stream's again afterwards, or the pool's.
            with on_this_stream():
                return (
                    shape.make(num_pages) if self.pool is None else mapped_cache(shape, self.pool, num_pages)
                )

        def measure(step: StepSize, streamed: StreamedExperts | None) -> int:
            return profile_activations(
                WithHeads(model, self.drafting, gpu.attention_backend),
                make_cache,
                lambda cache: make_attention(shape.layers, cache, shape.device, gpu.attention_backend),
                geometry,
                step,
                shape.page_size,
                memory,
                resident=resident,
                states=states,
                vocab_size=model.config.vocab_size,
                streamed=streamed,
            )

        step = StepSize.streaming(gpu) if lane_stream is None else StepSize.largest(gpu)
        with phase("profiling the largest step"):
            self.ledger.activations(measure(step, streamed))
            if lane_stream is not None:
                # What the allocator keeps after it is this stream's own.
                with lane_stream.active():
                    self.ledger.activations(measure(StepSize.streaming(gpu), streamed), LANE)
            if self.pool is not None:
                gc.collect()
                self.pool.close()
        return size_kv_pool(self.ledger.plan, config, model.config, memory.use())


def mapped_cache(shape: CacheShape, pool: PhysicalPool, num_pages: int) -> PagedCache:
    """Returns a cache whose memory is the pool's, and goes back there with its last tensor."""
    pages = ElasticPages(pool, num_pages, max(shape.row_bytes()))
    pool.add(max(0, 1 - pool.free))
    cache, groups = shape.make(num_pages, pages.allocate), range(pages.num_groups)
    pool.add(max(0, pages.chunks_for(groups) - pool.free))
    pages.add(groups)
    return cache


def scheduler_limits(gpu: GpuConfig, model: ModelConfig, num_pages: int) -> SchedulerLimits:
    """Returns what a pool of `num_pages` pages can serve."""
    pool_tokens = (num_pages - 1) * gpu.page_size
    context_limit = min(model.max_model_len, pool_tokens)
    if context_limit < model.max_model_len:
        _log.warning(
            "the KV pool is smaller than one context of the model; longer requests are refused",
            context_limit=context_limit,
            max_model_len=model.max_model_len,
        )
    return SchedulerLimits(
        max_num_seqs=gpu.num_seqs,
        max_num_batched_tokens=gpu.num_batched_tokens,
        context_limit=context_limit,
        watermark_pages=max(1, num_pages // 100),
        eos_token_ids=frozenset(model.eos_token_ids),
        scored_token_cost=scored_token_cost(model),
        prefill_chunk_max=gpu.prefill_chunk_max or 0,
        max_rows=gpu.num_rows if gpu.may_draft else 0,
    )


def scored_token_cost(model: ModelConfig) -> int:
    """Returns the number of tokens without log-probabilities that take about as long as a prompt token with
    them; 2 to 8.

    The head's GEMM, and about as much again for reading its logits four times (normaliser, chosen, best
    ones, their conversion), against the weights that a token meets in the layers.
    """
    hidden = model.hidden_size
    layers = sum(layer.weight_elements(hidden) for layer in model.layers)
    head = 2 * hidden * model.vocab_size
    return 1 + max(1, min(_MOST_SCORED_COST - 1, -(-head // max(1, layers))))
