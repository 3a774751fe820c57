"""What every rank of an engine will hold, from configuration and model alone: for `moebius plan`.

Models are composed on the meta device as `build_engine` composes them, and the same functions plan with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpu_service.assembly.kv_memory import CacheShape, SharedKvMemory, cache_shape
from gpu_service.assembly.rank_plan import RankPlan, shared_num_seqs
from gpu_service.assembly.vision import vision_memory
from gpu_service.cache.request_states import all_states_bytes
from gpu_service.core.parallel import ParallelContext
from gpu_service.core.partition import stage_layers
from gpu_service.layers.gated_streams import NGramRows
from gpu_service.layers.linear import Linear, StoredWeight
from gpu_service.loader.load import shape_weights
from gpu_service.memory.device_memory import MemoryUse
from gpu_service.memory.plan import (
    ExpertMemory,
    MemoryPlan,
    MemoryShort,
    StepSize,
    activation_bytes,
    host_parameters,
    parameter_bytes,
    useful_pages,
)
from gpu_service.models.common import CausalLM
from gpu_service.models.compose import build_model
from gpu_service.ops.linear import can_pack
from moebius.checkpoint.index import has_weights
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.models.served import read_served_model


@dataclass(frozen=True, slots=True)
class RankForecast:
    """One rank's part of the model; filled by `Forecast`. Bytes."""

    rank: int
    stage: int
    tp_rank: int
    # All parameters and buffers where it computes, and those that a decode step reads.
    dense_bytes: int
    read_bytes: int
    host_bytes: int  # Parameters that stay in the host's memory next to a GPU.
    # Elements of the latter: a token costs two operations for each.
    read_elements: int
    largest_tensor_bytes: int
    page_bytes: int  # One page of the KV cache over this rank's layers.
    # Of linear attention, all requests' and prefixes'.
    state_bytes: int
    moe_layers: tuple[int, ...]
    # In addition to the parameters on a CPU: the packed copy of an embedding that is the head as well.
    packed_head_bytes: int
    # On a CPU that does not multiply bfloat16: what linear layers and that copy take more, packed as float32.
    widened_bytes: int
    activation_bytes: int


class Forecast:
    """All ranks of a configuration. Raises what the configuration of a model or of ranks may raise."""

    def __init__(self, config: MoebiusConfig, on_gpu: bool) -> None:
        """`on_gpu`: whether GPUs, which need not be there, compute the dense part."""
        chosen, parallel = config.model, config.parallel
        self.model_config = read_served_model(config)
        # Of every rank: towers are not divided.
        self._vision = vision_memory(config, self.model_config)
        self.vision_bytes = self._vision.total
        tp, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        # Sizes do not depend on which GPU it is.
        device = torch.device("meta" if on_gpu else "cpu")
        self._models: list[CausalLM] = [
            build_model(
                self.model_config, device=device, parallel=ParallelContext(tp_rank, tp, stage, stages)
            )
            for stage in range(stages)
            for tp_rank in range(tp)
        ]
        for model in self._models if has_weights(chosen.model) else ():
            shape_weights(model, chosen)
        if not on_gpu:
            gpu = config.gpu.model_copy(update={"max_num_seqs": self.shared_num_seqs(config)})
            config = config.model_copy(update={"gpu": gpu})
        self._shapes = [
            cache_shape(config.gpu, model.config, model.rank_layers, device) for model in self._models
        ]
        self.ranks = tuple(
            _forecast(config, rank, model, shape)
            for rank, (model, shape) in enumerate(zip(self._models, self._shapes, strict=True))
        )

    def device_plans(
        self, config: MoebiusConfig, total_bytes: int, experts: Sequence[ExpertMemory]
    ) -> tuple[MemoryPlan, ...]:
        """Returns each rank's ledger on an empty GPU of `total_bytes`. Raises MemoryShort: it cannot fit."""
        return tuple(rank.make(config) for rank in self._on_device(config, total_bytes, experts))

    def has_room(self, config: MoebiusConfig, total_bytes: int, experts: Sequence[ExpertMemory]) -> bool:
        """Returns whether everything fits such GPUs, with as few outputs in a step as may be."""
        return all(rank.fits() for rank in self._on_device(config, total_bytes, experts))

    def num_seqs(self, config: MoebiusConfig, total_bytes: int, experts: Sequence[ExpertMemory]) -> int:
        """What an engine on such GPUs would choose for `max_num_seqs` where it is unset."""
        return min(rank.num_seqs() for rank in self._on_device(config, total_bytes, experts))

    def batched_tokens(self, config: MoebiusConfig, total_bytes: int, experts: Sequence[ExpertMemory]) -> int:
        """What they would choose for `max_num_batched_tokens` where it is unset."""
        return min(rank.batched_tokens(config) for rank in self._on_device(config, total_bytes, experts))

    def prefill_chunk(self, config: MoebiusConfig, total_bytes: int, experts: Sequence[ExpertMemory]) -> int:
        """What they would choose for `prefill_chunk_max` where it is unset; 0: no experts are streamed."""
        return min(rank.prefill_chunk(config) for rank in self._on_device(config, total_bytes, experts))

    def refusal(
        self, config: MoebiusConfig, total_bytes: int, experts: Sequence[ExpertMemory], error: MemoryShort
    ) -> UserError:
        """`error` of the first rank that does not fit, with what would make it fit."""
        for rank in self._on_device(config, total_bytes, experts):
            try:
                rank.make(config)
            except MemoryShort as own:
                return rank.refusal(config, own)
        return error

    def _on_device(
        self, config: MoebiusConfig, total_bytes: int, experts: Sequence[ExpertMemory]
    ) -> list[RankPlan]:
        empty = MemoryUse(total_bytes, total_bytes, 0, 0, 0, 0)
        return [
            RankPlan(config, model, empty, held, self._vision, rank.dense_bytes)
            for model, held, rank in zip(self._models, experts, self.ranks, strict=True)
        ]

    def shared_num_seqs(self, config: MoebiusConfig) -> int:
        """Returns what engines on a CPU choose for `max_num_seqs` where it is unset."""
        return min(shared_num_seqs(config, model) for model in self._models)

    def state_bytes(self, config: MoebiusConfig) -> int:
        """Returns the bytes of all states on the rank that has most."""
        return max(all_states_bytes(config.gpu, model.rank_layers, model.dtype) for model in self._models)

    def shared_pages(self, config: MoebiusConfig) -> int:
        """Returns the number of pages of the pool of an engine on a CPU."""
        return min(
            SharedKvMemory(config, shape).num_pages(model, None, None)
            for model, shape in zip(self._models, self._shapes, strict=True)
        )

    def useful_pages(self, config: MoebiusConfig) -> int:
        """More pages than these no engine takes of its own accord."""
        return useful_pages(config, self.model_config)


