"""The plan of one rank's memory, made before anything is loaded, and the KV pool that is left at the end.

Weights are exact (layers declare them). The rest are upper estimates of what the
layers allocate at their largest step; the KV pool is sized by a measurement, not by them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from torch import nn

from gpu_service.attention.base import MAX_BLOCK_SCORES
from gpu_service.cache.request_states import all_states_bytes
from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.core.partition import all_stages_layers, rank_layers
from gpu_service.device import TORCH_DTYPES
from gpu_service.device.graphs import graph_sizes, prompt_graph_sizes
from gpu_service.experts.resident.panels import PAIRS_BYTES, UNPACK_FROM, UNPACKED_BYTES, pair_bytes
from gpu_service.memory.device_memory import MemoryUse, gib
from moebius.config import GpuConfig, MoebiusConfig
from moebius.errors import UserError
from moebius.models.config import ModelConfig
from moebius.models.layers.ffn import FeedForward, Routed
from moebius.models.layers.gqa import GQA
from moebius.models.layers.layer import mixers, states
from moebius.models.layers.mixer import Mixer

MIB = 2**20
# The driver's context, the modules of torch, cuBLAS, Triton and FlashInfer: 0.5 to 0.7 GiB on Hopper.
CUDA_CONTEXT = 768 * MIB
# FlashInfer's plans (a float and an integer buffer for prefill and decode each), page tables, staging; or,
# where Triton attends, results of splits and scores of sparse attention, which take less.
ATTENTION_WORKSPACE = 512 * MIB
# cuBLAS takes 32 MiB a stream on Hopper; two streams compute.
CUBLAS_WORKSPACE = 64 * MIB
# Of the prefill lane's stream.
LANE_CUBLAS = 32 * MIB
# Communicators' channels: one for tensor groups, and one for stages or for the prefill lane, never both.
NCCL_BUFFERS = 512 * MIB
# Nodes and arguments of one captured graph; the tensors of all graphs share one pool.
GRAPH_BYTES = 24 * MIB
# Blocks of the allocator that no later tensor fits exactly.
ALLOCATOR_SLACK = 256 * MIB


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step; filled by `largest_step`."""

    tokens: int
    sequences: int

    @staticmethod
    def largest(gpu: GpuConfig) -> StepSize:
        """Returns what the scheduler may put into one step of the main lane, which streams no
        longer prompts.
        """
        return StepSize(gpu.num_batched_tokens, min(gpu.num_rows, gpu.num_batched_tokens))

    @staticmethod
    def streaming(gpu: GpuConfig) -> StepSize:
        """Returns the size of a step of prompts whose experts are streamed: the lane's, or without one the
        main lane's.
        """
        tokens = max(gpu.num_batched_tokens, gpu.prefill_chunk_max or 0)
        return StepSize(tokens, min(gpu.num_rows, tokens))


def has_lane(gpu: GpuConfig, parallel: ParallelContext) -> bool:
    """Returns whether prompts that stream their experts have a step of their own, next to the others.

    `gpu.prefill_chunk_max` is chosen: unset or within the usual budget, nothing is to be gained. Pipeline
    stages launch different layers; their main lane takes the longer steps (`scheduler/pacing.py`). That of
    tensor-parallel ranks does unless a lane is asked for: two communicators on one GPU were not measured.
    """
    is_longer = (gpu.prefill_chunk_max or 0) > gpu.num_batched_tokens
    is_wanted = parallel.tp_size == 1 or gpu.prefill_lane_min_tokens is not None
    return is_longer and is_wanted and parallel.num_stages == 1


def lane_bytes(config: ModelConfig, gpu: GpuConfig, parallel: ParallelContext) -> int:
    """Returns the prefill lane's largest step, and what libraries keep for its stream; 0 without a lane."""
    if not has_lane(gpu, parallel):
        return 0
    step = activation_bytes(config, StepSize.streaming(gpu), parallel, has_resident_experts=True)
    return step + ATTENTION_WORKSPACE + LANE_CUBLAS


