"""config.json of published models, checkpoints of headers only, and hardware to plan for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moebius.config import MoebiusConfig
from moebius.config_loader import load_config
from moebius.planning.gpu_table import GPU_MODELS
from moebius.planning.hardware import Hardware
from moebius.random_model.shapes import parse_shape

GIB = 2**30
_DEEPSEEK: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "eos_token_id": 1,
}
_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
# Name -> (config.json, parameters that its makers state, without layers of multi-token prediction).
PUBLISHED: Mapping[str, tuple[dict[str, Any], float]] = {
    "qwen3-30b-a3b": (parse_shape("qwen3-30b-a3b", 0).hf_config(None), 30.5e9),
    "deepseek-v3": (
        _DEEPSEEK
        | {
            "model_type": "deepseek_v3",
            "first_k_dense_replace": 3,
            "max_position_embeddings": 163840,
            "n_group": 8,
            "topk_group": 4,
            "n_routed_experts": 256,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "routed_scaling_factor": 2.5,
            "rope_scaling": _YARN,
            "vocab_size": 129280,
        },
        671e9,
    ),
    "kimi-k2": (
        _DEEPSEEK
        | {
            "model_type": "kimi_k2",
            "first_k_dense_replace": 1,
            "max_position_embeddings": 131072,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "routed_scaling_factor": 2.827,
            "vocab_size": 163840,
        },
        1.026e12,
    ),
    "glm-4.7": (
        {
            "model_type": "glm4_moe",
            "attention_bias": True,
            "first_k_dense_replace": 3,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "max_position_embeddings": 202752,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "n_routed_experts": 160,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 92,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "torch_dtype": "bfloat16",
            "use_qk_norm": True,
            "vocab_size": 151552,
        },
        355e9,
    ),
    "gpt-oss-120b": (
        {
            "model_type": "gpt_oss",
            "attention_bias": True,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []},
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "rope_theta": 150000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 201088,
        },
        116.83e9,
    ),
}


def write_config(directory: Path, config: Mapping[str, Any]) -> Path:
    """A directory with nothing but config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_headers(directory: Path, tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> None:
    """model.safetensors of (name, dtype, shape, bytes) whose data is a hole in the file."""
    header: dict[str, Any] = {}
    position = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    raw = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + position)


def settings(model: Path, **flags: Any) -> MoebiusConfig:
    """As `moebius plan MODEL --flag ...` reads them."""
    return load_config(None, {"model": str(model), **flags})


def hardware(gpu: str | None = None, gpus: int = 1, ram_gib: float = 1024, **changes: Any) -> Hardware:
    """A host with two sockets of 32 AMX cores, and GPUs of the table where one is named."""
    numbers: dict[str, Any] = {
        "gpus": gpus if gpu else 0,
        "gpu": GPU_MODELS[gpu] if gpu else None,
        "ram_bytes": int(ram_gib * GIB),
        "sockets": 2,
        "cores": 64,
        "bandwidth": 500e9,
        "cpu_flops": 100e12,
        "isa": "amx",
    }
    return Hardware(**numbers | changes)
