"""Guards that draft tokens come from a model's own layers exactly where the checkpoint has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moebius.config import MoebiusConfig
from moebius.experts.slices import SliceRequest
from moebius.models.served import read_served_model, with_drafts, with_own_layers
from tests.helpers.mtp_models import MTP_FILE, write_mtp_model
from tests.helpers.tiny_models import make_tiny_model

METHODS = ("off", "auto", "mtp")


def settings(directory: Path, method: str = "auto", **parallel: Any) -> MoebiusConfig:
    """Returns the settings that serve a checkpoint."""
    return MoebiusConfig.model_validate(
        {"model": {"model": str(directory)}, "gpu": {"speculative_method": method}, "parallel": parallel}
    )


def decision(config: MoebiusConfig) -> str:
    """Returns what auto would be by the checkpoint: mtp, why it can not be, or nothing."""
    drafting, reason = with_own_layers(config)
    return reason or ("" if drafting is None else drafting.gpu.speculative_method)


def test_auto_follows_the_checkpoint(tmp_path: Path) -> None:
    """Its layers, if it has them and they can be served; what is set besides is no question."""
    write_mtp_model("glm4_moe", tmp_path / "mtp")
    make_tiny_model("glm4_moe", tmp_path / "plain")
    make_tiny_model("qwen3_moe", tmp_path / "other")
    assert decision(settings(tmp_path / "mtp")) == "mtp"
    assert decision(settings(tmp_path / "plain")) == decision(settings(tmp_path / "other")) == ""
    for method in ("off", "ngram", "mtp"):
        assert with_own_layers(settings(tmp_path / "mtp", method)) == (None, "")


def test_what_can_not_draft_is_a_reason_and_no_error(tmp_path: Path) -> None:
    """Stages refuse an explicit mtp; expert servers that others start may lack the layer's experts."""
    write_mtp_model("glm4_moe", tmp_path)
    assert "pipeline stages" in decision(settings(tmp_path, pipeline_parallel_size=2))
    config = settings(tmp_path)
    experts = config.experts.model_copy(
        update={"expert_addresses": ("localhost:1",), "expert_transport": "grpc"}
    )
    assert "others start" in decision(config.model_copy(update={"experts": experts}))


def test_a_process_alone_has_no_layers_unless_they_are_named(tmp_path: Path) -> None:
    """What has not been planned with the rest takes no memory for them: engine and expert servers agree."""
    write_mtp_model("glm4_moe", tmp_path)
    heads = {method: read_served_model(settings(tmp_path, method)).num_mtp_heads for method in METHODS}
    assert heads == {"off": 0, "auto": 0, "mtp": 1}
    assert {
        method: SliceRequest.from_config(settings(tmp_path, method)).mtp_heads > 0 for method in METHODS
    } == {method: count > 0 for method, count in heads.items()}
    assert with_drafts(settings(tmp_path)).gpu.speculative_method == "off"


def test_a_promise_without_tensors_is_no_layer(tmp_path: Path) -> None:
    """Many quantised copies keep the key of config.json and leave the layer out."""
    write_mtp_model("glm4_moe", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path / MTP_FILE).unlink()
    index.unlink()
    assert "the checkpoint lacks" in decision(settings(tmp_path))
    with pytest.raises(Exception, match="the checkpoint lacks"):
        read_served_model(settings(tmp_path, "mtp"))
