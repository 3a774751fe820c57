"""What the config.json of several families say about their vision towers, in the same keys."""

from __future__ import annotations

from moebius.models.config import VisionConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys

# What begins and ends an image, which chat templates write, what stands for videos, what the tower's builder
# reads for itself, and switches of training.
_HARMLESS = (
    "ignore_index",
    "boi_token_id",
    "eoi_token_id",
    "eoi_token_index",
    "image_end_token_id",
    "image_start_token_id",
    "language_model_only",  # Of another engine; here the tower's tensors and --language-model-only decide.
    "projection_hidden_size",
    "projection_layer_norm_eps",
    "use_unified_vision_chunk",
    "video_end_token_id",
    "video_placeholder",
    "video_start_token_id",
    "video_token_id",
    "vision_end_token_id",
    "vision_start_token_id",
)


def read_grid_vision(hf: HfKeys, vision: HfKeys) -> VisionConfig:
    """Reads Qwen3-VL, GLM and MiniMax: square merges of patches."""
    return VisionConfig(
        image_token_id=hf.integer("image_token_id", "image_token_index", minimum=0),
        merge_size=vision.integer("spatial_merge_size", default=2),
        patch_size=vision.integer("patch_size"),
        hidden_size=vision.integer("hidden_size"),
        intermediate_size=vision.integer("intermediate_size"),
    )


def read_pixtral_vision(hf: HfKeys, vision: HfKeys) -> VisionConfig:
    """Reads Mistral: a projection merges the patches of a token."""
    hf.refuse("vision_feature_layer", -1)
    return VisionConfig(
        image_token_id=hf.integer("image_token_index", "image_token_id", default=10, minimum=0),
        merge_size=hf.integer("spatial_merge_size", default=2),
        patch_size=vision.integer("patch_size", default=16),
        hidden_size=vision.integer("hidden_size", default=1024),
        intermediate_size=vision.integer("intermediate_size", default=4096),
    )


# An image's lines are as many `[IMG]`; these stand between two lines and after the last.
PIXTRAL_TOKENS = {"line": "[IMG_BREAK]", "end": "[IMG_END]"}


def read_vision(hf: HfKeys, family: Family, *, wanted: bool = True) -> VisionConfig | None:
    """Reads the model's vision tower; None: the family, or this checkpoint, has none, or it is not `wanted`.

    Raises ModelConfigError for a wanted tower's keys.
    """
    if family.vision is None:
        return None
    hf.skip(*_HARMLESS)
    if not wanted:
        hf.skip("image_token_id", "image_token_index", "media_placeholder_token_id", "vision_config")
        return None
    vision = hf.section("vision_config")
    return None if vision is None else family.vision.read(hf, vision)
