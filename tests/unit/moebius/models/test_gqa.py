"""Invariant: families with grouped-query attention are read as published; other settings are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_service.attention.base import grouped_queries
from moebius.models.config import ModelConfig, ModelConfigError, ModelOverrides
from moebius.models.layers.gqa import GQA, BlockIndexer, QkNorm
from moebius.models.layers.norms import RMSNorm
from moebius.models.layers.rope import RopeConfig
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.layer_values import first, first_moe, mixers_of, read_config, shared_width

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
QWEN3 = COMMON | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16}
EXPERTS_ONLY = COMMON | {"num_local_experts": 8}
MIXTRAL = EXPERTS_ONLY | {"model_type": "mixtral"}
OLMOE = COMMON | {"model_type": "olmoe", "num_experts": 8}
DOTS = COMMON | {
    "model_type": "dots1",
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
}
ERNIE = {key: value for key, value in COMMON.items() if key != "num_experts_per_tok"} | {
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 16,
}
# With the keys of the published checkpoint.
MINIMAX = EXPERTS_ONLY | {
    "model_type": "minimax_m2",
    "head_dim": 16,
    "rotary_dim": 8,
    "attn_type_list": [1, 1, 1, 1],
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_mtp": True,
    "num_mtp_modules": 3,
    "use_qk_norm": True,
    "use_routing_bias": True,
}
HUNYUAN = {key: value for key, value in COMMON.items() if key != "num_experts_per_tok"} | {
    "model_type": "hunyuan_v1_moe",
    "num_experts": 8,
    "moe_topk": [2, 2, 2, 2],
    "num_shared_expert": [1, 1, 1, 1],
    "attention_head_dim": 10,
    "rope_theta": 100.0,
    "rope_scaling": {"type": "dynamic", "alpha": 16.0, "factor": 1.0, "mscale": 1.0},
}


# Published keys once more, with values of no model.
MINIMAX_3 = EXPERTS_ONLY | {
    "model_type": "minimax_m3_vl",
    "head_dim": 16,
    "rotary_dim": 8,
    "hidden_act": "swigluoai",
    "moe_layer_freq": [0, 1, 1, 1],
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 8,
        "sparse_block_size": 4,
        "sparse_topk_blocks": 3,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0, 0, 1, 1],
    },
}
LLAMA4 = EXPERTS_ONLY | {"model_type": "llama4_text", "num_experts_per_tok": 1, "attention_chunk_size": 16}


def _rope(config: ModelConfig) -> RopeConfig:
    """The rotation of the first layer."""
    rope = first(config, GQA).rope
    assert rope is not None
    return rope


def _has_qk_norm(config: ModelConfig) -> bool:
    return first(config, GQA).qk_norm is not None


def _moe_layers(tmp_path: Path, base: dict[str, Any], **changes: Any) -> tuple[int, ...]:
    """Returns the MoE layers as both services read them, which must agree."""
    layers = read_config(tmp_path, base, **changes).moe_layer_ids
    assert read_geometry(tmp_path).moe_layers == layers
    return layers


def test_qwen2_moe(tmp_path: Path) -> None:
    """Biases unless it says otherwise, a gate before the shared experts, no renormalisation by default."""
    config = read_config(tmp_path, QWEN2)
    assert (first(config, GQA).bias, _has_qk_norm(config)) == (True, False)
    assert (shared_width(config), first_moe(config).shared_gate) == (24, True)
    assert (first_moe(config).router.score, first_moe(config).router.post) == ("softmax", "none")
    assert _moe_layers(tmp_path, QWEN2, decoder_sparse_step=2, mlp_only_layers=[3]) == (1,)
    changed = read_config(tmp_path, QWEN2, qkv_bias=False, norm_topk_prob=True)
    assert (first(changed, GQA).bias, first_moe(changed).router.post) == (False, "renormalize")


def test_mixtral_and_olmoe(tmp_path: Path) -> None:
    """`intermediate_size` is an expert's; only Mixtral always renormalises, only OLMoE norms queries."""
    mixtral, olmoe = read_config(tmp_path, MIXTRAL), read_config(tmp_path, OLMOE)
    assert (_rope(mixtral).theta, _rope(olmoe).theta) == (1e6, 1e4)
    assert (_has_qk_norm(mixtral), _has_qk_norm(olmoe)) == (False, True)
    assert (first_moe(mixtral).router.post, first_moe(olmoe).router.post) == ("renormalize", "none")
    for base in (MIXTRAL, OLMOE):
        config = read_config(tmp_path, base)
        assert (first_moe(config).experts.intermediate_size, shared_width(config)) == (48, 0)
        assert read_geometry(tmp_path).moe_intermediate_size == 48
        assert _moe_layers(tmp_path, base) == (0, 1, 2, 3)
    assert first_moe(read_config(tmp_path, OLMOE, norm_topk_prob=True)).router.post == "renormalize"


