"""Turn the dense GGUF and the split into `glm4_moe` tensors, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from moebius.app.demo_model import recipe
from moebius.app.demo_model.errors import DemoModelError
from moebius.app.demo_model.progress import ProgressCallback
from moebius.app.demo_model.shards import (
    StoredTensor,
    bfloat16_tensor,
    float32_tensor,
    write_index,
    write_shard,
)
from moebius.app.demo_model.sources import DenseWeights, ExpertSplit
from moebius.checkpoint.gguf.values import rows_of_pairs

Array: TypeAlias = NDArray[np.float32]

LAYERS_PER_SHARD = 10


def unpermute_rotary(weight: Array, num_heads: int) -> Array:
    """Undo the GGUF order of rotary pairs in a q or k projection.

    `weight` is float32 [num_heads * head_dim, hidden_size]. GGUF's llama layout interleaves the two members
    of a rotary pair (0, d/2, 1, d/2+1, ...); Hugging Face keeps them as two halves.
    """
    rows = len(weight)
    return weight[rows_of_pairs(np.arange(rows), rows // num_heads)]


def attention_tensors(dense: DenseWeights, layer: int) -> dict[str, Array]:
    """Return norms and attention projections of a layer, by their name inside the layer (float32)."""
    return {
        "input_layernorm": dense.layer(layer, "attn_norm"),
        "post_attention_layernorm": dense.layer(layer, "ffn_norm"),
        "self_attn.q_proj": unpermute_rotary(dense.layer(layer, "attn_q"), recipe.NUM_HEADS),
        "self_attn.k_proj": unpermute_rotary(dense.layer(layer, "attn_k"), recipe.NUM_KV_HEADS),
        "self_attn.v_proj": dense.layer(layer, "attn_v"),
        "self_attn.o_proj": dense.layer(layer, "attn_output"),
    }


def expert_tensors(dense: DenseWeights, split: ExpertSplit, layer: int) -> dict[str, Array]:
    """Cut a layer's dense MLP [1536 neurons] into the shared expert [512] and 16 routed experts [64 each]."""
    order = split.neuron_order[layer].astype(np.int64)
    gate = dense.layer(layer, "ffn_gate")[order]
    up = dense.layer(layer, "ffn_up")[order]
    down = dense.layer(layer, "ffn_down")[:, order]
    size = recipe.EXPERT_INTERMEDIATE_SIZE
    shared = size * recipe.NUM_SHARED_EXPERTS
    bounds = [("mlp.shared_experts", 0, shared)]
    for expert in range(recipe.NUM_EXPERTS):
        begin = shared + expert * size
        bounds.append((f"mlp.experts.{expert}", begin, begin + size))
    tensors: dict[str, Array] = {}
    for name, begin, end in bounds:
        tensors[f"{name}.gate_proj"] = gate[begin:end]
        tensors[f"{name}.up_proj"] = up[begin:end]
        tensors[f"{name}.down_proj"] = down[:, begin:end]
    return tensors


def layer_tensors(dense: DenseWeights, split: ExpertSplit, layer: int) -> dict[str, StoredTensor]:
    """Return all tensors of one layer under their checkpoint names."""
    prefix = f"model.layers.{layer}."
    matrices = attention_tensors(dense, layer) | expert_tensors(dense, split, layer)
    tensors = {f"{prefix}{name}.weight": bfloat16_tensor(value) for name, value in matrices.items()}
    # fp32: rounded to bf16, the shrunken router scores of a token would tie.
    router = split.router[layer].astype(np.float32) * np.float32(recipe.ROUTER_SCALE)
    bias = split.bias[layer] * np.float32(recipe.BIAS_SCALE)
    tensors[f"{prefix}mlp.gate.weight"] = float32_tensor(router)
    tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = float32_tensor(bias)
    return tensors


def shard_contents(dense: DenseWeights, split: ExpertSplit) -> Iterator[dict[str, StoredTensor]]:
    """Yield the tensors of each shard: the embedding with the final norm, then groups of layers."""
    # The head is tied to the embedding, so there is no lm_head tensor.
    yield {
        "model.embed_tokens.weight": bfloat16_tensor(dense.tensor("token_embd.weight")),
        "model.norm.weight": bfloat16_tensor(dense.tensor("output_norm.weight")),
    }
    for begin in range(0, recipe.NUM_LAYERS, LAYERS_PER_SHARD):
        tensors: dict[str, StoredTensor] = {}
        for layer in range(begin, min(begin + LAYERS_PER_SHARD, recipe.NUM_LAYERS)):
            tensors |= layer_tensors(dense, split, layer)
        yield tensors


def convert_weights(gguf: Path, split_file: Path, directory: Path, progress: ProgressCallback) -> None:
    """Write the safetensors shards and their index into `directory`.

    Raises DemoModelError when a source does not have the recipe's geometry, and OSError from writing.
    """
    num_shards = 1 + -(-recipe.NUM_LAYERS // LAYERS_PER_SHARD)
    progress("converting weights", 0, num_shards)
    dense = DenseWeights.open(gguf)
    split = ExpertSplit.load(split_file)
    weight_map: dict[str, str] = {}
    total_size = 0
    for number, tensors in enumerate(shard_contents(dense, split), start=1):
        file_name = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        write_shard(directory / file_name, tensors)
        weight_map |= dict.fromkeys(tensors, file_name)
        total_size += sum(tensor.data.nbytes for tensor in tensors.values())
        progress("converting weights", number, num_shards)
    dense.require_all_used()
    if len(set(weight_map.values())) != num_shards:
        raise DemoModelError(f"wrote {len(set(weight_map.values()))} shards, expected {num_shards}")
    write_index(directory, weight_map, total_size)
