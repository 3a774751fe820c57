"""What every rank of an engine will hold, from configuration and model alone: for `moebius plan`.

Weights are those that layers declare, and the same functions plan with them as in `build_engine`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gpu_service.assembly.draft_model import draft_model_bytes
from gpu_service.assembly.kv_memory import CacheShape, SharedKvMemory, cache_shape
from gpu_service.assembly.rank_plan import RankPlan, shared_num_seqs
from gpu_service.assembly.vision import vision_memory
from gpu_service.cache.request_states import all_states_bytes
from gpu_service.core.parallel import ParallelContext
from gpu_service.core.partition import check_divisible, stage_layers
from gpu_service.device import TORCH_DTYPES
from gpu_service.loader.held import HeldParameter, HeldWeights
from gpu_service.loader.load import plan_weights
from gpu_service.memory.device_memory import MemoryUse
from gpu_service.memory.plan import (
    ExpertMemory,
    MemoryPlan,
    MemoryShort,
    StepSize,
    activation_bytes,
    useful_pages,
)
from gpu_service.ops.linear import can_pack
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.models.served import read_served_model
from moebius.models.weights import HEAD


@dataclass(frozen=True, slots=True)
class RankForecast:
    """One rank's part of the model; filled by `Forecast`. Bytes."""

    rank: int
    stage: int
    tp_rank: int
    # All parameters where it computes, and those that a decode step reads.
    dense_bytes: int
    read_bytes: int
    host_bytes: int  # Parameters that stay in the host's memory next to a GPU.
    # Elements of those that a step reads: a token costs two operations for each. By the packed format in
    # which they are kept, "" for values: of layers, and of the head, which only tokens that are sampled after
    # pass.
    layer_elements: Mapping[str, int]
    head_elements: Mapping[str, int]
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
    drafting_bytes: int = 0  # A draft model's weights.
    packed_bytes: int = 0  # Of those that a step reads, in packed formats.
    table_bytes: int = 0  # Of the parameters, tables of embeddings, or their rows that are kept in RAM.

    @property
    def read_elements(self) -> int:
        """Returns the elements that a token which is sampled after is multiplied with."""
        return sum(self.layer_elements.values()) + sum(self.head_elements.values())


@dataclass(frozen=True, slots=True)
class LayerForecast:
    """One layer on the first rank of its stage; filled by `Forecast.layers`. Bytes."""

    index: int
    stage: int
    is_moe: bool
    dense_bytes: int
    read_bytes: int  # Of them, what a decode step reads.
    page_bytes: int
    state_bytes: int


