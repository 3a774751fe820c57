"""Which attention backend a model's cache gets on a device: decided once, at start.

A cache of keys and values takes grouped-query attention, a cache of latents latent attention, one of entries
compressed attention; the setting `attention_backend` means the same for all.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from gpu_service.attention.base import AttentionBackend
from gpu_service.attention.compressed.base import CompressedAttentionBackend, CompressedDimensions
from gpu_service.attention.mla.base import IndexDimensions, MlaAttentionBackend, MlaDimensions
from gpu_service.cache.kv_cache import CompressedCache, MlaCache, PagedCache
from moebius.errors import UserError, brief
from moebius.models.layers.compressed import EntryIndexer, SharedEntryAttention, entry_mixers
from moebius.models.layers.latent import MLA
from moebius.models.layers.layer import Layers, mixers

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """Where a backend is found; its module is imported only when it is chosen."""

    module: str
    class_name: str
    package: str = ""  # must be importable; empty: nothing beyond torch
    install: str = ""  # how the user gets it
    device_type: str = ""  # of the devices that it runs on; empty: of all
    cost: str = ""  # what is lost with those before it

    def load(self) -> Any:
        """Returns the class. Raises ImportError (or what a broken package raises)."""
        return getattr(importlib.import_module(self.module), self.class_name)

    def missing(self, device: torch.device) -> str:
        """Returns why the backend cannot be used on a device; empty: nothing is missing."""
        if self.device_type and device.type != self.device_type:
            return f"it needs a {self.device_type.upper()} device, this one is {device.type!r}"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"package {self.package!r} is not installed; {self.install}"
        return ""


# Runs a backend as the service will.
TryOut = Callable[[Any], None]

_FLASHINFER_INSTALL = "install flashinfer-python (pip install 'moebius[gpu]')"
_TRITON_INSTALL = "install triton (it comes with torch's CUDA builds)"

# `attention_backend` -> where it is, best first: `auto` takes the first that is installed and able.
ATTENTION_BACKENDS: dict[str, BackendEntry] = {
    "flashinfer": BackendEntry(
        "gpu_service.attention.flashinfer_backend",
        "FlashInferAttention",
        "flashinfer",
        _FLASHINFER_INSTALL,
        device_type="cuda",
    ),
    "triton": BackendEntry(
        "gpu_service.attention.triton_backend",
        "TritonAttention",
        "triton",
        _TRITON_INSTALL,
        device_type="cuda",
        cost="long prompts are slower",
    ),
    "cpu": BackendEntry("gpu_service.attention.cpu_backend", "CpuAttention", device_type="cpu"),
    "torch": BackendEntry(
        "gpu_service.attention.torch_reference",
        "TorchReferenceAttention",
        cost="steps run without graphs and attend to one request after another: many times slower",
    ),
}


def check_attention_backend(name: str, device: torch.device | str) -> None:
    """Checks the name before a model is loaded.

    Raises UserError when a backend that is named cannot be used.
    """
    if name == "auto":
        return
    reason = _entry(ATTENTION_BACKENDS, name).missing(torch.device(device))
    if reason:
        raise UserError(f"attention_backend: {name!r} cannot be used: {reason}")


def choose_backend(
    entries: dict[str, BackendEntry],
    config: Any,
    cache: Any,
    device: torch.device,
    name: str = "auto",
    try_out: TryOut | None = None,
) -> Any:
    """Returns the backend to use.

    With `auto`, better ones that fell out on a GPU are named in one log line.
    """
    if name != "auto":
        _entry(entries, name)
    refused: dict[str, str] = {}
    for candidate in entries if name == "auto" else [name]:
        backend, reason = _try_make(entries[candidate], config, cache, device, try_out)
        if backend is not None:
            _report(candidate, refused, entries, device)
            return backend
        refused[candidate] = reason
    if name == "auto":
        raise UserError(f"no attention backend can serve this model: {_sentence(refused)}")
    raise UserError(f"attention_backend: {name!r} cannot be used: {refused[name]}")


def _entry(entries: dict[str, BackendEntry], name: str) -> BackendEntry:
    if name not in entries:
        raise UserError(f"attention_backend: {name!r} is unknown; allowed: auto, {', '.join(entries)}")
    return entries[name]


def _try_make(
    entry: BackendEntry, config: Any, cache: Any, device: torch.device, try_out: TryOut | None
) -> tuple[Any, str]:
    """The backend this entry makes, or None and why it cannot be used here."""
    reason = entry.missing(device)
    if reason:
        return None, reason
    try:
        backend = entry.load()
    except Exception as error:  # a package that is installed but broken may raise anything
        return None, f"package {entry.package!r} cannot be imported ({error}); {entry.install}"
    reason = backend.unsupported(config, cache)
    if reason:
        return None, reason
    made = backend(config, cache)
    if try_out is not None and entry.device_type == "cuda":
        try:
            try_out(made)
        except Exception as error:  # a compiler, a driver or a kernel may raise anything
            return None, f"its kernels do not run here ({brief(error)})"
    return made, ""


def _report(
    chosen: str, refused: dict[str, str], entries: dict[str, BackendEntry], device: torch.device
) -> None:
    """What is not installed costs one warning in all, and the choice of ops gives that one."""
    if not refused or device.type != "cuda":
        return
    only_missing = all(entries[name].missing(device) for name in refused)
    say = _log.info if only_missing else _log.warning
    because, cost = _sentence(refused), entries[chosen].cost
    say("a slower attention backend is used", backend=chosen, because=because, cost=cost)


def _sentence(refused: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in refused.items())


def _entry_like(name: str, module: str, class_name: str) -> BackendEntry:
    """The same package is needed as for grouped-query attention."""
    base = ATTENTION_BACKENDS[name]
    path = f"gpu_service.attention.{module}"
    return BackendEntry(path, class_name, base.package, base.install, base.device_type, base.cost)


MLA_BACKENDS: dict[str, BackendEntry] = {
    "flashinfer": _entry_like("flashinfer", "mla.flashinfer_backend", "FlashInferMlaAttention"),
    "triton": _entry_like("triton", "mla.triton_backend", "TritonMlaAttention"),
    "cpu": _entry_like("cpu", "mla.cpu_backend", "CpuMlaAttention"),
    "torch": _entry_like("torch", "mla.torch_reference", "TorchMlaAttention"),
}

COMPRESSED_BACKENDS: dict[str, BackendEntry] = {
    "triton": _entry_like("triton", "compressed.triton_backend", "TritonCompressedAttention"),
    "torch": _entry_like("torch", "compressed.torch_reference", "TorchCompressedAttention"),
}


def compressed_dimensions(layers: Layers) -> CompressedDimensions:
    """Returns the sizes of a rank's own layers. Raises ValueError where none compresses."""
    kept = entry_mixers(layers)
    if not kept:
        raise ValueError("no layer has compressed attention")
    choosing = {layer: mixer.indexer for layer, mixer in enumerate(kept) if mixer.indexer is not None}
    # Without such a layer these sizes have no effect.
    index = next(iter(choosing.values()), EntryIndexer(1, 1, 1))
    return CompressedDimensions(
        num_heads=kept[0].num_heads,
        head_dim=kept[0].head_dim,
        window=kept[0].window,
        rates=tuple(mixer.rate for mixer in kept),
        sparse_layers=frozenset(choosing),
        top_k=index.top_k,
        index_num_heads=index.num_heads,
        index_head_dim=index.head_dim,
        softmax_scale=kept[0].scale,
        projects_keys=isinstance(kept[0], SharedEntryAttention),
        chooses_blocks=any(
            isinstance(mixer, SharedEntryAttention) and mixer.blocks is not None for mixer in mixers(layers)
        ),
    )


