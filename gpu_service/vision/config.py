"""What the engine has to know of a model's vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from moebius.errors import UserError


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


@contextmanager
def transformers_needed() -> Iterator[None]:
    """Around imports of transformers, which only models that take images need.

    Raises UserError, where it is not installed, with what to install and how to do without.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        raise UserError(
            "the model's vision tower needs transformers, which is not installed: "
            "pip install 'moebius[vision]'; or set language_model_only: true to serve text alone"
        ) from error
