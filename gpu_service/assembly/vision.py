"""What lets a model see: its tower on the device, and what prepares images for it."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
import torch

from gpu_service.loader.tower import load_tower
from gpu_service.memory.estimate import parameter_bytes
from gpu_service.memory.plan import VisionMemory
from gpu_service.model_config import ModelConfig
from gpu_service.models.vision.registry import build_tower
from gpu_service.vision.config import VisionConfig
from gpu_service.vision.features import ImageEncoder
from gpu_service.vision.processor import ImagePreparer
from moebius.config import MoebiusConfig
from moebius.errors import UserError

_log = structlog.get_logger(__name__)
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Vision:
    """Of a model that sees; filled by `load_vision`."""

    encoder: ImageEncoder
    preparer: ImagePreparer


def load_vision(config: MoebiusConfig, model: ModelConfig, device: torch.device) -> Vision | None:
    """The tower with its values; None: the model does not see.

    Raises UserError when the checkpoint does not say how images are prepared, CheckpointError when tensors
    of the tower are missing.
    """
    if model.vision is None:
        return None
    preparer = ImagePreparer(model, config.model.model, config.images.max_image_megapixels)
    try:
        tower = build_tower(model, config.model.model, device)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{config.model.model}: vision_config can not be used: {error}") from error
    load_tower(tower, config.model.model, model.model_type)
    encoder = ImageEncoder(tower, device, config.images.image_cache_mib * _MIB)
    _log.info("the vision tower is loaded", mib=round(parameter_bytes(tower) / _MIB))
    return Vision(encoder, preparer)


def vision_memory(config: MoebiusConfig, model: ModelConfig) -> VisionMemory:
    """Device memory of tower, kept images and the largest image being encoded, before any of it exists."""
    if model.vision is None:
        return VisionMemory()
    tower = build_tower(model, config.model.model, "meta")
    preparer = ImagePreparer(model, config.model.model, config.images.max_image_megapixels)
    largest = encoding_bytes(model.vision, preparer.max_patches, model.torch_dtype.itemsize)
    return VisionMemory(parameter_bytes(tower), config.images.image_cache_mib * _MIB + largest)


def encoding_bytes(vision: VisionConfig, patches: int, itemsize: int) -> int:
    """Most bytes that live while an image is encoded: residual, norm, queries, keys and values, or an MLP."""
    widest = max(8 * vision.hidden_size, 3 * vision.hidden_size + 2 * vision.intermediate_size)
    return patches * widest * itemsize
