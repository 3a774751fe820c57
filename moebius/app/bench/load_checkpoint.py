"""Synthetic checkpoints for `moebius bench load`: routed experts of random weights, in files of one layer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moebius.errors import UserError

Array = NDArray[Any]
# safetensors dtype, array
Tensor = tuple[str, Array]


@dataclass(frozen=True)
class LoadShape:
    """Sizes of the synthetic model; filled by the command line."""

    hidden_size: int = 2048
    intermediate_size: int = 768
    num_experts: int = 128
    num_layers: int = 4

    @property
    def weights_per_layer(self) -> int:
        """Of all experts."""
        return 3 * self.hidden_size * self.intermediate_size * self.num_experts


def parse_shape(text: str, layers: int) -> LoadShape:
    """ "HxIxE". Raises UserError."""
    try:
        hidden, intermediate, experts = (int(part) for part in text.split("x"))
    except ValueError:
        hidden = intermediate = experts = 0
    if min(hidden, intermediate, experts) < 1:
        raise UserError(f"--shape: {text!r} is not allowed; allowed: HxIxE, three numbers >= 1")
    return LoadShape(hidden, intermediate, experts, layers)


def _bfloat16(rng: np.random.Generator, rows: int, cols: int) -> dict[str, Tensor]:
    values = rng.standard_normal((rows, cols), np.float32) / 32
    return {"weight": ("BF16", (values.view(np.uint32) >> 16).astype(np.uint16))}


def _fp8_block(rng: np.random.Generator, rows: int, cols: int) -> dict[str, Tensor]:
    # Below 0x78 no code is NaN, and magnitudes are spread as exponents are.
    codes = rng.integers(0, 0x78, (rows, cols), np.uint8) | (rng.integers(0, 2, (rows, cols), np.uint8) << 7)
    blocks = (math.ceil(rows / 128), math.ceil(cols / 128))
    scales = rng.uniform(1e-4, 2e-4, blocks).astype(np.float32)
    return {"weight": ("F8_E4M3", codes), "weight_scale_inv": ("F32", scales)}


def _int4(rng: np.random.Generator, rows: int, cols: int) -> dict[str, Tensor]:
    words = rng.integers(-(2**31), 2**31, (rows, math.ceil(cols / 8)), np.int32)
    scales = rng.uniform(0.01, 0.02, (rows, math.ceil(cols / 32))).astype(np.float32)
    return {
        "weight_packed": ("I32", words),
        "weight_scale": ("BF16", (scales.view(np.uint32) >> 16).astype(np.uint16)),
        "weight_shape": ("I64", np.array([rows, cols], np.int64)),
    }


_INT4_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
# Format -> how a matrix is made, and quantization_config.
FORMATS: Mapping[str, tuple[Callable[[np.random.Generator, int, int], dict[str, Tensor]], Any]] = {
    "bfloat16": (_bfloat16, None),
    "fp8_block": (_fp8_block, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "int4_g32": (
        _int4,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4_WEIGHTS}},
        },
    ),
}


def write_checkpoint(directory: Path, shape: LoadShape, name: str) -> int:
    """Write the checkpoint; bytes of tensors. Experts repeat a few random ones, which no reader can tell."""
    make, quantization = FORMATS[name]
    rng = np.random.default_rng(0)
    wide, tall = (shape.intermediate_size, shape.hidden_size), (shape.hidden_size, shape.intermediate_size)
    experts = [
        {"gate_proj": make(rng, *wide), "up_proj": make(rng, *wide), "down_proj": make(rng, *tall)}
        for _ in range(3)
    ]
    weight_map: dict[str, str] = {}
    total = 0
    for layer in range(shape.num_layers):
        file = f"model-{layer + 1:05d}-of-{shape.num_layers:05d}.safetensors"
        tensors = dict(_layer_tensors(layer, shape, experts))
        weight_map |= dict.fromkeys(tensors, file)
        total += _write_file(directory / file, tensors)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "hidden_size": shape.hidden_size,
        "moe_intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": min(8, shape.num_experts),
        "torch_dtype": "bfloat16",
    }
    if quantization is not None:
        config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    return total


def _layer_tensors(
    layer: int, shape: LoadShape, experts: list[dict[str, dict[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    for expert in range(shape.num_experts):
        for matrix, tensors in experts[(layer + expert) % len(experts)].items():
            for suffix, tensor in tensors.items():
                yield f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.{suffix}", tensor


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> int:
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, array) in tensors.items():
        end = position + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for _, array in tensors.values():
            stream.write(array.data)
    return position
