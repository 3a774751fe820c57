"""Invariant: families with linear attention are read as published; what they do not compute is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.cache.kv_cache import page_bytes
from gpu_service.cache.state_cache import state_bytes
from gpu_service.core.parallel import ParallelContext
from gpu_service.core.partition import check_divisible, rank_layers
from gpu_service.device import TORCH_DTYPES
from gpu_service.layers.linear import gated_query_order, linear_attention_order
from gpu_service.models.compose import build_model
from moebius.errors import ConfigError
from moebius.models.config import ModelConfig, ModelConfigError
from moebius.models.layers.gqa import GQA
from moebius.models.layers.latent import MLA
from moebius.models.layers.layer import cached, states
from moebius.models.layers.norms import RMSNorm
from moebius.models.layers.recurrent import KDA, GatedDeltaNet, Mamba2, Recurrent, SelectiveScan
from moebius.models.read import read_geometry
from tests.helpers.layer_values import first, first_moe, layers_of, read_config
from tests.helpers.published_checkpoints import Published

# With the sizes of Qwen3-Next-80B-A3B.
NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
# With those of Qwen3.5-35B-A3B; of the vision tower, only what the language model's reader meets.
NEXT_5: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": {
        **{key: value for key, value in NEXT.items() if key not in ("intermediate_size", "rope_theta")},
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 248320,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    },
}


def attending(config: ModelConfig) -> tuple[int, ...]:
    """Returns the layers that have a cache."""
    return tuple(i for i, layer in enumerate(config.layers) if cached([layer]))


def _text(tmp_path: Path, **changes: Any) -> ModelConfig:
    return read_config(tmp_path, NEXT_5["text_config"], **changes)


def test_qwen3_next_is_read(tmp_path: Path) -> None:
    config = read_config(tmp_path, NEXT)
    mixer = first(config, GatedDeltaNet)
    assert (mixer.conv_size, mixer.value_size, mixer.conv_width) == (8192, 4096, 4)
    assert attending(config) == tuple(range(3, 48, 4))
    assert sorted((*attending(config), *layers_of(config, GatedDeltaNet))) == list(range(48))
    rope = first(config, GQA).rope
    assert rope is not None
    assert (rope.rotary_dim, rope.mrope_sections) == (64, ())
    assert (first_moe(config).shared_gate, first_moe(config).router.post) == (True, "renormalize")
    assert {layer.norm for layer in config.layers} == {RMSNorm(1e-6, one_plus_weight=True)}
    assert len(config.routed) == 48
    assert read_geometry(tmp_path).moe_layers == config.moe_layer_ids
    # Keys and values in 12 layers; 36 matrices of 32 heads, and what their convolutions remember.
    assert (
        page_bytes(config.layers, 16, torch.bfloat16, TORCH_DTYPES[config.dtype]) == 12 * 16 * 2 * 2 * 256 * 2
    )
    assert state_bytes(config.layers, TORCH_DTYPES[config.dtype]) == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)


def test_the_text_model_of_qwen3_5_is_read_where_it_is(tmp_path: Path) -> None:
    """Nested in the whole model's configuration, or alone."""
    (tmp_path / "alone").mkdir()
    alone = _text(tmp_path / "alone")
    for config in (alone, read_config(tmp_path, NEXT_5)):
        assert attending(config) == tuple(range(3, 40, 4))
        rope = first(config, GQA).rope
        assert rope is not None
        assert (rope.mrope_sections, rope.mrope_interleaved) == ((11, 11, 10), True)
        assert first_moe(config).router.post == "renormalize"
        assert len(config.routed) == 40
    assert read_geometry(tmp_path).moe_layers == tuple(range(40))
    assert build_model(alone).config is alone


# With the layers and heads of Kimi-Linear-48B-A3B.
KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": {
        "full_attn_layers": [4, 8],
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "model_max_length": 1048576,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}


