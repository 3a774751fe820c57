"""Imports that loading needs on a GPU, made by a sleeping engine ahead of its wake: they take seconds.

They take memory of the host, and none of a GPU: nothing is launched, and no context made.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

import structlog
import torch

from gpu_service.assembly.process import local_rank, resolve_device, use_jit_cache
from gpu_service.ops import backends
from moebius.config import MoebiusConfig
from moebius.errors import brief

_log = structlog.get_logger(__name__)
# Of this project, which import Triton or the driver when they are.
_OWN = (
    "gpu_service.experts.resident.triton_kernels.backend",
    "gpu_service.experts.fetching.triton_kernels",
    "gpu_service.experts.doorbell.client",
    "gpu_service.experts.doorbell.cuda_launcher",
    "gpu_service.device.cuda_program",
)


def begin_imports(config: MoebiusConfig) -> threading.Thread:
    """Imports in a thread of its own what the engine would import when it loads."""
    thread = threading.Thread(target=_import_all, args=(config,), name="imports", daemon=True)
    thread.start()
    return thread


def _import_all(config: MoebiusConfig) -> None:
    try:
        device = resolve_device(config.gpu, local_rank(config.parallel))
        if device.type != "cuda":
            return
        # Before FlashInfer, which reads once where its kernels are.
        use_jit_cache(config.gpu.jit_cache_dir)
        modules = [backends.TABLES[name] for name in backends.BACKENDS[config.gpu.attention_backend]]
        for module in (*modules, *_OWN):
            _import(module)
        torch_c: Any = torch._C  # which builds without CUDA have less of
        if torch_c._cuda_hasPrimaryContext(device.index):
            _log.warning("a library has taken memory of the GPU while it was imported", device=str(device))
    except Exception as error:  # loading will say what is wrong, and how much it matters
        _log.info("nothing more is imported ahead", because=brief(error))


def _import(module: str) -> None:
    try:
        import_module(module)
    # Libraries check versions, compilers and drivers, each with exceptions of its own.
    except Exception as error:
        _log.info("a module cannot be imported ahead", module=module, because=brief(error))
