"""Images of prompts between ranks: facts as JSON, pixels as float32 in a tail, each image once.

Outputs of one request, and requests with the same image, share its pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_service.vision.prompt import PreparedImage, PromptImage, VisionPrompt, locate

_PIXEL = np.dtype("<f4")


class ImageSender:
    """Collects what requests show; `facts` and `tail` are what travels."""

    def __init__(self) -> None:
        self._images: dict[int, tuple[int, PreparedImage]] = {}

    def places(self, vision: VisionPrompt | None) -> list[list[int]]:
        """Number and first token of each image of a prompt."""
        placed = () if vision is None else vision.images
        return [[self._number(item.image), item.start] for item in placed]

    def _number(self, image: PreparedImage) -> int:
        return self._images.setdefault(image.key, (len(self._images), image))[0]

    @property
    def facts(self) -> list[dict[str, Any]]:
        """What is known of each image beside its pixels, by number."""
        return [
            {
                "key": image.key,
                "grid": image.grid,
                "token_grid": image.token_grid,
                "shape": image.pixels.shape,
            }
            for _, image in self._images.values()
        ]

    @property
    def tail(self) -> bytes:
        """All pixels, by number."""
        return b"".join(image.pixels.astype(_PIXEL).tobytes() for _, image in self._images.values())


class ImageReceiver:
    """Rebuilds images from what an `ImageSender` made. Raises ValueError when the tail is too short."""

    def __init__(self, facts: Sequence[dict[str, Any]], payload: bytes, offset: int) -> None:
        """The tail begins at `offset` and ends at `end`."""
        self._images: list[PreparedImage] = []
        self.end = offset
        for item in facts:
            shape = tuple(item["shape"])
            pixels: npt.NDArray[Any] = np.frombuffer(payload, _PIXEL, math.prod(shape), self.end)
            self.end += pixels.nbytes
            grid, token_grid = tuple(item["grid"]), tuple(item["token_grid"])
            # The payload's own memory can not be written to, which torch asks for.
            self._images.append(PreparedImage(item["key"], pixels.reshape(shape).copy(), grid, token_grid))

    def vision(self, places: Sequence[tuple[int, int]], prompt_len: int) -> VisionPrompt | None:
        """See `ImageSender.places`."""
        placed = [PromptImage(self._images[number], start) for number, start in places]
        return locate(prompt_len, placed) if placed else None
