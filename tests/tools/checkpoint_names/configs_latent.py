"""Published models with latent attention: DeepSeek's, Kimi's, GLM-4.7-Flash and GLM-5."""

from __future__ import annotations

from typing import Any

from tests.tools.checkpoint_names.config_parts import FP8, SAVED, common, deepseek_moe, without, yarn


def _latent(q_rank: int | None, nope: int, value: int) -> dict[str, Any]:
    ranks = {"q_lora_rank": q_rank, "kv_lora_rank": 512}
    return {**ranks, "qk_nope_head_dim": nope, "qk_rope_head_dim": 64, "v_head_dim": value}


_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_GLM_ENDS = {"eos_token_id": [154820, 154827, 154829], "pad_token_id": 154820}
_V3 = {
    **common("deepseek_v3", (129280, 7168, 18432, 61, 128, 128), 163840, 10000),
    **_latent(1536, 128, 128),
    **deepseek_moe((256, 8, 2048, 1), 3, 2.5, n_group=8, topk_group=4),
    **yarn(40, 1.0),
    **_ROUTER,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "num_nextn_predict_layers": 1,
    "quantization_config": FP8,
}
_KIMI = {
    **common("kimi_k2", (163840, 7168, 18432, 61, 64, 64), 131072, 50000.0),
    **_latent(1536, 128, 128),
    **deepseek_moe((384, 8, 2048, 1), 1, 2.827),
    **yarn(32.0, 1.0, 1.0),
    **_ROUTER,
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "seq_aux": True,
}
_INT4_WEIGHTS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _INT4_WEIGHTS,
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
}
# Some of what transformers 4 wrote into every nested configuration: settings of its own `generate`.
_GENERATE = {
    "add_cross_attention": False,
    "do_sample": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_decoder": False,
    "max_length": 20,
    "num_beams": 1,
    "pruned_heads": {},
    "return_dict": True,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
}
_KIMI_VISION = {
    "init_pos_emb_height": 64,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_hidden_size": 1152,
    "mm_projector_type": "patchmerger",
    "patch_size": 14,
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "text_hidden_size": 7168,
    "video_attn_type": "spatial_temporal",
    "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304,
    "vt_num_attention_heads": 16,
    "vt_num_hidden_layers": 27,
}
_KIMI_TEXT = {
    **without(_KIMI, "torch_dtype"),
    **yarn(64.0, 1.0),
    **_GENERATE,
    "dtype": "bfloat16",
    "ep_size": 1,
    "max_position_embeddings": 262144,
    "pad_token_id": 163839,
    "quantization_config": _INT4,
    "rms_norm_eps": 1e-05,
}
LATENT: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        **common("deepseek_v2", (102400, 2048, 10944, 27, 16, 16), 163840, 10000),
        **_latent(None, 128, 128),
        **deepseek_moe((64, 6, 1408, 2), 1, 1.0, norm_topk_prob=False),
        **yarn(40, 0.707),
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "moe_layer_freq": 1,
        "pretraining_tp": 1,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_method": "greedy",
    },
    "deepseek-v3": _V3,
    "deepseek-v3.2": {
        **_V3,
        "model_type": "deepseek_v32",
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "quantization_config": FP8 | {"scale_fmt": "ue8m0"},
    },
    "kimi-k2": {**_KIMI, "quantization_config": FP8},
    "kimi-k2.5": {
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": 163585,
        "ignore_index": -100,
        "media_placeholder_token_id": 163605,
        "pad_token_id": 163839,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "text_config": _KIMI_TEXT,
        "vision_config": _KIMI_VISION,
    },
    "glm-4.7-flash": {
        **without(
            common("glm4_moe_lite", (154880, 2048, 10240, 47, 20, 20), 202752, 1000000, 1e-5),
            "torch_dtype",
            *(key for key in SAVED if key != "attention_dropout"),
        ),
        **_latent(768, 192, 256),
        **deepseek_moe((64, 4, 1536, 1), 1, 1.8),
        **_GLM_ENDS,
        "attention_bias": False,
        "dtype": "bfloat16",
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "topk_method": "noaux_tc",
    },
    "glm-5": {
        **without(
            common("glm_moe_dsa", (154880, 6144, 12288, 78, 64, 64), 202752, 1e6, 1e-5),
            "rope_theta",
            "torch_dtype",
        ),
        **_latent(2048, 192, 256),
        **deepseek_moe((256, 8, 2048, 1), 3, 2.5),
        **_ROUTER,
        **_GLM_ENDS,
        "attention_bias": False,
        "dtype": "bfloat16",
        "ep_size": 1,
        "head_dim": 64,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "indexer_rope_interleave": True,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "qk_head_dim": 256,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    },
}
_GLM_5_2_FULL = [layer < 3 or layer % 4 == 2 for layer in range(78)]
LATENT["glm-5.2"] = {
    **LATENT["glm-5"],
    "head_dim": 192,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_types": ["full" if full else "shared" for full in _GLM_5_2_FULL],
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "moe_router_dtype": "float32",
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}