def test_kimi_linear_is_read(tmp_path: Path) -> None:
    """Latents in a quarter of the layers, states in the others, and no positions."""
    config = read_config(tmp_path, KIMI)
    linear, mla = first(config, KDA), first(config, MLA)
    assert (attending(config), mla.rope, config.max_model_len) == ((3, 7), None, 1048576)
    assert linear.decay_bound is None
    assert mla.softmax_scale == pytest.approx(192**-0.5)
    # One layer is dense where nothing says how many.
    assert config.moe_layer_ids == tuple(range(1, 8))
    assert page_bytes(config.layers, 16, torch.bfloat16, TORCH_DTYPES[config.dtype]) == 2 * 16 * 576 * 2
    assert state_bytes(config.layers, TORCH_DTYPES[config.dtype]) == 6 * (
        32 * 128 * 128 * 4 + 3 * 3 * 4096 * 2
    )
    # As transformers writes it.
    listed = ["full_attention" if layer in (3, 7) else "linear_attention" for layer in range(8)]
    own = {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
    assert read_config(tmp_path, KIMI, linear_attn_config="absent", layer_types=listed, **own) == config


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"linear_attn_config": KIMI["linear_attn_config"] | {"kda_layers": [1, 2]}}, "all layers but"),
        ({"linear_attn_config": KIMI["linear_attn_config"] | {"use_full_rank_gate": True}}, "use_full_rank"),
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"num_key_value_heads": 8}, "num_attention_heads"),
        ({"moe_router_activation_func": "softmax"}, "sigmoid"),
        ({"attn_res_block_size": 12}, "attn_res_block_size"),
    ],
)
def test_what_kimi_linear_has_not_is_named(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    """Most of it is Kimi-K3's, which has the same `model_type`."""
    with pytest.raises(ModelConfigError, match=complaint):
        read_config(tmp_path, KIMI, **changes)


NEMOTRON = Published.load("nemotron-3-super-120b-a12b").config
JAMBA = Published.load("jamba-1.5-mini").config


def test_layers_of_one_half_are_read(tmp_path: Path) -> None:
    """8 of 88 layers have a cache, 40 a state and 40 experts, which work in a narrower space."""
    config = read_config(tmp_path, NEMOTRON)
    assert attending(config) == (7, 16, 25, 36, 47, 58, 69, 78)
    assert (len(layers_of(config, Mamba2)), len(config.routed)) == (40, 40)
    assert [i for i, layer in enumerate(config.layers) if layer.ffns] == list(config.moe_layer_ids)
    geometry = read_geometry(tmp_path)
    assert (geometry.hidden_size, geometry.is_gated, config.hidden_size) == (1024, False, 4096)
    assert (
        page_bytes(config.layers, 16, torch.bfloat16, TORCH_DTYPES[config.dtype]) == 8 * 16 * 2 * 2 * 128 * 2
    )
    assert state_bytes(config.layers, TORCH_DTYPES[config.dtype]) == 40 * (
        128 * 128 * 64 * 4 + 3 * (8192 + 2 * 8 * 128) * 2
    )
    own = rank_layers(config, ParallelContext(stage=1, num_stages=2))
    assert [i for i, layer in enumerate(own) if cached([layer])] == [3, 14, 25, 34]
    assert (len(own), own[0].ffn is not None) == (44, bool(config.layers[44].ffns))
    # By names instead of letters.
    names = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
    kinds = [names[letter] for letter in NEMOTRON["hybrid_override_pattern"]]
    listed = {"layers_block_type": kinds, "hybrid_override_pattern": "absent", "num_hidden_layers": "absent"}
    assert read_config(tmp_path, NEMOTRON, **listed) == config
    # No limit of steps, as Nemotron-3-Ultra's file says it, which is JSON to the letter.
    assert read_config(tmp_path, NEMOTRON, time_step_limit=[0.0, 1e308]) == config


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (NEMOTRON, {"hybrid_override_pattern": "MEM*X"}, "allowed: M, mamba"),
        (NEMOTRON, {"hybrid_override_pattern": "M*M*"}, "layers of the kind moe"),
        (NEMOTRON, {"hybrid_override_pattern": "ME*E"}, "num_hidden_layers = 88"),
        (NEMOTRON, {"n_shared_experts": 2}, "n_shared_experts"),
        (NEMOTRON, {"mlp_hidden_act": "gelu"}, "'relu2'"),
        (NEMOTRON, {"use_conv_bias": False}, "use_conv_bias"),
        (NEMOTRON, {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        (JAMBA, {"num_experts": 1}, "2 or more"),
        (JAMBA, {"attn_layer_offset": 8}, "less than 8"),
        (JAMBA, {"mamba_proj_bias": True}, "mamba_proj_bias"),
    ],
)
def test_what_mamba_models_have_not_is_named(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelConfigError, match=complaint):
        read_config(tmp_path, base, **changes)


def test_jamba_is_read(tmp_path: Path) -> None:
    """A state for each channel, whose inputs alone are convolved."""
    config = read_config(tmp_path, JAMBA)
    linear = first(config, SelectiveScan)
    assert attending(config) == (4, 12, 20, 28)
    assert (linear.step_rank, config.moe_layer_ids) == (256, tuple(range(1, 32, 2)))
    assert state_bytes(config.layers, TORCH_DTYPES[config.dtype]) == 28 * (8192 * 16 * 4 + 3 * 8192 * 2)
    rank = rank_layers(config, ParallelContext(tp_rank=1, tp_size=4))[0].mixer
    assert isinstance(rank, SelectiveScan)
    assert (rank.conv_size, rank.num_value_heads) == (2048, 2048)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layer_types": ["linear_attention"] * 48}, "layers of both types"),
        ({"layer_types": ["full_attention"] * 3}, "one type for each of the 48 layers"),
        ({"layer_types": ["sliding_attention"] * 48}, "allowed: full_attention, linear_attention"),
        ({"linear_num_value_heads": 24}, "a multiple of 16"),
        ({"linear_conv_kernel_dim": 1}, "an integer >= 2"),
        ({"shared_expert_intermediate_size": "absent"}, "shared_expert_intermediate_size"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelConfigError, match=complaint):
        read_config(tmp_path, NEXT, **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"attn_output_gate": False}, "attn_output_gate = False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'.*'silu', 'swish'"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
    ],
)
def test_gates_and_layers_that_qwen3_5_does_not_have_are_refused(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    """Later models name them, with the values that all have so far."""
    same = {"attn_output_gate": True, "output_gate_type": "swish", "mlp_only_layers": []}
    assert _text(tmp_path, **same).unread_keys == ()
    with pytest.raises(ModelConfigError, match=complaint):
        _text(tmp_path, **(same | changes))


def test_ranks_that_can_not_divide_states_are_refused(tmp_path: Path) -> None:
    config = read_config(tmp_path, NEXT)
    layers = (
        replace(layer, mixer=replace(layer.mixer, num_key_heads=9))
        if isinstance(layer.mixer, Recurrent)
        else layer
        for layer in config.layers
    )
    uneven = replace(config, layers=tuple(layers))
    with pytest.raises(ConfigError, match=r"2 does not divide the 9 key heads .* allowed for this model: 1$"):
        check_divisible(uneven, ParallelContext(tp_size=2))
    check_divisible(config, ParallelContext(tp_size=2))
    check_divisible(config, ParallelContext(num_stages=12))
    with pytest.raises(ConfigError, match="none of which attends"):
        check_divisible(config, ParallelContext(num_stages=13))


def test_stages_have_their_own_layers(tmp_path: Path) -> None:
    config = read_config(tmp_path, NEXT)
    own = rank_layers(config, ParallelContext(tp_rank=1, tp_size=2, stage=1, num_stages=3))
    linear = own[0].mixer
    assert isinstance(linear, GatedDeltaNet)
    assert (linear.num_key_heads, linear.num_value_heads) == (8, 16)
    assert [i for i, layer in enumerate(own) if cached([layer])] == [3, 7, 11, 15]
    assert len(states(own)) == 12


def test_rows_are_put_apart_as_transformers_takes_them_apart() -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    heads = {"num_key_heads": 2, "num_value_heads": 6, "key_head_dim": 4, "value_head_dim": 5}
    sizes = GatedDeltaNet(**heads, conv_width=4, eps=1e-6)
    reference: Any = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=8,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=4,
            linear_value_head_dim=5,
        ),
        0,
    )
    rows = torch.arange(sizes.conv_size + sizes.value_size + 12)
    mixed, gates = rows[None, None, :-12], rows[None, None, -12:]
    parts = reference.fix_query_key_value_ordering(mixed, gates)
    assert linear_attention_order(sizes) == torch.cat([part.flatten() for part in parts]).tolist()


def test_gates_of_queries_go_last() -> None:
    """Two heads of three elements, one key and one value head."""
    assert gated_query_order(2, 1, 3) == [0, 1, 2, 6, 7, 8, *range(12, 18), 3, 4, 5, 9, 10, 11]
