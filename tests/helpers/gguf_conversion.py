"""One tensor of a GGUF file, as it follows from those of a model in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Function = Callable[[torch.Tensor], torch.Tensor]


def same(values: torch.Tensor) -> torch.Tensor:
    return values


@dataclass(frozen=True)
class Converted:
    """One tensor of the file."""

    # As the package's table knows it; `gguf`: its name in the file.
    name: str
    # int64, in the stored shape: positions in the flattened weights.
    places: torch.Tensor
    forward: Function = same
    backward: Function = same
    gguf: bool = False
