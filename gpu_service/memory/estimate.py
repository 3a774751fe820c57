"""How many bytes each part will take, before any of it exists.

Weights are exact (the model is composed without memory first). The rest are upper estimates of what the
layers allocate at their largest step; the KV pool is sized by a measurement, not by them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from gpu_service.model_config import ModelConfig
from gpu_service.parallel.context import ParallelContext
from moebius.config import GpuConfig

MIB = 2**20
# The driver's context, the modules of torch, cuBLAS, Triton and FlashInfer: 0.5 to 0.7 GiB on Hopper.
CUDA_CONTEXT = 768 * MIB
# FlashInfer's plans (a float and an integer buffer for prefill and decode each), page tables, staging; or,
# where Triton attends, results of splits and scores of sparse attention, which take less.
ATTENTION_WORKSPACE = 512 * MIB
# cuBLAS takes 32 MiB a stream on Hopper; two streams compute.
CUBLAS_WORKSPACE = 64 * MIB
# A communicator's channels; one for tensor groups, one for stages.
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
        """What the scheduler may put into one step."""
        return StepSize(gpu.max_num_batched_tokens, min(gpu.num_seqs, gpu.max_num_batched_tokens))


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, whether they have memory or are on the meta device."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _distinct(model))


def _distinct(model: nn.Module) -> Iterable[torch.Tensor]:
    seen: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in model.parameters()}
    seen |= {id(tensor): tensor for tensor in model.buffers()}
    return seen.values()


def activation_bytes(
    config: ModelConfig, step: StepSize, parallel: ParallelContext, has_resident_experts: bool
) -> int:
    """Most bytes of tensors that live at once within a step, of this rank."""
    item, ranks = config.torch_dtype.itemsize, parallel.tp_size
    # Residual, normed input, its output and one temporary; partial sum and answer in float32.
    stream = config.hidden_size * (4 * item + 2 * 4)
    attention = _attention_row(config) * item // ranks + _selection_row(config)
    return step.tokens * (stream + max(attention, _mlp_row(config, ranks, has_resident_experts))) + (
        logits_bytes(config, step)
    )


def _attention_row(config: ModelConfig) -> int:
    """Elements of one token's row while a layer attends, over all heads."""
    mla, linear = config.mla, config.linear
    if linear is not None:
        # Projected and convolved; all heads' queries, keys, values, changes in float32, some of them twice.
        recurrence = 3 * linear.num_value_heads * (2 * linear.key_head_dim + 2 * linear.value_head_dim)
        gated = 4 * config.q_size + 2 * config.kv_size
        return max(gated, 3 * linear.conv_size + 2 * linear.value_size + 2 * recurrence)
    if mla is None:
        return 2 * config.q_size + 2 * config.kv_size
    absorbed = 2 * mla.kv_lora_rank
    written_out = 2 * mla.qk_nope_head_dim + mla.qk_rope_head_dim + 2 * mla.v_head_dim
    return config.num_heads * (mla.qk_head_dim + max(absorbed, written_out) + 2 * mla.v_head_dim)


def _selection_row(config: ModelConfig) -> int:
    """Bytes of one token's row of sparse attention's choice, which every rank makes whole."""
    indexer = config.mla.indexer if config.mla is not None else None
    if indexer is None:
        return 0
    query = 2 * indexer.num_heads * indexer.head_dim * config.torch_dtype.itemsize
    # Hidden states and weights of heads in float32, and the chosen positions.
    return query + 4 * (config.hidden_size + 2 * indexer.num_heads + indexer.top_k)


def _mlp_row(config: ModelConfig, ranks: int, has_resident_experts: bool) -> int:
    """Of one token's row in the widest second half of a layer."""
    item = config.torch_dtype.itemsize
    dense = config.intermediate_size if len(config.moe.layers) < config.num_layers else 0
    row = 3 * max(dense, config.moe.shared_intermediate_size) * item // ranks
    row += 3 * 4 * config.moe.router.num_experts
    if has_resident_experts:
        inner = 3 * config.moe.intermediate_size // ranks
        # Each choice has its own sorted row in, its product, and its weighted row out.
        row += config.moe.router.top_k * (inner * item + config.hidden_size * (item + 4))
    return row


def logits_bytes(config: ModelConfig, step: StepSize) -> int:
    """Logits in both types, penalised, as probabilities, sorted with their indices: all of the sampler."""
    return step.sequences * config.vocab_size * (config.torch_dtype.itemsize + 5 * 4 + 8)


def graph_bytes(config: ModelConfig, gpu: GpuConfig, parallel: ParallelContext, resident: bool) -> int:
    """Graphs of 1, 2, 4, 8 and every further 8 requests, and the shared pool of the largest one."""
    if not gpu.cuda_graphs:
        return 0
    largest = min(gpu.cuda_graph_max_batch_size, gpu.num_seqs)
    count = 3 + -(-largest // 8)
    pool = activation_bytes(config, StepSize(largest, largest), parallel, resident)
    return count * GRAPH_BYTES + pool


def workspace_bytes(parallel: ParallelContext) -> int:
    """Buffers of libraries that live as long as the process."""
    several = parallel.tp_size * parallel.num_stages > 1
    return ATTENTION_WORKSPACE + CUBLAS_WORKSPACE + (NCCL_BUFFERS if several else 0)
