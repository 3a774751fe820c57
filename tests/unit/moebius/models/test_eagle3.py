"""Invariant: an EAGLE-3 head is served as one layer after the last, or refused naming what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_service.loader.load import check_weights
from moebius.checkpoint.errors import CheckpointError
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.models.config import ModelConfig, ModelConfigError, ModelOverrides
from moebius.models.geometry import MoeGeometry
from moebius.models.layers.layer import Places, divided, places
from moebius.models.layers.residual import Eagle3
from moebius.models.read import read_geometry, read_model_config
from moebius.models.served import read_served_model
from tests.helpers.eagle3_heads import drop_tensors, write_head
from tests.helpers.tiny_engine import tiny_model
from tests.helpers.tiny_models import make_tiny_model

READ_LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Returns a checkpoint of three layers, and transformers' model of it."""
    directory = tmp_path_factory.mktemp("qwen")
    return directory, make_tiny_model("qwen3_moe", directory)


def read(model: Path, head: Path) -> ModelConfig:
    return read_model_config(model, ModelOverrides(draft_model=str(head)))


def of_speculators(head: Path) -> None:
    """Changes a head's config.json to that of another library, which nests the decoder layer's."""
    described = json.loads((head / "config.json").read_text())
    own = {key: described.pop(key) for key in ("draft_vocab_size", "norm_before_residual")}
    del described["eagle_config"]
    outer = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": described,
        READ_LAYERS: [0, 2, 3],
    }
    (head / "config.json").write_text(json.dumps(outer | own))


def test_a_head_is_a_layer_that_no_token_passes(qwen: tuple[Path, Any], tmp_path: Path) -> None:
    """The model's own layers, and what expert servers hold, stay as they are."""
    directory, model = qwen
    write_head(model, tmp_path)
    plain, served = read_model_config(directory), read(directory, tmp_path)
    assert (served.num_layers, served.num_decoder_layers, served.num_stored_layers) == (4, 3, 3)
    assert served.layers[:3] == plain.layers
    assert MoeGeometry.of(served) == read_geometry(directory)
    check_weights(served, directory)


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        # Without a word of it vLLM and SGLang take 2, half of the layers, and the third last, here of three.
        ({"eagle_config": None}, (0, 1, 2)),
        ({}, (1, 2, 3)),
        ({READ_LAYERS: [3, 0, 1]}, (0, 1, 3)),
    ],
)
def test_layers_are_counted_as_each_spelling_does(
    keys: dict[str, Any], layers: tuple[int, ...], qwen: tuple[Path, Any], tmp_path: Path
) -> None:
    """SGLang names layers by their output, vLLM the layer after it."""
    write_head(qwen[1], tmp_path, **keys)
    residual = read(qwen[0], tmp_path).layers[-1].residual
    assert isinstance(residual, Eagle3)
    assert residual.read_layers == layers


def test_the_configuration_of_speculators_is_read(qwen: tuple[Path, Any], tmp_path: Path) -> None:
    write_head(qwen[1], tmp_path, prefix="layers.0.", norm_before_residual=True)
    of_speculators(tmp_path)
    residual = read(qwen[0], tmp_path).layers[-1].residual
    assert isinstance(residual, Eagle3)
    assert (residual.read_layers, residual.norm_before_residual) == ((0, 2, 3), True)
    check_weights(read(qwen[0], tmp_path), qwen[0])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": 64}, "hidden_size = 64 is not supported; allowed: 48, in an EAGLE-3 head"),
        ({"target_hidden_size": 64}, "target_hidden_size = 64"),
        ({"vocab_size": 300}, "vocab_size = 300 is not supported; allowed: 211"),
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2 is not supported; allowed: 1,"),
        ({"own": ("head",), "draft_vocab_size": 90}, "draft_vocab_size = 90 .* lm_head.weight and d2t"),
        ({READ_LAYERS: [0, 1, 4]}, r"eagle_aux_hidden_state_layer_ids = \[0, 1, 4\] .* layers, 0 to 3"),
        ({"mlp_bias": True}, "mlp_bias = True"),
    ],
)
def test_a_head_of_another_model_is_refused_naming_the_key(
    keys: dict[str, Any], message: str, qwen: tuple[Path, Any], tmp_path: Path
) -> None:
    write_head(qwen[1], tmp_path, **keys)
    with pytest.raises(ModelConfigError, match=f"^{tmp_path}/config.json: {message}"):
        read(qwen[0], tmp_path)


def test_models_with_several_streams_are_refused(tmp_path: Path) -> None:
    """A head reads one."""
    make_tiny_model("deepseek_v4", tmp_path)
    with pytest.raises(ModelConfigError, match="not supported for deepseek_v4, which has several residual"):
        read(tmp_path, tmp_path)


def test_a_heads_keys_lie_beside_latents(tmp_path: Path) -> None:
    """Its place there is the first; the model's own layers have theirs as before."""
    model = make_tiny_model("deepseek_v3", tmp_path / "model")
    write_head(model, tmp_path / "head")
    plain, served = read_model_config(tmp_path / "model"), read(tmp_path / "model", tmp_path / "head")
    assert divided(served.layers) == (plain.layers, served.layers[-1:])
    assert places(served.layers) == [*places(plain.layers), [Places(cache=0)]]
    assert divided(plain.layers) == (plain.layers, ())


def test_tensors_of_a_head_are_all_accounted_for(qwen: tuple[Path, Any], tmp_path: Path) -> None:
    """The message names the head's directory, and not the model's."""
    write_head(qwen[1], tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"fc_norm.weight": torch.ones(48)}, file)
    drop_tensors(tmp_path, "midlayer.hidden_norm.weight")
    missing = r"1 missing: model\.layers\.3\.hidden_norm\.weight; 1 unused: fc_norm\.weight"
    with pytest.raises(CheckpointError, match=f"{tmp_path} does not fit its config.json: {missing}"):
        check_weights(read(qwen[0], tmp_path), qwen[0])


def test_tokens_that_the_model_does_not_have_are_refused(qwen: tuple[Path, Any], tmp_path: Path) -> None:
    """A device would read beyond its tables."""
    write_head(qwen[1], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["d2t"][-1] = 211
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="d2t names tokens beyond the model's 211"):
        tiny_model(qwen[0], torch.device("cpu"), draft_model=str(tmp_path))


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ({"speculative_method": "eagle3"}, "eagle3 needs speculative_model"),
        ({"speculative_method": "mtp", "speculative_model": "/heads"}, "'/heads' is not read by .* mtp"),
    ],
)
def test_a_method_and_its_head_come_together(
    gpu: dict[str, str], message: str, qwen: tuple[Path, Any]
) -> None:
    config = MoebiusConfig.model_validate({"model": {"model": str(qwen[0])}, "gpu": gpu})
    with pytest.raises(UserError, match=message):
        read_served_model(config)
