"""What the engine has to know of a model's vision tower."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Filled by `hf_config.vision`; the tower itself is composed from `vision_config` by `models.vision`."""

    # The token that stands for images in a prompt.
    image_token_id: int
    # Patches along each side of what becomes one token.
    merge_size: int
    # Height and width of a patch, pixels.
    patch_size: int
    # Widths of the tower: its stream and the inner side of its MLPs.
    hidden_size: int
    intermediate_size: int
