"""Kimi-K2.5: DeepSeek-V3 as Kimi-K2, with a vision tower (MoonViT) and its projector."""

from __future__ import annotations

from dataclasses import replace

from moebius.models.config import ModelConfig, VisionConfig
from moebius.models.families.deepseek import read_deepseek_v3
from moebius.models.family import Family, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.names import RenameRule, TensorNames, drop, rename

_TEXT = rename("language_model.**", "**")
# Transformers 5 calls decoder layers blocks when it writes them, and puts one norm elsewhere.
_BLOCKS = rename("language_model.model.blocks.**", "model.layers.**")
_VISION = (drop("vision_tower.**"), drop("mm_projector.**"), drop("model.mm_projector.**"))


def _kimi_block(theirs: str, ours: str) -> RenameRule:
    """Returns the rule for a tensor of each encoder layer."""
    return rename(f"vision_tower.encoder.blocks.*.{theirs}.**", f"vision_tower.layers.*.{ours}.**")


_TOWER = (
    _kimi_block("norm0", "norm1"),
    _kimi_block("norm1", "norm2"),
    _kimi_block("mlp.fc0", "mlp.fc1"),
    _kimi_block("mlp.fc1", "mlp.fc2"),
    _kimi_block("wo", "attn.proj"),
    _kimi_block("wqkv", "attn.qkv_proj"),
    rename("vision_tower.encoder.final_layernorm.**", "vision_tower.final_layernorm.**"),
    rename("vision_tower.patch_embed.pos_emb.weight", "vision_tower.patch_embed.pos_emb.position_embeddings"),
    rename("mm_projector.proj.0.**", "mm_projector.in_proj.**"),
    rename("mm_projector.proj.2.**", "mm_projector.out_proj.**"),
    # As transformers 5 writes them.
    rename("vision_tower.encoder.patch_embed.proj.**", "vision_tower.patch_embed.proj.**"),
    rename("model.mm_projector.pre_norm.**", "mm_projector.pre_norm.**"),
    # All others are called alike; names that the modules do not have are an error, not left out.
    rename("vision_tower.**", "vision_tower.**"),
    rename("mm_projector.**", "mm_projector.**"),
)


def read_kimi_k25(hf: HfKeys) -> ModelConfig:
    """Reads Kimi-K2.5: DeepSeek-V3, as Kimi-K2; images take one position each token as text does."""
    config = read_deepseek_v3(hf)
    # The family's class, unlike its checkpoints, takes the embedding for the head where the key is absent.
    return replace(config, tie_word_embeddings=hf.boolean("tie_word_embeddings", default=True))


def _read_kimi_vision(hf: HfKeys, vision: HfKeys) -> VisionConfig:
    """Reads Kimi-K2.5, in the spelling of its checkpoints (`vt_hidden_size`) or that of transformers."""
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
        TensorNames((*_VISION, _BLOCKS, _TEXT)),
        VisionFamily(_read_kimi_vision, _TOWER, tower="Kimi_K25", processor="kimi"),
    ),
)
