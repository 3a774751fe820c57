"""Which device the configuration means on this machine: decided once, at start."""

from __future__ import annotations

import torch

from moebius.config import GpuConfig
from moebius.errors import UserError


def resolve_device(gpu: GpuConfig, local_rank: int = 0) -> torch.device:
    """The device of this rank; `auto` takes a GPU where torch sees one.

    Raises UserError when `device: cuda` is set and there is none, or fewer than the ranks of this host.
    """
    if gpu.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        if gpu.device == "auto":
            return torch.device("cpu")
        raise UserError("device: 'cuda' is set, but torch sees no CUDA device; allowed here: auto, cpu")
    if local_rank >= count:
        raise UserError(f"rank {local_rank} of this host needs GPU {local_rank}; torch sees {count}")
    return torch.device("cuda", local_rank)
