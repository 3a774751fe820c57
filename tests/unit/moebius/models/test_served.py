"""Guards that draft tokens come from a model's own layers exactly where the checkpoint has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moebius.config import MoebiusConfig
from moebius.models.served import read_served_model, with_drafts
from tests.helpers.mtp_models import MTP_FILE, write_mtp_model
from tests.helpers.tiny_models import make_tiny_model


def settings(directory: Path, method: str = "auto", **parallel: Any) -> MoebiusConfig:
    """Returns the settings that serve a checkpoint."""
    return MoebiusConfig.model_validate(
        {"model": {"model": str(directory)}, "gpu": {"speculative_method": method}, "parallel": parallel}
    )


def method_of(config: MoebiusConfig) -> str:
    """What it is decided to be."""
    return with_drafts(config).gpu.speculative_method


def test_auto_follows_the_checkpoint(tmp_path: Path) -> None:
    """Its layers, if it has them and they can be served; what is set besides stays."""
    write_mtp_model("glm4_moe", tmp_path / "mtp")
    make_tiny_model("glm4_moe", tmp_path / "plain")
    make_tiny_model("qwen3_moe", tmp_path / "other")
    assert method_of(settings(tmp_path / "mtp")) == "mtp"
    assert method_of(settings(tmp_path / "mtp", pipeline_parallel_size=2)) == "off"
    assert method_of(settings(tmp_path / "plain")) == "off"
    assert method_of(settings(tmp_path / "other")) == "off"
    assert method_of(settings(tmp_path / "other", "ngram")) == "ngram"
    assert read_served_model(settings(tmp_path / "mtp")).num_mtp_heads == 1
    assert read_served_model(settings(tmp_path / "plain")).num_mtp_heads == 0


def test_a_promise_without_tensors_is_no_layer(tmp_path: Path) -> None:
    """Many quantised copies keep the key of config.json and leave the layer out."""
    write_mtp_model("glm4_moe", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path / MTP_FILE).unlink()
    index.unlink()
    assert method_of(settings(tmp_path)) == "off"
    with pytest.raises(Exception, match="the checkpoint lacks"):
        read_served_model(settings(tmp_path, "mtp"))
