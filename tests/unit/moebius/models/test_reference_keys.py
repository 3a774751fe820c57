"""Invariant: no key of config.json that a family's reference computes with is left aside.

Each is changed by itself: that has to change the `ModelConfig`, or to be refused.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from typing import Any

import pytest

from moebius.checkpoint.config_file import flat_config
from moebius.models.config import ModelConfig, ModelConfigError
from moebius.models.keys import HfKeys
from moebius.models.registry import FAMILIES
from tests.helpers.tiny_models import TINY_MODELS, tiny_config

# One of each.
NAMES = {tiny.model_type: name for name, tiny in reversed(TINY_MODELS.items())}
del NAMES["deepseek_v41"]  # which transformers does not know
# Of training, of what is returned besides logits, of kernels' pieces, and of how transformers computes.
HARMLESS = {
    "attention_dropout",
    "block_size",
    "chunk_size",
    "enable_moe_fp32_combine",
    "initializer_range",
    "input_jitter_noise",
    "learnable_sink_init",
    "mamba_chunk_size",
    "num_logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "rescale_prenorm_residual",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "use_associative_scan",
    "use_cache",
    "use_mamba_kernels",
    "use_mambapy",
}
# What follows from other keys, or means something next to others only.
DEPENDENT = {
    "bailing_hybrid": {"linear_conv_kernel_dim", "linear_num_heads"},
    "cohere2_moe": {"layer_norm_eps"},  # without rms_norm_eps
    "dots1": {"sliding_window"},  # of layers that slide
    "ernie4_5_moe": {"moe_layer_end_index"},  # beyond the last layer here
    "exaone_moe": {"sliding_window_pattern"},  # without layer_types
    "gemma4_text": {"vocab_size_per_layer_input"},  # of embeddings by layer, which are refused
    "kolibri1": {"intermediate_size"},  # of dense layers, which it has none of
    "longcat_flash": {"head_dim", "qk_head_dim"},
    # Of initial values: the published code has no such limit (families/nemotron_h.py).
    "nemotron_h": {"time_step_floor", "time_step_max", "time_step_min"},
    "qwen2_moe": {"sliding_window"},  # with use_sliding_window
    "qwen3_moe": {"sliding_window"},
    # Of dense layers, which these models have none of.
    "qwen3_5_moe": {"intermediate_size"},
    "qwen3_5_moe_text": {"intermediate_size"},
    "qwen4_exp": {"intermediate_size"},
    "qwen4_exp_text": {"intermediate_size"},
    "solar_open": {"intermediate_size"},
}


def _read(model_type: str, values: dict[str, Any]) -> ModelConfig | None:
    """None: refused."""
    try:
        return FAMILIES[model_type].read(HfKeys("config.json", values))
    except ModelConfigError:
        return None


def _others(value: object) -> list[object]:
    """Returns other values of a key; lists are as long as there are layers and are left as they are."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 1, value + 1]
    if isinstance(value, float):
        return [1.5 * value or 0.5]
    if isinstance(value, str):
        return ["another"]
    return [True, 2, 0.5, "another"] if value is None else []


@pytest.mark.full  # transformers' sources change with its version alone
@pytest.mark.parametrize("model_type", sorted(NAMES))
def test_what_the_reference_computes_with_counts(model_type: str) -> None:
    written = tiny_config(NAMES[model_type])
    text = getattr(written, "text_config", written)
    module = importlib.import_module(type(text).__module__.replace("configuration_", "modeling_"))
    used = set(re.findall(r"\bconfig\.(\w+)", inspect.getsource(module)))
    values = flat_config(json.loads(written.to_json_string(use_diff=False))) | {"model_type": model_type}
    base = _read(model_type, values)
    assert base is not None
    ignored = {
        name
        for name in used & text.to_dict().keys() & values.keys()
        if (others := _others(values[name]))
        and all(_read(model_type, values | {name: other}) == base for other in others)
    }
    assert ignored <= HARMLESS | DEPENDENT.get(model_type, set())
