"""Which families see, and how their config.json says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpu_service.hf_config.keys import HfKeys
from gpu_service.vision.config import VisionConfig

# What begins and ends an image, which chat templates write, what stands for videos, what the tower's builder
# reads for itself, and switches of training.
_HARMLESS = (
    "ignore_index",
    "image_end_token_id",
    "image_start_token_id",
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


def _read_grid_vision(hf: HfKeys, vision: HfKeys) -> VisionConfig:
    """Qwen3-VL and GLM-4.xV: square merges of patches."""
    return VisionConfig(
        image_token_id=hf.integer("image_token_id", minimum=0),
        merge_size=vision.integer("spatial_merge_size", default=2),
        patch_size=vision.integer("patch_size"),
        hidden_size=vision.integer("hidden_size"),
        intermediate_size=vision.integer("intermediate_size"),
    )


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


_READERS: Mapping[str, Callable[[HfKeys, HfKeys], VisionConfig]] = {
    "glm4v_moe": _read_grid_vision,
    "kimi_k25": _read_kimi_vision,
    "qwen3_5_moe": _read_grid_vision,
    "qwen3_vl_moe": _read_grid_vision,
}


def read_vision(hf: HfKeys, model_type: str, *, wanted: bool = True) -> VisionConfig | None:
    """The model's vision tower; None: the family, or this checkpoint, has none, or it is not `wanted`.

    Raises ModelConfigError for a wanted tower's keys.
    """
    reader = _READERS.get(model_type)
    if reader is None:
        return None
    hf.skip(*_HARMLESS)
    if not wanted:
        hf.skip("image_token_id", "media_placeholder_token_id", "vision_config")
        return None
    vision = hf.section("vision_config")
    return None if vision is None else reader(hf, vision)
