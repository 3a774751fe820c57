"""Invariant: gpt-oss' published config.json becomes windows, sinks, router and experts, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moebius.checkpoint.errors import CheckpointError
from moebius.models.config import ModelConfigError
from moebius.models.layers.gqa import GQA
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.layer_values import first_moe, mixers_of

PUBLISHED: dict[str, Any] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def write(tmp_path: Path, changes: dict[str, Any]) -> Path:
    values = {key: value for key, value in (PUBLISHED | changes).items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_the_published_config(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, {}))
    assert config.unread_keys == ()
    found = mixers_of(config, GQA)
    assert [mixer.window for mixer in found] == [128, None, 128, None]
    assert all((mixer.has_sinks, mixer.bias, mixer.output_bias) == (True, True, True) for mixer in found)
    router = first_moe(config).router
    assert (router.num_experts, router.top_k, router.score, router.post) == (32, 4, "none", "softmax")
    assert router.gate_bias
    assert (first_moe(config).experts.intermediate_size, config.moe_layer_ids) == (2880, (0, 1, 2, 3))
    rope = found[0].rope
    assert rope is not None
    assert (rope.theta, rope.scaling_kind) == (150000.0, "yarn")
    assert dict(rope.scaling)["truncate"] == 0.0


def test_windows_follow_the_layer_types(tmp_path: Path) -> None:
    """Without a list every other layer slides, the first one first."""
    without = read_model_config(write(tmp_path, {"layer_types": "absent"}))
    assert [mixer.window for mixer in mixers_of(without, GQA)] == [128, None, 128, None]
    full = {"layer_types": ["full_attention"] * 4, "sliding_window": None}
    found = mixers_of(read_model_config(write(tmp_path, full)), GQA)
    assert [mixer.window for mixer in found] == [None] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types.*one type for each of the 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, "'linear_attention'.*full_attention, sliding_attention"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"num_local_experts": "absent"}, "num_local_experts"),
        ({"num_experts_per_tok": 33}, "1 to 32"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=message):
        read_model_config(write(tmp_path, changes))


def test_the_experts_activation_is_read(tmp_path: Path) -> None:
    geometry = read_geometry(write(tmp_path, {"swiglu_alpha": 1.5, "swiglu_limit": 6}))
    assert (geometry.activation, geometry.alpha, geometry.limit) == ("gpt_oss", 1.5, 6.0)
    assert read_geometry(write(tmp_path, {})).alpha == 1.702
    with pytest.raises(CheckpointError, match="swiglu_alpha = -1"):
        read_geometry(write(tmp_path, {"swiglu_alpha": -1}))