def test_dots1(tmp_path: Path) -> None:
    """A window that no layer has is none."""
    config = read_config(tmp_path, DOTS, routed_scaling_factor=2.5, sliding_window=32, max_window_layers=4)
    assert (_has_qk_norm(config), shared_width(config)) == (True, 32)
    assert (first_moe(config).router.score, first_moe(config).router.correction_bias) == ("sigmoid", True)
    assert (first_moe(config).router.scale, first_moe(config).router.post) == (2.5, "none")
    assert _moe_layers(tmp_path, DOTS, first_k_dense_replace=3) == (3,)


def test_ernie4_5_moe(tmp_path: Path) -> None:
    """Tied unless it says otherwise; pairs are neighbours; MoE layers are a range with a step."""
    config = read_config(tmp_path, ERNIE)
    assert (config.tie_word_embeddings, _rope(config).interleaved, _rope(config).theta) == (True, True, 5e5)
    assert (shared_width(config), first_moe(config).router.top_k) == (32, 3)
    assert first_moe(config).router.correction_bias_is_row
    assert _moe_layers(tmp_path, ERNIE) == (1, 2, 3)
    assert _moe_layers(tmp_path, ERNIE, moe_layer_start_index=0, moe_layer_interval=2) == (1, 3)
    assert _moe_layers(tmp_path, ERNIE, moe_layer_end_index=2) == (1, 2)
    assert _moe_layers(tmp_path, ERNIE, moe_layer_end_index=9) == (1, 2, 3)


def test_qwen3_coder_names_what_it_has_not(tmp_path: Path) -> None:
    """Its keys for that are known; with any other value they are refused, below."""
    named = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert read_config(tmp_path, QWEN3, **named).unread_keys == ()


def test_settings_of_generation_are_no_unknown_keys(tmp_path: Path) -> None:
    """Nested configurations of transformers 4 have dozens of them."""
    written = {"top_k": 50, "temperature": 1.0, "id2label": {"0": "LABEL_0"}, "torchscript": False}
    assert read_config(tmp_path, QWEN3, **written).unread_keys == ()


