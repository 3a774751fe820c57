"""A model's vision: its tower on the device, and what prepares images for it."""

from __future__ import annotations

import io
from dataclasses import dataclass

import structlog
import torch
from PIL import Image

from gpu_service.loader.load import load_tower
from gpu_service.memory.plan import VisionMemory, parameter_bytes
from gpu_service.models.vision.registry import build_tower
from gpu_service.vision.features import ImageEncoder
from gpu_service.vision.processor import ImagePreparer
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.models.config import ModelConfig, VisionConfig

_log = structlog.get_logger(__name__)
_MIB = 2**20
# Pixels of the image that is tried at start; processors make it larger where they have to.
_TRIAL_SIZE = (32, 32)


@dataclass(frozen=True, slots=True)
class Vision:
    """The vision part of a model that has one; filled by `load_vision`."""

    encoder: ImageEncoder
    preparer: ImagePreparer


def load_vision(config: MoebiusConfig, model: ModelConfig, device: torch.device) -> Vision | None:
    """Returns the tower with its values; None: the model is text-only.

    Raises UserError when the checkpoint does not say how images are prepared, CheckpointError when tensors
    of the tower are missing.
    """
    if model.vision is None:
        return None
    preparer = ImagePreparer(model, config.model.model, config.images.max_image_megapixels)
    try:
        tower = build_tower(model, config.model.model, device)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{config.model.model}: vision_config cannot be used: {error}") from error
    load_tower(tower, config.model.model, model.model_type)
    _check_budget(config, model, preparer)
    encoder = ImageEncoder(tower, device, config.images.image_cache_mib * _MIB)
    _try_once(encoder, preparer, model.hidden_size)
    _log.info("the vision tower is loaded", mib=round(parameter_bytes(tower) / _MIB))
    return Vision(encoder, preparer)


def _check_budget(config: MoebiusConfig, model: ModelConfig, preparer: ImagePreparer) -> None:
    """Raises UserError where an image of the largest size would never fit into a step."""
    assert model.vision is not None
    most, budget = preparer.max_patches // model.vision.merge_size**2, config.gpu.num_batched_tokens
    if model.vision.sees_ahead and most > budget:
        raise UserError(
            f"max_num_batched_tokens: {budget} is too little for images of this model, of up to {most} "
            f"tokens in one step; allowed: at least {most}"
        )


def _try_once(encoder: ImageEncoder, preparer: ImagePreparer, hidden_size: int) -> None:
    """An image goes all the way before any request does; what libraries load at first use is there then."""
    buffer = io.BytesIO()
    Image.new("RGB", _TRIAL_SIZE, (128, 96, 64)).save(buffer, "PNG")
    image = preparer.prepare(buffer.getvalue())
    with torch.inference_mode():
        features = encoder.encode(image)
    finite = bool(features.isfinite().all())
    if not finite and features.dtype == torch.float16:
        raise UserError(
            "dtype: float16 holds at most 65504, which the vision tower exceeds; allowed: bfloat16, float32, "
            "or language_model_only"
        )
    if features.shape[1:] != (image.num_tokens, hidden_size) or not finite:
        raise UserError(
            f"the vision tower makes {list(features.shape)} of an image of {image.num_tokens} tokens; "
            f"expected are finite features of {hidden_size} elements for each token"
        )


def vision_memory(config: MoebiusConfig, model: ModelConfig) -> VisionMemory:
    """Device memory of tower, kept images and the largest image being encoded, before any of it exists."""
    if model.vision is None:
        return VisionMemory()
    tower = build_tower(model, config.model.model, "meta")
    preparer = ImagePreparer(model, config.model.model, config.images.max_image_megapixels)
    largest = encoding_bytes(model.vision, preparer.max_patches, model.dtype_bytes)
    return VisionMemory(parameter_bytes(tower), config.images.image_cache_mib * _MIB + largest)


def encoding_bytes(vision: VisionConfig, patches: int, itemsize: int) -> int:
    """Returns the most bytes that live while an image is encoded: residual, norm, queries, keys and values,
    or an MLP.
    """
    widest = max(8 * vision.hidden_size, 3 * vision.hidden_size + 2 * vision.intermediate_size)
    return patches * widest * itemsize
