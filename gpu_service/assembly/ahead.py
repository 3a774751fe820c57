"""What a sleeping engine does ahead of its wake: imports that loading needs on a GPU, which take seconds, and
the headers of the checkpoint.

Both take memory of the host, and none of a GPU: nothing is launched, and no context made.
"""

from __future__ import annotations

import threading
from importlib import import_module

import structlog

from gpu_service.assembly.process import local_rank, resolve_device, use_jit_cache
from gpu_service.device.stream import has_context
from gpu_service.ops import backends
from moebius.checkpoint.index import CheckpointIndex
from moebius.config import MoebiusConfig
from moebius.errors import brief
from moebius.models.checkpoint import open_index

_log = structlog.get_logger(__name__)
# Of this project, which import Triton or the driver when they are.
_OWN = (
    "gpu_service.experts.resident.triton_kernels.backend",
    "gpu_service.experts.fetching.triton_kernels",
    "gpu_service.experts.doorbell.client",
)


class AheadOfWake:
    """Works in a thread of its own from the beginning; loading takes what is there by then."""

    def __init__(self, config: MoebiusConfig) -> None:
        self._config = config
        # Headers are read once as long as somebody holds them, and again where files have changed.
        self._indices: list[CheckpointIndex] = []
        self._is_asleep = True
        self._thread = threading.Thread(target=self._run, name="ahead-of-wake", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Returns when all is done: for tests."""
        self._thread.join()

    def wake(self) -> None:
        """The engine wakes: whoever takes memory of the GPU from now on is meant to. Before anything loads."""
        self._is_asleep = False

    def forget(self) -> None:
        """The model is loaded, which holds what it needs."""
        self._indices.clear()

    def _run(self) -> None:
        model = self._config.model
        try:
            self._import_all()
            self._indices += [open_index(path) for path in (model.expert_checkpoint, model.model) if path]
        except Exception as error:  # loading will say what is wrong, and how much it matters
            _log.info("nothing more is done ahead of the wake", because=brief(error))

    def _import_all(self) -> None:
        device = resolve_device(self._config.gpu, local_rank(self._config.parallel))
        if device.type == "cpu":
            return
        # Before FlashInfer, which reads once where its kernels are.
        use_jit_cache(self._config.gpu.jit_cache_dir)
        modules = [backends.TABLES[name] for name in backends.BACKENDS[self._config.gpu.attention_backend]]
        for module in (*modules, *_OWN):
            _import(module)
        # In this order: a context that loading has made comes after the wake.
        if has_context(device) and self._is_asleep:
            _log.warning("a library has taken memory of the GPU while it was imported", device=str(device))


def _import(module: str) -> None:
    try:
        import_module(module)
    # Libraries check versions, compilers and drivers, each with exceptions of its own.
    except Exception as error:
        _log.info("a module cannot be imported ahead", module=module, because=brief(error))