_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Forecast:
    """All ranks of a configuration. Raises what the configuration of a model or of ranks may raise."""

    def __init__(self, config: MoebiusConfig, on_gpu: bool) -> None:
        """`on_gpu`: whether GPUs, which need not be there, compute the dense part."""
        chosen, parallel = config.model, config.parallel
        self.model_config = read_served_model(config)
        # Of every rank: towers are not divided.
        self._vision = vision_memory(config, self.model_config)
        self.vision_bytes = self._vision.total
        # Sizes do not depend on which GPU it is.
        device = torch.device("meta" if on_gpu else "cpu")
        # The caller has decided `gpu_expert_split` auto, as an engine does before ranks meet.
        contexts = [ParallelContext.place(parallel, rank) for rank in range(parallel.num_ranks)]
        for context in contexts:
            check_divisible(self.model_config, context)
        self._held = [plan_weights(chosen, self.model_config, context, device) for context in contexts]
        if not on_gpu:
            gpu = config.gpu.model_copy(update={"max_num_seqs": self.shared_num_seqs(config)})
            config = config.model_copy(update={"gpu": gpu})
        self._shapes = [
            cache_shape(config.gpu, self.model_config, held.rank_layers, device) for held in self._held
        ]
        self.ranks = tuple(
            _forecast(config, rank, held, shape)
            for rank, (held, shape) in enumerate(zip(self._held, self._shapes, strict=True))
        )

    def device_plans(
        self, config: MoebiusConfig, total_bytes: Sequence[int], experts: Sequence[ExpertMemory]
    ) -> tuple[MemoryPlan, ...]:
        """Returns each rank's ledger on an empty GPU of its part of `total_bytes`. Raises MemoryShort: it
        cannot fit.
        """
        return tuple(rank.make(config) for rank in self._on_device(config, total_bytes, experts))

    def has_room(
        self, config: MoebiusConfig, total_bytes: Sequence[int], experts: Sequence[ExpertMemory]
    ) -> bool:
        """Returns whether everything fits such GPUs, with as few outputs in a step as may be."""
        return all(rank.fits() for rank in self._on_device(config, total_bytes, experts))

    def holds(
        self,
        config: MoebiusConfig,
        total_bytes: Sequence[int],
        experts: Sequence[ExpertMemory],
        tokens: int,
    ) -> bool:
        """Returns whether the experts fit such GPUs beside a KV cache of this number of tokens: the
        question by which engines decide `dense_weights: auto`.
        """
        return all(rank.has_room(tokens) for rank in self._on_device(config, total_bytes, experts))

    def num_seqs(
        self, config: MoebiusConfig, total_bytes: Sequence[int], experts: Sequence[ExpertMemory]
    ) -> int:
        """What an engine on such GPUs would choose for `max_num_seqs` where it is unset."""
        return min(rank.num_seqs() for rank in self._on_device(config, total_bytes, experts))

    def batched_tokens(
        self, config: MoebiusConfig, total_bytes: Sequence[int], experts: Sequence[ExpertMemory]
    ) -> int:
        """What they would choose for `max_num_batched_tokens` where it is unset."""
        return min(rank.batched_tokens(config) for rank in self._on_device(config, total_bytes, experts))

    def prompt_graph_tokens(
        self, config: MoebiusConfig, total_bytes: Sequence[int], experts: Sequence[ExpertMemory]
    ) -> int:
        """What they would choose for `cuda_graph_max_prompt_tokens` where it is unset."""
        return min(rank.prompt_graph_tokens(config) for rank in self._on_device(config, total_bytes, experts))

    def prefill_chunk(
        self, config: MoebiusConfig, total_bytes: Sequence[int], experts: Sequence[ExpertMemory]
    ) -> int:
        """What they would choose for `prefill_chunk_max` where it is unset; 0: no experts are streamed."""
        return min(rank.prefill_chunk(config) for rank in self._on_device(config, total_bytes, experts))

    def refusal(
        self,
        config: MoebiusConfig,
        total_bytes: Sequence[int],
        experts: Sequence[ExpertMemory],
        error: MemoryShort,
    ) -> UserError:
        """`error` of the first rank that does not fit, with what would make it fit."""
        for rank in self._on_device(config, total_bytes, experts):
            try:
                rank.make(config)
            except MemoryShort as own:
                return rank.refusal(config, own)
        return error

    def _on_device(
        self, config: MoebiusConfig, total_bytes: Sequence[int], experts: Sequence[ExpertMemory]
    ) -> list[RankPlan]:
        ranks = zip(self._held, total_bytes, experts, strict=True)
        return [
            RankPlan(config, held, MemoryUse(total, total, 0, 0, 0, 0), memory, self._vision)
            for held, total, memory in ranks
        ]

    def layers(self, config: MoebiusConfig) -> tuple[LayerForecast, ...]:
        """Returns what each layer of the model takes on the first rank of its stage."""
        return tuple(
            layer
            for held, shape in zip(self._held, self._shapes, strict=True)
            if not held.parallel.tp_rank
            for layer in _layers(config, held, shape)
        )

    def shared_num_seqs(self, config: MoebiusConfig) -> int:
        """Returns what engines on a CPU choose for `max_num_seqs` where it is unset."""
        return min(shared_num_seqs(config, self.model_config, held.rank_layers) for held in self._held)

    def state_bytes(self, config: MoebiusConfig) -> int:
        """Returns the bytes of all states on the rank that has most."""
        dtype = TORCH_DTYPES[self.model_config.dtype]
        return max(all_states_bytes(config.gpu, held.rank_layers, dtype) for held in self._held)

    def shared_pages(self, config: MoebiusConfig) -> int:
        """Returns the number of pages of the pool of an engine on a CPU."""
        return min(SharedKvMemory(config, shape).pages_for(self.model_config) for shape in self._shapes)

    def useful_pages(self, config: MoebiusConfig) -> int:
        """More pages than these no engine takes of its own accord."""
        return useful_pages(config, self.model_config)


