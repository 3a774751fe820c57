"""Invariant: the families of `hf_gqa` are read as published, and what they do not compute is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_service.model_config import ModelConfig, ModelConfigError
from moebius.checkpoint.moe_config import MoeGeometry

COMMON: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
QWEN2 = COMMON | {
    "model_type": "qwen2_moe",
    "num_experts": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}


def _read(tmp_path: Path, base: dict[str, Any], **changes: Any) -> ModelConfig:
    values = {key: value for key, value in (base | changes).items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_dir(tmp_path)


def _moe_layers(tmp_path: Path, base: dict[str, Any], **changes: Any) -> tuple[int, ...]:
    """As both services read them, which must agree."""
    layers = _read(tmp_path, base, **changes).moe_layer_ids
    assert MoeGeometry.from_config(tmp_path).moe_layers == layers
    return layers


def test_qwen2_moe(tmp_path: Path) -> None:
    """Biases unless it says otherwise, a gate before the shared experts, no renormalisation by default."""
    config = _read(tmp_path, QWEN2)
    assert (config.attention_bias, config.qk_norm) == (True, False)
    assert (config.moe.shared_intermediate_size, config.moe.shared_gate) == (24, True)
    assert (config.moe.router.score, config.moe.router.post) == ("softmax", "none")
    assert _moe_layers(tmp_path, QWEN2, decoder_sparse_step=2, mlp_only_layers=[3]) == (1,)
    changed = _read(tmp_path, QWEN2, qkv_bias=False, norm_topk_prob=True)
    assert (changed.attention_bias, changed.moe.router.post) == (False, "renormalize")


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window = True"),
        (
            QWEN2,
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types = 'sliding_attention'",
        ),
        (QWEN2, {"layer_types": "full_attention"}, "layer_types = 'full_attention'.*list of strings"),
        (QWEN2, {"attention_bias": True}, "attention_bias = True"),
        (QWEN2, {"shared_expert_intermediate_size": "absent"}, "shared_expert_intermediate_size is missing"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    """By the name of the key and its value."""
    with pytest.raises(ModelConfigError, match=message):
        _read(tmp_path, base, **changes)
