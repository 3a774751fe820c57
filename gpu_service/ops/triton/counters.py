"""Counters of programs that have ended, by which the last one of a kernel knows itself.

Kernels of one stream follow one another, and leave the counters at zero: each stream has its own.
"""

from __future__ import annotations

from typing import Any

import torch

# More than one request's or head's of any kernel that counts.
MAX_COUNTERS = 1024
# By device and stream, int32 [MAX_COUNTERS]. Graphs hold their addresses: they are kept for good.
_counters: dict[tuple[torch.device, int], torch.Tensor] = {}
# torch leaves its streams untyped.
_cuda: Any = torch.cuda


def stream_counters(device: torch.device) -> torch.Tensor | None:
    """Returns the counters of the current stream; None while it is captured and has none yet: a graph could
    not keep it.
    """
    on_gpu = device.type == "cuda"
    key = device, int(_cuda.current_stream(device).cuda_stream) if on_gpu else 0
    if key not in _counters:
        if on_gpu and _cuda.is_current_stream_capturing():
            return None
        _counters[key] = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
    return _counters[key]