def _forecast(config: MoebiusConfig, rank: int, held: HeldWeights, shape: CacheShape) -> RankForecast:
    model, parallel = held.config, held.parallel
    stage = stage_layers(model, parallel)
    tied = parallel.is_last_stage and model.tie_word_embeddings
    # A step of text looks up rows of some, and reads the embedding whole where it is the head as well.
    read = [one for one in held.parameters if not one.on_host and (tied or one.use != "lookup")]
    values = [one for one in held.parameters if not one.is_kept]
    packs = [one for one in values if tied and held.on_cpu and one.use == "lookup" and _can_pack(one.dtype)]
    products = [one for one in values if one.use == "product" and held.on_cpu]
    widened = [one for one in (*products, *packs) if one.dtype == torch.bfloat16]
    return RankForecast(
        rank=rank,
        stage=parallel.stage,
        tp_rank=parallel.tp_rank,
        dense_bytes=held.device_bytes,
        read_bytes=sum(one.nbytes for one in read),
        host_bytes=held.host_bytes,
        layer_elements=_by_format(one for one in read if not _is_head(one, tied)),
        head_elements=_by_format(one for one in read if _is_head(one, tied)),
        largest_tensor_bytes=max(one.largest_part for one in held.parameters),
        page_bytes=shape.page_bytes,
        state_bytes=all_states_bytes(config.gpu, held.rank_layers, TORCH_DTYPES[model.dtype]),
        moe_layers=tuple(layer for layer in model.moe_layer_ids if layer in stage),
        packed_head_bytes=sum(one.nbytes for one in packs),
        widened_bytes=sum(one.nbytes for one in widened),  # as much again
        activation_bytes=activation_bytes(
            model, StepSize.largest(config.gpu), parallel, has_resident_experts=False
        ),
        packed_bytes=sum(one.nbytes for one in read if one.parts),
        table_bytes=held.table_bytes,
        drafting_bytes=draft_model_bytes(config, model, torch.device("cpu" if held.on_cpu else "meta")),
    )


def _layers(config: MoebiusConfig, held: HeldWeights, shape: CacheShape) -> list[LayerForecast]:
    model, stage = held.config, held.parallel.stage
    own = dict(zip(stage_layers(model, held.parallel), held.rank_layers, strict=True))
    dense, read = Counter[int](), Counter[int]()
    for one in held.parameters:
        found = _LAYER.match(one.weights[0].parameter)
        if found and not one.on_host:
            dense[int(found[1])] += one.nbytes
            read[int(found[1])] += 0 if one.use == "lookup" else one.nbytes
    return [
        LayerForecast(
            index=index,
            stage=stage,
            is_moe=index in model.moe_layer_ids,
            dense_bytes=dense[index],
            read_bytes=read[index],
            page_bytes=replace(shape, layers=(layer,), beside=()).page_bytes,
            state_bytes=all_states_bytes(config.gpu, (layer,), TORCH_DTYPES[model.dtype]),
        )
        for index, layer in own.items()
    ]


def _is_head(held: HeldParameter, tied: bool) -> bool:
    """Returns whether logits are products with it, `tied` being whether those with the embedding are."""
    return held.weights[0].parameter.startswith(f"{HEAD}.") or (tied and held.use == "lookup")


def _by_format(parameters: Iterable[HeldParameter]) -> Mapping[str, int]:
    """Returns the elements of all by their packed format, "" for those that are values."""
    found: dict[str, int] = {}
    for held in parameters:
        parts = [(part.format, part.rows) for part in held.parts] or [("", sum(held.rows))]
        for name, rows in parts:
            found[name] = found.get(name, 0) + held.num_elements * rows // sum(held.rows)
    return found


def _can_pack(dtype: torch.dtype) -> bool:
    return can_pack(torch.empty(0, dtype=dtype))
