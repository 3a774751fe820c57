"""What slots are meant to hold, as checksums: by them memory that has changed is found."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moebius import _kernels


@dataclass(frozen=True, eq=False, slots=True)
class SlotContent:
    """An expert in a slot, from when it was filled until before it is written to again.

    Compared by identity: a slot that holds the same object before and after its bytes were read was not
    replaced meanwhile.
    """

    expert: int
    # Of the packed bytes, by the function of the expert servers, which begins with `seed`.
    digest: int
    seed: int

    def matches(self, packed: torch.Tensor) -> bool:
        """Returns whether these bytes, uint8 on the host, are the ones that were meant to be there."""
        return _kernels.weight_digest(packed.numpy(), self.seed) == self.digest


def content_of(expert: int, packed: torch.Tensor) -> SlotContent:
    """Returns the content of packed bytes as they were made, uint8 `[expert_bytes]`."""
    return SlotContent(expert, _kernels.weight_digest(packed.cpu().numpy(), expert), expert)
