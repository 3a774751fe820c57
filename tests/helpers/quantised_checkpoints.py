"""Writes tiny MoE checkpoints in every quantised format, with the weights that they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.helpers.checkpoints import TinyMoe, write_safetensors
from tests.helpers.quantised_sources import ENCODERS, Floats, Quantised, bfloat16_bits, mxfp4, random_weights

Array = NDArray[Any]
Weights = dict[tuple[int, int, str], Floats]
MATRICES = ("gate", "up", "down")


def compressed(
    weights: dict[str, Any], form: str, activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    """compressed-tensors' configuration of one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def packed_int4(group_size: int, symmetric: bool) -> dict[str, Any]:
    """compressed-tensors int4 in groups."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": group_size,
        "symmetric": symmetric,
    }
    return compressed(weights, "pack-quantized")


def gptq(group_size: int, symmetric: bool, **changes: Any) -> dict[str, Any]:
    """AutoGPTQ's configuration."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": False,
        **changes,
    }


def awq(group_size: int) -> dict[str, Any]:
    """AutoAWQ's configuration."""
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}


_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
# Encoder -> quantization_config.
QUANTIZATION_CONFIGS: Mapping[str, dict[str, Any] | None] = {
    "float32": None,
    "bfloat16": None,
    "float16": None,
    "fp8_block": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "fp8_block_64": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 64]},
    "fp8_block_256": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 256]},
    "fp8_rows_128": {"quant_method": "fp8", "weight_block_size": [1, 128]},
    "mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "fp8_channel": compressed(_FLOAT8, "float-quantized"),
    "fp8_tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "int8": compressed(_INT8, "int-quantized"),
    "int8_g32_f16": compressed(_INT8 | {"strategy": "group", "group_size": 32}, "int-quantized"),
    "int8_g128": compressed(_INT8 | {"strategy": "group", "group_size": 128}, "int-quantized"),
    "int8_w8a8": compressed(_INT8, "int-quantized", _DYNAMIC),
    "compressed_int4_g32": packed_int4(32, True),
    "compressed_int4_g64_f16": packed_int4(64, True),
    "compressed_int4_g128": packed_int4(128, True),
    "compressed_int4_g32_zeros": packed_int4(32, False),
    "compressed_int4_g64_zeros": packed_int4(64, False),
    "awq_int4_g32": awq(32),
    "awq_int4_g64": awq(64),
    "awq_int4_g128": awq(128),
    "gptq_int4_g32": gptq(32, False),
    "gptq_int4_g128_v2": gptq(128, False, checkpoint_format="gptq_v2"),
    "gptq_int4_g64_symmetric": gptq(64, True),
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "nvfp4_reciprocal": compressed(_NVFP4, "nvfp4-pack-quantized"),
}


def _tiny() -> TinyMoe:
    return TinyMoe(hidden_size=96, moe_intermediate_size=160, num_layers=2, num_experts=3)


