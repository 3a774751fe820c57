"""Invariant: matrices of one checkpoint may be stored in several formats; each is read as its own.

Groups whose tensors look alike (int4 of two group sizes, 4 and 8 bits) are distinguished by the
configuration: by module, by pattern, by class, in that order; modules left alone are plain tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.model_formats import MODEL_FORMATS, ModelFormat
from tests.helpers.quantised_checkpoints import gptq
from tests.helpers.quantised_models import (
    QUANTISED_MODELS,
    Models,
    cached_plain_models,
    our_logits,
    reference_logits,
    write_quantised,
)
from tests.tolerances import LOGITS_FLOAT32_VS_TRANSFORMERS


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cached_plain_models(tmp_path_factory.mktemp("plain"))


@dataclass(frozen=True)
class Mixture:
    """`rules`: pattern of names and a key of `MODEL_FORMATS`, "" to leave alone; the first that matches."""

    config: dict[str, Any]
    rules: tuple[tuple[str, str], ...]

    def choose(self, name: str) -> ModelFormat | None:
        found = next((kind for pattern, kind in self.rules if re.match(pattern, name)), "")
        return MODEL_FORMATS[found] if found else None


def group(format_name: str, *targets: str) -> dict[str, Any]:
    """Returns the one group of a compressed-tensors format, with its own `format` and other targets."""
    config = MODEL_FORMATS[format_name].config
    assert config is not None
    return {**config["config_groups"]["group_0"], "format": config["format"], "targets": list(targets)}


def groups(*found: dict[str, Any], ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    named = {f"group_{index}": each for index, each in enumerate(found)}
    base = {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": list(ignore)}
    return {**base, "config_groups": named}


_AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "extra_config": {
        "model.layers.0.self_attn.o_proj": {"bits": 8},
        "model.layers.1.self_attn.o_proj": {"bits": 8, "group_size": 32},
        r".*layers\.0\.mlp\.down.*": {"bits": 8},
        "lm_head": {"bits": 16, "data_type": "float"},
    },
}
_QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_channel"}
_QUARK_FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
MIXTURES: dict[str, Mixture] = {
    "fp8_dense_int4_experts": Mixture(
        groups(
            group("fp8_block_compressed", "re:.*self_attn.*", "re:.*shared_experts.*"),
            group("compressed_int4_g32", r"re:.*\.experts\..*"),
            ignore=("lm_head", "re:.*layers.0.mlp.*"),
        ),
        (
            (r".*(self_attn|shared_experts)", "fp8_block_compressed"),
            (r".*\.experts\.", "compressed_int4_g32"),
        ),
    ),
    "linear_fp8_config": Mixture(
        {
            **groups(group("compressed_int4_g32", "Linear"), ignore=("lm_head",)),
            "linear_fp8_config": MODEL_FORMATS["fp8_block"].config,
        },
        ((r".*\.experts\.", "compressed_int4_g32"), (r".*self_attn|.*shared_experts", "fp8_block")),
    ),
    "two_group_sizes": Mixture(
        groups(
            group("compressed_int4_g128", "Linear"),
            group("compressed_int4_g32", "re:.*down_proj"),
            group("compressed_int4_g64_f16", "model.layers.1.self_attn.o_proj"),
        ),
        (
            (r".*layers\.1\.self_attn\.o_proj", "compressed_int4_g64_f16"),
            (r".*down_proj", "compressed_int4_g32"),
            (r".*layers", "compressed_int4_g128"),
        ),
    ),
    "zeros_and_none": Mixture(
        groups(
            group("compressed_int4_g32_zeros", r"re:.*\.experts\..*"),
            group("compressed_int4_g32", "Linear"),
        ),
        ((r".*\.experts\.", "compressed_int4_g32_zeros"), (r".*layers", "compressed_int4_g32")),
    ),
    "gptq_rules": Mixture(
        gptq(32, True, dynamic={"-:lm_head": {}, r"+:.*\.self_attn\..*": {"bits": 8}, r"-:.*\.0\.mlp.*": {}}),
        ((r".*self_attn", "gptq_int8_g32"), (r".*layers\.0\.mlp|lm_head", ""), (r".*", "auto_round")),
    ),
    "auto_round_rules": Mixture(
        _AUTO_ROUND,
        ((r".*(o_proj|0\.mlp\.down)", "gptq_int8_g32"), (r"lm_head", ""), (r".*", "auto_round")),
    ),
    "fp8_not_converted": Mixture(
        {
            **(MODEL_FORMATS["fp8_block"].config or {}),
            "modules_to_not_convert": ["lm_head", "model.layers.0"],
        },
        ((r"lm_head|.*layers\.0\.", ""), (r".*", "fp8_block")),
    ),
    "modelopt_mixed": Mixture(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"},
                "model.layers.1.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
            },
        },
        ((r".*self_attn", "fp8_tensor"), (r".*experts", "nvfp4")),
    ),
    "quark_mixed": Mixture(
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": _QUARK_FP4},
            "layer_quant_config": {
                "*self_attn*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}
            },
        },
        ((r".*self_attn", "fp8_channel"), (r".*experts", "mxfp4_quark")),
    ),
    "kimi": Mixture(
        groups(group("kimi_int4", "Linear"), ignore=("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*")),
        ((r".*\.experts\.", "kimi_int4"),),
    ),
}


@pytest.mark.parametrize("model", list(QUANTISED_MODELS))
@pytest.mark.parametrize("name", list(MIXTURES))
def test_every_matrix_has_its_own_format(name: str, model: str, models: Models, tmp_path: Path) -> None:
    mixture, plain = MIXTURES[name], models(model)
    reference = write_quantised(plain, tmp_path, mixture.choose, mixture.config)
    expected = reference_logits(reference)
    assert (expected - plain.logits).abs().max() > 1e-3, "the formats must matter"
    torch.testing.assert_close(our_logits(tmp_path), expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)
