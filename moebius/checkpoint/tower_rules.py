"""How families name the tensors of their vision towers: the counterpart of what `rules` leaves out.

The names here are those of transformers' modules, below `visual`, `vision_tower` and `mm_projector`.
"""

from __future__ import annotations

from collections.abc import Mapping

from moebius.checkpoint.rules import RenameRule


def _rename(pattern: str, replacement: str, before: str, after: str) -> RenameRule:
    return RenameRule(pattern, replacement, (before, after))


_VISUAL = (
    _rename(
        r"model\.(visual\..*)",
        r"\1",
        "model.visual.patch_embed.proj.weight",
        "visual.patch_embed.proj.weight",
    ),
)
_BLOCK, _LAYER = r"vision_tower\.encoder\.blocks\.(\d+)\.", r"vision_tower.layers.\1."


def _kimi_block(theirs: str, ours: str) -> RenameRule:
    """Of a tensor of each encoder layer."""
    return _rename(
        _BLOCK + theirs.replace(".", r"\.") + r"\.(weight|bias)",
        _LAYER + ours + r".\2",
        f"vision_tower.encoder.blocks.3.{theirs}.weight",
        f"vision_tower.layers.3.{ours}.weight",
    )


_KIMI = (
    _kimi_block("norm0", "norm1"),
    _kimi_block("norm1", "norm2"),
    _kimi_block("mlp.fc0", "mlp.fc1"),
    _kimi_block("mlp.fc1", "mlp.fc2"),
    _kimi_block("wo", "attn.proj"),
    _kimi_block("wqkv", "attn.qkv_proj"),
    _rename(
        r"vision_tower\.encoder\.(final_layernorm\..*)",
        r"vision_tower.\1",
        "vision_tower.encoder.final_layernorm.bias",
        "vision_tower.final_layernorm.bias",
    ),
    _rename(
        r"vision_tower\.patch_embed\.pos_emb\.weight",
        "vision_tower.patch_embed.pos_emb.position_embeddings",
        "vision_tower.patch_embed.pos_emb.weight",
        "vision_tower.patch_embed.pos_emb.position_embeddings",
    ),
    _rename(
        r"mm_projector\.proj\.0\.(.*)",
        r"mm_projector.in_proj.\1",
        "mm_projector.proj.0.weight",
        "mm_projector.in_proj.weight",
    ),
    _rename(
        r"mm_projector\.proj\.2\.(.*)",
        r"mm_projector.out_proj.\1",
        "mm_projector.proj.2.weight",
        "mm_projector.out_proj.weight",
    ),
    # As transformers 5 writes them.
    _rename(
        r"vision_tower\.encoder\.(patch_embed\.proj\..*)",
        r"vision_tower.\1",
        "vision_tower.encoder.patch_embed.proj.weight",
        "vision_tower.patch_embed.proj.weight",
    ),
    _rename(
        r"model\.(mm_projector\.pre_norm\..*)",
        r"\1",
        "model.mm_projector.pre_norm.weight",
        "mm_projector.pre_norm.weight",
    ),
    # All others are called alike; names that the modules do not have are an error, not left out.
    _rename(
        r"((?:vision_tower|mm_projector)\..*)",
        r"\1",
        "vision_tower.patch_embed.proj.weight",
        "vision_tower.patch_embed.proj.weight",
    ),
)

TOWER_RULES: Mapping[str, tuple[RenameRule, ...]] = {
    "glm4v_moe": _VISUAL,
    "kimi_k25": _KIMI,
    "qwen3_5_moe": _VISUAL,
    "qwen3_vl_moe": _VISUAL,
}


def tower_name(model_type: str, name: str) -> str | None:
    """The name in the tower's module; None: the tensor is no part of the family's tower."""
    for rule in TOWER_RULES.get(model_type, ()):
        matches, renamed = rule.apply(name)
        if matches:
            return renamed
    return None
