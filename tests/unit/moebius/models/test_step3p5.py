"""Invariant: Step-3.5-Flash's config.json is read by layer, alike by both services, or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gpu_service.attention.base import grouped_queries
from gpu_service.core.parallel import ParallelContext
from gpu_service.core.partition import check_divisible, rank_layers
from moebius.checkpoint.errors import CheckpointError
from moebius.errors import ConfigError
from moebius.models.config import ModelConfig, ModelConfigError
from moebius.models.layers.ffn import Dense, Routed
from moebius.models.layers.gqa import GQA
from moebius.models.layers.layer import routed
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.layer_values import first_moe, mixers_of

FULL, SLIDING = "full_attention", "sliding_attention"
STEP: dict[str, Any] = {
    "model_type": "step3p5",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_attention_groups": 2,
    "head_dim": 16,
    "max_seq_len": 256,
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_intermediate_size": 12,
    "share_expert_dim": 20,
    "moe_layers_enum": "1,2,3,4,5",
    "moe_router_scaling_factor": 3.0,
    "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING],
    "sliding_window": 32,
    "attention_other_setting": {"attention_type": SLIDING, "num_attention_heads": 12, "true_head_dim": 16},
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0, 1.0],
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "yarn_only_types": [FULL],
    "swiglu_limits": [0.0, None, 7.0, 7, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.0, 16.0, 0.0, 0.0],
    "num_nextn_predict_layers": 2,
    "need_fp32_gate": True,
    "use_head_wise_attn_gate": True,
    "zero_centered": True,
}


def _directory(directory: Path, **changes: Any) -> Path:
    values = {key: value for key, value in (STEP | changes).items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def _read(directory: Path, **changes: Any) -> ModelConfig:
    return read_model_config(_directory(directory, **changes))


def test_every_layer_has_its_own(tmp_path: Path) -> None:
    """Entries of MTP layers are cut off; layers that slide have no scaling of positions."""
    config = _read(tmp_path)
    found = mixers_of(config, GQA)
    assert (config.num_layers, config.num_mtp_layers) == (4, 2)
    assert [mixer.num_kv_heads for mixer in found] == [2] * 4
    assert [mixer.num_heads for mixer in found] == [8, 12, 12, 8]
    assert [mixer.window for mixer in found] == [None, 32, 32, None]
    full, sliding, *_ = ropes = [mixer.rope for mixer in found]
    assert ropes == [full, sliding, sliding, full]
    assert full is not None
    assert sliding is not None
    assert (full.theta, full.rotary_dim, full.scaling_kind) == (5e6, 8, "linear")
    assert (sliding.theta, sliding.rotary_dim, sliding.scaling_kind) == (1e4, 16, "default")
    dense = [ffn.shared if isinstance(ffn, Routed) else ffn for layer in config.layers for ffn in layer.ffns]
    assert [ffn.limit for ffn in dense if isinstance(ffn, Dense)] == [math.inf, math.inf, math.inf, 16.0]
    assert (config.moe_layer_ids, first_moe(config).router.scale, config.max_model_len) == (
        (1, 2, 3),
        3.0,
        256,
    )
    assert config.unread_keys == ()


def test_expert_servers_read_the_same(tmp_path: Path) -> None:
    geometry = read_geometry(_directory(tmp_path))
    assert (geometry.moe_layers, geometry.num_experts, geometry.top_k) == ((1, 2, 3), 8, 2)
    assert (geometry.activation, geometry.layer_limits) == ("silu_clamped", (math.inf, math.inf, 7.0, 7.0))
    assert [geometry.limit_of(layer) for layer in (1, 2)] == [math.inf, 7.0]
    unclamped = read_geometry(_directory(tmp_path, swiglu_limits="absent"))
    assert unclamped.limit_of(3) == math.inf


def test_a_stage_and_a_rank_have_their_part(tmp_path: Path) -> None:
    config = _read(tmp_path)
    rank = rank_layers(config, ParallelContext(tp_rank=1, tp_size=2, stage=1, num_stages=2))
    grouped = grouped_queries(rank)
    assert [(mixer.num_heads, mixer.num_kv_heads) for mixer in grouped] == [(6, 1), (4, 1)]
    assert [mixer.rope for mixer in grouped] == [mixer.rope for mixer in mixers_of(config, GQA)[2:]]
    assert [ffn.shared.limit for ffn in routed(rank).values() if ffn.shared] == [math.inf, 16.0]
    # Eight ranks would divide the heads of some layers only.
    with pytest.raises(ConfigError, match="allowed for this model: 1, 2, 4"):
        check_divisible(config, ParallelContext(tp_rank=0, tp_size=8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [FULL] * 3}, "layer_types.*a list of 4 entries"),
        ({"layer_types": ["linear"] * 4}, "layer_types = 'linear'"),
        ({"rope_theta": [1e4, 0.0, 1e4, 1e4]}, "rope_theta = 0.0.*numbers > 0"),
        ({"partial_rotary_factors": [0.5]}, "partial_rotary_factors"),
        ({"use_rope_layers": [1]}, "use_rope_layers"),
        ({"yarn_only_types": [SLIDING]}, "yarn_only_types = 'sliding_attention'"),
        ({"moe_layers_enum": "1,x"}, "moe_layers_enum = '1,x'"),
        ({"swiglu_limits_shared": [1.0, -1.0, 0.0, 0.0]}, "swiglu_limits_shared.*numbers >= 0"),
        ({"attention_other_setting": {"num_attention_groups": 4}}, "num_attention_groups = 4.*2"),
        ({"attention_other_setting": {"num_attention_heads": 7}}, "num_attention_heads = 7.*multiple"),
        ({"attention_other_setting": {"sinks": 7}}, "sinks.*keys of the heads"),
        ({"attention_other_setting": {"attention_type": FULL}}, "attention_type = 'full_attention'"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate = False.*True"),
        ({"zero_centered": False}, "zero_centered = False"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation = 'softmax'.*sigmoid"),
        ({"sink": True}, "sink = True"),
        ({"num_attention_groups": "absent"}, "num_attention_groups or num_key_value_heads is missing"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=message):
        _read(tmp_path, **changes)


@pytest.mark.parametrize("limits", [[0.0, 1.0], [0.0, True, 0.0, 0.0], "7", [0.0, -1, 0.0, 0.0]])
def test_expert_servers_refuse_clamps_that_are_none(tmp_path: Path, limits: Any) -> None:
    with pytest.raises(CheckpointError, match="swiglu_limits"):
        read_geometry(_directory(tmp_path, swiglu_limits=limits))
