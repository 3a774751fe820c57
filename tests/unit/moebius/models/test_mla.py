"""Invariant: config.json of families with latent attention is understood as published, or refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.cache.kv_cache import MlaCache, make_cache, page_bytes
from gpu_service.core.parallel import ParallelContext
from gpu_service.core.partition import check_divisible, rank_layers
from gpu_service.device import TORCH_DTYPES
from gpu_service.ops.rope import learned_query_scales
from moebius.errors import ConfigError
from moebius.models.config import ModelConfig, ModelConfigError
from moebius.models.layers.latent import MLA
from moebius.models.layers.layer import cached
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.layer_values import first, first_moe, mixers_of, read_config, shared_width
from tests.helpers.published_checkpoints import Published

# The keys of the published DeepSeek-V3 that change the function, in its own spelling, with small sizes.
V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16,
    },
    "ep_size": 1,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "pretraining_tp": 1,
    "eos_token_id": 1,
}

V2: dict[str, Any] = V3 | {
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
    "num_nextn_predict_layers": "absent",
    "routed_scaling_factor": 16.0,
}
FLASH: dict[str, Any] = V3 | {
    "model_type": "glm4_moe_lite",
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": None,
}
# The keys of the published LongCat-Flash, with small sizes.
LONGCAT: dict[str, Any] = {
    "model_type": "longcat_flash",
    "vocab_size": 100,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "num_layers": 3,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "zero_expert_num": 4,
    "zero_expert_type": "identity",
    "moe_topk": 3,
    "norm_topk_prob": False,
    "routed_scaling_factor": 6.0,
    "router_bias": False,
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 2,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000000.0,
}


def test_the_published_spelling_is_read_to_the_last_key(tmp_path: Path) -> None:
    config = read_config(tmp_path, V3)
    assert config.unread_keys == ()
    mla, router = first(config, MLA), first_moe(config).router
    assert (mla.q_lora_rank, mla.kv_lora_rank, mla.v_head_dim) == (24, 20, 10)
    assert (mla.qk_head_dim, mla.num_heads, config.num_mtp_layers) == (16, 4, 1)
    assert mla.rope is not None
    assert (mla.rope.rotary_dim, mla.rope.interleaved) == (4, True)
    assert (router.score, router.correction_bias, router.group_score) == ("sigmoid", True, "top2_sum")
    assert (router.num_groups, router.top_groups, router.scale) == (4, 2, 2.5)
    assert (router.post, router.float32_gate) == ("renormalize", True)
    assert (config.moe_layer_ids, shared_width(config)) == ((3,), 16)
    assert read_geometry(tmp_path).moe_layers == (3,)


def test_the_scores_temperature(tmp_path: Path) -> None:
    """YaRN's, squared, as far as mscale_all_dim says; the rotation's is the ratio of both."""
    both = first(read_config(tmp_path, V3), MLA)
    assert both.rope is not None
    assert both.softmax_scale == pytest.approx(16**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert both.rope.attention_factor == 1.0
    plain = first(read_config(tmp_path, V3, rope_scaling=None), MLA)
    assert plain.softmax_scale == 16**-0.5
    rotation_only = first(read_config(tmp_path, V3, rope_scaling={"type": "yarn", "factor": 40}), MLA)
    assert rotation_only.rope is not None
    assert rotation_only.softmax_scale == 16**-0.5
    assert rotation_only.rope.attention_factor == pytest.approx(0.1 * math.log(40) + 1)


def test_queries_without_a_latent(tmp_path: Path) -> None:
    for absent in (None, "absent"):
        assert first(read_config(tmp_path, V3, q_lora_rank=absent), MLA).q_lora_rank is None


def test_deepseek_v2_chooses_groups_by_their_best_expert(tmp_path: Path) -> None:
    grouped = read_config(tmp_path, V2)
    router = first_moe(grouped).router
    assert grouped.unread_keys == ()
    assert (router.score, router.correction_bias, router.group_score) == ("softmax", False, "max")
    assert (router.num_groups, router.top_groups, router.post, router.scale) == (4, 2, "none", 16.0)
    greedy = first_moe(read_config(tmp_path, V2, topk_method="greedy")).router
    assert (greedy.num_groups, greedy.top_groups) == (1, 1)


def test_kimi_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    kimi, v3 = read_config(tmp_path, V3, model_type="kimi_k2"), read_config(tmp_path, V3)
    assert kimi.model_type == "kimi_k2"
    assert kimi == replace(v3, model_type="kimi_k2")


def test_glm_flash_may_list_its_layers(tmp_path: Path) -> None:
    assert read_config(tmp_path, FLASH).moe_layer_ids == (3,)
    kinds = ["sparse", "dense", "dense", "sparse"]
    assert read_config(tmp_path, FLASH, mlp_layer_types=kinds).moe_layer_ids == (0, 3)
    assert read_geometry(tmp_path).moe_layers == (0, 3)


def test_longcat_has_two_attentions_a_layer_and_choices_without_weights(tmp_path: Path) -> None:
    """Experts that servers hold are those with weights; of an even choice, two of three are."""
    config = read_config(tmp_path, LONGCAT)
    assert config.unread_keys == ()
    assert [len(cached([layer])) for layer in config.layers] == [2, 2, 2]
    assert [(type(ffn).__name__) for ffn in config.layers[0].ffns] == ["Dense", "Dense", "MoE"]
    router = first_moe(config).router
    assert (router.num_experts, router.num_zero_experts, router.num_choices) == (8, 4, 12)
    assert (router.score, router.correction_bias, router.post, router.scale) == ("softmax", True, "none", 6.0)
    mla = first(config, MLA)
    # The square roots of 32 / 8 and of 32 / 2.
    assert (mla.softmax_scale, mla.latent_scale) == (pytest.approx(2 * 16**-0.5), 4.0)
    geometry = read_geometry(tmp_path)
    assert (geometry.num_experts, geometry.top_k, geometry.mean_top_k) == (8, 3, 2.0)
    own = rank_layers(config, ParallelContext(stage=1, num_stages=2))
    assert [len(cached([layer])) for layer in own] == [2, 2]
    plain = first(read_config(tmp_path, LONGCAT, mla_scale_q_lora=False, mla_scale_kv_lora=False), MLA)
    assert (plain.softmax_scale, plain.latent_scale) == (16**-0.5, 1.0)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LONGCAT, {"zero_expert_type": "copy"}, "zero_expert_type = 'copy'.*identity"),
        (LONGCAT, {"router_bias": True}, "router_bias = True"),
        (LONGCAT, {"norm_topk_prob": True}, "norm_topk_prob = True"),
        (LONGCAT, {"attention_method": "MHA"}, "attention_method = 'MHA'.*MLA"),
        (LONGCAT, {"q_lora_rank": None}, "q_lora_rank = None"),
        (LONGCAT, {"moe_topk": 13}, "top_k.*13.*1 to 12"),
        (V3, {"num_key_value_heads": 2}, r"num_key_value_heads = 2.*num_attention_heads \(4\)"),
        (V3, {"kv_lora_rank": "absent"}, "kv_lora_rank is missing"),
        (V3, {"q_lora_rank": 0}, "q_lora_rank = 0"),
        (V3, {"qk_rope_head_dim": 5}, "an even number of the 5 elements"),
        (V3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5.*1.0"),
        (V3, {"first_k_dense_replace": "absent"}, "first_k_dense_replace is missing"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq = 2.*allowed: absent, 1"),
        (V3, {"scoring_func": "softmax"}, "scoring_func = 'softmax'.*sigmoid"),
        (V3, {"topk_method": "greedy"}, "topk_method = 'greedy'.*noaux_tc"),
        (V3, {"topk_group": 5}, "topk_group = 5"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'.*greedy, group_limited_greedy"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob = True"),
        (V2, {"mlp_bias": True}, "mlp_bias = True"),
        (V2, {"n_group": "absent"}, "n_group is missing"),
        (FLASH, {"mlp_layer_types": ["dense"]}, "mlp_layer_types = .*4 of 'dense' and 'sparse'"),
        (FLASH, {"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types = .*4 of 'dense' and 'sparse'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=message):
        read_config(tmp_path, base, **changes)


def _read_large4(tmp_path: Path, **changes: Any) -> ModelConfig:
    """Returns Mistral Large 4 with its published sizes, in eight layers."""
    config = Published.load("mistral-large-4").config
    text = {
        name: value[:8] if isinstance(value, list) else value for name, value in config["text_config"].items()
    }
    text |= {"num_hidden_layers": 8} | changes
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text}))
    return read_model_config(tmp_path)


def test_mistral_large4_shares_latents_of_layers_that_rotate_alike(tmp_path: Path) -> None:
    """What is cached, and what the memory plan counts, is the latents of layers that have some."""
    alone = _read_large4(tmp_path)
    found = mixers_of(alone, MLA)
    assert all(mixer.latents_back == 0 for mixer in found)
    assert [mixer.rope is not None for mixer in found] == [True, True, True, False] * 2
    assert found[0].rope is not None
    assert (found[0].rope.learned, alone.final_logit_softcap) == (True, 30.0)
    shared = _read_large4(tmp_path, kv_source_layers=[0, 0, 0, 3, 0, 0, 6, 3])
    assert [i for i, layer in enumerate(shared.layers) if cached([layer])] == [0, 3, 6]
    sizes = [
        page_bytes(config.layers, 16, torch.bfloat16, TORCH_DTYPES[config.dtype])
        for config in (alone, shared)
    ]
    assert sizes[0] - sizes[1] == 5 * 16 * 576 * 2
    cache = make_cache(shared.layers, 2, 16, torch.bfloat16)
    assert isinstance(cache, MlaCache)
    assert cache.num_layers == 3
    assert cache.index_keys is not None
    assert cache.index_keys.num_layers == 8
    with pytest.raises(ConfigError, match=r"latents of layer 0, of an earlier stage"):
        check_divisible(shared, ParallelContext(num_stages=2))
    check_divisible(alone, ParallelContext(num_stages=2))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kv_source_layers": [0] * 8}, "the latest earlier layer that shares and rotates as it does"),
        ({"kv_source_layers": [0, 1, 0, 3, 1, 0, 6, 7]}, "the latest earlier layer"),
        ({"kv_source_layers": [0, 0]}, "a layer for each of 8"),
        ({"no_rope_layers": [1, 2] * 4}, "0 or 1 for each of 8 layers"),
        ({"indexer_types": ["shared"] * 8}, "the first one full"),
        ({"q_lora_rank": 64}, "q_lora_rank"),
        ({"index_head_dim": 32}, "at least qk_rope_head_dim"),
    ],
)
def test_what_mistral_large4_has_not_is_named(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelConfigError, match=complaint):
        _read_large4(tmp_path, **changes)


def test_queries_of_each_head_grow_as_learned() -> None:
    """`scale * ln(position + 1) + bias`, the first position's factor being the bias."""
    positions = torch.tensor([0, 1, 4000])
    got = learned_query_scales(positions, torch.tensor([0.0, 0.5]), torch.tensor([1.0, 2.0]), torch.float32)
    expected = [[1.0, 2.0], [1.0, 2.0 + 0.5 * math.log(2)], [1.0, 2.0 + 0.5 * math.log(4001)]]
    torch.testing.assert_close(got[..., 0], torch.tensor(expected))
