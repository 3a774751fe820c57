"""Kimi-K2.5: DeepSeek-V3 as Kimi-K2, with a vision tower (MoonViT) and its projector."""

from __future__ import annotations

from dataclasses import replace

from moebius.models.config import ModelConfig, VisionConfig
from moebius.models.families.deepseek_v3 import read_deepseek_v3
from moebius.models.family import Family, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.names import RenameRule, TensorNames, drop, rename

_TEXT = rename(
    r"language_model\.(.*)",
    r"\1",
    "language_model.model.norm.weight",
    "model.norm.weight",
)
# Transformers 5 calls decoder layers blocks when it writes them, and puts one norm elsewhere.
_BLOCKS = rename(
    r"language_model\.model\.blocks\.(.*)",
    r"model.layers.\1",
    "language_model.model.blocks.0.input_layernorm.weight",
    "model.layers.0.input_layernorm.weight",
)
_VISION = drop(r"(?:vision_tower|(?:model\.)?mm_projector)\..*", "vision_tower.encoder.blocks.0.norm0.weight")


_BLOCK, _LAYER = r"vision_tower\.encoder\.blocks\.(\d+)\.", r"vision_tower.layers.\1."


def _kimi_block(theirs: str, ours: str) -> RenameRule:
    """Of a tensor of each encoder layer."""
    return rename(
        _BLOCK + theirs.replace(".", r"\.") + r"\.(weight|bias)",
        _LAYER + ours + r".\2",
        f"vision_tower.encoder.blocks.3.{theirs}.weight",
        f"vision_tower.layers.3.{ours}.weight",
    )


_TOWER = (
    _kimi_block("norm0", "norm1"),
    _kimi_block("norm1", "norm2"),
    _kimi_block("mlp.fc0", "mlp.fc1"),
    _kimi_block("mlp.fc1", "mlp.fc2"),
    _kimi_block("wo", "attn.proj"),
    _kimi_block("wqkv", "attn.qkv_proj"),
    rename(
        r"vision_tower\.encoder\.(final_layernorm\..*)",
        r"vision_tower.\1",
        "vision_tower.encoder.final_layernorm.bias",
        "vision_tower.final_layernorm.bias",
    ),
    rename(
        r"vision_tower\.patch_embed\.pos_emb\.weight",
        "vision_tower.patch_embed.pos_emb.position_embeddings",
        "vision_tower.patch_embed.pos_emb.weight",
        "vision_tower.patch_embed.pos_emb.position_embeddings",
    ),
    rename(
        r"mm_projector\.proj\.0\.(.*)",
        r"mm_projector.in_proj.\1",
        "mm_projector.proj.0.weight",
        "mm_projector.in_proj.weight",
    ),
    rename(
        r"mm_projector\.proj\.2\.(.*)",
        r"mm_projector.out_proj.\1",
        "mm_projector.proj.2.weight",
        "mm_projector.out_proj.weight",
    ),
    # As transformers 5 writes them.
    rename(
        r"vision_tower\.encoder\.(patch_embed\.proj\..*)",
        r"vision_tower.\1",
        "vision_tower.encoder.patch_embed.proj.weight",
        "vision_tower.patch_embed.proj.weight",
    ),
    rename(
        r"model\.(mm_projector\.pre_norm\..*)",
        r"\1",
        "model.mm_projector.pre_norm.weight",
        "mm_projector.pre_norm.weight",
    ),
    # All others are called alike; names that the modules do not have are an error, not left out.
    rename(
        r"((?:vision_tower|mm_projector)\..*)",
        r"\1",
        "vision_tower.patch_embed.proj.weight",
        "vision_tower.patch_embed.proj.weight",
    ),
)


def read_kimi_k25(hf: HfKeys) -> ModelConfig:
    """Kimi-K2.5: DeepSeek-V3, as Kimi-K2; images take one position each token as text does."""
    config = read_deepseek_v3(hf)
    # The family's class, unlike its checkpoints, takes the embedding for the head where nobody says so.
    return replace(config, tie_word_embeddings=hf.boolean("tie_word_embeddings", default=True))


def _read_kimi_vision(hf: HfKeys, vision: HfKeys) -> VisionConfig:
    """Kimi-K2.5, in the spelling of its checkpoints (`vt_hidden_size`) or that of transformers."""
    kernel = vision.integers("merge_kernel_size") or (2, 2)
    if len(set(kernel)) != 1:
        raise vision.error("merge_kernel_size", list(kernel), "two equal integers")
    return VisionConfig(
        image_token_id=hf.integer("image_token_id", "media_placeholder_token_id", minimum=0),
        merge_size=kernel[0],
        patch_size=vision.integer("patch_size", default=14),
        hidden_size=vision.integer("hidden_size", "vt_hidden_size"),
        intermediate_size=vision.integer("intermediate_size", "vt_intermediate_size"),
    )


FAMILIES = (
    Family(
        "kimi_k25",
        read_kimi_k25,
        TensorNames((_VISION, _BLOCKS, _TEXT)),
        VisionFamily(_read_kimi_vision, _TOWER, tower="Kimi_K25", processor="kimi"),
    ),
)