def test_minimax_m2(tmp_path: Path) -> None:
    """The published spelling of the rotated part and transformers' own mean the same."""
    config = read_config(tmp_path, MINIMAX)
    assert (_rope(config).rotary_dim, _rope(config).theta, _has_qk_norm(config)) == (8, 5e6, True)
    assert (config.num_mtp_layers, first_moe(config).experts.intermediate_size) == (3, 48)
    router = first_moe(config).router
    assert (router.correction_bias, router.post, router.float32_gate) == (True, "renormalize", True)
    assert config.unread_keys == ()
    spelled = {"rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}}
    assert read_config(tmp_path, MINIMAX, rotary_dim="absent", **spelled).layers == config.layers
    assert _moe_layers(tmp_path, MINIMAX) == (0, 1, 2, 3)


def test_minimax_m3(tmp_path: Path) -> None:
    """Layers that choose and layers that route are listed apart."""
    config = read_config(tmp_path, MINIMAX_3)
    found = [mixer.blocks for mixer in mixers_of(config, GQA)]
    assert found == [None, None, *[BlockIndexer(8, 4, 3, 1, RMSNorm(1e-6, one_plus_weight=True))] * 2]
    assert config.moe_layer_ids == (1, 2, 3)
    (dense,) = config.layers[0].ffns
    assert (first_moe(config).experts.intermediate_size, dense.intermediate_sizes) == (48, (12288,))
    section = MINIMAX_3["sparse_attention_config"]
    off = read_config(tmp_path, MINIMAX_3, sparse_attention_config=section | {"use_sparse_attention": False})
    assert all(mixer.blocks is None for mixer in mixers_of(off, GQA))
    for key, value in (("sparse_num_index_heads", 4), ("sparse_init_block", 1), ("sparse_local_block", 9)):
        with pytest.raises(ModelConfigError, match=key):
            read_config(tmp_path, MINIMAX_3, sparse_attention_config=section | {key: value})


def test_llama4(tmp_path: Path) -> None:
    """Chunks count where a sequence may be longer than one; only one expert's input can be weighed."""
    config = read_config(tmp_path, LLAMA4)
    assert [mixer.chunk for mixer in grouped_queries(config.layers)] == [16, 16, 16, None]
    assert [mixer.rope is None for mixer in mixers_of(config, GQA)] == [False, False, False, True]
    short = read_model_config(tmp_path, ModelOverrides(max_model_len=16))
    assert [mixer.chunk for mixer in grouped_queries(short.layers)] == [None] * 4
    with pytest.raises(ModelConfigError, match="num_experts_per_tok"):
        read_model_config(tmp_path, ModelOverrides(top_k=2))


def test_hunyuan_v1_moe(tmp_path: Path) -> None:
    """Lists that are alike in all layers, and a fixed alpha that is a larger base: 100 * 16^(10/8)."""
    config = read_config(tmp_path, HUNYUAN)
    assert (_rope(config).scaling_kind, _rope(config).theta) == ("default", pytest.approx(3200.0))
    attention, moe = first(config, GQA), first_moe(config)
    assert (attention.head_dim, attention.qk_norm) == (10, QkNorm(config.layers[0].norm, after_rope=True))
    assert (moe.router.top_k, moe.experts.intermediate_size, shared_width(config)) == (2, 48, 48)
    assert config.unread_keys == ()
    assert _moe_layers(tmp_path, HUNYUAN) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (
            QWEN2,
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types = 'sliding_attention'",
        ),
        (QWEN2, {"layer_types": "full_attention"}, "layer_types = 'full_attention'.*list of strings"),
        (QWEN2, {"attention_bias": True}, "attention_bias = True"),
        (QWEN3, {"qkv_bias": True}, "qkv_bias = True"),
        (QWEN3, {"shared_expert_intermediate_size": 16}, "shared_expert_intermediate_size = 16"),
        (QWEN3, {"use_qk_norm": False}, "use_qk_norm = False"),
        (QWEN2, {"shared_expert_intermediate_size": "absent"}, "shared_expert_intermediate_size is missing"),
        (MIXTRAL, {"sliding_window": 0}, "sliding_window = 0"),
        (MIXTRAL, {"attention_bias": True}, "attention_bias = True"),
        (OLMOE, {"clip_qkv": -8.0}, "clip_qkv = -8.0"),
        (DOTS, {"layer_types": ["sliding_attention"] * 3}, "layer_types = "),
        (DOTS, {"n_shared_experts": "absent"}, "n_shared_experts is missing"),
        (ERNIE, {"use_bias": True}, "use_bias = True"),
        (ERNIE, {"moe_use_aux_free": False}, "moe_use_aux_free = False"),
        (HUNYUAN, {"moe_topk": [2, 2, 2, 3]}, r"moe_topk = \[2, 2, 2, 3\]"),
        (HUNYUAN, {"moe_intermediate_size": 24}, "moe_intermediate_size = 24"),
        (HUNYUAN, {"num_shared_expert": 2}, "num_shared_expert = 2"),
        (HUNYUAN, {"use_cla": True}, "use_cla = True"),
        (HUNYUAN, {"norm_topk_prob": False}, "norm_topk_prob = False"),
        (HUNYUAN, {"rope_scaling": {"type": "yarn", "alpha": 2.0}}, "rope_type = 'yarn'"),
        (MINIMAX, {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list = 0"),
        (MINIMAX, {"use_qk_norm": False}, "use_qk_norm = False"),
        (MINIMAX, {"shared_intermediate_size": 64}, "shared_intermediate_size = 64"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    """The refusal has the name of the key and its value."""
    with pytest.raises(ModelConfigError, match=message):
        read_config(tmp_path, base, **changes)
