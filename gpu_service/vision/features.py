"""Images on the device: encoded once each, kept while there is room, and put into the stream of a step."""

from __future__ import annotations

from collections import OrderedDict

import torch

from gpu_service.core.images import ImageFeatures, ImagePlan, PreparedImage
from gpu_service.models.vision.tower import VisionTower


class ImageEncoder:
    """Runs the tower and keeps what it gives. Used in stream order only, like the model."""

    def __init__(self, tower: VisionTower, device: torch.device, cache_bytes: int) -> None:
        """`cache_bytes`: how much is kept for later steps and requests; the latest image always is."""
        self._tower = tower
        self._device = device
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()
        # Images encoded since start, for tests and metrics.
        self.num_encoded = 0

    def features_of(self, plan: ImagePlan) -> ImageFeatures:
        """Returns the features of a step's image tokens."""
        parts = [self._encoded(item.image)[:, item.begin : item.end] for item in plan.slices]
        return ImageFeatures(plan.rows, torch.cat(parts, dim=1))

    def _encoded(self, image: PreparedImage) -> torch.Tensor:
        """Returns `[1 + D, n, H]` of the whole image."""
        found = self._kept.get(image.key)
        if found is None:
            self.num_encoded += 1
            found = self.encode(image)
            self._kept[image.key] = found
            self._shrink()
        self._kept.move_to_end(image.key)
        return found

    def encode(self, image: PreparedImage) -> torch.Tensor:
        """Returns `[1 + D, n, H]` of the whole image; nothing is kept."""
        dtype = next(self._tower.parameters()).dtype
        pixels = torch.from_numpy(image.pixels).to(self._device, dtype)
        grid = torch.tensor([image.grid], device=self._device)
        # Convolutions round float32 to TF32 by default; and all ranks are to compute the same.
        with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
            return self._tower.encode(pixels, grid)

    def _shrink(self) -> None:
        """Gives up the least recently used ones, but never the latest."""
        total = sum(features.nbytes for features in self._kept.values())
        while total > self._cache_bytes and len(self._kept) > 1:
            total -= self._kept.popitem(last=False)[1].nbytes