def mla_dimensions(layers: Layers) -> MlaDimensions:
    """Returns the sizes of a rank's own layers. Raises ValueError where none has latents."""
    kept = [mixer for mixer in mixers(layers) if isinstance(mixer, MLA)]
    if not kept:
        raise ValueError("no layer has latent attention")
    mla = kept[0]
    indexer = next((mixer.indexer for mixer in kept if mixer.indexer is not None), None)
    return MlaDimensions(
        num_heads=mla.num_heads,
        latent_dim=mla.kv_lora_rank,
        nope_dim=mla.qk_nope_head_dim,
        rope_dim=mla.qk_rope_head_dim,
        value_dim=mla.v_head_dim,
        softmax_scale=mla.softmax_scale,
        index=None
        if indexer is None
        else IndexDimensions(indexer.num_heads, indexer.head_dim, indexer.top_k, indexer.pool),
        has_sinks=mla.has_sinks,
    )


Attention = AttentionBackend | MlaAttentionBackend | CompressedAttentionBackend


def make_attention(
    layers: Layers,
    cache: PagedCache,
    device: torch.device | str,
    name: str = "auto",
    try_out: TryOut | None = None,
) -> Attention:
    """The backend for a rank's own layers and their cache; `name` is `attention_backend`.

    `try_out` runs a candidate as the service will; one that it raises for is not taken. Raises UserError when
    a backend asked for by name is missing or cannot serve this model.
    """
    entries: dict[str, BackendEntry] = ATTENTION_BACKENDS
    sizes: Layers | MlaDimensions | CompressedDimensions = layers
    if isinstance(cache, MlaCache):
        entries, sizes = MLA_BACKENDS, mla_dimensions(layers)
    elif isinstance(cache, CompressedCache):
        entries, sizes = COMPRESSED_BACKENDS, compressed_dimensions(layers)
    chosen: Attention = choose_backend(entries, sizes, cache, torch.device(device), name, try_out)
    return chosen
