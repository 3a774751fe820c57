"""Invariant: config.json is understood or refused by name; nothing that changes the function is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moebius.models.config import ModelConfigError, ModelOverrides
from moebius.models.layers.gqa import GQA
from moebius.models.read import read_model_config
from tests.helpers.layer_values import first, first_moe, read_config, shared_width
from tests.helpers.published_checkpoints import Published

QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "eos_token_id": [5, 6],
}
GLM: dict[str, Any] = {
    **{key: value for key, value in QWEN.items() if key != "num_experts"},
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
}


def test_families_differ_where_they_should(tmp_path: Path) -> None:
    qwen = read_config(tmp_path, QWEN, norm_topk_prob=True)
    glm = read_config(tmp_path, GLM, n_shared_experts=3, routed_scaling_factor=2.5)
    assert (first_moe(qwen).router.score, first_moe(glm).router.score) == ("softmax", "sigmoid")
    assert (first_moe(qwen).router.float32_gate, first_moe(glm).router.float32_gate) == (False, True)
    assert (shared_width(qwen), shared_width(glm)) == (0, 48)
    attending = first(qwen, GQA), first(glm, GQA)
    assert [mixer.rope and mixer.rope.rotary_dim for mixer in attending] == [8, 4]
    assert [mixer.qk_norm is not None for mixer in attending] == [True, False]
    assert first_moe(glm).router.scale == 2.5


def test_which_layers_are_moe(tmp_path: Path) -> None:
    assert read_config(tmp_path, QWEN).moe_layer_ids == (0, 1, 2, 3)
    assert read_config(tmp_path, QWEN, decoder_sparse_step=2).moe_layer_ids == (1, 3)
    assert read_config(tmp_path, QWEN, mlp_only_layers=[0, 2]).moe_layer_ids == (1, 3)
    assert read_config(tmp_path, GLM, first_k_dense_replace=3).moe_layer_ids == (3,)


def test_overrides_and_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 9]}')
    config = read_config(tmp_path, QWEN, ModelOverrides(top_k=8, max_model_len=20, dtype="float32"))
    assert (first_moe(config).router.top_k, config.max_model_len, config.dtype) == (8, 20, "float32")
    assert config.eos_token_ids == (5, 6, 9)
    assert read_config(tmp_path, QWEN).dtype == "bfloat16"
    assert read_config(tmp_path, QWEN, dtype="float16").dtype == "bfloat16"


def test_old_and_new_rope_spellings_agree(tmp_path: Path) -> None:
    old = read_config(tmp_path, GLM, rope_theta=5e5, partial_rotary_factor=0.25, rope_scaling=None)
    new = read_config(tmp_path, GLM, rope_parameters={"rope_theta": 5e5, "partial_rotary_factor": 0.25})
    rope = first(old, GQA).rope
    assert rope is not None
    assert rope == first(new, GQA).rope
    assert (rope.theta, rope.rotary_dim) == (5e5, 2)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (QWEN, {"model_type": "gpt2"}, "model_type = 'gpt2'.*glm4_moe.*qwen3_moe"),
        (QWEN, {"model_type": "llama"}, "model_type 'llama' is a dense model; only mixture-of-experts"),
        (QWEN, {"hidden_size": "absent"}, "hidden_size is missing"),
        (QWEN, {"hidden_size": "32"}, "hidden_size = '32'.*integer"),
        (QWEN, {"num_key_value_heads": 3}, "num_key_value_heads = 3.*divisor"),
        (QWEN, {"use_sliding_window": True}, "sliding_window is missing"),
        (QWEN, {"hidden_act": "gelu"}, "hidden_act = 'gelu'.*silu"),
        (QWEN, {"rope_scaling": {"type": "su"}}, "rope_type = 'su'.*default, dynamic, linear"),
        (QWEN, {"rope_scaling": {"type": "linear", "factor": 2, "alpha": 1}}, "alpha"),
        (QWEN, {"num_experts_per_tok": 9}, r"top_k \(num_experts_per_tok\) = 9.*1 to 8"),
        (QWEN, {"dtype": "float64"}, "dtype = 'float64'.*float32"),
        (QWEN, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0.*absent"),
        (GLM, {"sliding_window": 128}, "sliding_window = 128"),
        (GLM, {"n_group": 3}, "n_group = 3.*divisor"),
        (GLM, {"n_group": 2, "topk_group": 3}, "topk_group = 3"),
        (GLM, {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "1 to 2"),
        (GLM, {"partial_rotary_factor": 0.125}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=message):
        read_config(tmp_path, base, **changes)


@pytest.mark.parametrize("key", ["engram_layer_ids", "kv_source_layer_ids", "kv_source_layers"])
def test_deepseek_v4_1_by_the_name_of_v4_is_refused(key: str, tmp_path: Path) -> None:
    """Which shares keys between layers, and has tables of n-grams: read as V4, it would answer nonsense."""
    base = Published.load("deepseek-v4-flash").config
    assert read_config(tmp_path, base).model_type == "deepseek_v4"
    with pytest.raises(ModelConfigError, match=rf"{key} = \[1, 14\] is not supported; allowed: absent"):
        read_config(tmp_path, base | {key: [1, 14]})


def test_overrides_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"top_k .* = 9"):
        read_config(tmp_path, QWEN, ModelOverrides(top_k=9))
    with pytest.raises(ModelConfigError, match=r"max_model_len = 65.*at most 64"):
        read_config(tmp_path, QWEN, ModelOverrides(max_model_len=65))


def test_unknown_keys_are_kept_for_the_log(tmp_path: Path) -> None:
    assert read_config(tmp_path, QWEN, my_note="x").unread_keys == ("my_note",)


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config.json does not exist"):
        read_model_config(tmp_path)
