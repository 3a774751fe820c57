"""Implementations of the ops, which a program tries once: the one that it becomes by falling asleep has the
same device, libraries and sizes, and takes what was chosen.

An engine that is killed leaves nothing, so one that fails with what it took over tries everything when it is
started again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import structlog
import torch

from gpu_service.assembly.kv_memory import CacheShape
from gpu_service.device.description import describe_device
from gpu_service.ops import backends
from gpu_service.ops.example_sizes import Sizes
from moebius.config import MoebiusConfig
from moebius.errors import brief
from moebius.process.sleep_mark import hand_over_text, take_over_text

_log = structlog.get_logger(__name__)
_NAME = "kernels"
_PACKAGES = ("moebius", "torch", "triton", "flashinfer-python")


def install_kernels(
    config: MoebiusConfig, device: torch.device, shape: CacheShape, sizes: Sequence[Sizes]
) -> dict[str, str]:
    """Chooses the ops' implementations for this process as `backends.install`, and returns the same."""
    backend = config.gpu.attention_backend
    asked = _asked(device, backend, shape.dtype, sizes)
    known = _known(take_over_text(_NAME), asked)
    chosen = backends.install(device, backend, shape.dtype, sizes, shape.attention_modules, known)
    if device.type != "cpu":
        try:
            hand_over_text(_NAME, json.dumps({"asked": asked, "chosen": chosen}))
        except OSError as error:
            _log.info("the next wake tries GPU kernels again", because=brief(error))
    return chosen


def _asked(device: torch.device, backend: str, dtype: torch.dtype, sizes: Sequence[Sizes]) -> str:
    """Returns all that the choice depends on."""
    versions = [f"{name} {_version(name)}" for name in _PACKAGES]
    return "\n".join([describe_device(device), *versions, backend, str(dtype), *map(repr, sizes)])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"


def _known(text: str, asked: str) -> dict[str, str]:
    """Returns what the former program chose; empty: nothing is known, or of something else."""
    if not text:
        return {}
    try:
        found = json.loads(text)
        if found["asked"] == asked:
            return {str(op): str(chosen) for op, chosen in found["chosen"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.info("GPU kernels are tried again", because=brief(error))
    return {}
