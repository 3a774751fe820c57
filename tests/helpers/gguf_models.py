"""Tiny models of every family that GGUF files are read of, with rows that blocks divide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.helpers.gguf_files import GgufTypes, write_gguf
from tests.helpers.gguf_newer_models import NEWER_CASES
from tests.helpers.tiny_models import TinyModel, write_tiny_model


@dataclass(frozen=True)
class GgufModelCase:
    """One file: a configuration of transformers and the types its tensors are stored in."""

    model_type: str
    types: GgufTypes
    changes: dict[str, Any] = field(default_factory=dict)
    latent_split: bool = True
    max_tensors: int = 0
    prediction_layer: bool = False
    # In gguf.MODEL_ARCH; empty: the family's first.
    architecture: str = ""
    fused: bool = False


# Rows of 64 and 32, or of 256 for types with blocks of that many.
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
_SHARED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = _SHARED | {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_mtp_layers": 0,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
# Both of DeepSeek's temperatures are the same in all models, which is why files have but one.
_YARN_V3 = _YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 32.0,
}
_STEP: dict[str, Any] = {
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "share_expert_dim": 64,
    "moe_router_scaling_factor": 3.0,
    "sliding_window": 5,
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    "rope_theta": [50000.0, 1000.0, 1000.0, 50000.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
}
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "sliding_window": 5,
}
_GPT_OSS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "num_hidden_layers": 2,
    "rope_parameters": _YARN | {"rope_theta": 150000.0, "truncate": False},
}
_INDEXED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 8,
    "norm_topk_prob": True,
    "attention_bias": False,
}
_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    # See `tiny_linear_models`.
    "rms_norm_eps": 1e-3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_PARTIAL: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
}
_PARTIAL_YARN: dict[str, Any] = _YARN | {"partial_rotary_factor": 0.25, "mrope_section": [1, 0, 1]}

CASES: dict[str, GgufModelCase] = {
    "qwen3_moe": GgufModelCase(
        "qwen3_moe",
        GgufTypes("Q4_K", "Q4_K", "Q4_K", first_down="Q6_K"),
        _WIDE | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
        max_tensors=9,
    ),
    "qwen3_moe_tied": GgufModelCase(
        "qwen3_moe",
        GgufTypes("Q4_0", "Q4_0", "F16"),
        _SMALL
        | {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl_moe_fused": GgufModelCase(
        "qwen3_moe",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
        architecture="QWEN3VLMOE",
        fused=True,
    ),
    "qwen2_moe": GgufModelCase(
        "qwen2_moe",
        GgufTypes("Q8_0", "Q4_0", "Q8_0"),
        _SMALL | {"num_experts": 6, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 32},
    ),
    "deepseek_v3": GgufModelCase(
        "deepseek_v3",
        GgufTypes("Q5_K", "IQ3_S", "Q8_0", first_down="IQ2_XXS"),
        _WIDE | _LATENT | {"norm_topk_prob": True, "attention_bias": False, "rope_parameters": _YARN_V3},
    ),
    "deepseek_v3_whole_kv_b": GgufModelCase(
        "deepseek_v3",
        GgufTypes("Q4_0", "Q8_0", "BF16"),
        _SMALL
        | _LATENT
        | {
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "attention_bias": False,
            "n_group": 1,
            "topk_group": 1,
        },
        latent_split=False,
        prediction_layer=True,
    ),
    "deepseek_v2": GgufModelCase(
        "deepseek_v2",
        GgufTypes("Q8_0", "Q8_0", "Q4_0"),
        _SMALL | _LATENT | {"topk_method": "group_limited_greedy", "rope_parameters": _YARN_V3},
    ),
    "glm4_moe": GgufModelCase(
        "glm4_moe",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL
        | _SHARED
        | {
            "num_mtp_layers": 0,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        prediction_layer=True,
    ),
    "gpt_oss": GgufModelCase("gpt_oss", GgufTypes("MXFP4", "MXFP4", "Q8_0"), _GPT_OSS),
    "gpt_oss_fused": GgufModelCase("gpt_oss", GgufTypes("MXFP4", "Q8_0", "Q8_0"), _GPT_OSS, fused=True),
    "olmoe": GgufModelCase(
        "olmoe",
        GgufTypes("Q8_0", "Q8_0", "Q8_0", up="Q4_0"),
        {
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 3,
        },
    ),
    "minimax_m2": GgufModelCase(
        "minimax_m2",
        GgufTypes("Q4_1", "Q8_0", "Q8_0"),
        _SMALL | {"intermediate_size": 32, "num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 8},
    ),
    "mixtral": GgufModelCase(
        "mixtral",
        GgufTypes("Q4_0", "Q4_0", "Q8_0"),
        _SMALL | {"intermediate_size": 32, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "ernie4_5_moe": GgufModelCase(
        "ernie4_5_moe",
        GgufTypes("BF16", "F16", "Q8_0"),
        _SMALL
        | {
            "num_hidden_layers": 4,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
        },
    ),
    "glm_moe_dsa": GgufModelCase(
        "glm_moe_dsa",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL | _LATENT | _INDEXED | {"indexer_types": ["full", "shared", "full"], "attention_bias": True},
        prediction_layer=True,
    ),
    "glm_moe_dsa_by_tensors": GgufModelCase(
        "glm_moe_dsa",
        GgufTypes("F32", "F32", "F32"),
        _SMALL | _LATENT | _INDEXED | {"indexer_types": ["full", "full", "shared"]},
        latent_split=False,
    ),
    "qwen3_next": GgufModelCase(
        "qwen3_next",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL | _LINEAR | {"rope_parameters": _PARTIAL},
        prediction_layer=True,
    ),
    "qwen3_next_whole_tied": GgufModelCase(
        "qwen3_next",
        GgufTypes("F32", "BF16", "BF16"),
        _SMALL
        | _LINEAR
        | {
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 4,
            "tie_word_embeddings": True,
            "rope_parameters": _PARTIAL,
        },
        latent_split=False,
        max_tensors=20,
    ),
    "qwen3_5_moe": GgufModelCase(
        "qwen3_5_moe_text",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL
        | _LINEAR
        | {"linear_num_value_heads": 6, "rope_parameters": _PARTIAL | {"mrope_section": [1, 1, 0]}},
        prediction_layer=True,
    ),
    "qwen3_5_moe_equal_heads": GgufModelCase(
        "qwen3_5_moe_text",
        GgufTypes("F32", "F32", "F32"),
        _SMALL | _LINEAR | {"linear_num_value_heads": 2, "rope_parameters": _PARTIAL_YARN},
        fused=True,
    ),
    # Rows of the table of n-grams are what the file says that they are padded to.
    "qwen4_exp": GgufModelCase(
        "qwen4_exp_text",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL
        | _LINEAR
        | {
            "rms_norm_eps": 1e-2,
            "linear_num_value_heads": 6,
            "linear_value_head_dim": 8,
            "output_gate_type": "sigmoid",
            "hc_count": 3,
            "hc_lowrank": 32,
            "indexer_n_heads": 16,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 6,
            "indexer_compress_ratio": 3,
            "ple_layer_ids": [2],
            "ple_embed_dim": 128,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 53,
            "make_ngram_vocab_size_divisible_by": 250,
            "split_ngram_parts": 1,
            "rope_parameters": _PARTIAL | {"mrope_section": [1, 1, 0]},
        },
        prediction_layer=True,
    ),
    "granitemoehybrid": GgufModelCase(
        "granitemoehybrid",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL
        | {
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-3,
            "head_dim": 16,
            "intermediate_size": 32,
            "shared_intermediate_size": 96,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 32,
            "mamba_n_groups": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "jamba": GgufModelCase(
        "jamba",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "head_dim": 16,
            "rms_norm_eps": 1e-3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 32,
        },
    ),
    "lfm2_moe": GgufModelCase(
        "lfm2_moe",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL
        | {
            "num_hidden_layers": 4,
            "intermediate_size": 96,
            "head_dim": 16,
            "num_key_value_heads": 2,
            "norm_eps": 1e-3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
        },
    ),
    "kimi_linear": GgufModelCase(
        "kimi_linear",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL
        | {
            "num_hidden_layers": 3,
            "rms_norm_eps": 3e-3,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "q_lora_rank": None,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "linear_num_heads": 2,
            "linear_head_dim": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "nemotron_h": GgufModelCase(
        "nemotron_h",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        {
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
            "layer_norm_epsilon": 1e-3,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_latent_size": 32,
            "moe_shared_expert_intermediate_size": 128,
            "routed_scaling_factor": 2.5,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 32,
        },
        prediction_layer=True,
    ),
    "afmoe": GgufModelCase(
        "afmoe",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL
        | {
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "sliding_window": 5,
            "mup_enabled": True,
            "route_scale": 2.5,
        },
    ),
    "exaone_moe": GgufModelCase(
        "exaone_moe",
        GgufTypes("Q8_0", "Q4_0", "Q8_0"),
        _SMALL | {"num_hidden_layers": 4, "num_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
    "hunyuan_v1_moe": GgufModelCase(
        "hunyuan_v1_moe",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL
        | {
            "intermediate_size": 32,
            "num_experts": 5,
            "moe_topk": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "gemma4": GgufModelCase(
        "gemma4_text",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL
        | _GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma4_own_values_untied": GgufModelCase(
        "gemma4_text",
        GgufTypes("F32", "F32", "F32"),
        _SMALL
        | _GEMMA4
        | {
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 3000.0,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "llama4": GgufModelCase(
        "llama4_text",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL
        | {
            "num_hidden_layers": 4,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "llama4_unscaled": GgufModelCase(
        "llama4_text",
        GgufTypes("F32", "F32", "F32"),
        _SMALL
        | {
            "intermediate_size": 32,
            "intermediate_size_mlp": 64,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        fused=True,
    ),
    "mimo_v2_flash": GgufModelCase(
        "mimo_v2_flash",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL
        | {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "v_head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "attention_value_scale": 0.5,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
                for kind, theta in (("full_attention", 50000.0), ("sliding_attention", 3000.0))
            },
        },
        prediction_layer=True,
    ),
    "step3p5": GgufModelCase(
        "step3p5",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL
        | _STEP
        | {
            "num_attention_heads": 4,
            "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 32},
            "moe_layers_enum": "1,2,3",
            "rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 4096},
            "swiglu_limits": [0.0, 0.0, 0.4, 0.7],
            "swiglu_limits_shared": [0.5, 0.0, 0.0, 0.3],
        },
        prediction_layer=True,
    ),
    "step3p5_unscaled": GgufModelCase(
        "step3p5",
        GgufTypes("F32", "F32", "F32"),
        _SMALL | _STEP | {"moe_layers_enum": "0,1,2,3"},
    ),
    "mistral4": GgufModelCase(
        "mistral4",
        GgufTypes("Q4_0", "Q8_0", "Q8_0"),
        _SMALL
        | _LATENT
        | {
            "head_dim": 40,
            "first_k_dense_replace": 0,
            "rope_parameters": _YARN_V3
            | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3},
        },
        fused=True,
    ),
    "dots1": GgufModelCase(
        "dots1",
        GgufTypes("IQ4_XS", "IQ3_XXS", "Q8_0", first_down="Q2_K"),
        _WIDE
        | _SHARED
        | {
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "attention_bias": False,
            "sliding_window": None,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
CASES |= {name: GgufModelCase(**fields) for name, fields in NEWER_CASES.items()}


@dataclass(frozen=True)
class GgufFile:
    """Filled by `make_gguf`."""

    # The file, or the first of its parts.
    path: Path
    # The same model's config.json lies here; its weights are those before they were quantised.
    published: Path
    # Transformers' model with the weights that the file says.
    reference: Any


def make_gguf(name: str, root: Path) -> GgufFile:
    """Writes the case's file, or its parts, below `root`."""
    case, published, directory = CASES[name], root / f"{name}-published", root / name
    directory.mkdir(parents=True)
    tiny = TinyModel(case.model_type, case.changes)
    reference = write_tiny_model(tiny, published, seed=sum(name.encode()))
    path = directory / f"{name}.gguf"
    write_gguf(
        reference,
        path,
        case.types,
        latent_split=case.latent_split,
        max_tensors=case.max_tensors,
        prediction_layer=case.prediction_layer,
        architecture=case.architecture,
        fused=case.fused,
    )
    return GgufFile(min(directory.iterdir()), published, reference)


def cached_gguf_files(root: Path) -> Callable[[str], GgufFile]:
    """`name -> file`, each made once under `root`."""
    return cache(lambda name: make_gguf(name, root))


@torch.inference_mode()
def reference_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    """Returns float32 `[tokens, vocabulary]`."""
    logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits
