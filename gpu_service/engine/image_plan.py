"""What a step needs of its requests' images: the rows that are image tokens, and positions by axis."""

from __future__ import annotations

import numpy as np
import torch

from gpu_service.batch import Batch
from gpu_service.vision.features import ImagePlan, ImageSlice
from gpu_service.vision.prompt import NUM_AXES, Positions


def plan_images(batch: Batch) -> ImagePlan | None:
    """Image tokens among the step's rows; None: there are none."""
    slices: list[ImageSlice] = []
    rows: list[Positions] = []
    first_row = 0
    for request, start, count in zip(
        batch.requests, batch.start_positions, batch.num_new_tokens, strict=True
    ):
        for placed in () if request.vision is None else request.vision.images:
            begin, end = max(start, placed.start), min(start + count, placed.end)
            if begin < end:
                slices.append(ImageSlice(placed.image, begin - placed.start, end - placed.start))
                rows.append(np.arange(begin, end) - start + first_row)
        first_row += count
    return ImagePlan(torch.from_numpy(np.concatenate(rows)), tuple(slices)) if slices else None


def plan_axis_positions(batch: Batch, positions: Positions) -> torch.Tensor:
    """int64 `[3, T]`: of text `positions` `[T]` along all axes, of requests with images their own."""
    by_axis = np.broadcast_to(positions, (NUM_AXES, len(positions))).copy()
    row = 0
    for request, start, count in zip(
        batch.requests, batch.start_positions, batch.num_new_tokens, strict=True
    ):
        if request.vision is not None:
            by_axis[:, row : row + count] = request.vision.axis_positions(start, start + count)
        row += count
    return torch.from_numpy(by_axis)
