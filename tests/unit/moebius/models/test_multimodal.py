"""Invariant: a multimodal config.json says of its text tower what a text model's says in its top level."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moebius.checkpoint.config_file import flat_config
from moebius.models.config import ModelConfig, ModelConfigError
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import GQA
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.layer_values import first, first_moe

TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
QWEN: dict[str, Any] = {**TEXT, "num_experts": 8, "rope_scaling": {"mrope_section": [4, 2, 2]}}
GLM: dict[str, Any] = {**TEXT, "n_routed_experts": 8, "rope_scaling": {"mrope_section": [1, 1, 2]}}
KIMI: dict[str, Any] = {
    **TEXT,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
}


def _write(directory: Path, model_type: str, text: dict[str, Any], **outer: Any) -> Path:
    values = {"model_type": model_type, "text_config": text, **outer}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def _read(directory: Path, model_type: str, text: dict[str, Any], **outer: Any) -> ModelConfig:
    return read_model_config(_write(directory, model_type, text, **outer))


def test_inner_keys_count_before_outer_ones_but_not_when_null() -> None:
    """The family and the tied head are the outer object's to decide; a text model is left as it is."""
    text = {"model_type": "inner", "tie_word_embeddings": True, "hidden_size": 8, "bos_token_id": None}
    outer = {"model_type": "outer", "tie_word_embeddings": False, "hidden_size": 9, "bos_token_id": 3}
    flat = flat_config({**outer, "text_config": text, "vision_config": {"depth": 2}})
    assert flat == {**outer, "hidden_size": 8, "vision_config": {"depth": 2}}
    assert flat_config({"model_type": "outer", "text_config": text})["tie_word_embeddings"] is True
    assert flat_config(outer) == outer
    # The type of all weights, in either spelling; without it that of the text.
    typed = {"dtype": "float32"}
    assert flat_config({"text_config": typed}) == typed
    for spelling in ("dtype", "torch_dtype"):
        flat = flat_config({"model_type": "outer", spelling: "bfloat16", "text_config": typed})
        assert HfKeys("c", flat).string("dtype", "torch_dtype") == "bfloat16"


def test_qwen_renormalises_whatever_the_checkpoint_says(tmp_path: Path) -> None:
    config = _read(tmp_path, "qwen3_vl_moe", {**QWEN, "norm_topk_prob": False})
    attention = first(config, GQA)
    assert (config.model_type, attention.qk_norm is not None) == ("qwen3_vl_moe", True)
    assert attention.rope is not None
    assert (first_moe(config).router.score, first_moe(config).router.post) == ("softmax", "renormalize")
    assert (attention.rope.theta, attention.rope.mrope_sections) == (500000.0, (4, 2, 2))
    assert attention.rope.mrope_interleaved is True


def test_glm_has_biases_and_no_norms_of_queries(tmp_path: Path) -> None:
    config = _read(tmp_path, "glm4v_moe", GLM)
    attention = first(config, GQA)
    assert (attention.qk_norm, attention.bias) == (None, True)
    assert attention.rope is not None
    assert (attention.rope.rotary_dim, attention.rope.mrope_sections) == (8, (1, 1, 2))
    assert attention.rope.mrope_interleaved is False
    assert first(_read(tmp_path, "glm4v_moe", {**GLM, "attention_bias": False}), GQA).bias is False


def test_kimi_ties_its_head_unless_someone_says_no(tmp_path: Path) -> None:
    assert _read(tmp_path, "kimi_k25", KIMI).tie_word_embeddings is True
    assert _read(tmp_path, "kimi_k25", {**KIMI, "tie_word_embeddings": False}).tie_word_embeddings is False
    assert _read(tmp_path, "kimi_k25", KIMI, tie_word_embeddings=False).tie_word_embeddings is False


@pytest.mark.parametrize(
    ("family", "text", "layers"),
    [
        ("qwen3_vl_moe", {**QWEN, "mlp_only_layers": [2]}, (0, 1, 3)),
        ("glm4v_moe", {**GLM, "first_k_dense_replace": 2}, (2, 3)),
        ("kimi_k25", KIMI, (1, 2, 3)),
    ],
)
def test_expert_servers_read_the_same(
    tmp_path: Path, family: str, text: dict[str, Any], layers: tuple[int, ...]
) -> None:
    geometry = read_geometry(_write(tmp_path, family, text, torch_dtype="float32"))
    config = read_model_config(tmp_path)
    assert geometry.moe_layers == config.moe_layer_ids == layers
    assert (geometry.model_type, geometry.dtype) == (config.model_type, config.dtype) == (family, "float32")


@pytest.mark.parametrize(
    ("family", "text", "message"),
    [
        ("glm4v_moe", {**GLM, "use_qk_norm": True}, "use_qk_norm = True.*allowed: false"),
        ("glm4v_moe", {**GLM, "rope_scaling": None}, r"mrope_section = \[8, 12, 12\].*sum is 4"),
        ("qwen3_vl_moe", {**QWEN, "hidden_size": None}, "hidden_size is missing"),
        ("qwen3_vl_moe", {**QWEN, "use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, family: str, text: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=message):
        _read(tmp_path, family, text)
