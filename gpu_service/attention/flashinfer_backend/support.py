"""Whether FlashInfer can run here, asked before anything is allocated."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import torch

from gpu_service.model_config import ModelConfig

HEAD_DIMS = (64, 128, 256)
HALF_TYPES = (torch.float16, torch.bfloat16)


def missing_compiler() -> str:
    """Why FlashInfer's kernels can not be had; empty: they are packaged, or nvcc and ninja can build them."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return ""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    has_nvcc = shutil.which("nvcc") or any(home and (Path(home) / "bin/nvcc").exists() for home in homes)
    if not has_nvcc:
        return "FlashInfer compiles its kernels: install nvcc of the CUDA toolkit, or flashinfer-jit-cache"
    if not shutil.which("ninja"):
        return "FlashInfer compiles its kernels: install ninja, or flashinfer-jit-cache"
    return ""


def unsupported_types(dtype: torch.dtype, head_dim: int) -> str:
    """Why FlashInfer has no kernel for these activations; empty: it has."""
    if dtype not in HALF_TYPES:
        return f"FlashInfer computes in float16 and bfloat16, not in {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"FlashInfer has kernels for head_dim {HEAD_DIMS}, not {head_dim}"
    return ""


def unsupported_layers(config: ModelConfig) -> str:
    """Why the wrappers used here can not compute what some layers need; empty: they can."""
    if config.attention_sinks:
        return "this model has attention sinks, which FlashInfer is not used for here"
    if len(set(config.layer_num_heads)) > 1:
        return "this model's layers have different numbers of heads, which FlashInfer is not used for here"
    if config.attention_windows:
        return "this model has sliding windows, which FlashInfer is not used for here"
    return ""


def unsupported_device(device: torch.device) -> str:
    """Why FlashInfer can not run on a device; empty: it can."""
    if device.type != "cuda":
        return f"FlashInfer needs a CUDA device, not {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"FlashInfer needs compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    return missing_compiler()
