"""Invariant: every kind of rotary scaling is transformers', from config.json to frequencies and tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpu_service.layers.decoder import RotaryEmbedding
from gpu_service.ops.rope import rope_table
from gpu_service.ops.rope_frequencies import inverse_frequencies
from gpu_service.ops.triton import rope as triton_rope
from moebius.models.config import ModelConfigError
from moebius.models.keys import HfKeys
from moebius.models.rope import read_rope
from tests.tolerances import ROPE_TABLE_FLOAT32

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + 0.03 * pair for pair in range(32)],
    "long_factor": [1.0 + 0.5 * pair**1.3 for pair in range(32)],
}
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
    "longrope": LONGROPE,
    "longrope with a factor of its own": {**LONGROPE, "factor": 8.0},
    "longrope with an attention factor": {**LONGROPE, "attention_factor": 1.19},
    "longrope that stretches nothing": {**LONGROPE, "original_max_position_embeddings": 131072},
    "yarn": YARN,
    "yarn of gpt-oss": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "yarn of deepseek": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 20},
    "yarn with a factor of its own": {**YARN, "attention_factor": 1.5, "mscale": 0.7},
    "yarn that stretches nothing": {**YARN, "factor": 1.0},
    "yarn with a factor that follows from lengths": {**YARN, "factor": None},
    "yarn without the original length": {"rope_type": "yarn", "factor": 4.0},
}
LENGTH, HEAD_DIM, THETA = 131072, 64, 5e5


def with_pairs(rope: dict[str, Any], partial: float) -> dict[str, Any]:
    """Returns the lists by pair cut to the pairs that are rotated."""
    pairs = int(HEAD_DIM * partial) // 2
    return {key: value[:pairs] if isinstance(value, list) else value for key, value in rope.items()}


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("name", sorted(SCALINGS))
def test_scaling_is_transformers(name: str, partial: float) -> None:
    """Frequencies and attention factor, for whole and for partial rotation."""
    from transformers import Qwen3MoeConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = with_pairs({**SCALINGS[name], "rope_theta": THETA, "partial_rotary_factor": partial}, partial)
    config = Qwen3MoeConfig(head_dim=HEAD_DIM, max_position_embeddings=LENGTH, rope_parameters=dict(rope))
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")

    keys = HfKeys("test", {"max_position_embeddings": LENGTH, "rope_parameters": rope})
    ours = read_rope(keys, HEAD_DIM)
    short = ours.pair_factors[0] if ours.pair_factors else ()
    found = inverse_frequencies(ours.theta, ours.rotary_dim, ours.scaling_kind, dict(ours.scaling), short)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(("longest", "position"), [(4096, 4095), (4097, 4096), (LENGTH, LENGTH - 1)])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_the_longest_sequence_chooses_the_factors_of_longrope(
    partial: float, longest: int, position: int
) -> None:
    """Tables are those of transformers' module for a sequence as long as the longest that is served.

    The Triton kernel, which makes them on GPUs, takes the same frequencies.
    """
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

    rope = with_pairs({**LONGROPE, "rope_theta": THETA, "partial_rotary_factor": partial}, partial)
    published = Qwen3MoeConfig(head_dim=HEAD_DIM, max_position_embeddings=LENGTH, rope_parameters=dict(rope))
    module: Any = Qwen3MoeRotaryEmbedding(published)
    positions = torch.tensor([0, 1, 77, position // 3, position])
    cos, sin = module(torch.zeros(1), positions[None])
    config = read_rope(HfKeys("t", {"max_position_embeddings": LENGTH, "rope_parameters": rope}), HEAD_DIM)
    rotary = RotaryEmbedding(config, longest, dtype=torch.float32, device=torch.device("cpu"))
    table = rotary.table(positions)
    half = config.rotary_dim // 2
    torch.testing.assert_close(table.cos[:, 0], cos[0], rtol=0, atol=ROPE_TABLE_FLOAT32)
    torch.testing.assert_close(table.sin[:, 0, half:], sin[0, :, half:], rtol=0, atol=ROPE_TABLE_FLOAT32)
    kernel = triton_rope.rope_table(
        positions, rotary.frequencies, torch.float32, config.interleaved, config.attention_factor
    )
    torch.testing.assert_close(kernel.cos, table.cos, rtol=0, atol=ROPE_TABLE_FLOAT32)
    torch.testing.assert_close(kernel.sin, table.sin, rtol=0, atol=ROPE_TABLE_FLOAT32)


def test_the_old_spelling_of_scaling_agrees() -> None:
    """`rope_scaling` next to `rope_theta`, with `type` for `rope_type`."""
    numbers = {key: value for key, value in YARN.items() if key != "rope_type"}
    old = {"rope_theta": THETA, "rope_scaling": {"type": "yarn", **numbers}}
    new = {"rope_parameters": {"rope_theta": THETA, **YARN}}
    read = [read_rope(HfKeys("t", {"max_position_embeddings": LENGTH, **keys}), 64) for keys in (old, new)]
    assert read[0] == read[1]


def test_an_original_length_outside_counts_first() -> None:
    """The model's own key wins over the scaling's, as in transformers."""
    values = {"max_position_embeddings": LENGTH, "original_max_position_embeddings": 2048}
    config = read_rope(HfKeys("t", {**values, "rope_scaling": YARN}), HEAD_DIM)
    assert dict(config.scaling)["original_max_position_embeddings"] == 2048


def test_the_attention_factor_multiplies_the_table() -> None:
    """The table is multiplied before it is rounded to the dtype of activations; 1 changes no bit."""
    positions, frequencies = torch.tensor([0, 3, 500]), torch.tensor([1.0, 0.1])
    for interleaved in (False, True):
        plain = rope_table(positions, frequencies, torch.float32, interleaved)
        scaled = rope_table(positions, frequencies, torch.bfloat16, interleaved, 1.25)
        assert torch.equal(scaled.cos, (plain.cos * 1.25).bfloat16())
        assert torch.equal(scaled.sin, (plain.sin * 1.25).bfloat16())


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "su", "factor": 2.0}, "rope_type = 'su'.*default, dynamic, linear, llama3, longrope"),
        ({"rope_type": "longrope"}, "required key short_factor"),
        ({**LONGROPE, "long_factor": [1.0] * 31}, "long_factor = .*32 numbers, one for each rotated pair"),
        ({**LONGROPE, "short_factor": [1.0] * 31 + [0.0]}, "short_factor = .*a list of numbers > 0"),
        ({**LONGROPE, "long_mscale": 1.2}, "long_mscale.*keys of longrope scaling: .*short_factor"),
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
