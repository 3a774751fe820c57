"""The vision towers of published models, in the same patterns as their text models."""

from __future__ import annotations

from tests.tools.checkpoint_names.parts import Config, Entry, numbers, plain


def _biased(stem: str, sizes: dict[str, list[int]]) -> list[Entry]:
    """Weights of any number of axes, each with a bias of its first."""
    entries: list[Entry] = []
    for name, shape in sizes.items():
        entries += plain(stem, {f"{name}.weight": shape, f"{name}.bias": shape[:1]})
    return entries


def _patches(vision: Config) -> list[int]:
    """The convolution that takes frames apart."""
    side = vision["patch_size"]
    return [vision["hidden_size"], 3, vision["temporal_patch_size"], side, side]


def qwen_tower(outer: Config) -> list[Entry]:
    """Qwen3-VL's, which merges after some layers too, and Qwen3.5's."""
    vision, stem = outer["vision_config"], "model.visual."
    size, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    block, merged = (
        f"{stem}blocks.{numbers(0, vision['depth'] - 1)}.",
        size * vision["spatial_merge_size"] ** 2,
    )
    entries = plain(stem, {"pos_embed.weight": [vision["num_position_embeddings"], size]})
    entries += _biased(stem, {"patch_embed.proj": _patches(vision)})
    entries += _biased(
        block,
        {
            "attn.qkv": [3 * size, size],
            "attn.proj": [size, size],
            "mlp.linear_fc1": [inner, size],
            "mlp.linear_fc2": [size, inner],
            "norm1": [size],
            "norm2": [size],
        },
    )
    products = {"linear_fc1": [merged, merged], "linear_fc2": [out, merged]}
    entries += _biased(f"{stem}merger.", {"norm": [size], **products})
    if deep := len(vision["deepstack_visual_indexes"]):
        entries += _biased(
            f"{stem}deepstack_merger_list.{numbers(0, deep - 1)}.", {"norm": [merged], **products}
        )
    return entries


def glm_tower(outer: Config) -> list[Entry]:
    """GLM-4.5V's: no biases but those of convolutions and of one layer norm."""
    vision, stem = outer["vision_config"], "model.visual."
    size, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    block, merge = f"{stem}blocks.{numbers(0, vision['depth'] - 1)}.", vision["spatial_merge_size"]
    positions = (vision["image_size"] // vision["patch_size"]) ** 2
    convolutions = {"patch_embed.proj": _patches(vision), "downsample": [out, size, merge, merge]}
    entries = _biased(stem, convolutions | {"merger.post_projection_norm": [out]})
    entries += plain(
        stem,
        {
            "embeddings.position_embedding.weight": [positions, size],
            "post_conv_layernorm.weight": [size],
            "post_layernorm.weight": [size],
            "merger.proj.weight": [out, out],
            "merger.gate_proj.weight": [inner, out],
            "merger.up_proj.weight": [inner, out],
            "merger.down_proj.weight": [out, inner],
        },
    )
    return entries + plain(
        block,
        {
            "attn.qkv.weight": [3 * size, size],
            "attn.proj.weight": [size, size],
            "mlp.gate_proj.weight": [out, size],
            "mlp.up_proj.weight": [out, size],
            "mlp.down_proj.weight": [size, out],
            "norm1.weight": [size],
            "norm2.weight": [size],
        },
    )


def kimi_tower(outer: Config) -> list[Entry]:
    """Kimi-K2.5's, with a projector beside it."""
    vision = outer["vision_config"]
    size, inner, out = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["text_hidden_size"]
    side, merged = (
        vision["patch_size"],
        size * vision["merge_kernel_size"][0] * vision["merge_kernel_size"][1],
    )
    grid = [vision["init_pos_emb_height"], vision["init_pos_emb_width"], size]
    entries = _biased(
        f"vision_tower.encoder.blocks.{numbers(0, vision['vt_num_hidden_layers'] - 1)}.",
        {
            "wqkv": [3 * size, size],
            "wo": [size, size],
            "mlp.fc0": [inner, size],
            "mlp.fc1": [size, inner],
            "norm0": [size],
            "norm1": [size],
        },
    )
    ends = {"patch_embed.proj": [size, 3, side, side], "encoder.final_layernorm": [size]}
    entries += _biased("vision_tower.", ends) + plain("vision_tower.", {"patch_embed.pos_emb.weight": grid})
    sizes = {"pre_norm": [size], "proj.0": [merged, merged], "proj.2": [out, merged]}
    return entries + _biased("mm_projector.", sizes)
