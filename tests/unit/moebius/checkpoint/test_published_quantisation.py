"""Guards that `quantization_config` is understood as published checkpoints write it, with all of its keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moebius.checkpoint.matrix_finder import SchemeTargets
from moebius.checkpoint.quantisation import read_schemes

_UNUSED = {"actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {}}
_WEIGHTS = {"dynamic": False, "symmetric": True, **_UNUSED}
_INT4 = {**_WEIGHTS, "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_FP8 = {**_WEIGHTS, "num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
_PER_TOKEN = {**_WEIGHTS, "num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_FP4 = {**_WEIGHTS, "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def _compressed(form: str, weights: dict[str, Any], activations: Any, ignore: list[str]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {"group_0": {**group, "output_activations": None}},
    }


_GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "damp_percent": 0.01,
    "true_sequential": True,
    "model_name_or_path": None,
    "model_file_base_name": "model",
}
_MX = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "scale_format": "e8m0"}
_QUARK = {
    "quant_method": "quark",
    "quant_mode": "eager_mode",
    "algo_config": None,
    "exclude": ["lm_head", "re:.*self_attn.*"],
    "layer_type_quant_config": {},
    "kv_cache_quant_config": {},
    "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
}


def _quark(weight: dict[str, Any]) -> dict[str, Any]:
    """Returns the quark configuration of a module."""
    return {"weight": weight, "input_tensors": {**weight, "is_dynamic": True}, "output_tensors": None}


_QUARK_INT8 = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True}
_QUARK_BLOCKS = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128], "symmetric": True}
# Family -> configuration, and the packed format of its quantised experts.
PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v3": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        "fp8_block",
    ),
    "deepseek_v31": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        "fp8_block",
    ),
    "qwen3_fp8": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
            "weight_block_size": [128, 128],
        },
        "fp8_block",
    ),
    "kimi_k2_int4": (
        _compressed(
            "pack-quantized", _INT4, None, ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.(gate|up|down)_proj.*"]
        ),
        "int4_g32{scale}",
    ),
    "glm_fp8": (_compressed("float-quantized", _FP8, _PER_TOKEN, ["lm_head"]), "fp8_channel"),
    "nvfp4": (_compressed("nvfp4-pack-quantized", _FP4, {**_FP4, "dynamic": "local"}, ["lm_head"]), "nvfp4"),
    "qwen3_gptq": (_GPTQ, "int4_g128{scale}"),
    "gptq_model": (
        {**_GPTQ, "checkpoint_format": "gptq", "lm_head": False, "dynamic": {"-:.*mlp.gate": {}}, "meta": {}},
        "int4_g128{scale}",
    ),
    "qwen_awq": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": None,
            "version": "gemm",
            "zero_point": True,
        },
        "int4_g128_zeros{scale}",
    ),
    "modelopt_nvfp4": (
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "producer": {"name": "modelopt", "version": "0.33.0"},
            "ignore": ["lm_head", "model.layers.0*"],
            "config_groups": {"group_0": {"weights": _FP4, "input_activations": _FP4, "targets": ["Linear"]}},
        },
        "nvfp4",
    ),
    # nvidia/Qwen3.6-35B-A3B-NVFP4: experts in four bits, attention in eight.
    "modelopt_mixed": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "producer": {"name": "modelopt", "version": "0.37.0"},
            "ignore": ["mtp.layers.0*", "mtp*"],
            "quantized_layers": {
                "model.language_model.layers.3.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
            },
        },
        "nvfp4",
    ),
    "auto_round": (
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "autoround_version": "0.6.0",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "data_type": "int",
            "block_name_to_quantize": "model.layers",
            "iters": 200,
            "extra_config": {
                "model.layers.0.self_attn.q_proj": {
                    "bits": 8,
                    "group_size": 128,
                    "sym": True,
                    "act_bits": 16,
                },
                "model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"},
            },
        },
        "int4_g128{scale}",
    ),
    "minimax_m3_mxfp8": (
        {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 32],
            "ignored_layers": ["lm_head", "model.embed_tokens", "model.layers.3.block_sparse_moe.gate"],
        },
        "mxfp8",
    ),
    "hy3_fp8": (
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ["lm_head", "model.embed_tokens"],
            "kv_cache_scheme": "static",
        },
        "fp8_channel",
    ),
    "modelopt_mxfp8": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MXFP8",
            "producer": {"name": "modelopt", "version": "0.41.0"},
            "ignore": ["lm_head"],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        },
        "mxfp8",
    ),
    "mixtral_gptq_act_order": (
        {
            **_GPTQ,
            "desc_act": True,
            "damp_percent": 0.1,
            "true_sequential": True,
            "model_file_base_name": "model",
        },
        "int4_g128{scale}",
    ),
    "mixtral_gptq_act_order_rows": ({**_GPTQ, "desc_act": True, "group_size": -1}, "int4_g128{scale}"),
    "gptq_static_groups": ({**_GPTQ, "desc_act": True, "static_groups": True}, "int4_g128{scale}"),
    "kimi_quark": ({**_QUARK, "global_quant_config": _quark(_MX), "layer_quant_config": {}}, "mxfp4"),
    "step_quark": (
        {**_QUARK, "global_quant_config": _quark(_QUARK_INT8), "layer_quant_config": None},
        "int8_w8a8",
    ),
    # What is said of a module counts before what is said of all; there may be nothing for all.
    "mixed_quark": (
        {
            **_QUARK,
            "global_quant_config": _quark(_MX),
            "layer_quant_config": {"*.mlp.experts.*": _quark(_QUARK_BLOCKS)},
        },
        "fp8_block",
    ),
    "single_quark": (
        {**_QUARK, "global_quant_config": None, "layer_quant_config": {"*down_proj": _quark(_MX)}},
        "mxfp4",
    ),
    "gpt_oss": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        "mxfp4",
    ),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
@pytest.mark.parametrize("inside", ["", "text_config"])
def test_published_configurations_are_understood(name: str, inside: str, tmp_path: Path) -> None:
    """Configurations are understood also in the text part of a multimodal model."""
    config, packed = PUBLISHED[name]
    whole = {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps({inside: whole} if inside else whole))
    expert = "model.layers.3.mlp.experts.7.down_proj"
    found = SchemeTargets.of(read_schemes(tmp_path)).applying(expert)
    assert found[0].packed_format == packed
