"""Invariant: quantised copies of published models, which more people run than the originals, load completely:
what a copy names and stores otherwise is found, and of what the original has nothing is missing.

The copies' configurations and the names, types and shapes of their tensors are those of public tests and
loaders of other engines and of notes that read headers; the originals are `tests/data/checkpoints`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gpu_service.loader import load
from moebius.checkpoint.matrix_finder import MatrixFinder
from moebius.checkpoint.quantisation import read_schemes
from moebius.models.checkpoint import find_layout
from moebius.models.config import ModelOverrides
from moebius.models.expert_checkpoint import ExpertCheckpoint
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.published_checkpoints import Published

Tensor = tuple[str, str, tuple[int, ...]]
Store = Callable[[str, tuple[int, ...]], Iterator[Tensor]]


def _blocks(name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yields what publishers write: 8 bits, a scale per 128 x 128."""
    yield f"{name}.weight", "F8_E4M3", shape
    yield f"{name}.weight_scale_inv", "BF16", (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))


def _nvfp4(name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """ModelOpt's."""
    yield f"{name}.weight", "U8", (shape[0], shape[1] // 2)
    yield f"{name}.weight_scale", "F8_E4M3", (shape[0], shape[1] // 16)
    yield f"{name}.weight_scale_2", "F32", ()
    yield f"{name}.input_scale", "F32", ()


def _nvfp4_whole(name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """ModelOpt's Llama 4: all experts in one tensor, `[in, out]` as the original has them."""
    count, inner, out = shape
    yield name, "U8", (count, inner // 2, out)
    yield f"{name}_weight_scale", "F8_E4M3", (count, inner // 16, out)
    yield f"{name}_weight_scale_2", "F32", ()
    yield f"{name}_input_scale", "F32", ()


def _expert(store: Store, prefix: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yields a model's experts in one tensor, taken apart."""
    count, rows, columns = shape
    names = ("gate_proj", "up_proj") if prefix.endswith("gate_up_proj") else ("down_proj",)
    for name in names:
        stem = f"{prefix.rpartition('.')[0]}.{{0..{count - 1}}}.{name}"
        yield from store(stem, (rows // len(names), columns))


@dataclass(frozen=True)
class Copy:
    """A quantised copy; written by hand below."""

    original: str
    quantisation: dict[str, Any]
    format: str
    experts: Store
    # Those of layers that predict further tokens; None: as the original has them.
    mtp_experts: Store | None = None
    has_fp8_table: bool = False

    def tensors(self) -> Iterator[Tensor]:
        """Yields name pattern, type, shape, as `Published` has them."""
        for name, dtype, shape in Published.load(self.original).tensors:
            store = self.mtp_experts if name.startswith("mtp.") else self.experts
            if ".experts." in name and store is None:
                yield name, dtype, shape
            elif ".experts." in name and name.endswith(".scale"):
                continue
            elif ".experts." in name and name.endswith(".weight"):
                assert store is not None
                yield from store(name.removesuffix(".weight"), (shape[0], 2 * shape[1]))
            elif ".experts." in name:
                assert store is not None
                yield from store(name, shape) if store is _nvfp4_whole else _expert(store, name, shape)
            elif ".ngram_embedding." in name and self.has_fp8_table:
                yield name, "F8_E4M3", shape
            else:
                yield name, dtype, shape
        if self.has_fp8_table:
            place = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
            yield f"{place}.weight_scale", "BF16", (1,)


_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
_QWEN_TABLE = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
COPIES = {
    "Qwen/Qwen3.8-Flash-Next-FP8": Copy(
        "qwen3.8-flash-next",
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_per_tensor": False,
            "act_per_tensor": False,
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.language_model.embed_tokens"],
            "modules_to_convert": ["ple.ple_embedding.ngram_embedding"],
        },
        "fp8_block",
        _blocks,
        _blocks,
        has_fp8_table=True,
    ),
    "RadixArk/Qwen3.8-Flash-Next-NVFP4": Copy(
        "qwen3.8-flash-next",
        {**_MODELOPT, "ignore": ["mtp.*", "*.ple.*"]},
        "nvfp4",
        _nvfp4,
        has_fp8_table=True,
    ),
    "nvidia/Qwen3.8-Flash-Next-NVFP4": Copy(
        "qwen3.8-flash-next",
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.language_model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
                _QWEN_TABLE: {"quant_algo": "FP8"},
                "mtp.layers.0.mlp.experts": {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 128},
            },
        },
        "nvfp4",
        _nvfp4,
        _blocks,
        has_fp8_table=True,
    ),
    "nvidia/DeepSeek-V4-Flash-NVFP4": Copy(
        "deepseek-v4-flash",
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
            "quant_algo": "MIXED_PRECISION",
            "moe_quant_algo": "NVFP4",
            "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}},
        },
        "nvfp4",
        _nvfp4,
    ),
    "nvidia/Gemma-4-26B-A4B-NVFP4": Copy(
        "gemma-4-26b-a4b", {**_MODELOPT, "ignore": ["lm_head", "model.embed_vision*"]}, "nvfp4", _nvfp4
    ),
    "nvidia/Llama-4-Scout-17B-16E-Instruct-FP4": Copy("llama-4-scout", _MODELOPT, "nvfp4", _nvfp4_whole),
}


@pytest.mark.parametrize("name", list(COPIES))
def test_quantised_copies_load_completely(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense weights, and experts of every layer: the first, the last, and the MTP layer's where others."""
    copy = COPIES[name]
    original = Published.load(copy.original)
    raw = {**original.config, "quantization_config": copy.quantisation}
    index = replace(original, config=raw, tensors=list(copy.tensors())).index(tmp_path)
    config = read_model_config(tmp_path, ModelOverrides(language_model_only=True))
    assert config.unread_keys == ()
    monkeypatch.setattr(load, "open_index", lambda _: index)
    load.check_weights(config, tmp_path)
    geometry = read_geometry(tmp_path)
    finder = MatrixFinder(index.tensors, index.directory, read_schemes(index.directory))
    checkpoint = ExpertCheckpoint(geometry, find_layout(index, geometry.model_type), finder)
    for layer in geometry.moe_layers:
        for expert in (0, geometry.num_experts - 1):
            found = checkpoint.expert(layer, expert)
            found.check_kept()
            assert found.formats[0] == copy.format
    if copy.mtp_experts is not None:
        size = geometry.moe_intermediate_size, geometry.hidden_size
        finder.find("mtp.layers.0.mlp.experts.0.gate_proj.weight", size)
