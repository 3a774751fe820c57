"""What has to be set for the whole process before anything of the model exists."""

from __future__ import annotations

import os
from typing import Any

import torch

from gpu_service.attention.registry import check_attention_backend
from gpu_service.device.jit_cache import use_jit_cache
from gpu_service.device.resolve import resolve_device
from moebius.config import GpuConfig, MoebiusConfig

# torch leaves these untyped.
_cuda: Any = torch.cuda


def prepare_process(config: MoebiusConfig) -> torch.device:
    """The rank's device, made current; threads and the place of compiled kernels. Raises UserError."""
    use_jit_cache(config.gpu.jit_cache_dir)
    # All ranks of a model are on this host, so their order is that of its GPUs.
    device = resolve_device(config.gpu, config.parallel.rank)
    check_attention_backend(config.gpu.attention_backend, device)
    if device.type == "cuda":
        # The host only fills small tensors; more threads would spin on the cores of the expert servers.
        torch.set_num_threads(1)
        _cuda.set_device(device)
    else:
        _set_threads(config.gpu)
    return device


def _set_threads(gpu: GpuConfig) -> None:
    """Leaves a core to the engine's and the event loop's threads where there is more than one."""
    allowed = len(os.sched_getaffinity(0))
    torch.set_num_threads(gpu.gpu_threads or max(1, allowed - 1))