def _forecast(config: MoebiusConfig, rank: int, model: CausalLM, shape: CacheShape) -> RankForecast:
    read = _read_tensors(model)
    held = stage_layers(model.config, model.parallel)
    tied = model.lm_head is None and model.parallel.is_last_stage and model.model.embed_tokens is not None
    embedding = model.model.embed_tokens.weight if model.model.embed_tokens is not None else None
    on_cpu = shape.device.type == "cpu"
    packs = on_cpu and tied and embedding is not None and can_pack(torch.empty(0, dtype=embedding.dtype))
    head = [embedding] if packs and embedding is not None else []
    linears = [module.weight for module in model.modules() if isinstance(module, Linear)] if on_cpu else []
    widened = [weight for weight in (*linears, *head) if weight.dtype == torch.bfloat16]
    return RankForecast(
        rank=rank,
        stage=model.parallel.stage,
        tp_rank=model.parallel.tp_rank,
        dense_bytes=parameter_bytes(model),
        read_bytes=sum(map(_nbytes, read)),
        host_bytes=sum(map(_nbytes, host_parameters(model))),
        read_elements=_elements(model, read),
        largest_tensor_bytes=_largest_tensor_bytes(model),
        page_bytes=shape.page_bytes,
        state_bytes=all_states_bytes(config.gpu, model.rank_layers, model.dtype),
        moe_layers=tuple(layer for layer in model.config.moe_layer_ids if layer in held),
        packed_head_bytes=sum(map(_nbytes, head)),
        widened_bytes=sum(map(_nbytes, widened)),  # as much again
        activation_bytes=activation_bytes(
            model.config, StepSize.largest(config.gpu), model.parallel, has_resident_experts=False
        ),
    )


def _elements(model: CausalLM, tensors: Sequence[torch.Tensor]) -> int:
    """Returns the number of weights that the tensors stand for: those that are kept as they are stored are
    bytes.
    """
    kept = [module for module in model.modules() if isinstance(module, StoredWeight)]
    counts = {id(module.weight): math.prod(module.weight_shape) for module in kept if module.packed_parts}
    return sum(counts.get(id(tensor), tensor.numel()) for tensor in tensors)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tables(model: CausalLM) -> list[nn.Parameter]:
    """Returns the tables of n-grams."""
    return [module.weight for module in model.modules() if isinstance(module, NGramRows)]


def _largest_tensor_bytes(model: CausalLM) -> int:
    """Returns the bytes of the largest tensor that a checkpoint stores as one; tables of n-grams are in
    parts.
    """
    tables = [module for module in model.modules() if isinstance(module, NGramRows)]
    known = {id(table.weight) for table in tables}
    sizes = [_nbytes(tensor) for tensor in model.parameters() if id(tensor) not in known]
    return max(*sizes, *(_nbytes(table.weight) // table.num_parts for table in tables), 0)


def _read_tensors(model: CausalLM) -> list[nn.Parameter]:
    """Returns what a step of text reads whole: of tables of n-grams it looks up rows, and of the embedding
    unless it is the head as well.
    """
    tied = model.lm_head is None and model.parallel.is_last_stage
    looked_up = {id(table) for table in _tables(model)}
    if not tied and model.model.embed_tokens is not None:
        looked_up.add(id(model.model.embed_tokens.weight))
    parts = [model.model, *([model.lm_head] if model.lm_head is not None else [])]
    return [tensor for part in parts for tensor in part.parameters() if id(tensor) not in looked_up]
