"""From the packaged GGUF to the demo checkpoint's tensors, shards and tokenizer, without torch.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header
with dtype, shape and byte range of every tensor, then the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from app.demo_model import recipe
from app.demo_model.download import DemoModelError, ProgressCallback
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.values import rows_of_pairs
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.stored_values import as_float32

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.model import GgufModel


class DenseWeights:
    """The GGUF's tensors, dequantised to float32 one at a time, and a record of which were used."""

    def __init__(self, model: GgufModel) -> None:
        """Use `open`, which checks the file first."""
        self._model = model
        self._unused = set(model.tensors)

    @classmethod
    def open(cls, path: Path) -> DenseWeights:
        """Open a GGUF file; raises DemoModelError when it is not GGUF or not the recipe's geometry."""
        from moebius.checkpoint.gguf.model import open_gguf

        try:
            weights = cls(open_gguf(path))
        except CheckpointError as error:
            raise DemoModelError(f"{path} is not a readable GGUF file: {error}") from error
        weights._check_geometry()
        return weights

    def field(self, name: str) -> Any:
        """Return a metadata value (number, string or list); raises DemoModelError when it is absent."""
        if name not in self._model.metadata:
            raise DemoModelError(f"the GGUF file has no field {name!r}")
        return self._model.metadata[name]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as float32, [out_features, in_features] for matrices."""
        from moebius.checkpoint.gguf.tensors import in_floats

        if name not in self._model.tensors:
            raise DemoModelError(f"the GGUF file has no tensor {name!r}")
        self._unused.discard(name)
        info = in_floats(self._model.tensors[name], name)
        with SliceReader() as reader:
            return as_float32(reader.read(info), info.dtype)

    def layer(self, layer: int, name: str) -> NDArray[np.float32]:
        """Return `blk.<layer>.<name>.weight` as float32."""
        return self.tensor(f"blk.{layer}.{name}.weight")

    def require_all_used(self) -> None:
        """Raise DemoModelError when a tensor of the file went into no output: the recipe missed it."""
        if self._unused:
            raise DemoModelError(f"GGUF tensors that the recipe does not use: {sorted(self._unused)}")

    def _check_geometry(self) -> None:
        expected = {
            "general.architecture": "llama",
            "llama.block_count": recipe.NUM_LAYERS,
            "llama.embedding_length": recipe.HIDDEN_SIZE,
            "llama.feed_forward_length": recipe.DENSE_INTERMEDIATE_SIZE,
            "llama.attention.head_count": recipe.NUM_HEADS,
            "llama.attention.head_count_kv": recipe.NUM_KV_HEADS,
        }
        found = {name: self.field(name) for name in expected}
        if found != expected:
            raise DemoModelError(f"the GGUF file describes another model: {found}, expected {expected}")


class ExpertSplit:
    """How each dense MLP becomes experts; filled by `load` from split.safetensors.

    neuron_order: int16 [layers, 1536], of channels per layer: the shared ones, then expert 0, 1, ...
    router: float16 [layers, experts, hidden] and bias: float32 [layers, experts], both before scaling.
    """

    def __init__(
        self, neuron_order: NDArray[np.int16], router: NDArray[np.float16], bias: NDArray[np.float32]
    ) -> None:
        """Filled by `load`; raises DemoModelError when a shape or a permutation is wrong."""
        self.neuron_order = neuron_order
        self.router = router
        self.bias = bias
        layers, experts = recipe.NUM_LAYERS, recipe.NUM_EXPERTS
        expected = {
            "neuron_order": (layers, recipe.DENSE_INTERMEDIATE_SIZE),
            "router": (layers, experts, recipe.HIDDEN_SIZE),
            "bias": (layers, experts),
        }
        found = {"neuron_order": neuron_order.shape, "router": router.shape, "bias": bias.shape}
        if found != expected:
            raise DemoModelError(f"the split has shapes {found}, expected {expected}")
        identity = np.arange(recipe.DENSE_INTERMEDIATE_SIZE)
        if not (np.sort(neuron_order, axis=1) == identity).all():
            raise DemoModelError(
                "the split's neuron_order is not a permutation of all intermediate channels in every layer"
            )

    @classmethod
    def load(cls, path: Path) -> ExpertSplit:
        """Read the split from a safetensors file."""
        from safetensors.numpy import load_file

        try:
            tensors = load_file(path)
            return cls(tensors["neuron_order"], tensors["router"], tensors["bias"])
        except KeyError as error:
            raise DemoModelError(f"{path} has no tensor {error}") from error


INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as it lies on disk; filled by `bfloat16_tensor` or `float32_tensor`.

    `dtype` is safetensors' name ("BF16" or "F32"), `data` a C-contiguous array whose bytes are the content
    (uint16 bit patterns for BF16).
    """

    dtype: str
    data: NDArray[np.uint16] | NDArray[np.float32]


def to_bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite float32 `values` to bfloat16 (nearest, ties to even); return bit patterns, same shape."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Adding half of the dropped part, plus the lowest kept bit, makes ties go to the even neighbour.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def bfloat16_tensor(values: NDArray[np.float32]) -> StoredTensor:
    """Return `values` (float32, any shape) as a BF16 tensor."""
    return StoredTensor("BF16", to_bfloat16_bits(values))


def float32_tensor(values: NDArray[np.float32]) -> StoredTensor:
    """Return `values` (float32, any shape) as an F32 tensor."""
    return StoredTensor("F32", np.ascontiguousarray(values, dtype="<f4"))


def write_shard(path: Path, tensors: dict[str, StoredTensor]) -> None:
    """Write one safetensors file holding `tensors`; raises OSError (for one: disk full)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.data.shape, "data_offsets": (offset, end)}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # data starts aligned to 8 bytes
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors.values():
            tensor.data.tofile(file)


def write_index(directory: Path, weight_map: dict[str, str], total_size: int) -> None:
    """Write the index of a sharded checkpoint: tensor name -> file name, and the data's size in bytes."""
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def build_tokenizer(gguf: Path, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `directory`.

    Byte-level BPE; digits are single tokens, as llama.cpp's pre-tokenizer "smollm" and the original
    SmolLM2 tokenizer have it. Raises DemoModelError when the GGUF holds another kind of tokenizer.
    """
    from moebius.checkpoint.gguf.tokenizer import read_tokenizer

    source = DenseWeights.open(gguf)
    kind = (source.field("tokenizer.ggml.model"), source.field("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise DemoModelError(f"the GGUF's tokenizer is {kind}, expected byte-level BPE ('gpt2', 'smollm')")
    found = read_tokenizer(gguf)
    tokenizer = found.backend
    if tokenizer.get_vocab_size() != recipe.VOCAB_SIZE:
        raise DemoModelError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {recipe.VOCAB_SIZE}"
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(found.chat_template, encoding="utf-8")
    _write_tokenizer_config(directory, source.field("tokenizer.ggml.tokens"), found.chat_template)


def _write_tokenizer_config(directory: Path, tokens: list[str], template: str) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": tokens[recipe.BOS_TOKEN_ID],
        "eos_token": tokens[recipe.EOS_TOKEN_ID],
        "pad_token": tokens[recipe.PAD_TOKEN_ID],
        "unk_token": tokens[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": recipe.CONTEXT_LENGTH,
        "chat_template": template,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


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
    """Cut a layer's dense MLP [1536 channels] into the shared expert [512] and 16 routed ones [64 each]."""
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
    """Yields the tensors of each shard: the embedding with the final norm, then groups of layers."""
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
