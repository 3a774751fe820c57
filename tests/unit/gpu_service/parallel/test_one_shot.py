"""Guards which tensors GPUs add without NCCL: small, whole words, of a type and layout the kernel takes."""

from __future__ import annotations

import torch

from gpu_service.parallel.collectives import MAX_BYTES, takes_one_shot


def test_only_what_the_kernel_takes() -> None:
    """One row and 32 rows of bfloat16; not empty, odd, strided, misplaced, large or integer ones."""
    row = torch.zeros(1, 2048, dtype=torch.bfloat16)
    assert takes_one_shot(row)
    assert takes_one_shot(torch.zeros(MAX_BYTES // 4))
    assert not takes_one_shot(torch.zeros(MAX_BYTES // 4 + 4))
    assert not takes_one_shot(row[:, :0])
    assert not takes_one_shot(torch.zeros(3, 3))
    assert not takes_one_shot(torch.zeros(8, 16).t())
    assert not takes_one_shot(torch.zeros(65)[1:])
    assert not takes_one_shot(row.long())
    assert not takes_one_shot(row.half())