def most_chunk_tokens(config: ModelConfig, parallel: ParallelContext) -> int:
    """Returns the number of rows of a step whose widest tensor kernels can still count in 31 bits."""
    hidden, ranks = config.hidden_size, parallel.tp_size
    widest = max(mixer.widest_row // ranks for mixer in mixers(config.layers))
    for layer in config.layers:
        for ffn in layer.ffns:
            of_experts = ffn.router.top_k * ffn.expert_input_size(hidden) if isinstance(ffn, Routed) else 0
            widest = max(widest, of_experts, *ffn.intermediate_sizes)
    return int((2**31 - 1) // widest)


def parameter_bytes(model: nn.Module) -> int:
    """Returns the bytes of parameters and buffers, with memory or on the meta device."""
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


# A plan asks for the same parts for each size of a step.
@lru_cache(maxsize=32)
def _distinct_parts(
    config: ModelConfig, tp_rank: int, tp_size: int
) -> tuple[tuple[FeedForward, ...], tuple[Mixer, ...]]:
    """Returns the different feed-forward blocks and mixers of a rank, each once."""
    layers = all_stages_layers(config, ParallelContext(tp_rank=tp_rank, tp_size=tp_size))
    ffns = dict.fromkeys(ffn for layer in layers for ffn in layer.ffns)
    return tuple(ffns), tuple(dict.fromkeys(mixers(layers)))


@lru_cache(maxsize=32)
def _stream_bytes(config: ModelConfig, tp_rank: int, tp_size: int) -> int:
    """Returns the most bytes of one token in any layer next to the stream that every layer has."""
    layers = all_stages_layers(config, ParallelContext(tp_rank=tp_rank, tp_size=tp_size))
    return max(layer.stream_bytes(config.hidden_size, config.dtype_bytes) for layer in layers)


def activation_bytes(
    config: ModelConfig, step: StepSize, parallel: ParallelContext, has_resident_experts: bool
) -> int:
    """Returns the most bytes of tensors that live at once within a step, of this rank."""
    if config.small_model is not None:
        # Its passes begin when the large model's tensors are free again, but have a row more of each request.
        small, longer = config.small_model.config, replace(step, tokens=step.tokens + step.sequences)
        own = activation_bytes(replace(config, small_model=None), step, parallel, has_resident_experts)
        return max(own, activation_bytes(small, longer, SOLO, bool(small.moe_layer_ids)))
    item, hidden = config.dtype_bytes, config.hidden_size
    # Residual, normed input, its output and one temporary; partial sum and answer in float32.
    stream = hidden * (4 * item + 2 * 4)
    stream += _stream_bytes(config, parallel.tp_rank, parallel.tp_size)
    if not config.layers[-1].passed:
        # The model's hidden states, those of the head and the embeddings next to them, normed and projected.
        stream += 6 * hidden * item
    ffns, kinds = _distinct_parts(config, parallel.tp_rank, parallel.tp_size)
    mlp = step.tokens * max(ffn.row_bytes(item) for ffn in ffns)
    row = max(mixer.row_elements for mixer in kinds) * item
    row += max(mixer.choice_bytes(hidden, config.max_model_len, item) for mixer in kinds)
    # As many rows as are scored at once: scores of blocks, and masks of them.
    scores = step.tokens * max(mixer.num_block_scores(config.max_model_len) for mixer in kinds)
    attending = step.tokens * row + 8 * min(scores, MAX_BLOCK_SCORES)
    if has_resident_experts:
        routed = [ffn for ffn in ffns if isinstance(ffn, Routed)]
        sizes = step.tokens, parallel.expert_channel_ranks, hidden, item
        mlp += max((_experts_bytes(ffn, *sizes) for ffn in routed), default=0)
    return step.tokens * stream + max(attending, mlp) + logits_bytes(config, step)


# Of one (row, choice) pair: its place among those of its expert, twice. Of an expert: pairs that pad a block.
_ROUTING_PAIR, _ROUTING_EXPERT = 16, 1024


def _experts_bytes(ffn: Routed, tokens: int, ranks: int, hidden_size: int, item: int) -> int:
    """Returns the bytes of products of experts that are on the device, resident or streamed: bounded,
    whatever the tokens.
    """
    router, inner = ffn.router, ffn.experts.intermediate_size // ranks
    size = ffn.expert_input_size(hidden_size)
    pairs = tokens * router.top_k
    between = min(pairs * pair_bytes(inner, size, item), PAIRS_BYTES)
    unpacked = 0
    if pairs >= UNPACK_FROM * router.num_experts:
        unpacked = min(UNPACKED_BYTES, router.num_experts * 3 * inner * size * 2)
    return between + unpacked + _ROUTING_PAIR * pairs + _ROUTING_EXPERT * router.num_experts


def logits_bytes(config: ModelConfig, step: StepSize) -> int:
    """Returns the logits in both types, penalised, as probabilities, sorted with their indices: all of the
    sampler.
    """
    return step.sequences * config.vocab_size * (config.dtype_bytes + 5 * 4 + 8)


def prompt_sizes(config: ModelConfig, gpu: GpuConfig, parallel: ParallelContext, whole: bool) -> list[int]:
    """Returns the sizes of graphs of steps with prompts, ascending; empty: such steps run without graphs, as
    where no number of tokens is set or chosen.

    `whole`: no expert is computed elsewhere, or copied for a step. Layers may read requests in attention
    alone, and there without a choice before it: states, latents and chosen blocks are not captured.
    """
    attends = all(isinstance(mixer, GQA) and mixer.blocks is None for mixer in mixers(config.layers))
    attends = attends and not states(config.layers)
    is_single = parallel.tp_size * parallel.num_stages == 1
    if not (gpu.cuda_graphs and attends and is_single and (whole or not config.moe_layer_ids)):
        return []
    return prompt_graph_sizes(min(gpu.cuda_graph_max_prompt_tokens or 0, gpu.num_batched_tokens))


def graph_bytes(
    config: ModelConfig, gpu: GpuConfig, parallel: ParallelContext, resident: bool, whole: bool = False
) -> int:
    """Returns all captured graphs, and the shared pool of the largest one.

    `resident`: experts are on this device; `whole`: as `prompt_sizes`.
    """
    if not gpu.cuda_graphs:
        return 0
    largest = min(gpu.cuda_graph_max_batch_size, gpu.num_rows)
    prompts = prompt_sizes(config, gpu, parallel, whole)
    count = len(graph_sizes(largest)) + len(prompts)
    pool = activation_bytes(config, StepSize(largest, largest), parallel, resident)
    if prompts:
        # No logits; and beside the pool what the layers leave and what attention does.
        pool = max(pool, activation_bytes(config, StepSize(prompts[-1], 0), parallel, resident))
        kept = 2 * config.hidden_size + max(mixer.row_elements for mixer in mixers(config.layers))
        pool += prompts[-1] * kept * config.dtype_bytes
    return count * GRAPH_BYTES + pool


def workspace_bytes(parallel: ParallelContext) -> int:
    """Returns the buffers of libraries that live as long as the process."""
    several = parallel.tp_size * parallel.num_stages > 1
    return ATTENTION_WORKSPACE + CUBLAS_WORKSPACE + (NCCL_BUFFERS if several else 0)


GIB = 2**30
DENSE, RESIDENT, RING = "dense weights", "resident experts", "expert streaming ring"
VISION, IMAGES = "vision tower", "images"
GRAPHS, WORKSPACE, ACTIVATIONS = "CUDA graphs", "workspaces", "activations"
LANE = "prefill lane"
STATES = "states of requests"
DRAFTING = "draft model"
CONTEXT, SLACK, KV = "CUDA context", "allocator slack", "KV cache"


class MemoryShort(UserError):
    """The parts of a plan do not fit."""

    def __init__(self, message: str, missing: int) -> None:
        """`missing`: bytes."""
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One part of the plan, bytes."""

    part: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Filled by `plan_memory`, bytes; the line of the KV cache is what the others leave."""

    total: int
    # What settings allow of `total`, or what other processes leave of it.
    budget: int
    lines: tuple[MemoryLine, ...]
    page_bytes: int  # One page over all layers of this rank.

    def of(self, part: str) -> int:
        """Returns the bytes of a part; 0 for one that the plan does not name."""
        return sum(line.nbytes for line in self.lines if line.part == part)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self.of(KV)

    @property
    def fixed(self) -> int:
        """Bytes of everything but the KV cache."""
        return sum(line.nbytes for line in self.lines if line.part != KV)


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """The memory of the routed experts on this rank's GPU; filled by the module that places them."""

    # Experts over all layers, and bytes of one of them in the form the GPU holds.
    count: int = 0
    bytes_each: int = 0
    ring_bytes: int = 0  # Buffers through which experts of the CPU pass the GPU.
    is_everything: bool = False  # No routed expert of the model is computed elsewhere.


@dataclass(frozen=True, slots=True)
class VisionMemory:
    """The memory for images in prompts; filled by `assembly.vision`."""

    tower_bytes: int = 0  # The tower's weights.
    # What comes in service only: encoded images that are kept, and the largest one while it is encoded.
    image_bytes: int = 0

    @property
    def total(self) -> int:
        """Bytes of both."""
        return self.tower_bytes + self.image_bytes


def plan_memory(
    config: MoebiusConfig,
    model_config: ModelConfig,
    dense_bytes: int,
    use: MemoryUse,
    page_bytes: int,
    experts: ExpertMemory | None = None,
    parallel: ParallelContext = SOLO,
    vision: VisionMemory | None = None,
    draft_model_bytes: int = 0,
) -> MemoryPlan:
    """Returns the plan of this rank. `dense_bytes`: `parameter_bytes` of its part; `use`: the device before
    loading.

    `vision` None: the model is text-only. `draft_model_bytes`: of a draft model's weights.

    The KV cache gets num_pages or kv_cache_gib where one is set, else all that is left. Raises MemoryShort
    when the parts do not fit the budget, naming the numbers.
    """
    experts, vision = experts or ExpertMemory(), vision or VisionMemory()
    gpu = config.gpu
    if not experts.ring_bytes:
        gpu = gpu.model_copy(update={"prefill_chunk_max": 0})
    step = StepSize.largest(gpu) if has_lane(gpu, parallel) else StepSize.streaming(gpu)
    has_resident = experts.count > 0 or experts.ring_bytes > 0
    own = rank_layers(model_config, parallel)
    states = all_states_bytes(config.gpu, own, TORCH_DTYPES[model_config.dtype])
    lines = (
        MemoryLine(DENSE, dense_bytes),
        MemoryLine(DRAFTING, draft_model_bytes),
        MemoryLine(VISION, vision.tower_bytes),
        MemoryLine(IMAGES, vision.image_bytes),
        MemoryLine(RESIDENT, experts.count * experts.bytes_each),
        MemoryLine(RING, experts.ring_bytes),
        MemoryLine(STATES, states),
        MemoryLine(
            GRAPHS,
            graph_bytes(model_config, config.gpu, parallel, experts.count > 0, experts.is_everything),
        ),
        MemoryLine(WORKSPACE, workspace_bytes(parallel)),
        MemoryLine(ACTIVATIONS, activation_bytes(model_config, step, parallel, has_resident)),
        MemoryLine(LANE, lane_bytes(model_config, gpu, parallel)),
        MemoryLine(CONTEXT, CUDA_CONTEXT),
        MemoryLine(SLACK, ALLOCATOR_SLACK),
    )
    plan = MemoryPlan(use.total, _budget(config, use), lines, page_bytes)
    return _with_kv(plan, config, _needed_pages(config, model_config))


def _budget(config: MoebiusConfig, use: MemoryUse) -> int:
    """Raises UserError when other processes hold so much that nothing could be planned with."""
    wanted = config.gpu.usable_bytes(use.total)
    # What is used already is partly this process's own context, which the plan counts as well.
    others = max(0, use.total - use.free - use.reserved - CUDA_CONTEXT)
    return min(wanted, use.total - others)


def _needed_pages(config: MoebiusConfig, model_config: ModelConfig) -> int:
    """Returns the pages for the dummy page and one step's tokens: fewer could never run the step that was
    planned.
    """
    tokens = min(config.gpu.num_batched_tokens, model_config.max_model_len)
    return 1 + -(-tokens // config.gpu.page_size)


def wanted_kv_bytes(config: MoebiusConfig, page_bytes: int) -> int | None:
    """Returns what the settings ask for; None: all that is left."""
    if config.gpu.num_pages is not None:
        return config.gpu.num_pages * page_bytes
    return None if config.gpu.kv_cache_gib is None else int(config.gpu.kv_cache_gib * GIB)


def _with_kv(plan: MemoryPlan, config: MoebiusConfig, needed_pages: int) -> MemoryPlan:
    left = plan.budget - plan.fixed
    wanted = wanted_kv_bytes(config, plan.page_bytes)
    needed = needed_pages * plan.page_bytes if wanted is None else wanted
    if left < needed:
        parts = ", ".join(f"{line.part} {gib(line.nbytes)}" for line in plan.lines if line.nbytes)
        raise MemoryShort(
            f"GPU memory: {parts}: {gib(plan.fixed)} GiB together, and a KV cache of {gib(needed)} GiB or "
            f"more, do not fit the {gib(plan.budget)} GiB planned with ({_share(plan, config)}); "
            f"{gib(needed - left)} GiB are missing",
            needed - left,
        )
    return replace(plan, lines=(*plan.lines, MemoryLine(KV, left if wanted is None else wanted)))


def _share(plan: MemoryPlan, config: MoebiusConfig) -> str:
    gpu = config.gpu
    text = f"gpu_memory_utilization {gpu.gpu_memory_utilization:g}"
    if gpu.gpu_memory_gib is not None:
        text = f"gpu_memory_gib {gpu.gpu_memory_gib:g}"
    text = f"{text} of {gib(plan.total)} GiB"
    usable = gpu.usable_bytes(plan.total)
    return text if plan.budget >= usable else f"{text}, less what other processes hold"


# Copies of all slots at full length are the most pages that requests and the prefix cache can make use of.
_USEFUL_COPIES = 2


def useful_pages(config: MoebiusConfig, model_config: ModelConfig) -> int:
    """More pages than this would only cost memory."""
    per_request = -(-model_config.max_model_len // config.gpu.page_size)
    return 1 + _USEFUL_COPIES * config.gpu.num_seqs * per_request


def size_kv_pool(plan: MemoryPlan, config: MoebiusConfig, model_config: ModelConfig, use: MemoryUse) -> int:
    """Returns the number of pages of the pool; `use` is the device after weights were loaded and the largest
    step was profiled.

    The profile's blocks stay reserved, so a step's activations are in what is used already; only what
    comes later (graphs, images, slack) is set aside. Raises UserError when what was measured leaves too
    little.
    """
    if not plan.page_bytes:  # Layers of this stage keep states alone: it bounds no other's pages.
        return config.gpu.num_pages or useful_pages(config, model_config)
    later = plan.of(GRAPHS) + plan.of(IMAGES) + plan.of(SLACK)
    left = use.free - (use.total - plan.budget) - later
    where = (
        f"after loading and one step of {config.gpu.num_batched_tokens} tokens {gib(max(left, 0))} GiB "
        f"of the {gib(plan.budget)} GiB planned with are left"
    )
    wanted = wanted_kv_bytes(config, plan.page_bytes)
    if wanted is not None and wanted > left:
        asked = "num_pages" if config.gpu.num_pages is not None else "kv_cache_gib"
        raise UserError(
            f"GPU memory: the KV cache that {asked} asks for takes {gib(wanted)} GiB, but {where}"
        )
    pages = (left if wanted is None else wanted) // plan.page_bytes
    if wanted is None:
        pages = min(pages, useful_pages(config, model_config))
    if pages < 2:
        raise UserError(
            f"GPU memory: {where}; the KV cache needs two pages, {2 * plan.page_bytes} bytes. A smaller "
            "max_num_batched_tokens or fewer gpu_experts leave more"
        )
    return pages
