"""Tiny checkpoints of whole models in any format, and transformers' float32 models of what they mean."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gpu_service.experts.local_client import LocalExpertClient
from moebius.models.read import read_geometry
from tests.helpers.checkpoints import write_safetensors
from tests.helpers.model_formats import ModelFormat
from tests.helpers.paged_runner import load_runner
from tests.helpers.quantised_sources import Array, Floats
from tests.helpers.tiny_models import TinyModel, write_tiny_model

# Widths that are no multiples of most groups and blocks, several of which exceed one block of 128.
_SIZES: dict[str, Any] = {
    "vocab_size": 216,
    "hidden_size": 160,
    "intermediate_size": 224,
    "moe_intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
}
QUANTISED_MODELS: dict[str, TinyModel] = {
    "qwen3_moe": TinyModel(
        "qwen3_moe",
        {**_SIZES, "head_dim": 40, "num_key_value_heads": 2, "num_experts": 4, "mlp_only_layers": [0]},
    ),
    "deepseek_v3": TinyModel(
        "deepseek_v3",
        {
            **_SIZES,
            "head_dim": 8,
            "num_key_value_heads": 4,
            "q_lora_rank": 56,
            "kv_lora_rank": 136,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 8,
            "v_head_dim": 48,
            "num_mtp_layers": 0,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "attention_bias": True,
        },
    ),
}
PROMPT = [3, 17, 200, 5, 99, 42, 42, 8, 150, 23, 61, 2]
_MATRIX = re.compile(r".*(?:proj|proj_with_mqa|lm_head|embed_tokens)\.weight")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class PlainModel:
    """Written once, quantised many times; made by `write_plain`."""

    directory: Path
    reference: Any
    weights: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    # Of `PROMPT`.
    logits: torch.Tensor


Models = Callable[[str], PlainModel]


def write_plain(name: str, directory: Path) -> PlainModel:
    """Returns the float32 checkpoint that is quantised, and transformers' model of it."""
    reference = write_tiny_model(QUANTISED_MODELS[name], directory, seed=len(name))
    state = copy.deepcopy(reference.state_dict())
    weights = load_file(directory / "model.safetensors")
    return PlainModel(directory, reference, weights, state, reference_logits(reference))


@torch.inference_mode()
def reference_logits(reference: Any) -> torch.Tensor:
    """Returns `[len(PROMPT), V]`."""
    logits: torch.Tensor = reference(torch.tensor([PROMPT])).logits[0]
    return logits


def cached_plain_models(root: Path) -> Models:
    """`name -> PlainModel`, each written once under `root`."""
    return cache(lambda name: write_plain(name, root / name))


def local_experts(directory: Path) -> LocalExpertClient:
    """Dequantised, in float32."""
    return LocalExpertClient(str(directory), read_geometry(directory), torch.float32)


def our_logits(directory: Path) -> torch.Tensor:
    """Returns `[len(PROMPT), V]` of our float32 model, experts dequantised."""
    runner = load_runner(directory, experts=local_experts(directory))
    _, logits = runner.prefill(PROMPT)
    return logits


# What a matrix of that name is stored as; None: left alone.
Choose = Callable[[str], ModelFormat | None]


@dataclass
class QuantisedModel:
    """A checkpoint before it is written; made by `quantise`. Tests may spoil any part of it."""

    tensors: dict[str, Array]
    # safetensors dtypes that numpy's do not tell.
    dtypes: dict[str, str]
    # config.json.
    config: dict[str, Any]
    # What quantised matrices mean, by their plain names.
    meant: dict[str, Floats] = field(default_factory=dict)
    # Names of the tensors that they are stored as.
    parts: set[str] = field(default_factory=set)
    tokenizer: Path | None = None  # File of the checkpoint, which n-grams are hashed by.

    def dequantised(self) -> QuantisedModel:
        """Returns the same weights as a plain checkpoint."""
        kept = {name: array for name, array in self.tensors.items() if name not in self.parts}
        config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        return QuantisedModel({**kept, **self.meant}, {}, config, tokenizer=self.tokenizer)

    def write(self, directory: Path) -> Path:
        """Returns one safetensors file and config.json."""
        directory.mkdir(parents=True, exist_ok=True)
        write_safetensors(directory / "model.safetensors", self.tensors, self.dtypes)
        (directory / "config.json").write_text(json.dumps(self.config))
        if self.tokenizer is not None:
            shutil.copy(self.tokenizer, directory)
        return directory


def quantise(plain: PlainModel, choose: Choose, config: dict[str, Any] | None) -> QuantisedModel:
    """Store every matrix as chosen."""
    settings = json.loads((plain.directory / "config.json").read_text())
    settings |= {} if config is None else {"quantization_config": config}
    tokenizer = plain.directory / "tokenizer.json"
    model = QuantisedModel({}, {}, settings, tokenizer=tokenizer if tokenizer.exists() else None)
    for name, weight in plain.weights.items():
        chosen = choose(name) if _MATRIX.fullmatch(name) else None
        if chosen is None:
            model.tensors[name] = weight.numpy()
            continue
        parts, model.meant[name] = chosen.encode(weight.numpy())
        for suffix, array in parts.items():
            stored = name.removesuffix("weight") + suffix
            if stored in plain.weights and stored != name:
                continue  # The model's own bias.
            model.tensors[stored] = array
            model.parts.add(stored)
            if suffix in chosen.dtypes:
                model.dtypes[stored] = chosen.dtypes[suffix]
    return model


@torch.no_grad()
def write_quantised(plain: PlainModel, directory: Path, choose: Choose, config: dict[str, Any] | None) -> Any:
    """Write the checkpoint with matrices stored as chosen; the reference, holding what they mean."""
    model = quantise(plain, choose, config)
    model.write(directory)
    plain.reference.load_state_dict(plain.state)
    for name, meant in model.meant.items():
        _parameter(plain.reference, name).copy_(torch.from_numpy(meant))
    return plain.reference


def _parameter(reference: Any, name: str) -> torch.Tensor:
    """Returns the part of transformers' parameters that a checkpoint's matrix is: experts are fused there."""
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        found: torch.Tensor = reference.get_parameter(name).data
        return found
    stem, index, which = expert[1], int(expert[2]), expert[3]
    if which == "down":
        down: torch.Tensor = reference.get_parameter(f"{stem}.down_proj").data[index]
        return down
    both: torch.Tensor = reference.get_parameter(f"{stem}.gate_up_proj").data[index]
    return both.chunk(2)[0 if which == "gate" else 1]
