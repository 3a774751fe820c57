"""Invariant: mRoPE turns each pair by the position that transformers does, from config.json to the table,
and equal positions give the table of plain ones bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpu_service.layers.decoder import RotaryEmbedding
from gpu_service.ops.rope import section_axes
from moebius.models.config import ModelConfigError
from moebius.models.keys import HfKeys
from moebius.models.layers.rope import RopeConfig
from moebius.models.rope import SectionDefaults, read_rope

HEAD_DIM = 24
CPU = torch.device("cpu")
ALTERNATING, CONSECUTIVE = SectionDefaults((4, 4, 4), True), SectionDefaults((1, 2, 3), False)


def _rotary(config: RopeConfig) -> RotaryEmbedding:
    return RotaryEmbedding(config, 4096, dtype=torch.float32, device=CPU)


def _by_axis() -> torch.Tensor:
    """Returns positions `[3, T]` as around an image; all three differ."""
    return torch.tensor([[0, 1, 2, 2, 9], [0, 1, 5, 6, 10], [0, 1, 3, 8, 11]])


def _transformers_table(family: str, rope: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[T, rotary_dim]` of the family's own module."""
    if family == "qwen3_vl_moe":
        from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as qwen

        config = qwen.Qwen3VLMoeTextConfig(head_dim=HEAD_DIM, rope_parameters=rope)  # type: ignore[attr-defined]
        module: Any = qwen.Qwen3VLMoeTextRotaryEmbedding(config)
    else:
        from transformers.models.glm4v_moe import modeling_glm4v_moe as glm

        module = glm.Glm4vMoeTextRotaryEmbedding(
            glm.Glm4vMoeTextConfig(head_dim=HEAD_DIM, rope_parameters=rope)  # type: ignore[attr-defined]
        )
    cos, sin = module(torch.zeros(1), _by_axis()[:, None])
    return cos[0], sin[0]


@pytest.mark.parametrize(
    ("family", "mrope", "keys"),
    [
        ("qwen3_vl_moe", ALTERNATING, {"mrope_section": [6, 3, 3], "mrope_interleaved": True}),
        ("qwen3_vl_moe", ALTERNATING, {"mrope_section": [2, 6, 4]}),
        ("qwen3_vl_moe", ALTERNATING, {"mrope_section": [4, 4, 4], "rope_type": "linear", "factor": 3.0}),
        ("glm4v_moe", CONSECUTIVE, {"mrope_section": [2, 1, 3], "partial_rotary_factor": 0.5}),
        ("glm4v_moe", CONSECUTIVE, {"mrope_section": [1, 0, 11], "partial_rotary_factor": 1.0}),
    ],
)
def test_the_table_is_transformers(family: str, mrope: SectionDefaults, keys: dict[str, Any]) -> None:
    """Half-split pairs: our signs of the sine are the rotation's."""
    rope = {"rope_type": "default", "rope_theta": 1e4, **keys}
    config = read_rope(HfKeys("t", {"rope_parameters": dict(rope)}), HEAD_DIM, mrope=mrope)
    cos, sin = _transformers_table(family, rope)
    table = _rotary(config).table(_by_axis())
    half = config.rotary_dim // 2
    torch.testing.assert_close(table.cos[:, 0], cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(table.sin[:, 0, half:], sin[:, half:], rtol=0, atol=1e-6)
    assert torch.equal(table.sin[:, 0, :half], -table.sin[:, 0, half:])


@pytest.mark.parametrize("mrope_interleaved", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_equal_positions_are_plain_ones(interleaved: bool, mrope_interleaved: bool) -> None:
    positions = torch.tensor([0, 3, 70_001])
    config = RopeConfig(1e4, 12, interleaved, mrope_sections=(3, 2, 1), mrope_interleaved=mrope_interleaved)
    rotary = _rotary(config)
    plain, by_axis = rotary.table(positions), rotary.table(positions.expand(3, -1))
    without = _rotary(RopeConfig(1e4, 12, interleaved)).table(positions)
    for table in (by_axis, without):
        assert torch.equal(table.cos, plain.cos)
        assert torch.equal(table.sin, plain.sin)


def test_axes_of_published_models() -> None:
    """Qwen3-VL-235B: 24 + 20 + 20 alternating; GLM-4.5V: 8 + 12 + 12 in a row."""
    qwen = section_axes((24, 20, 20), True)
    assert qwen.tolist() == [0, 1, 2] * 20 + [0] * 4
    assert torch.bincount(section_axes((8, 12, 12), False)).tolist() == [8, 12, 12]
    with pytest.raises(ValueError, match="2 sections"):
        section_axes((8, 8), False)


def test_three_positions_need_a_model_with_sections() -> None:
    with pytest.raises(ValueError, match=r"\(3, 5\).*mRoPE"):
        _rotary(RopeConfig(1e4, 12)).table(_by_axis())


@pytest.mark.parametrize(
    ("keys", "mrope", "message"),
    [
        ({"mrope_section": [1, 2]}, CONSECUTIVE, r"mrope_section = \[1, 2\].*3 numbers"),
        ({"mrope_section": [1, 2, 4]}, CONSECUTIVE, r"mrope_section = \[1, 2, 4\].*whose sum is 6"),
        ({"mrope_section": [7, -3, 2]}, CONSECUTIVE, "mrope_section.*>= 0"),
        ({"mrope_interleaved": True}, CONSECUTIVE, "mrope_interleaved = True"),
        ({"mrope_interleaved": False, "mrope_section": [2, 2, 2]}, ALTERNATING, "False.*allowed: true"),
        ({"mrope_section": [6, 3, 3]}, None, "mrope_section.*keys of default scaling"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    keys: dict[str, Any], mrope: SectionDefaults | None, message: str
) -> None:
    """Sections that do not fill the rotated width, the other family's order, and families without mRoPE."""
    values = {"rope_scaling": {"rope_type": "default", **keys}, "partial_rotary_factor": 0.5}
    with pytest.raises(ModelConfigError, match=message):
        read_rope(HfKeys("t", values), HEAD_DIM, mrope=mrope)