@dataclass
class QuantisedMoe:
    """A tiny model whose experts are stored by one encoder of `quantised_sources`."""

    encoder: str
    model: TinyMoe = field(default_factory=_tiny)
    # Filled by `write`: what the checkpoint means.
    weights: Weights = field(default_factory=dict)
    # quantization_config, when it is not the encoder's own.
    quantization: dict[str, Any] | None = None

    def shape(self, matrix: str) -> tuple[int, int]:
        """Returns logical `[out, in]`."""
        size = (self.model.moe_intermediate_size, self.model.hidden_size)
        return size[::-1] if matrix == "down" else size

    def tensors(self) -> tuple[dict[str, Array], dict[str, str]]:
        """Tensors and, where numpy does not tell, their dtypes."""
        rng = np.random.default_rng(7)
        tensors: dict[str, Array] = {"model.norm.weight": np.ones(4, np.float32)}
        dtypes: dict[str, str] = {}
        encode: Callable[[Floats], Quantised] = ENCODERS[self.encoder]
        for layer in self.model.moe_layers:
            for expert in range(self.model.num_experts):
                for matrix in MATRICES:
                    quantised = encode(random_weights(rng, *self.shape(matrix)))
                    self.weights[layer, expert, matrix] = quantised.weights
                    stem = f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj"
                    for suffix, array in quantised.tensors.items():
                        name = f"{stem}.{suffix}"
                        tensors[name] = array
                        if array.dtype == np.uint8 and suffix in ("weight_packed", "weight"):
                            dtypes[name] = "U8" if "fp4" in self.encoder else "F8_E4M3"
                        elif array.dtype == np.uint8 and self.encoder == "mxfp8":
                            dtypes[name] = "U8"
        return tensors, dtypes

    def config(self) -> dict[str, Any]:
        """config.json."""
        quantization = self.quantization or QUANTIZATION_CONFIGS[self.encoder]
        extra = {} if quantization is None else {"quantization_config": quantization}
        return {**self.model.config(), **extra}

    def write(
        self,
        directory: Path,
        replace: Mapping[str, Array | None] | None = None,
        dtypes: Mapping[str, str] | None = None,
    ) -> Path:
        """Write the checkpoint; `replace` changes tensors, or drops those it maps to None."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors, known = self.tensors()
        wanted: dict[str, Array | None] = {**tensors, **(replace or {})}
        present = {name: array for name, array in wanted.items() if array is not None}
        write_safetensors(directory / "model.safetensors", present, {**known, **(dtypes or {})})
        (directory / "config.json").write_text(json.dumps(self.config()))
        return directory


@dataclass
class GptOssMoe:
    """gpt-oss: MXFP4 blocks of all experts in one tensor, gate and up interleaved, with biases."""

    hidden_size: int = 96
    intermediate_size: int = 64
    num_layers: int = 2
    num_experts: int = 3
    top_k: int = 2
    weights: Weights = field(default_factory=dict)
    biases: Weights = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "model_type": "gpt_oss",
            "vocab_size": 11,
            "num_attention_heads": 4,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64,
            "sliding_window": 8,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "hidden_act": "silu",
            "swiglu_limit": 5.0,
            "torch_dtype": "bfloat16",
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []},
        }

    def write(self, directory: Path) -> Path:
        """Write the checkpoint and remember what it means."""
        rng = np.random.default_rng(11)
        tensors: dict[str, Array] = {}
        dtypes: dict[str, str] = {}
        for layer in range(self.num_layers):
            for stem, rows, cols in (
                ("gate_up_proj", 2 * self.intermediate_size, self.hidden_size),
                ("down_proj", self.hidden_size, self.intermediate_size),
            ):
                below = f"model.layers.{layer}.mlp.experts.{stem}"
                experts = [mxfp4(random_weights(rng, rows, cols)) for _ in range(self.num_experts)]
                bias = bfloat16_bits(rng.standard_normal((self.num_experts, rows)).astype(np.float32) / 4)
                for suffix in ("blocks", "scales"):
                    stacked = np.stack([expert.tensors[suffix] for expert in experts])
                    tensors[f"{below}_{suffix}"] = stacked
                    dtypes[f"{below}_{suffix}"] = "U8"
                blocks = tensors[f"{below}_blocks"]
                tensors[f"{below}_blocks"] = blocks.reshape(*blocks.shape[:2], -1, 16)
                tensors[f"{below}_bias"] = bias
                self._remember(layer, stem, [expert.weights for expert in experts], bias)
        directory.mkdir(parents=True, exist_ok=True)
        write_safetensors(directory / "model.safetensors", tensors, dtypes)
        (directory / "config.json").write_text(json.dumps(self.config()))
        return directory

    def _remember(self, layer: int, stem: str, weights: list[Floats], bias: Array) -> None:
        values = (bias.astype(np.uint32) << 16).view(np.float32)
        for expert, matrix in enumerate(weights):
            parts = (("gate", 0, 2), ("up", 1, 2)) if stem == "gate_up_proj" else (("down", 0, 1),)
            for name, part, step in parts:
                self.weights[layer, expert, name] = matrix[part::step]
                self.biases[layer, expert, name] = values[expert, part::step]
