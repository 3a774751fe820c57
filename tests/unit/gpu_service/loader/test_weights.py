"""Invariant: a checkpoint loads completely or not at all; every name is accounted for."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gpu_service.loader import load, sources
from gpu_service.loader.load import load_weights
from gpu_service.models.common import CausalLM
from gpu_service.models.compose import build_model
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.reader import SliceReader
from moebius.models.read import read_model_config

Tensors = dict[str, torch.Tensor]
CONFIG = {
    "model_type": "glm4_moe",
    "vocab_size": 11,
    "hidden_size": 6,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "moe_intermediate_size": 3,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


def _layer(layer: int) -> Tensors:
    shapes = {
        "input_layernorm.weight": (6,),
        "post_attention_layernorm.weight": (6,),
        "self_attn.q_proj.weight": (8, 6),
        "self_attn.k_proj.weight": (4, 6),
        "self_attn.v_proj.weight": (4, 6),
        "self_attn.o_proj.weight": (6, 8),
    }
    mlps = {"mlp": 10} if layer == 0 else {"mlp.shared_experts": 3, "mlp.experts.0": 3, "mlp.experts.1": 3}
    for prefix, width in mlps.items():
        shapes |= {
            f"{prefix}.gate_proj.weight": (width, 6),
            f"{prefix}.up_proj.weight": (width, 6),
            f"{prefix}.down_proj.weight": (6, width),
        }
    if layer == 1:
        shapes |= {"mlp.gate.weight": (2, 6), "mlp.gate.e_score_correction_bias": (2,)}
    return {f"model.layers.{layer}.{name}": torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(11, 6), "model.norm.weight": torch.randn(6)}
    save_file(tensors | _layer(0) | _layer(1), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def _change(directory: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def _load(directory: Path) -> CausalLM:
    model = build_model(read_model_config(directory))
    load_weights(model, directory)
    return model


def test_every_parameter_is_filled_and_no_expert_is_created(checkpoint: Path) -> None:
    model = _load(checkpoint)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert not any(".experts." in name for name, _ in model.named_parameters())
    stored = load_file(checkpoint / "model.safetensors")
    fused = model.model.layers[1].self_attn.qkv_proj.weight
    fused = fused.to_dense() if fused.is_mkldnn else fused  # type: ignore[operator]
    parts = [stored[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    torch.testing.assert_close(fused, torch.cat(parts), rtol=0, atol=0)


def test_names_that_may_be_there_are_skipped(checkpoint: Path) -> None:
    extra = {
        "lm_head.weight": load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
        "model.layers.2.eh_proj.weight": torch.zeros(6, 12),
    }
    _change(checkpoint, lambda tensors: tensors.update(extra))
    _load(checkpoint)


def test_layers_that_config_json_lacks_are_named(checkpoint: Path) -> None:
    """What is left out after the last layer is multi-token prediction, not a layer of the model."""
    _change(
        checkpoint, lambda tensors: tensors.update({"model.layers.2.input_layernorm.weight": torch.ones(6)})
    )
    with pytest.raises(CheckpointError, match=r"layers\.2\.input.* is of layer 2, .*num_hidden_layers 2"):
        _load(checkpoint)
    _change(checkpoint, lambda tensors: tensors.update({"model.layers.2.enorm.weight": torch.ones(6)}))
    _load(checkpoint)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias"]
)
def test_a_missing_tensor_is_named(checkpoint: Path, name: str) -> None:
    _change(checkpoint, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"1 missing: {name}"):
        _load(checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.extra.weight",
    ],
)
def test_an_unused_tensor_is_named(checkpoint: Path, name: str) -> None:
    _change(checkpoint, lambda tensors: tensors.update({name: torch.zeros(4)}))
    with pytest.raises(CheckpointError, match=f"1 unused: {name}"):
        _load(checkpoint)


def test_a_misshaped_part_of_a_fused_weight_is_named_with_both_shapes(checkpoint: Path) -> None:
    name = "model.layers.1.self_attn.v_proj.weight"
    _change(checkpoint, lambda tensors: tensors.update({name: torch.zeros(6, 4)}))
    with pytest.raises(CheckpointError, match=r"mis-shaped: .*v_proj.weight \[6, 4\] \(expected \[4, 6\]\)"):
        _load(checkpoint)


def test_an_integer_tensor_is_refused(checkpoint: Path) -> None:
    _change(
        checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(6, dtype=torch.int32)})
    )
    with pytest.raises(CheckpointError, match=r"mis-typed: model.norm.weight I32"):
        _load(checkpoint)


def test_all_problems_are_reported_at_once(checkpoint: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        del tensors["model.norm.weight"]
        tensors["stray"] = torch.zeros(1)

    _change(checkpoint, spoil)
    with pytest.raises(CheckpointError, match=r"missing: model.norm.weight; 1 unused: stray"):
        _load(checkpoint)


def test_bfloat16_values_survive_the_numpy_reader(checkpoint: Path) -> None:
    exact = torch.tensor([1.0, -0.5, 3.140625, 1e-30, -65280.0, 0.0], dtype=torch.bfloat16)
    _change(checkpoint, lambda tensors: tensors.update({"model.norm.weight": exact}))
    assert torch.equal(_load(checkpoint).model.norm.weight, exact.float())


def test_threads_fill_one_parameter_together(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused projections are one parameter, whichever of the threads that read its parts is the first."""
    monkeypatch.setattr(CausalLM, "pack", lambda model: None)  # packed weights cannot be compared
    expected = _load(checkpoint).state_dict()
    monkeypatch.setattr(load, "_MAX_THREADS", 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    together = threading.Barrier(8)

    class MetAtTheSameTime(SliceReader):
        """All threads have begun before the first parameter is made."""

        def __init__(self) -> None:
            super().__init__()
            together.wait(30)

    monkeypatch.setattr(load, "SliceReader", MetAtTheSameTime)

    def slow(memory: torch.Tensor, requires_grad: bool) -> nn.Parameter:
        time.sleep(0.01)  # so that another thread could make the same one meanwhile
        return nn.Parameter(memory, requires_grad=requires_grad)

    monkeypatch.setattr(sources, "nn", SimpleNamespace(Parameter=slow))
    found = _load(checkpoint).state_dict()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def test_an_error_in_a_thread_ends_the_load(checkpoint: Path) -> None:
    """It is raised as it was found, and the other threads take nothing more."""
    _change(checkpoint, lambda tensors: tensors["model.layers.1.self_attn.o_proj.weight"].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight"):
        _load(checkpoint)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("dense", "blocks"))]
