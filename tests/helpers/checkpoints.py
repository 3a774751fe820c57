"""Writes tiny random MoE checkpoints: config.json and safetensors, without any model library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
StoredDtype = Literal["F32", "BF16", "F16"]
NAMES = {"<f4": "F32", "<f2": "F16", "<u2": "BF16", "<i8": "I64", "<i4": "I32", "|i1": "I8", "|u1": "F8_E4M3"}


def write_safetensors(
    path: Path, tensors: Mapping[str, Array], dtypes: Mapping[str, str] | None = None
) -> None:
    """One file; uint16 is stored as bfloat16, uint8 as float8, unless `dtypes` says otherwise by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, array in tensors.items():
        end = position + array.nbytes
        header[name] = {
            "dtype": (dtypes or {}).get(name, NAMES[array.dtype.str]),
            "shape": list(array.shape),
            "data_offsets": [position, end],
        }
        position = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for array in tensors.values():
            stream.write(np.ascontiguousarray(array).tobytes())


def write_sharded(directory: Path, tensors: Mapping[str, Array], shards: int) -> None:
    """An index file and its shards, or a single file for one shard."""
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        weight_map |= dict.fromkeys(part, file)
        write_safetensors(directory / file, part)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def to_bfloat16(array: Array) -> npt.NDArray[np.uint16]:
    """Returns float32 to bfloat16 bits, by truncation."""
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class TinyMoe:
    """Sizes of a tiny model; all distinct, so that a mix-up of dimensions cannot pass."""

    family: Literal["qwen3_moe", "glm4_moe"] = "qwen3_moe"
    hidden_size: int = 48
    moe_intermediate_size: int = 56
    num_layers: int = 3
    num_experts: int = 7
    top_k: int = 3
    dtype: StoredDtype = "F32"
    shards: int = 2
    seed: int = 0

    @property
    def moe_layers(self) -> list[int]:
        """glm4_moe's first layer is dense here."""
        return list(range(1 if self.family == "glm4_moe" else 0, self.num_layers))

    def config(self) -> dict[str, Any]:
        """Returns what config.json says."""
        common = {
            "model_type": self.family,
            "hidden_size": self.hidden_size,
            "moe_intermediate_size": self.moe_intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_experts_per_tok": self.top_k,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16" if self.dtype == "BF16" else "float32",
            "vocab_size": 11,
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 64,
        }
        if self.family == "glm4_moe":
            return {**common, "n_routed_experts": self.num_experts, "first_k_dense_replace": 1}
        return {**common, "num_experts": self.num_experts, "decoder_sparse_step": 1, "mlp_only_layers": []}

    def tensors(self) -> dict[str, Array]:
        """Routed experts of every MoE layer, and some names that expert servers must leave alone."""
        random = np.random.default_rng(self.seed)
        inner, hidden = self.moe_intermediate_size, self.hidden_size

        def matrix(rows: int, cols: int) -> Array:
            values: Array = (random.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
            if self.dtype == "BF16":
                return to_bfloat16(values)
            return values.astype(np.float16) if self.dtype == "F16" else values

        tensors = {"model.embed_tokens.weight": matrix(11, hidden)}
        for layer in self.moe_layers:
            below = f"model.layers.{layer}.mlp"
            tensors[f"{below}.gate.weight"] = matrix(self.num_experts, hidden)
            for expert in range(self.num_experts):
                for name in ("gate_proj", "up_proj"):
                    tensors[f"{below}.experts.{expert}.{name}.weight"] = matrix(inner, hidden)
                tensors[f"{below}.experts.{expert}.down_proj.weight"] = matrix(hidden, inner)
        if self.family == "glm4_moe":
            after_last = f"model.layers.{self.num_layers}.mlp.experts.0"
            tensors[f"{after_last}.gate_proj.weight"] = matrix(inner, hidden)
            tensors["model.layers.1.mlp.shared_experts.up_proj.weight"] = matrix(inner, hidden)
        return tensors

    def write(self, directory: Path, replace: Mapping[str, Array | None] | None = None) -> Path:
        """Write the checkpoint; `replace` changes tensors, or drops those it maps to None."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config()))
        tensors: dict[str, Array | None] = {**self.tensors(), **(replace or {})}
        present = {name: array for name, array in tensors.items() if array is not None}
        write_sharded(directory, present, self.shards)
        return directory
