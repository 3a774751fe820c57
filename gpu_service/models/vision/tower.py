"""The interface of vision towers, and the one that most families share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moebius.errors import UserError


@contextmanager
def transformers_needed() -> Iterator[None]:
    """Wraps imports of transformers, which only models that take images need.

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


class VisionTower(nn.Module, ABC):
    """From an image's patches to what stands in the language model's stream at the image's tokens."""

    @abstractmethod
    def encode(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """Returns features `[1 + D, N, H]` of one image, in the tower's dtype.

        pixels `[P, ...]` as the family's image processor makes them, grid int64 `[1, 3]` with P patches.
        The first of the 1 + D replaces the embeddings of the image's N tokens, the others are added to the
        stream after the first D decoder layers (DeepStack, arXiv 2406.04334).
        """

    def parts(self, name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the parameters that a checkpoint's tensor fills, and with what; `name` by `tower_name`."""
        yield name, values


class GridTower(VisionTower):
    """One module that does it all; its name in the checkpoint is `visual`."""

    def __init__(self, visual: nn.Module) -> None:
        super().__init__()
        self.visual = visual

    def encode(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        output: Any = self.visual(pixels, grid_thw=grid, return_dict=True)
        deep = getattr(output, "deepstack_features", None) or []
        return torch.stack([output.pooler_output, *deep])


def unfused(
    name: str, values: torch.Tensor, fused: str, own: str, num_heads: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields queries, keys and values of one tensor, the rotary pairs of the first two as `half_split` has
    them.

    `fused` is what its name has in place of `own`, in which `{}` is q, k and v; other tensors stay.
    """
    if fused not in name:
        yield name, values
        return
    for part, piece in zip("qkv", values.chunk(3), strict=True):
        yield name.replace(fused, own.format(part)), piece if part == "v" else half_split(piece, num_heads)


def half_split(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns the rows of a projection whose rotary pairs are (2j, 2j + 1), so that they are (j, j
    + half).
    """
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
