"""What a sleeping engine does ahead of its wake: imports that loading needs on a GPU, which take seconds,
headers and samples of the checkpoint, and the tokenizer.

All of it takes memory of the host, and none of a GPU: nothing is launched, and no context made.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import structlog

from gpu_service.assembly.identity import read_ahead
from gpu_service.assembly.process import local_rank, resolve_device, use_jit_cache
from gpu_service.core.constraint import ConstraintCompiler, make_compiler
from gpu_service.device.stream import has_context
from gpu_service.ops import backends
from moebius.checkpoint.index import CheckpointIndex
from moebius.config import MoebiusConfig
from moebius.errors import brief
from moebius.models.config import ModelConfig
from moebius.models.identity import Parts, model_parts
from moebius.models.served import read_served_model
from moebius.process.progress import take_phases

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
        self._tokenizer: _Tokenizer | None = None
        self._is_asleep = True
        self._thread = threading.Thread(target=self._run, name="ahead-of-wake", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Returns when all is done: for tests."""
        self._thread.join()

    def wake(self) -> None:
        """The engine wakes: memory of the GPU may be taken from now on, and nothing more is begun here. To be
        called before anything loads.
        """
        self._is_asleep = False
        # Those of the sleep are none of the wake.
        take_phases()

    def compiler(self, model: ModelConfig, parts: Parts) -> ConstraintCompiler | None:
        """Returns the compiler of constraints that was made while the engine slept, once; None: it was not,
        or not for this model. `parts`: the identity of what is loaded. What is being read is waited for.
        """
        self._thread.join()
        found, self._tokenizer = self._tokenizer, None
        if found is None or found.key != _tokenizer_key(model):
            return None
        is_same = all(parts.get(name) == digest for name, digest in found.parts.items())
        return found.compiler if is_same else None

    def forget(self) -> None:
        """The model is loaded, which holds what it needs."""
        self._indices.clear()
        self._tokenizer = None

    def _run(self) -> None:
        try:
            for work in (self._import_all, self._read_headers, self._read_tokenizer):
                if self._is_asleep:
                    work()
        except Exception as error:  # loading will say what is wrong, and how much it matters
            _log.info("nothing more is done ahead of the wake", because=brief(error))

    def _read_headers(self) -> None:
        self._indices += read_ahead(self._config)

    def _read_tokenizer(self) -> None:
        if self._device.type == "cpu" or not self._config.model.model:
            return  # an engine on a CPU reads it with the first constraint
        # Before the tokenizer: files that change from here on have other digests when the engine wakes.
        parts = model_parts(self._config.model.model)
        model = read_served_model(self._config)
        path = Path(self._config.model.model)
        compiler = make_compiler(path, model.vocab_size, model.eos_token_ids)
        if compiler is not None:
            self._tokenizer = _Tokenizer(parts, _tokenizer_key(model), compiler)

    def _import_all(self) -> None:
        device = self._device = resolve_device(self._config.gpu, local_rank(self._config.parallel))
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


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """Made by `_read_tokenizer`."""

    # Of the files it was read from, among others.
    parts: Parts
    key: tuple[int, tuple[int, ...]]
    compiler: ConstraintCompiler


def _tokenizer_key(model: ModelConfig) -> tuple[int, tuple[int, ...]]:
    return model.vocab_size, tuple(model.eos_token_ids)


def _import(module: str) -> None:
    try:
        import_module(module)
    # Libraries check versions, compilers and drivers, each with exceptions of its own.
    except Exception as error:
        _log.info("a module cannot be imported ahead", module=module, because=brief(error))
