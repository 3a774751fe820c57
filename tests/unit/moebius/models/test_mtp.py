"""Invariant: multi-token prediction is served as layers after the last, or refused naming what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from moebius.checkpoint.errors import CheckpointError
from moebius.models.config import ModelConfigError, ModelOverrides
from moebius.models.read import read_geometry, read_model_config
from moebius.models.registry import FAMILIES
from tests.helpers.mtp_models import MTP_FILE, write_mtp_model
from tests.helpers.tiny_models import make_tiny_model

ONE_HEAD = ModelOverrides(mtp_heads=1)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("glm")
    write_mtp_model("glm4_moe", directory)
    return directory


def _copy(source: Path, target: Path, **changes: Any) -> Path:
    """Returns the checkpoint with other values in config.json; files of weights are linked."""
    for file in source.iterdir():
        (target / file.name).symlink_to(file)
    described = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(described))
    return target


def test_heads_are_layers_with_experts_after_the_last(glm: Path) -> None:
    plain, served = read_model_config(glm), read_model_config(glm, ONE_HEAD)
    assert (plain.num_layers, plain.num_mtp_layers, plain.num_mtp_heads) == (3, 1, 0)
    assert (served.num_layers, served.num_decoder_layers, served.num_mtp_heads) == (4, 3, 1)
    assert served.moe_layer_ids == (*plain.moe_layer_ids, 3)
    assert (read_geometry(glm).moe_layers, read_geometry(glm, mtp_heads=1).moe_layers) == ((1, 2), (1, 2, 3))


def test_a_family_without_known_heads_is_refused_naming_those_that_have_some(tmp_path: Path) -> None:
    make_tiny_model("qwen3_moe", tmp_path)
    known = ", ".join(sorted(name for name, family in FAMILIES.items() if family.mtp is not None))
    with pytest.raises(
        ModelConfigError, match=f"prediction of model_type 'qwen3_moe' .*or a model of {known}"
    ):
        read_model_config(tmp_path, ONE_HEAD)


def test_a_configuration_that_promises_no_heads_is_refused(glm: Path, tmp_path: Path) -> None:
    directory = _copy(glm, tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ModelConfigError, match=r"no layers of multi-token prediction .*0 or absent"):
        read_geometry(directory, mtp_heads=1)


def test_a_checkpoint_that_lacks_the_promised_heads_is_refused_naming_them(glm: Path, tmp_path: Path) -> None:
    """Most quantised copies are like that: the configuration is the original's, the last layer is gone."""
    directory = _copy(glm, tmp_path)
    index = json.loads((glm / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != MTP_FILE}
    (directory / "model.safetensors.index.json").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    lacking = ", ".join(
        f"model.layers.3.{module}" for module in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    )
    with pytest.raises(CheckpointError, match=f"promises 1 layers .*lacks {lacking}; many quantised copies"):
        read_model_config(directory, ONE_HEAD)
    assert read_model_config(directory).num_mtp_layers == 1


def test_one_missing_tensor_of_a_head_is_named(glm: Path, tmp_path: Path) -> None:
    directory = _copy(glm, tmp_path)
    (directory / MTP_FILE).unlink()
    tensors = load_file(glm / MTP_FILE)
    save_file({n: t for n, t in tensors.items() if "hnorm" not in n}, directory / MTP_FILE)
    index = json.loads((glm / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.3.hnorm.weight"]
    (directory / "model.safetensors.index.json").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.3\.hnorm; "):
        read_model_config(directory, ONE_HEAD)
