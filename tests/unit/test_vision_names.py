"""Guards that the towers of released models load completely: names and shapes by their naming rules.

Kimi-K2.5, whose names differ from the module's, is in `test_vision_towers.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpu_service.models.vision.registry import TOWER_BUILDERS
from moebius.checkpoint.rules import FAMILY_RULES
from moebius.checkpoint.tower_rules import tower_name

Shapes = dict[str, tuple[int, ...]]
QWEN: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}
GLM: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1536,
    "intermediate_size": 10944,
    "num_heads": 12,
    "patch_size": 14,
    "image_size": 336,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def _linear(name: str, rows: int, cols: int) -> Shapes:
    return {f"{name}.weight": (rows, cols), f"{name}.bias": (rows,)}


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _qwen_names(out: int, num_deep: int) -> Shapes:
    """Qwen3-VL and Qwen3.5: layer norms, biases everywhere."""
    names: Shapes = {"pos_embed.weight": (2304, 1152)}
    names |= {"patch_embed.proj.weight": (1152, 3, 2, 16, 16), "patch_embed.proj.bias": (1152,)}
    for layer in range(27):
        block = f"blocks.{layer}."
        names |= _linear(block + "attn.qkv", 3456, 1152) | _linear(block + "attn.proj", 1152, 1152)
        names |= _linear(block + "mlp.linear_fc1", 4304, 1152) | _linear(block + "mlp.linear_fc2", 1152, 4304)
        names |= _norm(block + "norm1", 1152) | _norm(block + "norm2", 1152)
    mergers = {"merger": 1152} | {f"deepstack_merger_list.{index}": 4608 for index in range(num_deep)}
    for merger, normed in mergers.items():
        names |= _norm(f"{merger}.norm", normed)
        names |= _linear(f"{merger}.linear_fc1", 4608, 4608) | _linear(f"{merger}.linear_fc2", out, 4608)
    return names


def _glm_names() -> Shapes:
    """GLM-4.5V and 4.6V: RMS norms, no biases but those of convolutions and one layer norm."""
    names: Shapes = {
        "embeddings.position_embedding.weight": (576, 1536),
        "patch_embed.proj.weight": (1536, 3, 2, 14, 14),
        "patch_embed.proj.bias": (1536,),
        "post_conv_layernorm.weight": (1536,),
        "post_layernorm.weight": (1536,),
        "downsample.weight": (4096, 1536, 2, 2),
        "downsample.bias": (4096,),
        "merger.proj.weight": (4096, 4096),
        "merger.gate_proj.weight": (10944, 4096),
        "merger.up_proj.weight": (10944, 4096),
        "merger.down_proj.weight": (4096, 10944),
    }
    names |= _norm("merger.post_projection_norm", 4096)
    for layer in range(24):
        block = f"blocks.{layer}."
        names |= {
            block + "attn.qkv.weight": (4608, 1536),
            block + "attn.proj.weight": (1536, 1536),
            block + "mlp.gate_proj.weight": (4096, 1536),
            block + "mlp.up_proj.weight": (4096, 1536),
            block + "mlp.down_proj.weight": (1536, 4096),
            block + "norm1.weight": (1536,),
            block + "norm2.weight": (1536,),
        }
    return names


@pytest.mark.parametrize(
    ("family", "vision", "hidden_size", "names"),
    [
        ("qwen3_vl_moe", QWEN | {"deepstack_visual_indexes": [8, 16, 24]}, 4096, _qwen_names(4096, 3)),
        ("qwen3_5_moe", QWEN, 2048, _qwen_names(2048, 0)),
        ("glm4v_moe", GLM, 4096, _glm_names()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_released_names_fill_the_tower(
    family: str, vision: dict[str, Any], hidden_size: int, names: Shapes
) -> None:
    """Every tensor has its place, of its shape; the language model's loader leaves each of them out."""
    config = {"vision_config": vision | {"out_hidden_size": hidden_size}}
    with torch.device("meta"):
        tower = TOWER_BUILDERS[family](config, hidden_size, torch.bfloat16)
    found = {tower_name(family, f"model.visual.{name}"): shape for name, shape in names.items()}
    assert found == {name: tuple(tensor.shape) for name, tensor in tower.state_dict().items()}
    for name in names:
        assert FAMILY_RULES[family].canonical_name(f"model.visual.{name}", num_layers=48) is None


def test_a_tower_of_another_model_is_refused() -> None:
    config = {"vision_config": GLM | {"out_hidden_size": 4096}}
    with torch.device("meta"), pytest.raises(ValueError, match="out_hidden_size = 4096"):
        TOWER_BUILDERS["glm4v_moe"](config, 5120, torch.bfloat16)
