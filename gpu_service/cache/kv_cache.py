"""The device tensors that hold keys and values, in pages.

Knows layers and pages; knows nothing of requests, prefixes or who owns a page (`cache/page_pool.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_service.cache.fp8 import E4M3
from gpu_service.model_config import ModelConfig
from gpu_service.ops.kv import append_kv


def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes one page takes over all layers, keys and values together."""
    return 2 * config.num_layers * page_size * config.kv_size * dtype.itemsize


class KVCache:
    """Keys and values of all layers.

    One tensor `[num_pages, page_size, 2 * num_kv_heads, head_dim]` per layer: a token's keys and values
    lie side by side, so that a reader gathers both with one index. Token `t` of a request lives in slot
    `page * page_size + t % page_size`. Page 0 is the dummy page: padding reads and writes it, no request
    owns it. Pages start as zeros, because a masked-out NaN would still poison a sum it is multiplied into.

    `dtype` is what attention computes in; `storage_dtype` is what pages hold: the same, or e4m3. As e4m3, a
    key is stored as key / `key_scales[layer]`, a value as value / `value_scales[layer]`, saturating at 448.
    The scales are 1.0; a loader that finds `k_scale` and `v_scale` in a checkpoint sets them before the
    first step (captured graphs hold them as constants).
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        storage_dtype: torch.dtype | None = None,
    ) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"KV cache needs num_pages >= 2 (page 0 is the dummy) and page_size >= 1, "
                f"got {num_pages} pages of {page_size}"
            )
        if storage_dtype not in (None, dtype, E4M3):
            raise ValueError(f"KV pages of {storage_dtype} are not supported; allowed: {dtype}, {E4M3}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_kv_heads = config.num_kv_heads
        self.dtype = dtype
        self.storage_dtype = storage_dtype or dtype
        self.device = torch.device(device)
        self.key_scales = [1.0] * config.num_layers
        self.value_scales = [1.0] * config.num_layers
        shape = (num_pages, page_size, 2 * config.num_kv_heads, config.head_dim)
        self._layers = [
            torch.zeros(shape, dtype=self.storage_dtype, device=self.device) for _ in range(config.num_layers)
        ]
        self._slots = [layer.view(-1, *shape[2:]) for layer in self._layers]

    @property
    def num_layers(self) -> int:
        """Layers that have keys and values."""
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def is_quantised(self) -> bool:
        """Whether readers must convert what they gather."""
        return self.storage_dtype != self.dtype

    def pages(self, layer_id: int) -> torch.Tensor:
        """Keys and values of a layer, `[num_pages, page_size, 2 * num_kv_heads, head_dim]`."""
        return self._layers[layer_id]

    def slots(self, layer_id: int) -> torch.Tensor:
        """The same memory by token slot, `[num_pages * page_size, 2 * num_kv_heads, head_dim]`."""
        return self._slots[layer_id]

    def keys(self, layer_id: int) -> torch.Tensor:
        """View of the keys, `[num_pages, page_size, num_kv_heads, head_dim]`."""
        return self._layers[layer_id][:, :, : self.num_kv_heads]

    def values(self, layer_id: int) -> torch.Tensor:
        """View of the values, `[num_pages, page_size, num_kv_heads, head_dim]`."""
        return self._layers[layer_id][:, :, self.num_kv_heads :]

    def append(
        self, layer_id: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store new keys and values, `[T, num_kv_heads, head_dim]`, in slots int64 `[T]` of a layer."""
        scales = self.key_scales[layer_id], self.value_scales[layer_id]
        append_kv(self._slots[layer_id], key, value, slot_mapping, *scales)

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Clear pages that may hold NaN or Inf (a failed request's), before anyone else is given them."""
        if not pages:
            return
        index = torch.as_tensor(pages, dtype=torch.int64, device=self.device)
        for layer in self._layers:
            layer.view(torch.uint8).index_fill_(0, index, 0)
