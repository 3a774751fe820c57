"""Invariant: every kind of rotary scaling is transformers', from config.json to frequencies and tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpu_service.hf_config.keys import HfKeys
from gpu_service.hf_config.rope import read_rope
from gpu_service.model_config import ModelConfigError
from gpu_service.ops.rope import rope_table
from gpu_service.ops.rope_frequencies import inverse_frequencies

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn of gpt-oss": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "yarn of deepseek": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 20},
    "yarn with a factor of its own": {**YARN, "attention_factor": 1.5, "mscale": 0.7},
    "yarn that stretches nothing": {**YARN, "factor": 1.0},
    "yarn without the original length": {"rope_type": "yarn", "factor": 4.0},
}
LENGTH, HEAD_DIM, THETA = 131072, 64, 5e5


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("name", sorted(SCALINGS))
def test_scaling_is_transformers(name: str, partial: float) -> None:
    """Frequencies and attention factor, for whole and for partial rotation."""
    from transformers import Qwen3MoeConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**SCALINGS[name], "rope_theta": THETA, "partial_rotary_factor": partial}
    config = Qwen3MoeConfig(head_dim=HEAD_DIM, max_position_embeddings=LENGTH, rope_parameters=dict(rope))
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")

    keys = HfKeys("test", {"max_position_embeddings": LENGTH, "rope_parameters": rope})
    ours = read_rope(keys, HEAD_DIM)
    found = inverse_frequencies(ours.theta, ours.rotary_dim, ours.scaling_kind, dict(ours.scaling))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


def test_the_old_spelling_of_scaling_agrees() -> None:
    """`rope_scaling` beside `rope_theta`, with `type` for `rope_type`."""
    numbers = {key: value for key, value in YARN.items() if key != "rope_type"}
    old = {"rope_theta": THETA, "rope_scaling": {"type": "yarn", **numbers}}
    new = {"rope_parameters": {"rope_theta": THETA, **YARN}}
    read = [read_rope(HfKeys("t", {"max_position_embeddings": LENGTH, **keys}), 64) for keys in (old, new)]
    assert read[0] == read[1]


def test_an_original_length_outside_counts_first() -> None:
    """As in transformers, where the model's own key wins over the scaling's."""
    values = {"max_position_embeddings": LENGTH, "original_max_position_embeddings": 2048}
    config = read_rope(HfKeys("t", {**values, "rope_scaling": YARN}), HEAD_DIM)
    assert dict(config.scaling)["original_max_position_embeddings"] == 2048


def test_the_attention_factor_multiplies_the_table() -> None:
    """Before it is rounded to the dtype of activations; 1 changes no bit."""
    positions, frequencies = torch.tensor([0, 3, 500]), torch.tensor([1.0, 0.1])
    for interleaved in (False, True):
        plain = rope_table(positions, frequencies, torch.float32, interleaved)
        scaled = rope_table(positions, frequencies, torch.bfloat16, interleaved, 1.25)
        assert torch.equal(scaled.cos, (plain.cos * 1.25).bfloat16())
        assert torch.equal(scaled.sin, (plain.sin * 1.25).bfloat16())


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type = 'longrope'.*default, dynamic, linear"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "alpha.*keys of dynamic scaling: factor"),
        ({"rope_type": "yarn"}, "required key factor"),
        ({**YARN, "truncate": 1}, "truncate = 1.*true or false"),
        ({**YARN, "beta_fast": 0}, "beta_fast = 0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(rope: dict[str, Any], message: str) -> None:
    """An unknown kind, a key that is none of its own, and numbers that make no sense."""
    with pytest.raises(ModelConfigError, match=message):
        read_rope(HfKeys("t", {"max_position_embeddings": LENGTH, "rope_scaling": rope}), HEAD_DIM)
